"""Routes that take events: ``POST /v1/events/{source}``, one for each source, with its contract in the document."""

import re
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response, Security
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect

from schemas.contract import Contract
from schemas.errors import ConfigError
from streams.serving.document import BatchDocument, TakenDocument
from streams.serving.edge import RefusedError
from streams.serving.event_admission import EventAdmission, Refusal
from streams.serving.event_intake import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, EventIntake, row_document
from streams.serving.gate import limit_headers
from streams.serving.once import Claim, StoredAnswer, fingerprint_of
from streams.serving.producer_key import ProducerKey
from streams.serving.responses import add_headers, documented, json_response
from streams.transport.event_producer import Delivered

PATH: Final = "/v1/events/"
_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_REPLAYED: Final = "Idempotency-Replayed"
_ERRORS: Final = {
    400: "The body did not come.",
    401: "There is no key, or it is not known, or was revoked.",
    403: "The key is not good for this source.",
    409: "A request with this Idempotency-Key is being worked on.",
    413: "The event or the batch is too large.",
    415: "The body is neither one JSON object nor NDJSON.",
    422: "The event was refused, for the reason that is the code; or the Idempotency-Key is another request's.",
    429: "There are more events than may be sent now, by this key or by all.",
    502: "The store of keys refuses to be read.",
    503: "Kafka has not acknowledged any of it, the store of keys does not answer, or there are too many requests.",
}
_BEARER: Final = Security(HTTPBearer(auto_error=False, scheme_name="key", description="A key of `headrace keys`."))
_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Names the request: one that is repeated within an hour gets the first one's answer.",
    "schema": {"type": "string", "pattern": r"^[!-~]{1,255}$"},
}


def add_event_routes(api: FastAPI, intake: EventIntake) -> None:
    """Add a route for each source, and one that says of any other that there is none."""

    async def answer(request: Request, source: str) -> Response:
        key = await intake.gate.identify(request.headers.get("authorization"), source=source)
        admission = intake.find(source)
        with intake.counted():
            return await work(request, admission, key)

    async def work(request: Request, admission: EventAdmission, key: ProducerKey) -> Response:
        source = admission.source.topic
        is_batch = _is_batch(request)
        body = await _read(request, MAX_BATCH_BYTES if is_batch else admission.source.schema.max_bytes)
        values = [line for line in body.split(b"\n") if not line.isspace() and line] if is_batch else [body]
        if not 0 < len(values) <= MAX_BATCH_EVENTS:
            text = f"the batch has {len(values)} events, expected 1 to {MAX_BATCH_EVENTS}"
            if values:
                raise RefusedError(413, "too_large", f"{text}; split it")
            msg = f"{text}, one JSON object a line"
            raise ConfigError(msg)
        try:
            limits = await intake.gate.take(key, events=len(values))
        except RefusedError as exc:
            intake.refused(source, exc.code, events=len(values))
            raise
        add_headers(request, limit_headers(limits))
        request_id: str = request.scope["headrace.request_id"]

        async def take(request_id: str, claim: Claim | None) -> Response:
            if not is_batch:
                return await _take_one(request, intake, admission, values[0], request_id=request_id, claim=claim)
            return await _take_batch(request, intake, admission, values, request_id=request_id, claim=claim)

        name = _idempotency_key(request)
        if name is None:
            return await take(request_id, None)
        kind = _NDJSON if is_batch else _JSON
        fingerprint = await fingerprint_of(source, kind, body)
        now_ms = intake.now_us() // 1_000
        found = await intake.once.wait(
            name, client=key.name, fingerprint=fingerprint, request_id=request_id, now_ms=now_ms
        )
        if isinstance(found, StoredAnswer):
            add_headers(request, {_REPLAYED: "true"})
            return Response(found.body, status_code=found.status, media_type=_JSON)
        try:
            response = await take(found.request_id, found)
        except Exception:
            await intake.once.leave(found)
            raise
        if found.is_complete:
            await intake.once.store(found, StoredAnswer(response.status_code, bytes(response.body)))
        else:
            await intake.once.leave(found)
        return response

    def add(topic: str, contract: Contract) -> None:
        async def take(request: Request) -> Response:
            return await answer(request, topic)

        api.add_api_route(
            f"{PATH}{topic}",
            take,
            methods=["POST"],
            responses=_responses(),
            dependencies=[_BEARER],  # for the document: the gate says what is wrong with a key
            summary=f"Put events on {topic}, one or a batch, answered once Kafka has acknowledged them",
            operation_id=f"put_events_{topic}",
            tags=["events"],
            openapi_extra={
                "requestBody": _request_body(contract),
                "parameters": [_IDEMPOTENCY_KEY],
            },
        )

    for topic, admission in intake.admissions.items():
        add(topic, admission.source.schema)
    api.add_api_route(PATH + "{source:path}", answer, methods=["POST"], include_in_schema=False)


async def _take_one(
    request: Request,
    intake: EventIntake,
    admission: EventAdmission,
    value: bytes,
    *,
    request_id: str,
    claim: Claim | None,
) -> Response:
    (outcome,) = await intake.take(admission, [value], request_ids=[request_id], claim=claim)
    if isinstance(outcome, Delivered):
        place = {"partition": outcome.partition, "offset": outcome.offset}
        return json_response(request, {"request_id": request_id, "source": admission.source.topic, **place})
    if isinstance(outcome, Refusal):
        raise RefusedError(422, outcome.reason, f"{outcome.detail}; {outcome.remedy}")
    row = row_document(0, outcome)  # too large: what is unavailable has been raised
    raise RefusedError(413, "too_large", f"{row['detail']}; {row['remedy']}")


async def _take_batch(
    request: Request,
    intake: EventIntake,
    admission: EventAdmission,
    values: Sequence[bytes],
    *,
    request_id: str,
    claim: Claim | None,
) -> Response:
    request_ids = [f"{request_id}:{index}" for index in range(len(values))]
    outcomes = await intake.take(admission, values, request_ids=request_ids, claim=claim)
    rows = [row_document(index, outcome) for index, outcome in enumerate(outcomes)]
    counts = dict.fromkeys(("accepted", "refused", "unavailable"), 0)
    for row in rows:
        counts[row["status"]] += 1
    told = {"request_id": request_id, "source": admission.source.topic, **counts, "rows": rows}
    return json_response(request, told, status=200 if counts["accepted"] == len(rows) else 207)


def _idempotency_key(request: Request) -> str | None:
    """Read the key, in quotes, as draft-ietf-httpapi-idempotency-key-header has it, or without."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    name = given.strip()
    if len(name) >= 2 and name[0] == name[-1] == '"':
        name = name[1:-1]
    if not _KEY.fullmatch(name):
        msg = f"Idempotency-Key is {given!r}, expected 1 to 255 visible ASCII characters, such as a UUID"
        raise ConfigError(msg)
    return name


def _is_batch(request: Request) -> bool:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        text = f"the body is encoded as {encoding}, expected it as it is; leave Content-Encoding out"
        raise RefusedError(415, "unsupported_media_type", text)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (_JSON, _NDJSON):
        text = f"Content-Type is {media_type or 'not given'}, expected {_JSON} for one event, {_NDJSON} for a batch"
        raise RefusedError(415, "unsupported_media_type", text)
    return media_type == _NDJSON


async def _read(request: Request, limit: int) -> bytes:
    parts, got = [], 0
    try:
        async for part in request.stream():
            got += len(part)
            if got > limit:
                text = f"the body is larger than {limit} bytes, expected no more; send less in one request"
                raise RefusedError(413, "too_large", text)
            parts.append(part)
    except ClientDisconnect as exc:
        raise RefusedError(400, "invalid_request", "the caller went before all of the body had come") from exc
    return b"".join(parts)


def _request_body(contract: Contract) -> dict[str, Any]:
    batch = {
        "type": "string",
        "pattern": r"\S",
        "description": f"One such object a line, {MAX_BATCH_EVENTS} at most, {MAX_BATCH_BYTES} bytes together.",
    }
    document = {name: rule for name, rule in contract.document.items() if name not in ("$schema", "$id")}
    return {"required": True, "content": {_JSON: {"schema": _with_bounds(document)}, _NDJSON: {"schema": batch}}}


def _with_bounds(schema: Any) -> Any:
    """Say of whole numbers what goes without saying in a contract: that they have 64 bits."""
    if isinstance(schema, list):
        return [_with_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _with_bounds(each) for name, each in schema.items()}
    kinds = schema.get("type")
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds):
        made = {"minimum": -(2**63), "maximum": 2**63 - 1, **made}
    return made


def _responses() -> dict[int | str, dict[str, Any]]:
    responses = documented(TakenDocument | BatchDocument, "All events were accepted.", errors=_ERRORS)
    responses[207] = {**responses[200], "model": BatchDocument, "description": "Not all were; see each row."}
    return responses

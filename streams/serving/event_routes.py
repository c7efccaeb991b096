"""Routes that take events: ``POST /v1/events/{source}``, one for each source, with its contract in the document."""

from typing import Any, Final

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from schemas.contract import Contract
from schemas.errors import ConfigError
from streams.serving.document import BatchDocument, TakenDocument
from streams.serving.edge import RefusedError
from streams.serving.event_admission import EventAdmission, Refusal
from streams.serving.event_intake import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, EventIntake, row_document
from streams.serving.responses import documented, json_response
from streams.transport.event_producer import Delivered

PATH: Final = "/v1/events/"
_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"
_ERRORS: Final = {
    400: "The body did not come.",
    413: "The event or the batch is too large.",
    415: "The body is neither one JSON object nor NDJSON.",
    422: "The event was refused, for the reason that is the code.",
    503: "Kafka has not acknowledged any of it, or there are too many requests.",
}


def add_event_routes(api: FastAPI, intake: EventIntake) -> None:
    """Add a route for each source, and one that says of any other that there is none."""

    async def answer(request: Request, source: str) -> Response:
        admission = intake.find(source)
        is_batch = _is_batch(request)
        body = await _read(request, MAX_BATCH_BYTES if is_batch else admission.source.schema.max_bytes)
        values = [line for line in body.split(b"\n") if not line.isspace() and line] if is_batch else [body]
        request_id: str = request.scope["headrace.request_id"]
        if not 0 < len(values) <= MAX_BATCH_EVENTS:
            text = f"the batch has {len(values)} events, expected 1 to {MAX_BATCH_EVENTS}"
            if values:
                raise RefusedError(413, "too_large", f"{text}; split it")
            msg = f"{text}, one JSON object a line"
            raise ConfigError(msg)
        if not is_batch:
            return await _answer_one(request, intake, admission, values[0], request_id)
        request_ids = [f"{request_id}:{index}" for index in range(len(values))]
        outcomes = await intake.take(admission, values, request_ids=request_ids)
        rows = [row_document(index, outcome) for index, outcome in enumerate(outcomes)]
        counts = dict.fromkeys(("accepted", "refused", "unavailable"), 0)
        for row in rows:
            counts[row["status"]] += 1
        status = 200 if counts["accepted"] == len(rows) else 207
        return json_response(request, {"source": source, **counts, "rows": rows}, status=status)

    def add(topic: str, contract: Contract) -> None:
        async def take(request: Request) -> Response:
            return await answer(request, topic)

        api.add_api_route(
            f"{PATH}{topic}",
            take,
            methods=["POST"],
            responses=_responses(),
            summary=f"Put events on {topic}, one or a batch, answered once Kafka has acknowledged them",
            operation_id=f"put_events_{topic}",
            tags=["events"],
            openapi_extra={"requestBody": _request_body(contract)},
        )

    for topic, admission in intake.admissions.items():
        add(topic, admission.source.schema)
    api.add_api_route(PATH + "{source:path}", answer, methods=["POST"], include_in_schema=False)


async def _answer_one(
    request: Request, intake: EventIntake, admission: EventAdmission, value: bytes, request_id: str
) -> Response:
    outcomes = await intake.take(admission, [value], request_ids=[request_id])
    (outcome,) = outcomes
    if isinstance(outcome, Delivered):
        place = {"partition": outcome.partition, "offset": outcome.offset}
        return json_response(request, {"source": admission.source.topic, **place})
    if isinstance(outcome, Refusal):
        raise RefusedError(422, outcome.reason, f"{outcome.detail}; {outcome.remedy}")
    row = row_document(0, outcome)  # too large: what is unavailable has been raised
    raise RefusedError(413, "too_large", f"{row['detail']}; {row['remedy']}")


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
    return {"required": True, "content": {_JSON: {"schema": document}, _NDJSON: {"schema": batch}}}


def _responses() -> dict[int | str, dict[str, Any]]:
    responses = documented(TakenDocument | BatchDocument, "All events were accepted.", errors=_ERRORS)
    responses[207] = {**responses[200], "model": BatchDocument, "description": "Not all were; see each row."}
    return responses

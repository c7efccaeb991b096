"""The HTTP API of the serve role: the generic route over all views, and a route for each use case.

Starlette's parts do the work; what comes in is checked by the models of :mod:`streams.serving.document`, which are also
the OpenAPI document. What goes out is written by hand and held to the document by tests.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Self

import pyarrow as pa
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from schemas.errors import ConfigError, SinkError, SinkUnavailableError
from schemas.use_case import UseCase
from schemas.view import FeatureView
from streams.observability.serving import ServingMetrics
from streams.serving.document import (
    AnswerDocument,
    Names,
    ReadDocument,
    UseCaseDocument,
    ViewsDocument,
    score_document,
    value_document,
)
from streams.serving.edge import MODEL_VERSION, App, Edge, RefusedError
from streams.serving.event_intake import MAX_BATCH_BYTES, EventIntake
from streams.serving.event_routes import PATH, add_event_routes
from streams.serving.responses import documented, error_response, json_response
from streams.serving.store import AsyncOnlineStore, FeatureQuery
from streams.serving.value import FeatureValue

MAX_VALUES: Final = 10_000
"""Entities of all queries of a request together."""
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")
_TEXT: Final = {"type": "string", "minLength": 1}
_WHOLE_NUMBER: Final = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}
_CODES: Final = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def make_api(
    views: Mapping[str, FeatureView],
    *,
    use_cases: Sequence[UseCase] = (),
    make_store: Callable[[], AsyncOnlineStore],
    intake: EventIntake | None = None,
    metrics: ServingMetrics,
    model_version: str = "none",
) -> App:
    """Make the API.

    Args:
        views: Views by name.
        use_cases: Use cases, each of which gets a route.
        make_store: Makes the online store, in the event loop that serves.
        intake: Takes events; None: the API takes none.
        metrics: Where requests are counted.
        model_version: Version of the model that scores; ``none`` without one.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.store = await stack.enter_async_context(make_store())
            if intake is not None:
                await stack.enter_async_context(intake)
            yield

    api = FastAPI(
        title="Headrace",
        version="1",
        description="Features and scores, each with how far it can be trusted.",
        lifespan=lifespan,
        docs_url=None,  # its page is made of scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _handle_errors(api)
    _add_generic_routes(api, views)
    for use_case in use_cases:
        _add_use_case(api, use_case)
    if intake is not None:
        add_event_routes(api, intake)
    return Edge(api, model_version=model_version, metrics=metrics, body_limits={PATH: MAX_BATCH_BYTES})


def _add_generic_routes(api: FastAPI, views: Mapping[str, FeatureView]) -> None:
    known = {name: _Readable.of(view) for name, view in views.items()}

    @api.get(
        "/v1/views", responses=documented(ViewsDocument, "The views."), summary="List the views", tags=["features"]
    )
    async def list_views(request: Request) -> Response:
        return json_response(request, {"views": [_view_document(view) for view in views.values()]})

    @api.post(
        "/v1/features",
        responses=documented(AnswerDocument, "The values."),
        summary="Read features of up to 1,000 entities of each of several views, in one round trip",
        tags=["features"],
    )
    async def read_features(request: Request, asked: ReadDocument) -> Response:
        if (total := sum(len(query.entities) for query in asked.queries)) > MAX_VALUES:
            msg = f"{total} entities are asked for, expected {MAX_VALUES} at most in all queries; split the request"
            raise ConfigError(msg)
        queries = []
        for query in asked.queries:
            readable = _readable(known, query.view)
            entities = [readable.checked_key(entity) for entity in query.entities]
            queries.append(FeatureQuery(view=readable.view, entities=entities, features=query.features))
        store: AsyncOnlineStore = request.app.state.store
        found = await store.read_many(queries, is_stale_wanted=asked.stale)
        results = [_values_document(query.view, values) for query, values in zip(queries, found, strict=True)]
        return json_response(request, {"results": results})

    @api.get(
        "/v1/features/{view}/{entity:path}",
        responses=documented(AnswerDocument, "The values of one entity."),
        summary="Read features of one entity",
        tags=["features"],
    )
    async def read_entity(
        request: Request,
        view: str,
        entity: Annotated[str, Path(min_length=1, max_length=1_000)],
        feature: Annotated[Names | None, Query(description="Names of the features; all when left out.")] = None,
        stale: Annotated[bool, Query(description="Give features of a stale value in place of defaults.")] = False,
    ) -> Response:
        readable = _readable(known, view)
        store: AsyncOnlineStore = request.app.state.store
        key = readable.parsed_key(entity)
        values = await store.read(readable.view, [key], features=feature, is_stale_wanted=stale)
        return json_response(request, {"results": [_values_document(readable.view, values)]})


def _add_use_case(api: FastAPI, use_case: UseCase) -> None:
    lookups = [(_Readable.of(lookup.view), lookup) for lookup in use_case.lookups]

    async def answer(request: Request) -> Response:
        store: AsyncOnlineStore = request.app.state.store
        given = request.path_params
        queries = [
            FeatureQuery(
                view=lookup.view,
                entities=[readable.parsed_key(given[lookup.parameter])],
                features=lookup.features,
            )
            for readable, lookup in lookups
        ]
        work: list[Awaitable[Any]] = [store.read_many(queries)]
        if use_case.model is not None:
            entity = given[use_case.model.entity]
            work.append(store.read_scores(use_case.model, [entity], ttl_us=use_case.score_ttl_us))
        found, *scores = await _together(work)
        document: dict[str, Any] = {
            "score": score_document(scores[0][0]) if scores else None,
            "features": [_values_document(query.view, values) for query, values in zip(queries, found, strict=True)],
        }
        response = json_response(request, document)
        if scores and (score := scores[0][0].score) is not None:
            response.raw_headers.append((MODEL_VERSION, str(score["model_version"]).encode()))
        return response

    whole = {lookup.parameter for readable, lookup in lookups if not readable.is_text}
    texts = set(use_case.parameters) - whole
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT if name in texts else _WHOLE_NUMBER}
        for name in use_case.parameters
    ]
    api.add_api_route(
        use_case.path,
        answer,
        methods=["GET"],
        responses=documented(UseCaseDocument, "The answer."),
        summary=use_case.description or use_case.path,
        name=use_case.path,
        operation_id=use_case.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace("-", "_"),
        tags=["use cases"],
        openapi_extra={"parameters": parameters},
    )


async def _together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all, which then share a round trip; an error of one is raised once all are done."""
    answers = await asyncio.gather(*work, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _handle_errors(api: FastAPI) -> None:
    async def invalid(request: Request, exc: Exception) -> Response:
        errors = exc.errors() if isinstance(exc, RequestValidationError) else []
        told = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors[:5])
        return error_response(request, 422, "invalid_request", told or str(exc))

    async def refused(request: Request, exc: Exception) -> Response:
        status = exc.status_code if isinstance(exc, HTTPException) else 500
        headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
        detail = exc.detail if isinstance(exc, HTTPException) else str(exc)
        code = exc.code if isinstance(exc, RefusedError) else _CODES.get(status, "refused")
        return error_response(request, status, code, detail, headers=headers)

    async def failed(request: Request, _: Exception) -> Response:
        return error_response(
            request, 500, "internal", "the server failed; its log has the reason under the request id"
        )

    async def unavailable(request: Request, exc: Exception) -> Response:
        retry_ms = exc.retry_after_ms if isinstance(exc, SinkUnavailableError) else 1_000
        headers = {"Retry-After": str(max(1, -(-retry_ms // 1_000)))}
        return error_response(request, 503, "unavailable", str(exc), headers=headers)

    api.add_exception_handler(RequestValidationError, invalid)
    api.add_exception_handler(ConfigError, invalid)
    api.add_exception_handler(HTTPException, refused)
    api.add_exception_handler(SinkUnavailableError, unavailable)
    api.add_exception_handler(SinkError, partial(_answer_error, 502, "store_refused"))
    api.add_exception_handler(Exception, failed)


async def _answer_error(status: int, code: str, request: Request, exc: Exception) -> Response:
    return error_response(request, status, code, str(exc))


@dataclass(frozen=True)
class _Readable:
    """A view, and what its entity keys are; made once, for a view makes its types anew each time."""

    view: FeatureView
    is_text: bool

    @classmethod
    def of(cls, view: FeatureView) -> Self:
        return cls(view, pa.types.is_string(view.feature_schema.field(view.entity.key).type))

    def checked_key(self, entity: str | int) -> str | int:
        """Refuse a key of the other kind, which no row can have."""
        if isinstance(entity, str) != self.is_text:
            raise self._refusal(entity)
        return entity

    def parsed_key(self, text: str) -> str | int:
        """Read a key out of a path."""
        if self.is_text:
            return text
        if not _WHOLE.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
            raise self._refusal(text)
        return int(text)

    def _refusal(self, entity: str | int) -> ConfigError:
        kind = "text" if self.is_text else "a whole number of 64 bits"
        return ConfigError(
            f"entity {entity!r} of view {self.view.name} is none, expected {kind} as `{self.view.entity.key}` is"
        )


def _readable(views: Mapping[str, _Readable], name: str) -> _Readable:
    if name not in views:
        raise HTTPException(404, f"there is no view {name!r}, expected one of {sorted(views)}")
    return views[name]


def _values_document(view: FeatureView, values: Sequence[FeatureValue]) -> dict[str, Any]:
    return {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "values": [value_document(value) for value in values],
    }


def _view_document(view: FeatureView) -> dict[str, Any]:
    types = view.feature_schema
    return {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "entity": view.entity.name,
        "key": view.entity.key,
        "features": {name: str(types.field(name).type) for name in view.definitions},
        "ttl": view.ttl,
        "freshness": view.serving.freshness,
        "defaults": dict(view.serving.defaults),
        "owner": view.owner,
    }

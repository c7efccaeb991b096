"""Answers of the HTTP API: how they are written, and what the document says of those that are errors."""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import Request, Response

from streams.serving.document import ErrorDocument
from streams.serving.edge import FURTHER_HEADERS, error_body

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorDocument, "description": "The body is no text."},
    404: {"model": ErrorDocument, "description": "There is no such view."},
    413: {"model": ErrorDocument, "description": "The request is too large."},
    422: {"model": ErrorDocument, "description": "The request is not as documented."},
    502: {"model": ErrorDocument, "description": "The online store refuses to be read."},
    503: {"model": ErrorDocument, "description": "The online store does not answer, or there are too many requests."},
}
_ID: Final = {"X-Request-Id": {"description": "Names the request.", "schema": {"type": "string"}}}
_HEADERS: Final = {
    **_ID,
    "X-Model-Version": {
        "description": "Version of the model whose score it is, else the newest there is; `none` without a model.",
        "schema": {"type": "string"},
    },
}


def documented(
    kind: Any, description: str, *, errors: Mapping[int, str] | None = None
) -> dict[int | str, dict[str, Any]]:
    """Document the answers of a route: its own, and errors; ``errors`` in place of those of reads."""
    answer = {"model": kind, "description": description, "headers": _HEADERS}
    failures: Mapping[int | str, dict[str, Any]] = _ERRORS
    if errors is not None:
        failures = {status: {"model": ErrorDocument, "description": text} for status, text in errors.items()}
    return {200: answer, **{status: {**error, "headers": _HEADERS} for status, error in failures.items()}}


def add_headers(request: Request, headers: Mapping[str, str]) -> None:
    """Give headers to the answer of a request, whatever it will be."""
    request.scope[FURTHER_HEADERS].extend((name.lower().encode(), value.encode()) for name, value in headers.items())


def json_response(request: Request, document: Mapping[str, Any], *, status: int = 200) -> Response:
    """Answer with a document, which begins with the request's id; or with that of another one, which it has."""
    named = {"request_id": request.scope["headrace.request_id"], **document}
    return Response(orjson.dumps(named), status_code=status, media_type="application/json")


def error_response(
    request: Request, status: int, code: str, text: str, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with an error."""
    body = error_body(request.scope["headrace.request_id"], code=code, text=text)
    return Response(body, status_code=status, media_type="application/json", headers=dict(headers or {}))

"""The edge of the HTTP API: what every answer has, whatever gave it, and what is turned away before it costs much."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.exceptions import HTTPException

from streams.observability.serving import ServingMetrics

logger = logging.getLogger(__name__)

REQUEST_ID: Final = b"x-request-id"
MODEL_VERSION: Final = b"x-model-version"
FURTHER_HEADERS: Final = "headrace.headers"
"""In the scope of a request: headers that its answer has, whatever the answer will be."""
MAX_BODY_BYTES: Final = 1_048_576
"""Of a request's body, where the route has no bound of its own."""
MAX_IN_FLIGHT: Final = 512
"""Requests that are worked on at a time; further ones are told to come again."""
_GIVEN_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RefusedError(HTTPException):
    """A request that is turned away, with the code that its answer has."""

    def __init__(self, status: int, code: str, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, text, dict(headers or {}))
        self.code = code


class Edge:
    """An ASGI application around another: request ids, model version, bounds, and an answer to every failure.

    A caller's own ``X-Request-Id`` is taken over where it is plain; it travels into the answer and the log.

    Args:
        app: The application.
        model_version: What ``X-Model-Version`` says where no score is in the answer.
        metrics: Where requests are counted.
        max_in_flight: Requests that are worked on at a time.
        body_limits: Bytes that a body may have, by how paths begin; :data:`MAX_BODY_BYTES` elsewhere.
    """

    def __init__(
        self,
        app: App,
        *,
        model_version: str,
        metrics: ServingMetrics,
        max_in_flight: int = MAX_IN_FLIGHT,
        body_limits: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._model_version = model_version.encode()
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._body_limits = body_limits or {}
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid4().hex.encode()
        scope["headrace.request_id"] = request_id.decode()
        scope[FURTHER_HEADERS] = []
        started_s, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                headers.append((REQUEST_ID, request_id))
                headers.extend(scope[FURTHER_HEADERS])
                if not any(name == MODEL_VERSION for name, _ in headers):
                    headers.append((MODEL_VERSION, self._model_version))
                message = {**message, "headers": headers}
            await send(message)

        self._in_flight += 1
        try:
            if self._in_flight > self._max_in_flight:
                text = f"{self._max_in_flight} requests are being worked on, expected fewer; try again"
                await _refuse(send_with_headers, scope, 503, "overloaded", text, retry_after_s=1)
                return
            await self._app(scope, _bounded(scope, receive, self._body_limit(scope["path"])), send_with_headers)
        except Exception:
            logger.exception("request %s %s failed", scope["headrace.request_id"], scope["path"])
            if status != 500:  # the application tells the caller, and raises what it was for the log
                raise
        finally:
            self._in_flight -= 1
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request_done(route, status=status, seconds=time.perf_counter() - started_s)

    def _body_limit(self, path: str) -> int:
        return next((limit for start, limit in self._body_limits.items() if path.startswith(start)), MAX_BODY_BYTES)


def _bounded(scope: Scope, receive: Receive, limit: int) -> Receive:
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    got = int(announced) if announced.isdigit() else 0
    is_announced = got > 0

    async def receive_bounded() -> Message:
        nonlocal got
        message = await receive() if got <= limit else {}
        if not is_announced:
            got += len(message.get("body", b""))
        if got > limit:
            text = f"the body is larger than {limit} bytes, expected no more; split the request"
            raise HTTPException(413, text)
        return message

    return receive_bounded


async def _refuse(
    send: Send, scope: Scope, status: int, code: str, text: str, *, retry_after_s: int | None = None
) -> None:
    body = error_body(scope["headrace.request_id"], code=code, text=text)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(request_id: str, *, code: str, text: str) -> bytes:
    """Write an error as :class:`streams.serving.document.ErrorDocument` says."""
    return orjson.dumps({"request_id": request_id, "error": {"code": code, "message": text}})

"""The HTTP endpoint of a worker: ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` for who starts it again."""

import json
import socket
import sys
import threading
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from prometheus_client import MetricsHandler

from schemas.errors import ConfigError
from streams.observability.health import Health
from streams.observability.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An HTTP endpoint; a context manager that closes it.

    Attributes:
        address: Address it listens on.
        port: Port it listens on, also when any free one was asked for.
    """

    address: str
    port: int
    _server: ThreadingHTTPServer
    _thread: threading.Thread

    @property
    def url(self) -> str:
        """Where to scrape."""
        return f"http://{self.address}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening, and wait until the last answer is out."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong; that a client went away, as Prometheus does after its timeout, is nothing."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


def _server_class(address: str) -> type[_Server]:
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    return _ServerOfIPv6 if family == socket.AF_INET6 else _Server


class _Handler(MetricsHandler):
    health: Health

    def do_GET(self) -> None:  # noqa: N802 - the standard library's name
        """Answer a request: 200 or 503 of health, with the reasons as JSON; 404 where there is nothing."""
        path = urlsplit(self.path).path
        if path in ("/", "/metrics"):
            super().do_GET()
            return
        asked = {"/livez": self.health.live, "/readyz": self.health.ready}.get(path)
        if asked is None:
            self._answer(404, {"error": f"there is no {path}, expected /metrics, /livez or /readyz"})
            return
        verdict = asked()
        status = "ok" if verdict.is_good else "not ok"
        self._answer(200 if verdict.is_good else 503, {"status": status, "reasons": list(verdict.reasons)})

    def _answer(self, code: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(metrics: Metrics, health: Health, *, port: int, address: str = "127.0.0.1") -> Endpoint:
    """Serve metrics and health over HTTP from a thread of their own.

    Args:
        metrics: What ``/metrics`` tells.
        health: What ``/livez`` and ``/readyz`` tell.
        port: Port to listen on; 0 takes any free one, see :attr:`Endpoint.port`.
        address: Address to listen on; ``0.0.0.0`` for all, as a container needs.

    Raises:
        ConfigError: The port is taken or the address is none of this machine's.
    """
    handler = type("Handler", (_Handler,), {"registry": metrics.registry, "health": health})
    try:
        server = _server_class(address)((address, port), handler)
    except OSError as exc:
        msg = f"metrics cannot be served on {address}:{port} ({exc.strerror}), expected a free port; 0 takes any"
        raise ConfigError(msg) from exc
    thread = threading.Thread(target=server.serve_forever, name="endpoint", daemon=True)
    thread.start()
    return Endpoint(address=address, port=server.server_port, _server=server, _thread=thread)

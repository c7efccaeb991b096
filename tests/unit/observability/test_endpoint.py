"""What the endpoint of a worker prints of requests that fail."""

import pytest

from streams.observability.endpoint import serve
from streams.observability.health import Health
from streams.observability.serving import ServingMetrics


@pytest.mark.parametrize(
    ("error", "is_told"), [(BrokenPipeError(), False), (ConnectionResetError(), False), (ValueError("a bug"), True)]
)
def test_a_client_that_went_away_is_no_error(
    capfd: pytest.CaptureFixture[str], error: Exception, is_told: bool
) -> None:
    with serve(ServingMetrics(), Health(), port=0) as endpoint:
        try:
            raise error
        except (ConnectionError, ValueError):
            endpoint._server.handle_error(None, ("127.0.0.1", 1))

    assert ("Traceback" in capfd.readouterr().err) == is_told

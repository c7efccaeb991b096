from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import SinkError
from streams.transport import epoch as epoch_module
from streams.transport.epoch import Epoch


class FakeProducer:
    """Kafka's client; one of its calls fails."""

    failing = ""

    def __init__(self, _: Any) -> None:
        pass

    def _call(self, name: str) -> None:
        if name == self.failing:
            raise KafkaException(KafkaError(KafkaError._FENCED))

    def begin_transaction(self) -> None:
        self._call("begin_transaction")

    def produce_batch(self, *_: Any) -> None:
        self._call("produce_batch")

    def poll(self, _: float) -> None:
        pass


@pytest.mark.parametrize("failing", ["begin_transaction", "produce_batch"])
async def test_what_the_client_refuses_as_a_whole_is_an_error_of_ours(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProducer, "failing", failing)
    monkeypatch.setattr(epoch_module, "Producer", FakeProducer)
    epoch = Epoch({}, transactional_id="t", group_metadata=lambda: None)
    with pytest.raises(SinkError) as raised:
        await epoch.write_rows("t", partition=None, keys=[b"k"], values=[b"v"])
    assert isinstance(raised.value.__cause__, KafkaException)

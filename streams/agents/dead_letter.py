"""Dead letters: what their headers say, the same for every role that makes them."""

from typing import Any

from streams.batch import RawBatch


def dead_letter_headers(batch: RawBatch, position: int, **facts: Any) -> list[tuple[str, bytes]]:
    """Give the record's own headers, where it came from, and why it is a dead letter.

    Args:
        batch: The batch with the record.
        position: Where the record is in the batch.
        facts: ``reason``, ``detail`` and whatever else is known; None is left out.
    """
    origin = {"topic": batch.topic, "partition": batch.partition, "offset": int(batch.offsets[position])}
    told = {**facts, **origin}
    return [
        *(batch.headers[position] or ()),
        *((f"headrace.{name}", str(fact).encode()) for name, fact in told.items() if fact is not None),
    ]

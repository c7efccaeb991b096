"""What of a request is on its topic already: found by the header that its records carry."""

import re
from typing import Final

from schemas.errors import ServiceError, SinkUnavailableError
from streams.transport.event_producer import Delivered
from streams.transport.topic_log import TopicLog

ONCE_HEADER: Final = "idempotency_claim"
"""``<claim>:<number>``, on records of requests with an idempotency key."""
MAX_RECORDS: Final = 2_000_000
"""Records that are looked through at most, some seconds."""
_MARGIN_MS: Final = 10_000
"""By how much the clocks of brokers and servers may differ: topics may carry the time of either."""
_NUMBER: Final = re.compile(rb"[0-9]{1,9}")


def find_sent(brokers: str, topic: str, *, tag: str, since_ms: int) -> dict[int, Delivered]:
    """Find the records of a claim, by their numbers.

    Args:
        brokers: Kafka bootstrap servers.
        topic: Where they may be.
        tag: The claim.
        since_ms: Time of the first of them.

    Raises:
        SinkUnavailableError: The topic cannot be read, or too much was written since.
    """
    log = TopicLog(brokers, topic, is_committed_only=False)
    try:
        starts = log.first_at((since_ms - _MARGIN_MS) * 1_000)
        ranges = {number: range(starts.get(number, 0), part.offsets.stop) for number, part in log.parts().items()}
        if (total := sum(map(len, ranges.values()))) > MAX_RECORDS:
            msg = (
                f"what became of the first request with this Idempotency-Key is not known: {total} records were "
                f"written since, expected {MAX_RECORDS} at most to look through; see whether its events are there, and "
                "send what is missing under another key"
            )
            raise SinkUnavailableError(msg)
        found: dict[int, Delivered] = {}
        start_of_tag = f"{tag}:".encode()
        for number, offsets in ranges.items():
            for batch in log.read(number, offsets) if offsets else ():
                for offset, headers in zip(batch.offsets.tolist(), batch.headers, strict=True):
                    for name, value in headers or ():
                        # Others write to the topic too, and may give a header of this name anything, or null.
                        if name != ONCE_HEADER or not value or not value.startswith(start_of_tag):
                            continue
                        if _NUMBER.fullmatch(value, len(start_of_tag)):
                            found.setdefault(int(value[len(start_of_tag) :]), Delivered(number, offset))
    except ServiceError as exc:
        msg = f"what became of the first request with this Idempotency-Key cannot be told now: {exc}"
        raise SinkUnavailableError(msg) from exc
    return found

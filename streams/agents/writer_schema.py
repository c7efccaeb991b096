"""Waits for the schema registry where a batch names schemas that are not known yet: rows wait in Kafka meanwhile."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from schemas.errors import RegistryUnavailableError
from streams.batch import RawBatch
from streams.observability.metrics import Metrics
from streams.writer_schema import find_writer, new_ids

logger = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 0.5
_MAX_WAIT_S: Final = 5.0


async def learn_writers(
    batch: RawBatch, *, is_routed: bool, is_wanted: Callable[[], bool], metrics: Metrics, role: str
) -> None:
    """Ask the registry for what the payloads of a batch name, until it has answered or the batch is wanted no more.

    Args:
        batch: Records of a source of framed payloads, or of a repartition topic.
        is_routed: Whether it is one of a repartition topic, where the payload stands after a line of its own.
        is_wanted: Tells whether to go on waiting.
        metrics: Told of each repetition, by which the watch knows that it is the registry that keeps the worker.
        role: The worker's role.

    Raises:
        ConfigError: The registry refuses the login, or none is named.
    """
    payloads: Any = batch.values
    if is_routed:
        payloads = [(value or b"").partition(b"\n")[2] for value in batch.values]
    wait_s = _FIRST_WAIT_S
    for schema_id in new_ids(payloads):
        while is_wanted():
            try:
                await asyncio.to_thread(find_writer, schema_id)
                break
            except RegistryUnavailableError as exc:
                metrics.store_retried(role, store="schema registry")
                logger.warning("schema registry unavailable, rows wait in Kafka, next try in %.1f s: %s", wait_s, exc)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _MAX_WAIT_S)

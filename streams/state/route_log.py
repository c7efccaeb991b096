"""How far the rows of each partition of a source have gone to a repartition topic, on a compacted topic beside it.

A record for each partition of each source, keyed by the application and the definition of what is on the repartition
topic: a changed one begins at the start of the source. Written inside the epoch that routes the rows and commits the
source's offsets, so that each row is routed exactly once, whatever becomes of the group's offsets.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from confluent_kafka import KafkaException, Message
from confluent_kafka.admin import AdminClient

from schemas.errors import ServiceError, StateVersionError
from schemas.view_input import ViewInput
from streams.ports import EpochWriter
from streams.repartition import RouteState, route_name
from streams.state.changelog import read_committed, state_topic

_TIMEOUT_S: Final = 15.0
_log = logging.getLogger(__name__)


def route_topic(view_input: ViewInput) -> str:
    """Name of the topic that holds how far the sources of a repartition topic have been routed."""
    return state_topic(view_input.topic)


async def write_route(
    epoch: EpochWriter, view_input: ViewInput, state: RouteState, *, application: str, source: str, partition: int
) -> None:
    """Write how far a partition of a source has been routed."""
    key = f"{route_name(view_input, application)}/{source}/{partition}"
    await epoch.write(route_topic(view_input), key=key.encode(), value=json.dumps(asdict(state)).encode())


def read_routes(
    kafka: Mapping[str, Any], inputs: Sequence[ViewInput], *, application: str
) -> dict[tuple[str, str, int], RouteState]:
    """Read how far the sources of repartition topics have been routed. Blocks.

    Args:
        kafka: librdkafka configuration of the client (``bootstrap.servers`` and the like).
        inputs: What stands on the repartition topics.
        application: Name of the application.

    Returns:
        By repartition topic, source and its partition; one that has never been routed is not in it.

    Raises:
        StateVersionError: A topic holds something else.
        KafkaException: The broker cannot be read.
    """
    if not inputs:
        return {}
    counts = count_partitions(kafka, [route_topic(view_input) for view_input in inputs])
    records = {
        (route_topic(view_input), partition): _Routes(view_input, application)
        for view_input in inputs
        for partition in range(counts[route_topic(view_input)])
    }
    read_committed(kafka, records)
    return {place: state for found in records.values() for place, state in found.states.items()}


@dataclass
class _Routes:
    view_input: ViewInput
    application: str
    states: dict[tuple[str, str, int], RouteState] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        place = f"record at {message.topic()}-{message.partition()}@{message.offset()}"
        try:
            route, source, partition = (message.key() or b"").decode().rsplit("/", 2)
            if route != route_name(self.view_input, self.application) or (value := message.value()) is None:
                return
            self.states[self.view_input.topic, source, int(partition)] = RouteState(**json.loads(value))
        except (ValueError, TypeError) as exc:
            msg = (
                f"{place} is no place of a source ({exc}); delete {message.topic()} and {self.view_input.topic} to "
                "route all rows again, and the state of the views that read them"
            )
            raise StateVersionError(msg) from exc


def count_partitions(kafka: Mapping[str, Any], topics: Sequence[str]) -> dict[str, int]:
    """Tell how many partitions each of these topics has. Blocks.

    Raises:
        ServiceError: The broker does not answer, or one of them is not there.
    """
    try:
        found = AdminClient(dict(kafka), logger=_log).list_topics(timeout=_TIMEOUT_S).topics
    except KafkaException as exc:
        msg = f"Kafka does not list its topics: {exc.args[0].str()}; expected a broker that answers"
        raise ServiceError(msg) from exc
    if missing := [topic for topic in topics if topic not in found]:
        msg = f"topics {missing} are not there, expected them; `headrace topics` makes those that are missing"
        raise ServiceError(msg)
    return {topic: len(found[topic].partitions) for topic in topics}

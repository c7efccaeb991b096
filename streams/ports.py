"""Ports: what the pipeline asks of the services around it. Adapters implement them, tests fake them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.view import FeatureView
from streams.batch import RawBatch


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """What a log holds of one partition.

    Attributes:
        offsets: From the first record to the last; some may hold none.
        records: How many records that is, at most.
        size_bytes: What they take as they are stored; None where that is not known.
    """

    offsets: range
    records: int
    size_bytes: int | None


class RecordLog(Protocol):
    """Records of a topic, to be read again: from Kafka, or from the archive."""

    @property
    def topic(self) -> str:
        """The topic."""
        ...

    def parts(self) -> Mapping[int, LogPart]:
        """Tell what is there, by partition."""
        ...

    def first_at(self, time_us: int) -> Mapping[int, int]:
        """Tell, by partition, the first offset with a record timestamp of this time or later; the end if none has."""
        ...

    def read(self, partition: int, offsets: range) -> Iterator[RawBatch]:
        """Read the records of a partition in log order, between these offsets."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnlineColumns:
    """The newest feature rows of a view's entities, as columns of the rows that there are.

    Attributes:
        row_of: ``(n_keys,)`` int32, which row is that of each key asked for; null where there is none.
        event_time_us: ``(n_rows,)`` event times.
        is_empty: ``(n_rows,)`` whether the windows of the row have run empty.
        features: ``(n_rows,)`` values of each feature by its name.
    """

    row_of: pa.Array
    event_time_us: Sequence[int]
    is_empty: Sequence[bool]
    features: Mapping[str, Sequence[Any]]


class EpochWriter(Protocol):
    """Writes into the open epoch: readers of committed state see all of an epoch or nothing."""

    def begin(self) -> int:
        """Open the epoch unless it is open; returns its number, which rises from one to the next."""
        ...

    async def write(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
    ) -> None:
        """Write one record of state."""
        ...

    async def write_output(
        self, topic: str, *, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]] | None = None
    ) -> None:
        """Write one record that readers are to see; it may be seen again where an epoch is done again."""
        ...


class OnlineReader(Protocol):
    """Reads the newest feature rows of entities from the online store."""

    async def read_columns(
        self, requests: Sequence[tuple[FeatureView, Sequence[str | int]]]
    ) -> Sequence[OnlineColumns]:
        """Read several views for several entity keys in one round trip.

        Args:
            requests: Views, each with the entity keys to read.

        Returns:
            For each request its rows. One of another version or definition is none.

        Raises:
            SinkUnavailableError: The store does not answer; the read may be tried again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What a model server answered for a feature matrix.

    Attributes:
        outputs: ``(n_rows, width)`` arrays by tensor name; rows in ``rejected`` hold zeros.
        rejected: Rows whose answer had the wrong shape or type, each range with what was wrong.
    """

    outputs: Mapping[str, NDArray[Any]]
    rejected: Sequence[tuple[range, str]] = field(default=())


class Recovery(StrEnum):
    """What came of an attempt to bring a model back."""

    AWAY = "away"
    """The server itself does not answer; nothing was done."""
    UNNEEDED = "unneeded"
    """The model answers, is only slow, or somebody else is loading it at the moment; nothing was done."""
    LOADED = "loaded"
    """It was not there, and now is."""
    HEALED = "healed"
    """It called itself ready and failed; it was unloaded and loaded, and answers."""
    FAILED = "failed"
    """It still does not answer."""


class ModelServer(Protocol):
    """Runs one version of one model."""

    async def infer(self, features: NDArray[np.float32], *, timeout_s: float) -> Inference:
        """Score a ``(n_rows, n_features)`` matrix; NaN is a missing value. Safe to repeat.

        Raises:
            InferenceUnavailableError: The server or the model is not there; may be tried again.
            InferenceTimeoutError: No answer within ``timeout_s``; may be tried again.
            TensorMismatchError: The server refuses the matrix; trying again cannot help.
        """
        ...

    async def recover(self) -> Recovery:
        """Bring back a model that fails although its server answers, or that was never there; does no more than try.

        Raises:
            ConfigError: What came back is another model.
            InferenceError: What is there now does not answer as the model did in training.
        """
        ...

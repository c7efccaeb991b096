"""What passes between the steps of a sliding view: a batch made ready, a batch taken in, rows of output to be."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.pane import Panes
from streams.windowing.segment import Bools, Ints
from streams.windowing.watermark_path import WatermarkPath
from streams.windowing.window_column import WindowRows
from streams.windowing.windowless_column import WindowlessRows


@dataclass(frozen=True)
class AdmittedRows:
    """The admitted rows of a batch, in offset order; or none, and steps of the watermark alone.

    Attributes:
        table: Columns of the input; None for no rows.
        time_us: ``(n_rows,)`` event times.
        path: The watermark over them.
    """

    table: pa.Table | None
    time_us: Ints
    path: WatermarkPath


@dataclass(frozen=True)
class OutputRows:
    """Rows of output in their order, yet without what the engine knows of their makers.

    Attributes:
        maker: Step of the watermark at which it was made (see :class:`WatermarkPath`).
        columns: Arrays by name, for the entity key, the features and the engine's columns that are known here.
    """

    maker: Ints
    columns: dict[str, pa.Array]


@dataclass(frozen=True)
class Queries:
    """Rows of output to be: panes, each read as of a row.

    Attributes:
        panes: Key and window end.
        maker: Step at which it is made.
        row: Newest row that it shows, -1 for none of the batch.
        as_of: Row as of which its windows are read: ``row``, or an earlier one for a pane that expired before.
        kind: Code of its :class:`Pane`.
        index: Its pane index.
    """

    panes: Panes
    maker: Ints
    row: Ints
    as_of: Ints
    kind: Ints
    index: Ints

    def take(self, rows: Ints | Bools) -> "Queries":
        """Some of them."""
        return Queries(
            self.panes.take(rows),
            self.maker[rows],
            self.row[rows],
            self.as_of[rows],
            self.kind[rows],
            self.index[rows],
        )


@dataclass(frozen=True)
class Prepared:
    """A batch made ready, with nothing changed yet.

    Attributes:
        rows: Its admitted rows.
        columns: Their columns; None when there are no rows.
        keys: Distinct keys.
        place: Position of each row's key among them.
        tile: Tile of each row.
        first: First window end that holds each row.
        last: Last one.
    """

    rows: AdmittedRows
    columns: BatchColumns | None
    keys: pa.Array
    place: Ints
    tile: Ints
    first: Ints
    last: Ints


@dataclass(frozen=True)
class Scanned:
    """A batch taken in: keys as numbers, rows by cell and by key.

    Attributes:
        prepared: The batch.
        key: Number of each row's key.
        windows: Its rows by cell; None when the view has no windows or the batch no rows.
        windowless: Its rows by key; None when the view has no such features or the batch no rows.
    """

    prepared: Prepared
    key: Ints
    windows: WindowRows | None
    windowless: WindowlessRows | None


@dataclass
class PendingPanes:
    """Panes that have changed since they were reached, waiting for the next tick.

    Attributes:
        changed: Those that got a row.
        emptied: Ends right after a tile that came when they had been reached.
        frozen: Those of ``changed`` that have expired meanwhile.
        frozen_values: Their window features as of the last row that counted.
        changed_is_told, emptied_is_told: Whether the last changes told of each.
        n_frozen_told: Of how many of ``frozen`` they told: the first ones.
    """

    changed: Panes
    emptied: Panes
    frozen: Panes
    frozen_values: dict[str, pa.Array]
    changed_is_told: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    emptied_is_told: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    n_frozen_told: int = 0

    def mark_told(self) -> None:
        """Note that all of them have been told."""
        self.changed_is_told = np.ones(len(self.changed), dtype=np.bool_)
        self.emptied_is_told = np.ones(len(self.emptied), dtype=np.bool_)
        self.n_frozen_told = len(self.frozen)

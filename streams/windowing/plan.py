"""A view compiled for the engine: window geometry in whole tiles, features in the order of their columns, row filters.

Tiles are ``tile_us`` wide, the greatest common divisor of the slide and all sizes, so that every window is a whole
number of tiles. Positions in time are then small integers: tile ``i`` is ``[align_to + i * tile_us, align_to + (i + 1)
* tile_us)``; window end ``e`` is ``align_to + e * slide_us``; a feature's window at ``e`` is the tiles
``[e * tiles_per_slide - n_tiles, e * tiles_per_slide)``. All divisions floor, so times before 1970 need no care.
With a time zone a tile is a slide, and :mod:`schemas.calendar` says where each begins; nothing else knows of it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa

from schemas.aggregation import Feature
from schemas.calendar import DAY_US, Calendar
from schemas.errors import WindowingError
from schemas.expression import Expression, parse_expression
from schemas.view import FeatureView
from streams.windowing.segment import Ints

FAR_US: Final = 2**60
"""Watermarks are clipped to plus or minus this before index arithmetic; plausible event times are well inside."""


class Scope(StrEnum):
    """What a feature runs over."""

    WINDOW = "window"
    LAST = "last"
    LIFETIME = "lifetime"
    EVENT = "event"
    DERIVED = "derived"


@dataclass(frozen=True, kw_only=True)
class PlannedFeature:
    """One feature, resolved.

    Attributes:
        name: Column of the output.
        function: Name of the aggregation.
        column: Event column it reads, or None.
        filter_index: Index into :attr:`Plan.filters`; None for all rows.
        scope: What it runs over.
        n_tiles: Size of its window in tiles, for a window feature of a sliding view; else 0.
        last: N of a last-N feature; else 0.
        input_type: Arrow type of ``column``, or None.
        result_type: Arrow type of the output.
        parameters: Further parameters of the aggregation.
    """

    name: str
    function: str
    column: str | None
    filter_index: int | None
    scope: Scope
    n_tiles: int
    last: int
    input_type: pa.DataType | None
    result_type: pa.DataType
    parameters: dict[str, Any]

    @property
    def source(self) -> str:
        """The event column, of a feature that reads one."""
        if self.column is None:
            msg = f"feature {self.name!r} ({self.function}) reads no column; this is a defect of the engine"
            raise WindowingError(msg)
        return self.column

    @property
    def is_integer_sum(self) -> bool:
        """Whether adding a row can overflow."""
        return self.function == "sum" and pa.types.is_integer(self.result_type)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A view, compiled.

    Attributes:
        view: The definition.
        key: Column of the entity key.
        features: In the order of the output columns.
        filters: Distinct row filters.
        align_us: A window end.
        calendar: Window ends in a time zone; None for windows of fixed length.
        slide_us: Distance of window ends; 0 for a session view.
        gap_us: Session gap; 0 for a sliding view.
        tile_us: Width of a tile; 0 for a session view.
        tiles_per_slide: Slide in tiles.
        max_tiles: Size of the longest window in tiles. A view without window features is judged by one slide.
        has_windows: Whether there is any window feature; if not, nothing ever closes.
        allowed_lateness_us: How far the watermark may pass a window end before the window is gone.
    """

    view: FeatureView
    key: str
    features: tuple[PlannedFeature, ...]
    filters: tuple[Expression, ...]
    align_us: int
    calendar: Calendar | None
    slide_us: int
    gap_us: int
    tile_us: int
    tiles_per_slide: int
    max_tiles: int
    has_windows: bool
    allowed_lateness_us: int

    @property
    def reach_us(self) -> int:
        """From a row's event time to the latest end of a window that can hold it, an upper bound."""
        if self.calendar is not None:
            # A change of the offset lengthens a window by a day at the very most.
            return self.max_tiles * self.tile_us + self.slide_us + DAY_US
        return self.gap_us if self.gap_us else self.max_tiles * self.tile_us + self.slide_us

    def tile_of(self, time_us: Ints) -> Ints:
        """Tile that holds each time."""
        if self.calendar is not None:
            return self.calendar.number_at(time_us)
        return (time_us - self.align_us) // self.tile_us

    def end_us(self, ends: Ints) -> Ints:
        """Time of each window end."""
        return self.align_us + ends * self.slide_us if self.calendar is None else self.calendar.boundary_us(ends)

    def span_us(self, ends: Ints, n_tiles: int) -> Ints | int:
        """Length of the windows of so many tiles at these ends."""
        if self.calendar is None:
            return n_tiles * self.tile_us
        return self.calendar.boundary_us(ends) - self.calendar.boundary_us(ends - n_tiles)

    def reached_ends(self, watermark_us: Ints) -> Ints:
        """Newest window end that each watermark has reached."""
        clipped = np.clip(watermark_us, -FAR_US, FAR_US)
        if self.calendar is not None:
            return self.calendar.number_at(clipped)
        ends: Ints = (clipped - self.align_us) // self.slide_us
        return ends

    def expired_ends(self, watermark_us: Ints) -> Ints:
        """Newest window end that is expired under each watermark."""
        return self.reached_ends(np.clip(watermark_us, -FAR_US, FAR_US) - self.allowed_lateness_us)

    def expired(self, watermark_us: int) -> int:
        """Newest window end that is expired under a watermark."""
        return int(self.expired_ends(np.array([watermark_us]))[0])


def compile_view(view: FeatureView) -> Plan:
    """Compile a view; its definition has been checked when it was made."""
    columns = view.columns
    types, definitions = view.feature_schema, view.definitions
    texts = list(dict.fromkeys(f.where for f in definitions.values() if f.where is not None))
    slide_us = view.slide_us or 0
    sizes = [f.size_us for f in definitions.values() if f.size_us is not None]
    tile_us = math.gcd(slide_us, *sizes) if slide_us else 0  # with a time zone the slide: sizes are multiples of it

    def planned(name: str, feature: Feature) -> PlannedFeature:
        return PlannedFeature(
            name=name,
            function=feature.function,
            column=feature.column,
            filter_index=None if feature.where is None else texts.index(feature.where),
            scope=_scope(feature),
            n_tiles=0 if feature.size_us is None else feature.size_us // tile_us,
            last=feature.last or 0,
            input_type=None if feature.column is None else columns.field(feature.column).type,
            result_type=types.field(name).type,
            parameters=dict(feature.parameters),
        )

    features = tuple(planned(name, feature) for name, feature in definitions.items())
    return Plan(
        view=view,
        key=view.entity.key,
        features=features,
        filters=tuple(parse_expression(t, columns=columns, where=f"view {view.name}") for t in texts),
        align_us=view.align_to_us,
        calendar=view.calendar,
        slide_us=slide_us,
        gap_us=view.gap_us or 0,
        tile_us=tile_us,
        tiles_per_slide=slide_us // tile_us if tile_us else 0,
        max_tiles=max(sizes, default=slide_us) // tile_us if tile_us else 0,
        has_windows=any(f.scope is Scope.WINDOW for f in features),
        allowed_lateness_us=view.allowed_lateness_us,
    )


def _scope(feature: Feature) -> Scope:
    if feature.function == "from_event":
        return Scope.EVENT
    if feature.function == "derived":
        return Scope.DERIVED
    if feature.last is not None:
        return Scope.LAST
    return Scope.LIFETIME if feature.lifetime else Scope.WINDOW

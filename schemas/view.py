"""A feature view: features of one entity, from one source or several, under one version."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from schemas.aggregation import COPYING, FUNCTIONS, Aggregation, Feature, Function
from schemas.calendar import DAY_US, HOUR_US, Calendar, is_zone, local_us, make_calendar
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.expression import Expression, names_read, parse_derivation, parse_expression
from schemas.reference import ReferenceLookup
from schemas.row import CONTEXT_COLUMNS, ENGINE_COLUMNS, ORIGIN_COLUMNS, TIMESTAMP
from schemas.serving import Serving
from schemas.source import EventSource
from schemas.time import format_duration, format_rfc3339, parse_duration_us, parse_rfc3339_us
from schemas.view_input import ViewInput, hash_definition

EMIT_MODES: Final = ("on_close", "every_event", "latest")
MAX_SLIDES: Final = 100_000
"""A window may be this many slides long; each row changes as many windows."""
_ROWS: Final = {"window": "windows", "last": "the newest rows", "lifetime": "all rows"}
_OVER: Final = {"window": "`.over('5m')`", "last": "`.over(last=N)`", "lifetime": "`.over(lifetime=True)`"}
_MAX_VERSION: Final = 2**31 - 1
_EPOCH: Final = "1970-01-01T00:00:00Z"
_MARGIN_US: Final = 400 * DAY_US
_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}")
_FIRST_US: Final = parse_rfc3339_us("0001-01-01T00:00:00Z")
_LAST_US: Final = parse_rfc3339_us("9999-12-31T23:59:59.999999Z")


@dataclass(frozen=True)
class FeatureView:
    """Features of one entity that share a slide (or a session gap), a version and an owner.

    Attributes:
        name: Lower-case name; topics, tables and keys carry it.
        version: 1 or more; goes up when the definition changes.
        entity: What the features describe.
        source: Where the events come from: a source, or several.
        slide: Distance of window ends, for a sliding view. A feature whose size equals it is tumbling.
        gap: Inactivity that ends a session, for a session view.
        allowed_lateness: How far the watermark may pass a window's end before the window is gone.
        time_zone: Zone, such as ``America/New_York``, whose days or hours the windows are; the slide is then whole
            days, or whole hours that divide a day, and a size is a number of slides. None for a fixed length.
        align_to: A window end, RFC 3339; default the epoch. With a time zone, what its clock showed then is shown at
            window ends; default midnight.
        state_ttl: Event time after a key's last event for which last-N and lifetime state is kept.
        emit: ``latest``, ``every_event`` or ``on_close`` (design: emit modes).
        ttl: Age after which a value read online is stale, and of which twice, without a new row, after which the online
            store drops it; None means never.
        serving: How values are read online, and how fresh they have to be.
        owner: Who answers for it.
        features: Definitions by feature name.
        lookups: Reference tables that are looked up at each event's time, by the name that their columns get: features
            read ``<name>_<column>``, null where there is no row.
    """

    name: str
    _: KW_ONLY
    version: int
    entity: Entity
    source: EventSource | Sequence[EventSource]
    features: Mapping[str, Feature | Aggregation]
    lookups: Mapping[str, ReferenceLookup] = field(default_factory=dict)
    slide: str | None = None
    gap: str | None = None
    allowed_lateness: str = "0s"
    time_zone: str | None = None
    align_to: str | None = None
    state_ttl: str = "30d"
    emit: str = "latest"
    ttl: str | None = None
    serving: Serving = field(default_factory=Serving)
    owner: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            msg = f"`FeatureView` name is {self.name!r}, expected lower-case letters, digits, _ such as 'user_activity'"
            raise ConfigError(msg)
        self._check_kinds()
        is_number = isinstance(self.version, int) and not isinstance(self.version, bool)
        if not is_number or not 1 <= self.version <= _MAX_VERSION:
            expected = f"expected a whole number of 1 or more, {_MAX_VERSION} at most"
            msg = f"view {self.name}: `version` is {self.version!r}, {expected}"
            raise ConfigError(msg)
        if (self.slide is None) == (self.gap is None):
            msg = f"view {self.name}: expected exactly one of `slide` (sliding windows) and `gap` (sessions)"
            raise ConfigError(msg)
        if self.emit not in EMIT_MODES:
            msg = f"view {self.name}: `emit` is {self.emit!r}, expected one of {list(EMIT_MODES)}"
            raise ConfigError(msg)
        for name in ("slide", "gap", "state_ttl", "allowed_lateness", "ttl"):
            text = getattr(self, name)
            if text is not None and parse_duration_us(text, field=name) == 0 and name != "allowed_lateness":
                msg = f"view {self.name}: `{name}` is {text}, expected more than 0"
                raise ConfigError(msg)
        self._check_time_zone()
        self._check_align_to()
        try:
            _ = self.input
        except ConfigError as exc:
            msg = f"view {self.name}: {exc}"
            raise ConfigError(msg) from exc
        if not self.features:
            msg = f"view {self.name}: `features` is empty, expected at least one feature"
            raise ConfigError(msg)
        self._check_lookups()
        key_type = self.columns.field(self.entity.key).type
        if not (pa.types.is_string(key_type) or pa.types.is_integer(key_type)):
            msg = f"view {self.name}: entity key {self.entity.key!r} is {key_type}, expected text or an integer"
            raise ConfigError(msg)
        completed = {name: self._complete(name, feature) for name, feature in self.features.items()}
        if self.emit == "on_close" and self.gap is None and not any(f.is_windowed for f in completed.values()):
            msg = (
                f"view {self.name}: `emit` is 'on_close' but no feature has a window, so no row would ever be made; "
                "expected 'latest' or 'every_event', or a feature with `.over('5m')`"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "features", completed)
        self._check_years()
        resolve_derived(self)
        copies = {name for name in self.personal & completed.keys() if completed[name].function in COPYING}
        self.serving.check(self.name, types=self.feature_schema, ttl_us=self.ttl_us, copies=copies)

    def _check_kinds(self) -> None:
        sources = [self.source] if isinstance(self.source, EventSource) else self.source
        is_sources = isinstance(sources, Sequence) and all(isinstance(source, EventSource) for source in sources)
        for name, is_right, expected in (
            ("entity", isinstance(self.entity, Entity), "an entity such as Entity('user', key='user_id')"),
            ("source", is_sources, "an event source such as EventSource('shop.events', …), or a list of them"),
            ("features", isinstance(self.features, Mapping), "features by name, such as {'n': count().over('5m')}"),
            ("lookups", isinstance(self.lookups, Mapping), "lookups by name, such as {'plane': planes.on('tail')}"),
            ("serving", isinstance(self.serving, Serving), "how it is read, such as Serving(cache='5s')"),
            ("owner", isinstance(self.owner, str), "text"),
        ):
            if not is_right:
                msg = f"view {self.name}: `{name}` is {getattr(self, name)!r}, expected {expected}"
                raise ConfigError(msg)

    def _check_align_to(self) -> None:
        if self.align_to is None:
            return
        where = f"view {self.name}: `align_to` is {self.align_to!r}"
        if self.gap is not None:
            msg = f"{where} in a session view, expected none: a session begins with its first event"
            raise ConfigError(msg)
        try:
            _ = self.align_to_us
        except (ValueError, OverflowError) as exc:
            msg = f"{where}, expected RFC 3339 such as '2013-01-01T00:00:00Z'"
            raise ConfigError(msg) from exc

    def _check_years(self) -> None:
        """See that every time in a row lies in the years that RFC 3339 can write."""
        from_us, until_us = self.input.plausible_us
        sizes = [f.size_us or 0 for f in self.definitions.values()]
        last_us = until_us + max(sizes) + (self.slide_us or self.gap_us or 0) + DAY_US
        first_us = from_us - self.input.max_out_of_orderness_us
        for name, time_us, what in (
            ("plausible_until", last_us, "windows of the last events would end after the year 9999"),
            ("plausible_from", first_us, "the watermark of the first events would lie before the year 1"),
        ):
            if not _FIRST_US <= time_us <= _LAST_US:
                got = format_rfc3339(until_us if name == "plausible_until" else from_us)
                msg = f"view {self.name}: `{name}` of its source is {got}: {what}; expected a time further from that"
                raise ConfigError(msg)

    def _check_lookups(self) -> None:
        for name, lookup in self.lookups.items():
            where = f"view {self.name}, lookup {name!r}"
            if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(lookup, ReferenceLookup):
                msg = (
                    f"{where} is a {type(lookup).__name__}, expected a lower-case name and a lookup such as "
                    "planes.on('tail_number')"
                )
                raise ConfigError(msg)
            lookup.check(self.input.columns, where=where)
        names = self.columns.names
        if double := sorted({column for column in names if names.count(column) > 1}):
            msg = f"view {self.name}: lookups make the columns {double} twice, or events have them; name them otherwise"
            raise ConfigError(msg)

    def _check_time_zone(self) -> None:
        if self.time_zone is None:
            return
        where = f"view {self.name}: `time_zone` is {self.time_zone!r}"
        if not isinstance(self.time_zone, str) or not is_zone(self.time_zone):
            msg = f"{where}, expected a name of the tz database such as 'America/New_York'"
            raise ConfigError(msg)
        if self.slide_us is None:
            msg = f"{where} in a session view, expected none: a gap has a fixed length; take a `slide`, or no time zone"
            raise ConfigError(msg)
        if self.slide_us % DAY_US and (self.slide_us % HOUR_US or DAY_US % self.slide_us):
            msg = (
                f"{where} and `slide` is {self.slide}, expected whole days, or whole hours that divide a day (1h, 2h, "
                "3h, 4h, 6h, 8h, 12h); leave the time zone out for windows of fixed length"
            )
            raise ConfigError(msg)

    def _complete(self, name: str, feature: Feature | Aggregation) -> Feature:
        where = f"view {self.name}, feature {name!r}"
        reserved = {
            *ENGINE_COLUMNS.names,
            *CONTEXT_COLUMNS.names,
            *ORIGIN_COLUMNS.names,
            "window_start",
            self.entity.key,
        }
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in reserved:
            msg = f"{where}: expected a lower-case name that is not one of {sorted(reserved)}"
            raise ConfigError(msg)
        if isinstance(feature, Aggregation):
            if self.gap is None:
                msg = (
                    f"{where}: {feature.function} has no window, expected `.over('5m')`, `.over(last=N)` or "
                    "`.over(lifetime=True)`"
                )
                raise ConfigError(msg)
            feature = feature.as_feature()
        if not isinstance(feature, Feature):
            msg = f"{where} is a {type(feature).__name__}, expected a feature such as count().over('5m')"
            raise ConfigError(msg)
        if (function := FUNCTIONS.get(feature.function)) is None:
            msg = f"{where}: aggregation {feature.function!r} is unknown, expected one of {sorted(FUNCTIONS)}"
            raise ConfigError(msg)
        self._check_window(feature, where=where)
        self._check_column(feature, function, where=where)
        if (got := tuple(name for name, _ in feature.parameters)) != function.parameters:
            msg = f"{where}: {feature.function} has the parameters {list(got)}, expected {list(function.parameters)}"
            raise ConfigError(msg)
        if feature.where is not None:
            parse_expression(feature.where, columns=self.columns, where=where)
        return feature

    def _check_window(self, feature: Feature, *, where: str) -> None:
        if self.gap is not None and feature.size_us is not None:
            msg = (
                f"{where} has a window size in a session view, expected no `over` (the session is its window); "
                "put it into a sliding view"
            )
            raise ConfigError(msg)
        scope = "last" if feature.last is not None else "lifetime" if feature.lifetime else "window"
        if scope not in (allowed := FUNCTIONS[feature.function].runs_over):
            remedy = " or ".join(_OVER[name] for name in sorted(allowed, reverse=True))
            if feature.function == "approx_distinct":
                remedy += "; `distinct` counts the newest rows exactly"
            msg = f"{where}: {feature.function} does not run over {_ROWS[scope]}, expected {remedy}"
            raise ConfigError(msg)
        if self.slide_us is None or not feature.is_windowed:
            return
        if feature.size_us is None:
            msg = f"{where}: {feature.function} has no window size, expected one such as `.over('5m')`"
            raise ConfigError(msg)
        size = format_duration(feature.size_us)
        if feature.size_us < self.slide_us:
            msg = (
                f"{where} has the size {size}, expected the slide {self.slide} or more: events between the windows "
                "would be in none; take a smaller `slide`"
            )
            raise ConfigError(msg)
        if self.time_zone is not None and feature.size_us % self.slide_us:
            msg = (
                f"{where} has the size {size}, expected a multiple of the slide {self.slide}: with a `time_zone` "
                "slides differ in length; take another size, or leave the time zone out"
            )
            raise ConfigError(msg)
        if feature.size_us > MAX_SLIDES * self.slide_us:
            msg = (
                f"{where} has the size {size}, expected at most {MAX_SLIDES} slides of {self.slide}; take a larger one"
            )
            raise ConfigError(msg)

    def _check_column(self, feature: Feature, function: Function, *, where: str) -> None:
        needs = function.needs
        columns = self.columns
        if feature.column is None:
            if needs is not None and not function.is_column_optional:
                msg = f"{where}: {feature.function} reads no column, expected one of {columns.names}"
                raise ConfigError(msg)
            return
        if feature.column not in columns.names:
            read = [*(s.contract for s in self.sources), *(k.reference.reference for k in self.lookups.values())]
            contracts = ", ".join(read)
            msg = f"{where}: column {feature.column!r} is no field of {contracts}, expected one of {columns.names}"
            raise ConfigError(msg)
        arrow = columns.field(feature.column).type
        if not _accepts(needs, arrow):
            expected = "no column" if needs is None else f"a {needs} column"
            msg = f"{where}: {feature.function} needs {expected}, but {feature.column!r} is {arrow}"
            raise ConfigError(msg)

    @cached_property
    def input(self) -> ViewInput:
        """What the view reads."""
        given = (self.source,) if isinstance(self.source, EventSource) else tuple(self.source)
        return ViewInput(tuple(sorted(given, key=lambda source: source.topic)), self.entity)

    @property
    def sources(self) -> tuple[EventSource, ...]:
        """Its sources, in the order of their topics."""
        return self.input.sources

    @cached_property
    def columns(self) -> pa.Schema:
        """Columns that features may read: those of the events, and of what is looked up."""
        looked_up = [
            pa.field(f"{name}_{column.name}", column.type)
            for name, lookup in self.lookups.items()
            for column in lookup.reference.value_schema
        ]
        return pa.schema([*self.input.columns, *looked_up])

    @property
    def definitions(self) -> dict[str, Feature]:
        """The features by name, completed and checked."""
        return dict(self.features)  # type: ignore[arg-type]  # __post_init__ completed each of them

    @property
    def slide_us(self) -> int | None:
        """Slide in microseconds, None for a session view."""
        return None if self.slide is None else parse_duration_us(self.slide, field="slide")

    @property
    def gap_us(self) -> int | None:
        """Session gap in microseconds, None for a sliding view."""
        return None if self.gap is None else parse_duration_us(self.gap, field="gap")

    @property
    def allowed_lateness_us(self) -> int:
        """Allowed lateness in microseconds."""
        return parse_duration_us(self.allowed_lateness, field="allowed_lateness")

    @property
    def state_ttl_us(self) -> int:
        """Time to live of windowless state, in microseconds of event time."""
        return parse_duration_us(self.state_ttl, field="state_ttl")

    @property
    def ttl_us(self) -> int | None:
        """Age after which an online value is stale, in microseconds; None means never."""
        return None if self.ttl is None else parse_duration_us(self.ttl, field="ttl")

    @property
    def align_to_us(self) -> int:
        """A window end that all others are whole slides away from; with a time zone, what its clock showed then."""
        if self.time_zone is not None:
            return 0 if self.align_to is None else local_us(self.time_zone, parse_rfc3339_us(self.align_to))
        return parse_rfc3339_us(self.align_to or _EPOCH)

    @cached_property
    def calendar(self) -> Calendar | None:
        """Window ends in a time zone; None for windows of fixed length."""
        if self.time_zone is None or self.slide_us is None:
            return None
        longest_us = max((f.size_us or 0 for f in self.definitions.values()), default=0)
        return make_calendar(
            self.time_zone,
            slide_us=self.slide_us,
            anchor_us=self.align_to_us % self.slide_us,
            from_us=self.input.plausible_us[0] - _MARGIN_US,
            until_us=self.input.plausible_us[1] + longest_us + _MARGIN_US,
        )

    @property
    def feature_schema(self) -> pa.Schema:
        """Entity key and feature columns."""
        columns = self.columns
        types = [
            self.derived[name].arrow_type if feature.function == "derived" else feature.result_type(columns)
            for name, feature in self.definitions.items()
        ]
        return pa.schema([columns.field(self.entity.key), *map(pa.field, self.definitions, types)])

    @cached_property
    def derived(self) -> dict[str, Expression]:
        """Derived features in an order in which each reads only what is known by then."""
        return resolve_derived(self)

    @cached_property
    def personal(self) -> frozenset[str]:
        """Columns of its rows, maybe the entity key among them, made of fields that a contract marks as personal."""
        fields = frozenset[str]().union(*(source.schema.personal for source in self.sources))
        found = {self.entity.key} & fields
        found |= {name for name, feature in self.definitions.items() if feature.column in fields}
        for name in self.derived:
            if names_read(dict(self.definitions[name].parameters)["expression"]) & found:
                found.add(name)
        return frozenset(found)

    @cached_property
    def engine_schema(self) -> pa.Schema:
        """Columns of the rows that the engine makes."""
        window_start = [] if self.gap is None else [pa.field("window_start", TIMESTAMP)]
        return pa.schema([*self.feature_schema, *ENGINE_COLUMNS, *window_start])

    @cached_property
    def row_schema(self) -> pa.Schema:
        """Columns of a feature row on its topic and in Delta."""
        origin = ORIGIN_COLUMNS if self.input.is_repartitioned else ()
        return pa.schema([*self.engine_schema, *CONTEXT_COLUMNS, *origin])

    @property
    def definition(self) -> dict[str, Any]:
        """The definition alone, as JSON values: all that decides which rows are admitted and what is computed of them.

        Version, owner, read-time TTL and :mod:`schemas.serving` are not part of it, nor are the names of the entity and
        the contract, nor how a duration or a time is spelled, nor by how many whole slides ``align_to`` is moved.
        """
        windows: dict[str, Any] = {
            "slide_us": self.slide_us,
            "gap_us": self.gap_us,
            "allowed_lateness_us": self.allowed_lateness_us,
            "align_to_us": None if self.slide_us is None else self.align_to_us % self.slide_us,
            "state_ttl_us": self.state_ttl_us,
        }
        if self.calendar is not None:
            # The boundaries themselves: another release of the tz database may move them.
            windows["time_zone"] = {"name": self.time_zone, "boundaries": self.calendar.fingerprint}
        looked_up = {name: lookup.definition for name, lookup in self.lookups.items()}
        return {
            "entity_key": self.entity.key,
            **({"lookups": looked_up} if looked_up else {}),
            **self.input.definition,
            "windows": windows,
            "emit": self.emit,
            "features": {name: asdict(feature) for name, feature in self.definitions.items()},
        }

    @cached_property
    def definition_hash(self) -> str:
        """Stable hash of :attr:`definition`, see :func:`hash_definition`."""
        return hash_definition(self.definition)

    @property
    def topic(self) -> str:
        """Topic that the feature rows go to."""
        return f"features.{self.name}"

    def describe_windows(self) -> str:
        """Say the view's windows in one line."""
        if self.gap is not None:
            return f"session, gap {self.gap}"
        sizes = sorted({f.size_us for f in self.definitions.values() if f.size_us is not None})
        zone = "" if self.time_zone is None else f" in {self.time_zone}"
        if not sizes:
            return f"no windows (last-N and lifetime features), slide {self.slide}{zone}"
        return f"sliding {', '.join(format_duration(size) for size in sizes)} every {self.slide}{zone}"


def resolve_derived(view: FeatureView) -> dict[str, Expression]:
    """Check the derived features of a view and put them in the order in which they can be calculated.

    Raises:
        ConfigError: One is wrong, reads an unknown name, or reads itself by way of others.
    """
    columns = view.columns
    waiting = {
        name: dict(feature.parameters)["expression"]
        for name, feature in view.definitions.items()
        if feature.function == "derived"
    }
    known = {name: f.result_type(columns) for name, f in view.definitions.items() if name not in waiting}
    resolved: dict[str, Expression] = {}
    while waiting:
        ready = [name for name, text in waiting.items() if not names_read(text) & waiting.keys()]
        if not ready:
            msg = (
                f"view {view.name}: the derived features {sorted(waiting)} read each other or themselves, "
                "expected none that hangs on itself; write one of them out in features that are not derived"
            )
            raise ConfigError(msg)
        for name in ready:
            where = f"view {view.name}, feature {name!r}"
            schema = pa.schema(list(known.items()))
            resolved[name] = parse_derivation(waiting.pop(name), columns=schema, where=where)
        known |= {name: resolved[name].arrow_type for name in ready}
    return resolved


def _accepts(needs: str | None, arrow: pa.DataType) -> bool:
    is_number: bool = pa.types.is_integer(arrow) or pa.types.is_floating(arrow)
    is_text: bool = pa.types.is_string(arrow)
    match needs:
        case "number":
            return is_number
        case "orderable":
            return is_number or is_text
        case "category":
            return is_text or pa.types.is_integer(arrow) or pa.types.is_boolean(arrow)
        case _:
            return needs == "any"

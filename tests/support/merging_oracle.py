"""The naive second opinion on views behind a repartition topic: records one by one, watermarks in plain dicts."""

import math
from typing import Any

from tests.support.oracle import MINUS_INFINITY, Oracle, Row


class MergingOracle(Oracle):
    """Takes events that were admitted before, and records that tell a watermark alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: dict[tuple[str, int], float] = {}
        self.idle: set[tuple[str, int]] = set()
        self.counts_of: dict[str, int] = {}

    def step(self, row: Row) -> None:
        self.last_offset = row["_offset"]
        row = row | {"_t": row["_time"]}
        if self.source.event_id is not None:
            row[self.source.event_id] = row["_event_id"]
        self.hear(row)
        self.move_watermark(max(self.watermark, self.merged()), maker=row)
        self.hear_after(row)
        if not row["_is_event"]:
            return
        before = self.watermark
        row |= {"_before": before}
        reason = None
        if self.is_duplicate(row, row["_t"], before):
            reason = "duplicate"
        elif self.is_late(row[self.key], row["_t"], before):
            reason = "late"
        elif self.overflows(row, before):
            reason = "overflow"
        if reason is not None:
            late_by = int(before) - row["_t"] if reason == "late" else None
            self.output.dead_letters.append({"_offset": row["_offset"], "reason": reason, "late_by_us": late_by})
            return
        self.output.admitted += 1
        self.admitted.append(row)
        key = row[self.key]
        if self.history[key] and self.is_forgotten(key, before):
            self.history[key] = []
        self.history[key].append(row)
        if self.view.gap_us is None:
            self.add_to_windows(row)
        else:
            self.add_to_session(row)
        if self.view.emit != "on_close":
            self.as_of(row)

    def hear(self, row: Row) -> None:
        speaker = row["_source"], row["_source_partition"]
        count = max(self.counts_of.get(row["_source"], 0), row["_source_partitions"], row["_source_partition"] + 1)
        self.counts_of[row["_source"]] = count
        told = MINUS_INFINITY if row["_watermark"] is None else row["_watermark"]
        self.told[speaker] = max(self.told.get(speaker, MINUS_INFINITY), told)
        self.idle -= {speaker}
        if row["_is_idle"]:
            self.idle.add(speaker)

    def hear_after(self, row: Row) -> None:
        after = row["_watermark_after"]
        speaker = row["_source"], row["_source_partition"]
        self.told[speaker] = max(self.told[speaker], MINUS_INFINITY if after is None else after)

    def merged(self) -> float:
        if set(self.counts_of) != {source.topic for source in self.view.sources}:
            return MINUS_INFINITY
        everyone = [(topic, number) for topic, count in self.counts_of.items() for number in range(count)]
        awake = [speaker for speaker in everyone if speaker not in self.idle]
        if not awake:
            return max(self.told.get(speaker, MINUS_INFINITY) for speaker in everyone)
        return min(self.told.get(speaker, MINUS_INFINITY) for speaker in awake)

    def watermark_at(self, maker: Row | None) -> float:
        return self.watermark

    def is_late(self, key: Any, time: int, before: float) -> bool:
        return not math.isinf(before) and super().is_late(key, time, before)

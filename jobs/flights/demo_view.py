"""What the demo shows while it runs: rates, watermark, freshness, late rows, scores and how good they turn out."""

import time
from datetime import UTC, datetime

from rich.table import Table

from jobs.flights.producer import ProduceProgress, ProduceSummary
from jobs.flights.scoreboard import Quality, Scoreboard
from jobs.flights.views import VIEWS
from jobs.scrape import Samples

_RATE_OVER_S = 5.0


class DemoView:
    """Turns scrapes of the workers into lines for people."""

    def __init__(self) -> None:
        self._samples = Samples()
        self._history: list[tuple[float, Samples]] = []
        self._sent_before = 0
        self._progress: ProduceProgress | None = None
        self._board: Scoreboard | None = None
        self._quality: Quality | None = None

    def progressed(self, progress: ProduceProgress) -> None:
        """Take how far producing is; called from the producer's thread."""
        self._progress = progress

    def produced(self, summary: ProduceSummary) -> None:
        """Take that a range is done."""
        self._sent_before += summary.events
        if self._progress is not None and summary.last_known_us is not None:
            self._progress = ProduceProgress(sent=0, total=0, known_us=summary.last_known_us, wall_s=0.0)

    def update(self, samples: Samples, board: Scoreboard | None) -> None:
        """Take a scrape."""
        now = time.monotonic()
        self._samples = samples
        self._history = [(at, old) for at, old in self._history if now - at <= _RATE_OVER_S] + [(now, samples)]
        self._board = board
        self._quality = board.quality() if board is not None else None

    def table(self) -> Table:
        """Show everything."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in self._facts():
            table.add_row(name, value)
        return table

    def line(self) -> str:
        """Show everything in one line, for a log."""
        return "  " + "; ".join(f"{name} {value}" for name, value in self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        samples = self._samples
        facts = []
        if self._progress is not None:
            facts.append(("simulated time", f"{_moment(self._progress.known_us / 1e6)}"))
        sent = self._sent_before + (self._progress.sent if self._progress else 0)
        done = samples.total("headrace_batch_rows_sum", role="features")
        rate = self._rate("headrace_batch_rows_sum", role="features")
        # More than were sent: what goes by way of a repartition topic is read twice.
        facts.append(
            ("events", f"{sent:,} sent; {done:,.0f} records read for features, with repartition, {rate:,.0f}/s")
        )
        if (watermark := self._watermark()) is not None:
            lag = f", {_span(self._progress.known_us / 1e6 - watermark)} behind" if self._progress else ""
            facts.append(("watermark", f"{_moment(watermark)}{lag}"))
        before = self._history[0][1] if self._history else None
        for name, metric in (
            ("freshness", "headrace_freshness_seconds"),
            ("score latency", "headrace_score_freshness_seconds"),
        ):
            recent = [samples.quantile(metric, q, before=before) for q in (0.5, 0.99)]
            if recent[0] is not None and recent[1] is not None:
                target = "score on its topic" if "score" in metric else "readable in Redis"
                facts.append((name, f"event to {target}: p50 {_ms(recent[0])}, p99 {_ms(recent[1])}"))
        reasons = samples.values("headrace_dead_letters_total", "reason")
        letters = ", ".join(f"{reason} {count:,.0f}" for reason, count in sorted(reasons.items())) or "none"
        late = samples.total("headrace_rows_total", outcome="partially_late")
        facts.append(("dead letters", f"{letters}; {late:,.0f} rows late for some windows"))
        rows = samples.total("headrace_offline_rows_total", outcome="appended")
        facts.append(
            ("stored", f"{samples.total('headrace_online_rows_total'):,.0f} rows online, {rows:,.0f} in Delta")
        )
        if self._board is not None:
            share = self._board.n_complete / self._board.n_scores if self._board.n_scores else 0.0
            rate = self._rate("headrace_scores_total")
            facts.append(("scores", f"{self._board.n_scores:,}, {rate:,.0f}/s, {share:.0%} with every input there"))
        if self._quality is not None:
            facts.append(("predictions", describe("", self._quality)))
        return facts

    def _rate(self, name: str, **labels: str) -> float:
        if len(self._history) < 2:
            return 0.0
        (began, old), (now, new) = self._history[0], self._history[-1]
        return max(0.0, new.total(name, **labels) - old.total(name, **labels)) / (now - began)

    def _watermark(self) -> float | None:
        found = self._samples.by_name.get("headrace_watermark_timestamp_seconds", [])
        watermarks = [value for labels, value in found if labels["view"] == VIEWS[0].name]
        return min(watermarks) if watermarks else None


def describe(name: str, quality: Quality) -> str:
    """Say a quality in one line."""
    head = f"{name}: " if name else ""
    if quality.auc is None or quality.brier is None:
        return f"{head}{quality.flights:,} scored flights have landed, too few to judge"
    return (
        f"{head}AUC {quality.auc:.3f}, Brier {quality.brier:.3f} over {quality.flights:,} scored flights that have "
        f"landed, {quality.late_share:.0%} of them late"
    )


def _moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"


def _span(span_s: float) -> str:
    return f"{span_s / 60:,.0f} min" if span_s < 7_200 else f"{span_s / 3_600:,.1f} h"


def _ms(span_s: float) -> str:
    return f"{span_s * 1_000:,.0f} ms" if span_s < 10 else f"{span_s:,.0f} s"

"""How ``headrace compute --report`` shows what settings of bounded out-of-orderness do."""

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from offline.report import LatenessReport, SettingReport

_COLUMNS = ("late", "partially", "after close", "open", "p50", "p99", "max")
_CLOCKS = {
    "broker_time": "broker time",
    "event_time": "event time (no `_broker_time`)",
    "mixed": "broker time where a row has one, else event time",
}


def print_report(report: LatenessReport, *, as_json: bool) -> None:
    """Print a report as a table, or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(_document(report), indent=2))
        return
    view, console = report.view, Console(highlight=False)
    console.print(f"[bold cyan]{view.name}[/] v{view.version}  {view.describe_windows()}, ", end="", soft_wrap=True)
    console.print(f"allowed lateness {view.allowed_lateness}; {report.rows:,} rows", soft_wrap=True)
    if report.rejected:
        rejected = ", ".join(f"{reason} {number:,}" for reason, number in report.rejected.items())
        console.print(f"Not counted, dead letters under any setting: {rejected}", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for setting in report.settings:
        name = f"{setting.max_out_of_orderness} *" if setting.is_own else setting.max_out_of_orderness
        table.add_row(*_cells(setting, name, report.rows), style="bold" if setting.is_own else "")
    console.print(table)
    for line in (
        "setting: max_out_of_orderness, * the view's own",
        "late: in no window, a dead letter; partially: in some of its windows alone",
        "after close: it came when its window had closed, which then fires again",
        "open: the log does not close its window",
        f"p50, p99, max: staleness, from its window's end to the closing, by {_CLOCKS[report.clock]}",
    ):
        console.print(line, style="dim", markup=False, soft_wrap=True)


def _cells(setting: SettingReport, name: str, rows: int) -> list[str]:
    counts = (setting.late, setting.partially_late, setting.after_close, setting.open)
    waits = (setting.staleness_p50_us, setting.staleness_p99_us, setting.staleness_max_us)
    return [name, *(_share(number, rows) for number in counts), *map(show_wait, waits)]


def _share(number: int, rows: int) -> str:
    return f"{100 * number / rows:.2f}%" if rows else "-"


def show_wait(wait_us: int | None) -> str:
    """Write a duration in the two units that matter, such as ``2h 47m``, ``1m 5s`` or ``3.20s``; ``-`` for none."""
    if wait_us is None:
        return "-"
    sign, seconds = ("-" if wait_us < 0 else ""), abs(wait_us) / 1e6
    if seconds < 60:
        return f"{sign}{seconds:.2f}s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_m = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{sign}{days}d {rest_h}h"
    return f"{sign}{hours}h {rest_m}m" if hours else f"{sign}{minutes}m {rest_s}s"


def _document(report: LatenessReport) -> dict[str, Any]:
    rows = report.rows
    return {
        "view": report.view.name,
        "version": report.view.version,
        "rows": rows,
        "rejected": report.rejected,
        "clock": report.clock,
        "settings": [
            asdict(setting)
            | {
                "late_share": setting.late / rows if rows else None,
                "partially_late_share": setting.partially_late / rows if rows else None,
                "after_close_share": setting.after_close / rows if rows else None,
            }
            for setting in report.settings
        ],
    }

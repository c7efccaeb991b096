"""Figures of a benchmark: each with its bar, and what it was compared with in the same run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_WIDTH: Final = 120
"""A narrower terminal breaks lines, but cuts nothing off."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure.

    Attributes:
        name: Dotted name, the benchmark's first.
        value: The median of all rounds.
        unit: Its unit.
        bar: What it should reach; None where there is none.
        is_lower_better: Whether reaching the bar means to stay at or below it.
        compared_with: What was measured beside it in the same run.
        ratio: ``value`` by the value of that; None where nothing was compared.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    is_lower_better: bool = False
    compared_with: str | None = None
    ratio: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.is_lower_better else self.value >= self.bar

    def to_document(self) -> dict[str, Any]:
        """The figure as JSON values."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "met": self.is_met,
            "compared_with": self.compared_with,
            "ratio": self.ratio,
        }


def print_figures(figures: Sequence[Figure]) -> None:
    """Print a table of figures with the bar, and whether it is met, beside each."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title, is_number in (("figure", False), ("value", True), ("bar", True), ("met", False), ("ratio", True)):
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("to", no_wrap=True)
    for figure in figures:
        bar = "" if figure.bar is None else f"{'≤' if figure.is_lower_better else '≥'} {show_number(figure.bar)}"
        met = {None: "", True: "[green]yes[/]", False: "[bold red]no[/]"}[figure.is_met]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        value = f"{show_number(figure.value)} {figure.unit}"
        table.add_row(figure.name, value, bar, met, ratio, figure.compared_with or "")
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(table)


def show_number(value: float) -> str:
    """Write a number with three digits or more, thousands apart."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"

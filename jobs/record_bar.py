"""The bar of commands that go over a log: how many of its records are done, and when the rest will be."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def record_bar(console: Console) -> Progress:
    """Make a bar that counts records; it shows nothing where the console is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} records"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

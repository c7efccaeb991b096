"""The log levels of workers, as an option of commands."""

from enum import StrEnum
from typing import Annotated

import typer


class LogLevel(StrEnum):
    """How much a worker tells in its log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelOption = Annotated[
    LogLevel, typer.Option(metavar="LEVEL", help=f"What workers log: {', '.join(LogLevel)}.", show_default="info")
]

"""The log levels of a worker."""

from enum import StrEnum


class LogLevel(StrEnum):
    """How much a worker tells in its log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

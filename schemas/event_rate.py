"""The most events a second that a setting or a key may name. By itself, so that settings read it and load nothing."""

from typing import Final

MAX_EVENT_RATE: Final = 1_000_000

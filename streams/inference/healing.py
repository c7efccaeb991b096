"""When a model that does not answer is to be brought back: a state machine without I/O and without a clock.

A server may call a model ready whose backend process has died: every request then fails, and nothing but loading the
model anew helps. Loading takes a working model away for a moment, so a single failure is no reason, a late answer is
none at all (the model may be busy), and what did not help is tried again ever less often.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from streams.ports import Recovery

FAILURES: Final = 2
"""Failed probes in a row after which a model is to be brought back."""
PAUSE_S: Final = 5.0
"""Seconds between two attempts, the first time; others may be waiting for an attempt's effect."""
LONGEST_PAUSE_S: Final = 80.0


class Probed(StrEnum):
    """What became of one row that a model was asked."""

    ANSWERED = "answered"
    LATE = "late"
    """It did not answer in time, which a busy model does not either."""
    REFUSED = "refused"
    """It answered, but not as its contract says: loading the same file again cannot help."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Healing:
    """What is known of one model; each step makes another.

    Attributes:
        failures: Failed probes since it last answered or was last seen to.
        fruitless: Attempts in a row after which it still failed.
        not_before_s: No attempt before this time, on the clock of whoever asks.
    """

    failures: int = 0
    fruitless: int = 0
    not_before_s: float = float("-inf")

    def after_probe(self, probed: Probed) -> "Healing":
        """Count a probe; a late one tells nothing."""
        match probed:
            case Probed.ANSWERED | Probed.REFUSED:
                return replace(self, failures=0, fruitless=0)
            case Probed.FAILED:
                return replace(self, failures=self.failures + 1)
            case Probed.LATE:
                return self

    def after_recovery(self, recovery: Recovery, *, now_s: float) -> "Healing":
        """Count an attempt; a server that is away is waited for without one."""
        match recovery:
            case Recovery.AWAY:
                return replace(self, failures=0)
            case Recovery.FAILED:
                pause_s = min(PAUSE_S * 2 ** (self.fruitless + 1), LONGEST_PAUSE_S)
                return replace(self, fruitless=self.fruitless + 1, not_before_s=now_s + pause_s)
            case Recovery.UNNEEDED | Recovery.LOADED | Recovery.HEALED:
                return Healing(not_before_s=now_s + PAUSE_S)

    def may_try(self, now_s: float) -> bool:
        """Whether enough time has passed since the attempt before."""
        return now_s >= self.not_before_s

    def is_due(self, now_s: float) -> bool:
        """Whether the model is to be brought back now."""
        return self.failures >= FAILURES and self.may_try(now_s)

"""Whether a worker works: what its endpoint answers, and how a partition that stands still is told from one at rest."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STARTING = "the worker is starting"


@dataclass(frozen=True)
class Verdict:
    """An answer of the endpoint.

    Attributes:
        is_good: Whether all is well.
        reasons: Why it is not.
    """

    is_good: bool
    reasons: Sequence[str] = ()


class Health:
    """What a worker's endpoint says of it; safe to use from any thread.

    Live: it makes headway, or has nothing to do, or waits for a service. What is not live must be started again.
    Ready: rows flow. What is not ready may be so soon.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stalls: tuple[str, ...] = ()
        self._waits: tuple[str, ...] = (_STARTING,)

    def waits_for(self, reasons: Sequence[str]) -> None:
        """Say what the worker waits for before rows flow; nothing where they do."""
        with self._lock:
            self._waits = tuple(reasons)

    def stalled(self, reasons: Sequence[str]) -> None:
        """Say what stands still and should not."""
        with self._lock:
            self._stalls = tuple(reasons)

    def live(self) -> Verdict:
        """Tell whether it is any use to let the worker run on."""
        with self._lock:
            return Verdict(is_good=not self._stalls, reasons=self._stalls)

    def ready(self) -> Verdict:
        """Tell whether rows flow."""
        with self._lock:
            reasons = (*self._stalls, *self._waits)
        return Verdict(is_good=not reasons, reasons=reasons)


@dataclass
class _Place:
    done: int
    since_s: float


class Progress:
    """Notices partitions that stand still although records wait in them: the failure that shows no error.

    Args:
        stall_timeout_s: How long one may stand still.
    """

    def __init__(self, *, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._places: dict[tuple[str, int], _Place] = {}

    def excuse(self) -> None:
        """Begin to count anew: there was a reason to stand still, such as a store that does not answer."""
        self._places = {}

    def look(
        self, now_s: float, *, done: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]
    ) -> list[str]:
        """Compare with the last look.

        Args:
            now_s: Any clock that does not go back.
            done: Up to where each partition of the worker is processed.
            ends: Where each of them ends, asked of the broker; one that is not named is not judged.

        Returns:
            What has stood still for too long, in words.
        """
        stalls = []
        places = {}
        for tp, offset in done.items():
            place = self._places.get(tp)
            behind = ends.get(tp, 0) - offset
            if place is None or place.done != offset or behind <= 0:
                place = _Place(offset, now_s)
            elif now_s - place.since_s >= self._stall_timeout_s:
                stalls.append(
                    f"{tp[0]}-{tp[1]} has stood at offset {offset} for {now_s - place.since_s:.0f} s, {behind} offsets "
                    "before its end"
                )
            places[tp] = place
        self._places = places
        return stalls

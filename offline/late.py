"""Late rows folded in: the rows of a view as they are once it counts what came too late for its live path.

A late row counts where it stands in the log: the windows that it is in fire again, and lifetime and last-N features
have it from there on. So nothing is known before it came, and a point-in-time join does not see what no online read
could have. It is the view with a longer ``allowed_lateness``, which is another definition with a hash of its own: its
rows are in a store of their own, and neither the live path nor a backfill of the view itself can get among them.

What was sent again for being late (``headrace dlq redrive --reason late``) stands in the log twice; it counts once.
"""

from collections.abc import Iterable
from dataclasses import replace

from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.time import format_duration
from schemas.view import FeatureView
from streams.dead_letter import DeadLetter

_SECOND_US = 1_000_000


def with_late(view: FeatureView, late_us: int) -> FeatureView:
    """Have a view count rows that are late by less than this.

    Args:
        view: The view.
        late_us: How far event times may be behind the watermark, in microseconds.

    Raises:
        ConfigError: It counts them itself.
    """
    if late_us <= view.allowed_lateness_us:
        msg = (
            f"rows late by less than {format_duration(late_us)} are to count, expected more than `allowed_lateness` "
            f"of view {view.name}, {view.allowed_lateness}: it waits for those itself"
        )
        raise ConfigError(msg)
    return replace(view, allowed_lateness=format_duration(late_us))


def lateness_us(letters: Iterable[DeadLetter], view: FeatureView) -> int:
    """Tell how late rows have to count so that none of a view's late dead letters is left, in whole seconds.

    Raises:
        ConfigError: There are none.
    """
    late = [
        int(letter.facts["late_by_us"])
        for letter in letters
        if letter.reason == Reason.LATE and letter.view == view.name and letter.facts.get("late_by_us", "").isdigit()
    ]
    if not late:
        msg = f"there are no dead letters of rows that were late for view {view.name}, expected some to fold in"
        raise ConfigError(msg)
    return (max(late) // _SECOND_US + 1) * _SECOND_US

"""``headrace``, ended by SIGKILL as it has passed a step of its commit for the n-th time.

Run as ``python -m tests.support.dying_worker STEP N worker --role …``. The steps are those that are numbered in
``streams/transport/epoch.py``, and what the roles without epochs do in their place.
"""

import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from jobs.cli import main
from jobs.role import Role
from streams.sinks.offline import OfflineWriter
from streams.sinks.online import OnlineWriter
from streams.transport.consumer import ColumnarConsumer
from streams.transport.epoch import Epoch

STEPS: Final[Mapping[Role, tuple[str, ...]]] = {
    Role.FEATURES: ("rows", "commit", "state", "offsets", "committed"),
    Role.SCORING: ("rows", "commit", "offsets", "committed"),
    Role.ONLINE: ("stored", "acknowledged"),
    Role.OFFLINE: ("stored", "acknowledged"),
}
"""By role, what has been done as the worker dies.

``rows``: rows are in the open transaction; ``commit``: a commit begins; ``state``: the state is in the transaction;
``offsets``: the offsets are; ``committed``: the transaction is committed, and the consumer does not know it;
``stored``: the store has the rows; ``acknowledged``: the consumer is about to commit their offsets.
"""


class Death:
    """Ends the process as a step is passed for the n-th time."""

    def __init__(self, step: str, times: int) -> None:
        self._step = step
        self._left = times
        self._lock = threading.Lock()

    def passed(self, step: str) -> None:
        """Note that a step has been passed; does not return from the last time."""
        with self._lock:
            self._left -= step == self._step
            if self._left > 0 or step != self._step:
                return
            sys.stderr.write(f"dies as scheduled: {step}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()


class MortalProducer:
    """Kafka's producer, which notes the steps that it does."""

    def __init__(self, inner: Any, death: Death) -> None:
        self._inner = inner
        self._death = death

    def send_offsets_to_transaction(self, *args: Any) -> None:
        self._inner.send_offsets_to_transaction(*args)
        self._death.passed("offsets")

    def commit_transaction(self, *args: Any) -> None:
        self._inner.commit_transaction(*args)
        self._death.passed("committed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def make_mortal(death: Death) -> None:
    """Have each step of a commit tell ``death`` that it has been passed."""
    make, commit, write_rows = Epoch.__init__, Epoch.commit, Epoch.write_rows

    def made(self: Epoch, *args: Any, before_commit: Any = None, **options: Any) -> None:
        async def write_state(offsets: Any) -> None:
            await before_commit(offsets)
            death.passed("state")

        make(self, *args, before_commit=None if before_commit is None else write_state, **options)
        self._producer = MortalProducer(self._producer, death)  # type: ignore[assignment]  # it passes calls on

    async def committed(self: Epoch, *args: Any, **options: Any) -> None:
        death.passed("commit")
        await commit(self, *args, **options)

    async def wrote(self: Epoch, *args: Any, values: Any, **options: Any) -> None:
        await write_rows(self, *args, values=values, **options)
        if values:
            death.passed("rows")

    Epoch.__init__, Epoch.commit, Epoch.write_rows = made, committed, wrote  # type: ignore[method-assign]
    OnlineWriter.write = then(OnlineWriter.write, death)  # type: ignore[method-assign]
    store = OfflineWriter.write

    def stored(self: OfflineWriter, *args: Any, **options: Any) -> Any:
        result = store(self, *args, **options)
        death.passed("stored")
        return result

    OfflineWriter.write = stored  # type: ignore[method-assign]
    acknowledge = ColumnarConsumer._commit_to_group

    async def acknowledged(self: ColumnarConsumer, offsets: Any) -> None:
        death.passed("acknowledged")
        await acknowledge(self, offsets)

    ColumnarConsumer._commit_to_group = acknowledged  # type: ignore[method-assign]


def then(write: Callable[..., Awaitable[Any]], death: Death) -> Callable[..., Awaitable[Any]]:
    async def stored(*args: Any, **options: Any) -> Any:
        result = await write(*args, **options)
        death.passed("stored")
        return result

    return stored


if __name__ == "__main__":
    make_mortal(Death(sys.argv[1], int(sys.argv[2])))
    del sys.argv[1:3]
    main()

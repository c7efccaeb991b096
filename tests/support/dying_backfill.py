"""``headrace backfill``, ended by SIGKILL as it has passed a step for the n-th time.

Run as ``python -m tests.support.dying_backfill STEP N backfill …``; ``-`` for no step. Checkpoints are made of every
batch.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, Final

import jobs.backfill_run
import offline.backfill
import streams.sinks.archive
from jobs.backfill_run import Run
from jobs.cli import main
from offline.backfill import PartitionBackfill
from streams.sinks.offline import OfflineWriter
from streams.sinks.staging import Stage
from tests.support.dying_worker import Death

STEPS: Final = ("planned", "rows", "state", "added", "ended", "cleared")
"""What has been done as it dies.

``planned``: the plan is on disk; ``rows``: rows of a checkpoint are in files; ``state``: its state is on disk;
``added``: all is in the view's table; ``ended``: the run says that it has ended; ``cleared``: its checkpoints have
gone.
"""


def make_mortal(death: Death) -> None:
    """Have each step tell ``death`` that it has been passed."""
    offline.backfill.CHECKPOINT_RECORDS = 1  # type: ignore[misc]
    streams.sinks.archive._JOINED_ROWS = 1  # type: ignore[misc]

    def after(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            death.passed(step)
            return result

        return called

    Run.replan = after("planned", Run.replan)  # type: ignore[method-assign]
    Stage.write = after("rows", Stage.write)  # type: ignore[method-assign]
    PartitionBackfill._checkpoint = after("state", PartitionBackfill._checkpoint)  # type: ignore[method-assign]
    OfflineWriter.add_history = after("added", OfflineWriter.add_history)  # type: ignore[method-assign]
    clear = jobs.backfill_run._clear_ended

    def cleared(directory: Any) -> None:
        is_ended = (directory / "ended.json").exists()
        if is_ended:
            death.passed("ended")
        clear(directory)
        if is_ended:
            death.passed("cleared")

    jobs.backfill_run._clear_ended = cleared


if __name__ == "__main__":
    make_mortal(Death(sys.argv[1], int(sys.argv[2])))
    del sys.argv[1:3]
    sys.argv[0] = "headrace"
    os.environ.setdefault("COLUMNS", "200")
    main()

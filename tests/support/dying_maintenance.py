"""``headrace tables maintain``, ended by SIGKILL as it has passed a step for the n-th time.

Run as ``python -m tests.support.dying_maintenance STEP N tables maintain …``.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, Final

import offline.compaction
import offline.maintenance
from jobs.cli import main
from tests.support.dying_worker import Death

STEPS: Final = ("written", "committed", "checkpoint", "deleted")
"""What has been done as it dies: a file is written, and no commit names it; a commit does; a checkpoint is written, and
no log file removed; files that are in no version any more are deleted."""


def make_mortal(death: Death) -> None:
    """Have each step tell ``death`` that it has been passed."""

    def after(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            death.passed(step)
            return result

        return called

    class Table(offline.maintenance.DeltaTable):  # type: ignore[misc]
        create_checkpoint = after("checkpoint", offline.maintenance.DeltaTable.create_checkpoint)

    opened = offline.maintenance._open

    def open_table(found: offline.maintenance.FoundTable) -> Any:
        return Table(opened(found).table_uri)

    offline.maintenance._open = open_table
    offline.compaction._write = after("written", offline.compaction._write)
    offline.compaction._commit = after("committed", offline.compaction._commit)
    offline.maintenance._vacuum = after("deleted", offline.maintenance._vacuum)


if __name__ == "__main__":
    make_mortal(Death(sys.argv[1], int(sys.argv[2])))
    del sys.argv[1:3]
    sys.argv[0] = "headrace"
    os.environ.setdefault("COLUMNS", "200")
    main()

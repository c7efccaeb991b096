"""``headrace`` whose redrive is killed at a commit: ``python -m tests.support.dying_redrive before|after N …``."""

import os
import signal
import sys
from typing import Any

from confluent_kafka import Producer

import jobs.redrive
from jobs.cli import main

STEP, NUMBER = sys.argv[1], int(sys.argv[2])


class Dying(Producer):
    """Dies before or after its n-th commit."""

    n_commits = 0

    def commit_transaction(self, *arguments: Any) -> None:
        self.n_commits += 1
        if self.n_commits == NUMBER and STEP == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit_transaction(*arguments)
        if self.n_commits == NUMBER:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    jobs.redrive.Producer = Dying  # type: ignore[misc]
    jobs.redrive._CHUNK_ROWS = 4  # type: ignore[misc]
    sys.argv[1:3] = []
    main()

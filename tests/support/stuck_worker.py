"""``headrace``, with a features role that after some rows waits for ever, without an error: how consumers are lost.

Run as ``python -m tests.support.stuck_worker worker --role features``.
"""

import asyncio
from typing import Any

from jobs.cli import main
from streams.agents.features import FeaturesWorker

ROWS = 100


def make_stuck() -> None:
    """Let the role take its rows no more once it has taken :data:`ROWS`."""
    process = FeaturesWorker._process
    taken = 0

    async def get_stuck(self: FeaturesWorker, batch: Any) -> None:
        nonlocal taken
        if taken >= ROWS:
            await asyncio.Event().wait()
        taken += len(batch)
        await process(self, batch)

    FeaturesWorker._process = get_stuck  # type: ignore[method-assign]  # it is what is tried


if __name__ == "__main__":
    make_stuck()
    main()

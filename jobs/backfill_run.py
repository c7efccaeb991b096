"""A run of a backfill: what it has been asked for, how far it is, and the processes that do it.

What is on disk is enough to go on after any of its steps: ``run.json`` says what is done and how its files are called,
a checkpoint of each partition how far. At the end ``run.json`` is renamed first, which leaves all of it behind at once.
"""

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from jobs.application import load_application
from jobs.record_bar import record_bar
from offline import backfill as engine
from offline.late import with_late
from schemas.errors import ConfigError, ServiceError
from schemas.view import FeatureView
from streams.ports import RecordLog
from streams.sinks.staging import Stage


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for; one that was interrupted is gone on with only when the same is asked for again."""

    application: str
    module: str
    view: str
    definition_hash: str
    log: str
    target: str
    from_us: int | None
    to_us: int | None
    late_us: int | None = None

    def driven(self, view: FeatureView) -> FeatureView:
        """The view, counting late rows where that is wanted."""
        return view if self.late_us is None else with_late(view, self.late_us)


@dataclass(kw_only=True)
class Run:
    """A backfill from its plan to its end.

    Attributes:
        directory: Where it says how far it is.
        job: What was asked for.
        table: The table that it adds to.
        name: What its files are called by.
        plans: What is to be done, by partition.
        is_resumed: Whether it was begun before.
        storage_options: Of the object store of the table, as delta-rs takes them.
    """

    directory: Path
    job: Job
    table: str
    name: str
    plans: list[engine.PartitionPlan]
    is_resumed: bool
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    @classmethod
    def begin(
        cls,
        directory: Path,
        job: Job,
        plan: Callable[[], list[engine.PartitionPlan]],
        *,
        table: str,
        restarts: bool,
        storage_options: Mapping[str, str] | None = None,
    ) -> "Run":
        """Go on with what was interrupted, or plan anew.

        Args:
            directory: Where it says how far it is.
            job: What is asked for.
            plan: Says what there is to do.
            table: The table that is added to.
            restarts: Whether to give up what was interrupted.
            storage_options: Of the object store of the table, as delta-rs takes them.

        Raises:
            ConfigError: What was interrupted was asked for otherwise.
            HeadraceError: What ``plan`` raises.
        """
        path = directory / "run.json"
        if path.exists() and restarts:
            given_up = json.loads(path.read_bytes())
            if "name" in given_up:
                left = Stage(given_up["table"], name=given_up["name"], storage_options=storage_options)
                left.clear()
                left.withdraw()
            path.replace(directory / "ended.json")
        _clear_ended(directory)
        if path.exists():
            found = json.loads(path.read_bytes())
            if different := [name for name, value in asdict(job).items() if found["job"].get(name) != value]:
                was = ", ".join(f"{name} {found['job'].get(name)!r}" for name in different)
                msg = (
                    f"a backfill of {job.view} was interrupted that had {was}, expected the same to go on with it; "
                    "give it the same options, or `--restart` to throw away what it has done"
                )
                raise ConfigError(msg)
            if "name" not in found:
                msg = (
                    f"a backfill of {job.view} was interrupted that an older release had begun, expected one of this "
                    "release to go on with it; begin anew with `--restart`"
                )
                raise ConfigError(msg)
            plans = [_plan_of(document) for document in found["plans"]]
            run = cls(
                directory=directory,
                job=job,
                table=table,
                name=found["name"],
                plans=plans,
                is_resumed=True,
                storage_options=storage_options,
            )
            run.stage.announce()
            return run
        run = cls(
            directory=directory,
            job=job,
            table=table,
            name=uuid4().hex,
            plans=plan(),
            is_resumed=False,
            storage_options=storage_options,
        )
        run.replan(run.plans)
        run.stage.announce()
        return run

    @property
    def stage(self) -> Stage:
        """Where its rows go."""
        return Stage(self.table, name=self.name, storage_options=self.storage_options)

    def replan(self, plans: list[engine.PartitionPlan]) -> None:
        """Have more to do than before; checkpoints hold."""
        self.plans = plans
        named = {"job": asdict(self.job), "table": self.table, "name": self.name}
        document = {**named, "plans": [document_of(plan) for plan in plans]}
        temporary = self.directory / "run.new"
        temporary.write_text(json.dumps(document))
        temporary.replace(self.directory / "run.json")

    def end(self) -> None:
        """Leave nothing behind; all has been added."""
        self.stage.withdraw()
        (self.directory / "run.json").replace(self.directory / "ended.json")
        _clear_ended(self.directory)

    def execute(
        self, view: FeatureView, log: RecordLog, *, workers: int, console: Console
    ) -> dict[int, engine.Progress]:
        """Do what is still to be done, with a bar; returns by partition how far it is, which is its end.

        Raises:
            ServiceError: A process of it was ended.
            HeadraceError: What a partition raises.
        """
        plans = [plan for plan in self.plans if plan.wanted]
        bar = record_bar(console)
        n_processes = min(workers, len(plans))
        with bar:
            total = bar.add_task(view.name, total=sum(plan.records for plan in plans))
            read: dict[int, int] = {}

            def tell(partition: int, records: int) -> None:
                read[partition] = records
                bar.update(total, completed=sum(read.values()))

            if n_processes <= 1:
                return {plan.partition: _run_one(view, log, plan, self, tell) for plan in plans}
            return _run_many(self, plans, log, n_processes=n_processes, tell=tell)


def _clear_ended(directory: Path) -> None:
    """Remove what a run that has ended has left; safe to repeat."""
    ended = directory / "ended.json"
    if not ended.exists():
        return
    for left in directory.glob("partition-*"):
        left.unlink()
    ended.unlink()


def document_of(plan: engine.PartitionPlan) -> dict[str, Any]:
    """Lay out a plan for JSON."""
    spans = {name: [getattr(plan, name).start, getattr(plan, name).stop] for name in ("read", "wanted")}
    return {**asdict(plan), **spans}


def _plan_of(document: Mapping[str, Any]) -> engine.PartitionPlan:
    spans = {name: range(*document[name]) for name in ("read", "wanted")}
    return engine.PartitionPlan(**{**document, **spans})


Report = Callable[[int, int], None]


def _run_one(view: FeatureView, log: RecordLog, plan: engine.PartitionPlan, run: Run, tell: Report) -> engine.Progress:
    task = engine.PartitionBackfill(
        view,
        log,
        plan,
        application=run.job.application,
        stage=run.stage,
        directory=run.directory,
        folds_late=run.job.late_us is not None,
    )
    return task.run(lambda progress: tell(plan.partition, progress.records))


def _run_many(
    run: Run, plans: Sequence[engine.PartitionPlan], log: RecordLog, *, n_processes: int, tell: Report
) -> dict[int, engine.Progress]:
    # Not forked: threads of Arrow, polars and Kafka's client would be lost on the way.
    context = get_context("spawn")
    told = context.Queue()
    done: dict[int, engine.Progress] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(
            ProcessPoolExecutor(n_processes, mp_context=context, initializer=_begin_process, initargs=(told,))
        )
        # Where one partition fails, those that have not begun need not.
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        futures: dict[Future[engine.Progress], int] = {
            pool.submit(_run_in_process, run, log, plan): plan.partition for plan in plans
        }
        waiting = set(futures)
        while waiting:
            with suppress(queue.Empty):
                tell(*told.get(timeout=0.2))
            for future in [future for future in waiting if future.done()]:
                waiting.discard(future)
                try:
                    done[futures[future]] = future.result()
                except BrokenProcessPool as exc:
                    msg = (
                        "a process of the backfill was ended from outside, maybe for want of memory; start it again, "
                        "with fewer `--workers`, and it goes on where it was"
                    )
                    raise ServiceError(msg) from exc
    return done


_told: Any = None


def _begin_process(told: Any) -> None:
    global _told  # noqa: PLW0603 - a process of the pool has one
    _told = told
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its processes, and whoever goes on in its place has others."""
    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
    os._exit(1)


def _run_in_process(run: Run, log: RecordLog, plan: engine.PartitionPlan) -> engine.Progress:
    view = run.job.driven(load_application(run.job.module).view(run.job.view))
    return _run_one(view, log, plan, run, lambda partition, records: _told.put((partition, records)))

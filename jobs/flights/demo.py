"""The course of the demo: train on the first months, go on live, then as fast as it goes, and add everything up."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console
from rich.live import Live

from jobs.application import consumer_groups, load_application
from jobs.audit import Check, print_checks, run_audit
from jobs.consumer_group import is_caught_up, place_group
from jobs.flights.demo_view import DemoView, describe
from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.producer import ProduceSummary, produce_flights
from jobs.flights.scoreboard import Quality, Scoreboard
from jobs.flights.views import airport_departures, landings
from jobs.role import CONSUMERS, Role
from jobs.scrape import Samples, scrape
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topic_reader import end_offsets
from jobs.topics import application_topics, ensure_topics
from jobs.train import train_late_arrival
from schemas.errors import ConfigError, ServiceError
from schemas.topology import connect

_REFRESH_S = 0.5
_LINE_EVERY_S = 5.0
_DRAIN_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the demo does when.

    Attributes:
        train_until: End of the flights that train the model.
        live_until: End of the flights at live speed.
        until: End of all flights.
        live_speed: Times faster than real time while live.
        late_share: Share of reports that arrive late.
        invalid_share: Share of reports that are corrupted.
    """

    train_until: datetime
    live_until: datetime
    until: datetime
    live_speed: float
    late_share: float
    invalid_share: float


class Demo:
    """One run.

    Args:
        settings: Settings of a home that holds nothing yet.
        plan: What to do when.
        supervisor: Runs the workers.
        ports: Port of each role's metrics.
        console: Where to show it.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        *,
        supervisor: Supervisor,
        ports: Mapping[Role, int],
        console: Console,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._supervisor = supervisor
        self._ports = ports
        self._console = console
        self._application = load_application(settings.application)
        self._brokers = settings.address("kafka")
        self._started = time.monotonic()
        self._view = DemoView()
        self._stop = threading.Event()
        self._sent: Counter[str] = Counter()
        self._delayed = 0
        self._corrupted = 0

    def run(self) -> bool:
        """Run the demo; returns whether everything added up."""
        plan = self._plan
        self._prepare()
        self._say(f"Computing the features of all flights before {plan.train_until:%d %B %Y}")
        self._supervisor.start([Role.FEATURES, Role.ONLINE, Role.OFFLINE])
        self._produce_watched(start=None, end=plan.train_until, speed=None, leaves_table=False)
        self._wait_until_drained([Role.FEATURES, Role.ONLINE, Role.OFFLINE])
        self._train()
        trigger = airport_departures.topic
        scored_from = end_offsets(self._brokers, trigger)
        place_group(self._brokers, consumer_groups(self._application)[Role.SCORING][0], trigger, scored_from)
        starts = {
            LATE_ARRIVAL.topic: end_offsets(self._brokers, LATE_ARRIVAL.topic),
            landings.topic: end_offsets(self._brokers, landings.topic),
        }
        self._supervisor.start([Role.SCORING, Role.SERVE])
        board = Scoreboard(self._brokers, start_offsets=starts)
        try:
            self._say(f"Live from {plan.train_until:%d %B}, {plan.live_speed:,.0f} times faster than real time")
            self._produce_watched(board=board, start=plan.train_until, end=plan.live_until, speed=plan.live_speed)
            live = board.quality()
            if plan.live_until < plan.until:
                self._say(f"The rest, up to {plan.until:%d %B %Y}, as fast as it goes")
                self._produce_watched(
                    board=board, start=plan.live_until, end=plan.until, speed=None, leaves_table=False
                )
            self._wait_until_drained(CONSUMERS, board=board)
            return self._sum_up(board, live=live, scored_from=scored_from)
        finally:
            board.close()

    def _prepare(self) -> None:
        views = list(self._application.views.values())
        ensure_topics(self._brokers, application_topics(self._application))
        for topic in connect(views).sources:
            if held := sum(end_offsets(self._brokers, topic).values()):
                msg = (
                    f"topic {topic} at {self._brokers} holds {held:,} records, expected none, so that the "
                    "sums at the end can come out; delete the topics, or unset HEADRACE_KAFKA for one of the demo's own"
                )
                raise ConfigError(msg)

    def _train(self) -> None:
        self._say("Training late_arrival on what is in Delta")
        card = train_late_arrival(
            self._settings.delta,
            self._settings.model_repository,
            created_us=time.time_ns() // 1_000,
            storage_options=self._settings.delta_options,
        )
        evaluation = card.evaluation
        self._say(
            f"Trained {card.name} v{card.version} on {card.training['rows']:,} flights from Delta; on the last "
            f"{evaluation['rows']:,} of them, held out: AUC {evaluation['auc']:.3f}, Brier {evaluation['brier']:.3f}"
        )

    def _produce_watched(
        self,
        *,
        start: datetime | None,
        end: datetime,
        speed: float | None,
        board: Scoreboard | None = None,
        leaves_table: bool = True,
    ) -> None:
        """Produce a range on a thread of its own, showing meanwhile what goes on."""
        outcome: list[ProduceSummary | BaseException] = []

        def produce() -> None:
            try:
                outcome.append(
                    produce_flights(
                        self._brokers,
                        start=start,
                        end=end,
                        speed=speed,
                        late_share=self._plan.late_share,
                        invalid_share=self._plan.invalid_share,
                        on_progress=self._view.progressed,
                        stop=self._stop,
                    )
                )
            except BaseException as exc:
                outcome.append(exc)

        thread = threading.Thread(target=produce, name="producer")
        thread.start()
        try:
            self._watch(lambda _: not thread.is_alive(), board=board, leaves_table=leaves_table)
        finally:
            self._stop.set()
            thread.join()
            self._stop.clear()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        self._sent.update(outcome[0].topics)
        self._delayed += sum(outcome[0].delayed.values())
        self._corrupted += sum(sum(kinds.values()) for kinds in outcome[0].injected.values())
        self._view.produced(outcome[0])

    def _wait_until_drained(self, roles: Sequence[Role], *, board: Scoreboard | None = None) -> None:
        """Wait until the workers have done all there is to do."""
        deadline = time.monotonic() + _DRAIN_S
        # Features first: once they are done, nothing more comes onto the topics of the others.
        waiting = sorted(roles, key=CONSUMERS.index)

        def is_drained(_: Samples) -> bool:
            while waiting and self._is_done(waiting[0]):
                waiting.pop(0)
            if waiting and time.monotonic() > deadline:
                logs = self._settings.home / "logs"
                msg = f"{', '.join(waiting)} are not done after {_DRAIN_S:.0f} s; see {logs}"
                raise ServiceError(msg)
            return not waiting

        self._watch(is_drained, board=board)

    def _is_done(self, role: Role) -> bool:
        """Tell by its committed offsets whether a role has done all there is to do."""
        group, topics = consumer_groups(self._application)[role]
        return all(is_caught_up(self._brokers, group, topic) for topic in topics)

    def _watch(
        self, is_done: Callable[[Samples], bool], *, board: Scoreboard | None, leaves_table: bool = True
    ) -> None:
        """Show what goes on until it is done; workers that fail are started again meanwhile."""
        printed = time.monotonic()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                samples = scrape(self._ports.values())
                self._view.update(samples, board)
                if self._console.is_terminal:
                    live.update(self._view.table(), refresh=True)
                elif time.monotonic() - printed >= _LINE_EVERY_S:
                    printed = time.monotonic()
                    self._console.print(self._view.line(), highlight=False)
                for line in self._supervisor.check():
                    self._say(line, style="yellow")
                if is_done(samples):
                    break
                time.sleep(_REFRESH_S)
        if leaves_table:
            self._console.print(self._view.table())

    def _sum_up(self, board: Scoreboard, *, live: Quality, scored_from: Mapping[int, int]) -> bool:
        self._say("Adding up what is on the topics, in Redis and in Delta")
        with self._console.status("Adding up") as status:

            def tell(line: str) -> None:
                # Without a terminal nobody sees the status, and for minutes nothing else would be said.
                if self._console.is_terminal:
                    status.update(line)
                else:
                    self._console.print(f"  {line}", highlight=False)

            checks = run_audit(
                self._application,
                brokers=self._brokers,
                redis_url=self._settings.address("redis"),
                delta=self._settings.delta,
                delta_options=self._settings.delta_options,
                scored_from={LATE_ARRIVAL.name: scored_from},
                tell=tell,
            )
        sent = [
            Check(
                name=f"{topic}: events sent = records on the topic",
                expected=events,
                actual=sum(end_offsets(self._brokers, topic).values()),
            )
            for topic, events in sorted(self._sent.items())
        ]
        checks = [*sent, *checks]
        print_checks(self._console, checks)
        self._say(
            f"{sum(self._sent.values()):,} events sent, {self._delayed:,} of them delayed and {self._corrupted:,} "
            f"corrupted on purpose; {board.n_scores:,} flights scored, {board.n_complete:,} with every input there"
        )
        for name, quality in (
            ("live", live),
            ("all replayed months", board.quality()),
            ("of these, scores with every input", board.quality(complete_only=True)),
        ):
            self._say(describe(name, quality))
        is_met = all(check.is_met for check in checks)
        self._say("Everything adds up." if is_met else "Something does not add up.", style="green" if is_met else "red")
        return is_met

    def _say(self, text: str, *, style: str = "bold") -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"[{elapsed:5.1f} s] {text}", style=style, highlight=False, markup=False)

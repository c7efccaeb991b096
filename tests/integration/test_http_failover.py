"""The HTTP API while the master of its Redis dies and sentinels put a replica in its place."""

import asyncio
import threading
from collections import Counter
from pathlib import Path

import httpx
import redis

from infra.local.process import wait_until
from schemas.aggregation import count
from schemas.serving import Serving
from streams.sinks.online import OnlineWriter
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.redis import Watched, watched_by_sentinels
from tests.support.serving import serving

FEATURES = {"n": count().over("5m")}
# Both are read from Redis each time, so that no answer of before the failover hides it.
PLAIN = make_view("plain", features=FEATURES, serving=Serving(cache="0s"))
DEFAULTED = make_view("defaulted", features=FEATURES, serving=Serving(cache="0s", defaults={"n": 0}))
WRITTEN = 7


async def write(watched: Watched) -> None:
    async with OnlineWriter(f"{watched.url}?wait_replicas=1", timeout_s=10) as writer:
        for view in (PLAIN, DEFAULTED):
            await writer.write(make_rows(view, [{"user_id": "u1", "n": WRITTEN}]), view=view)


def outcome(answer: httpx.Response) -> tuple[int, str, object]:
    """What a caller sees: the status, and the value's status and feature or the error's code."""
    document = answer.json()
    if answer.status_code != 200:
        return answer.status_code, document["error"]["code"], None
    (value,) = document["results"][0]["values"]
    return answer.status_code, value["status"], value["features"]["n"]


def test_a_failover_is_waited_for_or_defaulted_and_never_told_as_missing(tmp_path: Path) -> None:
    """A view with defaults answers throughout; one without says 503 until the new master answers."""
    with watched_by_sentinels(tmp_path) as watched:
        asyncio.run(write(watched))
        with serving([PLAIN, DEFAULTED], watched.url, clock_us=lambda: T0_US, timeout_s=1.0) as url:
            seen: dict[str, Counter[tuple[int, str, object]]] = {"plain": Counter(), "defaulted": Counter()}
            is_over = threading.Event()

            def ask(view: str) -> None:
                with httpx.Client(base_url=url, timeout=30) as client:
                    while not is_over.is_set():
                        seen[view][outcome(client.get(f"/v1/features/{view}/u1"))] += 1

            readers = [threading.Thread(target=ask, args=(view,)) for view in seen]
            for reader in readers:
                reader.start()
            try:
                present = (200, "present", WRITTEN)
                assert wait_until(lambda: all(answers[present] for answers in seen.values()), timeout_s=60)
                watched.fail_over()
                before = {view: answers[present] for view, answers in seen.items()}
                assert wait_until(lambda: all(seen[view][present] > before[view] for view in seen), timeout_s=60)
            finally:
                is_over.set()
                for reader in readers:
                    reader.join()
            with redis.Redis(port=watched.replica.port) as replica:
                assert replica.info("replication")["role"] == "master"
    assert set(seen["plain"]) == {present, (503, "unavailable", None)}, seen["plain"]
    assert {answer for answer in seen["defaulted"] if answer != present} == {(200, "missing", 0)}, seen["defaulted"]

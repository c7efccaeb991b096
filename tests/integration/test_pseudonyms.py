"""Pseudonyms on a real Valkey and in Delta: nothing personal is in the store, and every reader sees the same."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from redis import asyncio as redis

from schemas.aggregation import count, from_event
from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.serving import Serving
from schemas.source import EventSource
from schemas.view import FeatureView
from streams import AsyncOnlineStore
from streams.sinks.offline import OfflineWriter
from streams.sinks.online import OnlineReader, OnlineWriter
from streams.sinks.pseudonym import Pseudonyms
from tests.support.feature_rows import T0_US, make_rows

FIELDS = {"email": {"type": "string", "x-pii": True}, "event_time": {"type": "string"}}
PSEUDONYMS = Pseudonyms(b"a key that nobody can guess")
MAILS = ["ann@example.org", "bob@example.org"]


@pytest.fixture(autouse=True)
def _contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    path = tmp_path / "schemas" / "events" / "mail_opened@1.json"
    path.write_text(json.dumps({"type": "object", "properties": FIELDS}))
    monkeypatch.chdir(tmp_path)


def make_view(personal: str = "hash") -> FeatureView:
    return FeatureView(
        "pseudonymous",
        version=1,
        entity=Entity("reader", key="email"),
        source=EventSource("mails", contract="mail_opened@1"),
        slide="1m",
        emit="every_event",
        features={"n_5m": count().over("5m"), "address": from_event("email")},
        serving=Serving(personal=personal, cache="0s", fallback="delta"),
    )


VALUES = [{"email": mail, "address": mail, "n_5m": n, "source_offset": n} for n, mail in enumerate(MAILS, 1)]


async def test_nothing_personal_is_in_the_store_and_what_is_there_is_found(redis_url: str, tmp_path: Path) -> None:
    view = make_view()
    rows = make_rows(view, VALUES)
    async with (
        redis.Redis.from_url(redis_url) as server,
        OnlineWriter(redis_url, pseudonyms=PSEUDONYMS) as writer,
        OnlineReader(redis_url, pseudonyms=PSEUDONYMS) as reader,
        AsyncOnlineStore(redis_url, offline=tmp_path, pseudonyms=PSEUDONYMS, clock_us=lambda: T0_US) as store,
    ):
        assert (await writer.write(rows, view=view)).written == 2
        keys = await server.keys("headrace:pseudonymous:*")
        assert len(keys) == 2
        stored = b" ".join([*keys, *(await server.mget(keys))])
        assert not any(name in stored for name in (b"ann", b"bob", b"example"))

        values = await reader.read(view, [*MAILS, "carl@example.org"], now_us=T0_US)
        assert [(value.entity, value.status, value.features.get("n_5m")) for value in values] == [
            ("ann@example.org", "present", 1),
            ("bob@example.org", "present", 2),
            ("carl@example.org", "missing", None),
        ]
        ann = PSEUDONYMS.entities(view, MAILS)[0]
        assert values[0].features["address"] == ann
        served = await store.read(view, MAILS)
        assert [(v.entity, v.features) for v in served] == [(v.entity, v.features) for v in values[:2]]

        # What the offline store stands in with is what the online store would have said.
        await server.delete(*keys)
        OfflineWriter(tmp_path).write(rows, view=view, partition=0, offsets=pa.array([1, 2], pa.int64()))
        fallen = await store.read(view, MAILS)
        assert [str(value.source) for value in fallen] == ["offline", "offline"]
        assert [value.features for value in fallen] == [value.features for value in served]


async def test_a_view_that_begins_to_hash_replaces_what_is_there_and_reads_none_of_it(redis_url: str) -> None:
    plain, hashing = make_view("plain"), make_view()
    async with (
        OnlineWriter(redis_url, pseudonyms=PSEUDONYMS) as writer,
        OnlineReader(redis_url, pseudonyms=PSEUDONYMS) as reader,
    ):
        await writer.write(make_rows(plain, VALUES), view=plain)
        assert [v.status for v in await reader.read(hashing, MAILS, now_us=T0_US)] == ["missing", "missing"]
        await writer.write(make_rows(hashing, VALUES), view=hashing)
        assert [v.status for v in await reader.read(hashing, MAILS, now_us=T0_US)] == ["present", "present"]


async def test_without_the_key_nothing_is_written_or_read(redis_url: str) -> None:
    view = make_view()
    async with OnlineWriter(redis_url) as writer, OnlineReader(redis_url) as reader:
        with pytest.raises(ConfigError, match="expected a key"):
            await writer.write(make_rows(view, VALUES), view=view)
        with pytest.raises(ConfigError, match="expected a key"):
            await reader.read(view, MAILS, now_us=T0_US)

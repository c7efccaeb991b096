"""``headrace parity``: what was served is what the records make, and what is not is found."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from deltalake import DeltaTable, write_deltalake

from jobs.parity import DIFFERENT
from streams.sinks.offline import read_features, table_uri
from streams.sinks.online import OnlineWriter, online_key
from streams.sinks.pseudonym import Pseudonyms
from tests.support.history import FILES, N_RECORDS, PROJECT, Place

KEY = "a key that nobody can guess"


class Served(Place):
    """A place whose rows have been served, by both stores."""

    def __init__(self, directory: Path, redis_url: str, **definition: Any) -> None:
        super().__init__(directory, **definition)
        self.redis_url = redis_url
        self.settings = {"HEADRACE_REDIS": redis_url, "HEADRACE_PSEUDONYM_KEY": KEY}
        made = self.live_rows(self.view)
        self.write_live(self.view, made)
        with redis.Redis.from_url(redis_url) as client:  # another test may have left other values
            client.delete(*client.keys("headrace:activity:*"), "none")
        asyncio.run(self._write_online(pa.concat_tables([table for tables in made.values() for table in tables])))

    async def _write_online(self, rows: pa.Table) -> None:
        async with OnlineWriter(self.redis_url, pseudonyms=Pseudonyms(KEY.encode())) as writer:
            await writer.write(rows, view=self.view)

    def parity(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Run the command; its exit code, and what it says by store."""
        done = self.run(*arguments, "--json", command="parity activity", settings=self.settings)
        assert done.out, done.err
        return done.code, {found["store"]: found for found in json.loads(done.out)["stores"]}

    def tamper(self, updates: Mapping[str, str], where: str) -> None:
        result = DeltaTable(table_uri(self.delta, self.view)).update(updates=dict(updates), predicate=where)
        assert result["num_updated_rows"] == 1

    def tamper_online(self, entity: str, before: bytes, after: bytes) -> None:
        with redis.Redis.from_url(self.redis_url) as client:
            stored = client.get(online_key(self.view, entity))
            assert isinstance(stored, bytes)
            assert stored.count(before) == 1, stored
            client.set(online_key(self.view, entity), stored.replace(before, after))


@pytest.fixture
def served(tmp_path: Path, redis_url: str) -> Served:
    return Served(tmp_path, redis_url)


@pytest.mark.parametrize("emit", ["every_event", "latest", "on_close"])
def test_nothing_differs_of_what_the_live_path_has_served(tmp_path: Path, redis_url: str, emit: str) -> None:
    served = Served(tmp_path, redis_url, emit=emit)
    code, stores = served.parity()
    n_rows = read_features(served.delta, served.view).num_rows
    assert (code, stores["offline"]["mismatched"], stores["online"]["mismatched"]) == (0, 0, 0)
    assert (stores["offline"]["rows"], stores["offline"]["not_judged"]) == (n_rows, 0)
    assert stores["offline"]["values"] > 5 * n_rows
    assert (stores["online"]["rows"], stores["online"]["not_judged"]) == (6, 0)


def test_a_changed_value_in_the_offline_store_is_found_with_its_lineage(served: Served) -> None:
    (row,) = (
        read_features(served.delta, served.view).filter(pa.compute.equal(pa.compute.field("n_2m"), 7))[:1].to_pylist()
    )
    at = f"source_partition = {row['source_partition']} and source_offset = {row['source_offset']}"
    where = f"{at} and pane = '{row['pane']}' and pane_index = {row['pane_index']} and user_id = '{row['user_id']}'"
    served.tamper({"n_2m": "n_2m + 1"}, where)
    code, stores = served.parity()
    assert (code, stores["offline"]["mismatched"], stores["online"]["mismatched"]) == (DIFFERENT, 1, 0)
    (found,) = stores["offline"]["mismatches"]
    told = {name: found[name] for name in ("kind", "entity", "column", "served", "recomputed")}
    assert told == {"kind": "value", "entity": row["user_id"], "column": "n_2m", "served": 8, "recomputed": 7}
    for name in ("source_partition", "source_offset", "pane", "pane_index"):
        assert found["lineage"][name] == row[name]
    assert found["lineage"]["source_topic"] == "shop.events"
    said = served.run("--no-online", command="parity activity")
    assert said.code == DIFFERENT
    assert f"offline, {row['user_id']}: n_2m is 8, expected 7 (source_topic shop.events" in said.out


def test_the_last_bit_of_a_number_counts(served: Served) -> None:
    row = next(row for row in read_features(served.delta, served.view).to_pylist() if row["spend_5m"])
    at = f"source_partition = {row['source_partition']} and source_offset = {row['source_offset']}"
    where = f"{at} and pane = '{row['pane']}' and pane_index = {row['pane_index']} and user_id = '{row['user_id']}'"
    served.tamper({"spend_5m": f"spend_5m + {row['spend_5m'] * 2**-52!r}"}, where)
    code, stores = served.parity()
    assert code == DIFFERENT
    (found,) = stores["offline"]["mismatches"]
    assert found["served"] - found["recomputed"] == pytest.approx(row["spend_5m"] * 2**-52)


def test_a_changed_value_in_the_online_store_is_found(served: Served) -> None:
    served.tamper_online("u1-0", b"[1.5,1.5,1.5]", b"[1.5,1.5,2.5]")
    code, stores = served.parity()
    assert (code, stores["offline"]["mismatched"], stores["online"]["mismatched"]) == (DIFFERENT, 0, 1)
    (found,) = stores["online"]["mismatches"]
    assert (found["entity"], found["column"], found["served"]) == ("u1-0", "last_3", [1.5, 1.5, 2.5])
    assert found["recomputed"] == [1.5, 1.5, 1.5]
    assert found["lineage"]["source_partition"] == 0


def test_pseudonyms_in_the_online_store_are_no_difference(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = json.loads((PROJECT / "schemas" / "events" / "shop_event@1.json").read_text())
    contract["properties"]["user_id"]["x-pii"] = True
    (tmp_path / "schemas" / "events").mkdir(parents=True)
    (tmp_path / "schemas" / "events" / "shop_event_personal@1.json").write_text(json.dumps(contract))
    monkeypatch.chdir(tmp_path)
    hashing = {"contract": "shop_event_personal@1", "view": 'serving=Serving(personal="hash"),', "listed": "user_id"}
    served = Served(tmp_path, redis_url, **hashing)
    code, stores = served.parity()
    assert (code, stores["offline"]["mismatched"], stores["online"]["mismatched"]) == (0, 0, 0)
    assert (stores["online"]["rows"], stores["online"]["not_judged"]) == (6, 0)

    served.settings["HEADRACE_PSEUDONYM_KEY"] = "another key, as others have"
    code, stores = served.parity()
    assert (code, stores["online"]["rows"]) == (0, 0), "with another key nothing is found"
    del served.settings["HEADRACE_PSEUDONYM_KEY"]
    done = served.run("--json", command="parity activity", settings=served.settings)
    assert "expected their key in HEADRACE_PSEUDONYM_KEY" in done.err


def test_lost_doubled_and_invented_rows_are_found(served: Served) -> None:
    table = DeltaTable(table_uri(served.delta, served.view))
    rows = read_features(served.delta, served.view)
    early = [row for row in rows.to_pylist() if (row["pane"], row["source_partition"]) == ("EARLY", 0)]
    lost_at, twice_at, moved_at = (row["source_offset"] for row in early[10:13])
    one = "source_partition = 0 and pane = 'EARLY' and source_offset = "
    assert table.delete(f"{one}{lost_at}")["num_deleted_rows"] == 1
    served.tamper({"pane_index": "5"}, f"{one}{moved_at}")
    again = rows.filter(
        (pa.compute.field("source_partition") == 0)
        & (pa.compute.field("pane") == "EARLY")
        & (pa.compute.field("source_offset") == twice_at)
    )
    write_deltalake(table_uri(served.delta, served.view), again, mode="append")
    code, stores = served.parity("--no-online")
    assert code == DIFFERENT
    found = sorted((m["kind"], m["lineage"]["source_offset"]) for m in stores["offline"]["mismatches"])
    expected = [("doubled", twice_at), ("missing", lost_at), ("missing", moved_at), ("unexpected", moved_at)]
    assert found == sorted(expected)


def test_rows_of_records_that_the_archive_has_not_are_not_judged(tmp_path: Path, redis_url: str) -> None:
    served = Served(tmp_path, redis_url, n_archived=6)
    code, stores = served.parity()
    reach = 6 * N_RECORDS // FILES
    later = [row for row in read_features(served.delta, served.view).to_pylist() if row["source_offset"] >= reach]
    assert code == 0
    assert stores["offline"]["not_judged"] == len(later) > 0
    assert stores["online"]["rows"] + stores["online"]["not_judged"] == 6


def test_a_sample_compares_some_entities(served: Served) -> None:
    code, stores = served.parity("--sample", "0.5")
    n_rows = read_features(served.delta, served.view).num_rows
    assert code == 0
    assert 0 < stores["offline"]["rows"] < n_rows
    assert 0 < stores["online"]["rows"] < 6
    assert stores["offline"]["not_judged"] == 0


def test_metrics_are_written(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "parity.prom"
    served.parity("--metrics-file", str(file))
    said = file.read_text()
    assert 'headrace_parity_mismatches{store="offline",version="1",view="activity"} 0.0' in said
    assert 'headrace_parity_rows{store="online",version="1",view="activity"} 6.0' in said

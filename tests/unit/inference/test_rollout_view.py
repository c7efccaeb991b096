"""What is read of the topic of a rollout, record by record."""

import json
from typing import Any

import numpy as np
import pytest

from schemas.model import ServedVersion
from streams.inference.rollout import Evidence, Rollout
from streams.inference.rollout_log import Entry, View, _write_entry
from streams.inference.tally import Tally

OLD = ServedVersion(version="1", sha256="1" * 64)


def evidence(*, generation: int = 1, **tallies: Tally) -> bytes:
    document: dict[str, Any] = {"generation": generation}
    document["versions"] = {version.removeprefix("v"): tally.to_document() for version, tally in tallies.items()}
    return json.dumps(document).encode()


@pytest.fixture
def view() -> View:
    return View(n_bins=10, entry=Entry(generation=1, state=Rollout(model="delay", champion=OLD)))


@pytest.mark.parametrize(
    "junk", [b"{", b"null", b'{"generation": 1}', b'{"generation": 1, "versions": []}', evidence()[:-2], b"\xff"]
)
def test_evidence_that_nobody_can_read_counts_for_nothing(view: View, junk: bytes) -> None:
    view.take(b"evidence/a", evidence(v1=Tally(rows=3)))
    view.take(b"evidence/b", evidence(v1=Tally(rows=4)))
    view.take(b"evidence/a", junk)
    assert view.tally(OLD).rows == 4
    assert view.seen_by("a") == {}


def test_evidence_in_other_bins_counts_for_nothing(view: View) -> None:
    """As it is of another release, or of a contract whose output had other bounds."""
    bounded, unbounded = Tally(rows=4, scores=np.ones(10, np.int64)), Tally(rows=3, scores=np.ones(21, np.int64))
    view.take(b"evidence/a", evidence(v1=bounded))
    view.take(b"evidence/b", evidence(v1=unbounded))
    view.take(b"evidence/c", evidence(v1=Tally(rows=5, latency={0: np.ones(7, np.int64)})))
    assert (view.tally(OLD).rows, view.seen_by("b")) == (4, {})


@pytest.mark.parametrize(("n_bins", "is_kept"), [(10, True), (0, True), (21, False)])
def test_a_baseline_in_other_bins_is_left_out(view: View, n_bins: int, is_kept: bool) -> None:
    baseline = Evidence(rows=9, scores=(1,) * n_bins)
    entry = Entry(generation=2, state=Rollout(model="delay", champion=OLD, baseline=baseline))
    view.take(b"state", _write_entry(entry))
    assert view.entry is not None
    assert view.entry.state.baseline == (baseline if is_kept else None)


def test_evidence_stands_for_its_worker_until_it_is_replaced_or_taken_back(view: View) -> None:
    seen = Tally(rows=3)
    seen.add(rows=20, failures=2, took_ms=5.0, scores=seen.scores)
    view.take(b"evidence/a", evidence(v1=Tally(rows=9)))
    view.take(b"evidence/a", evidence(v1=seen))
    assert view.tally(OLD).evidence == seen.evidence
    assert view.seen_by("a")["1"].rows == 23
    view.take(b"evidence/a", evidence(generation=2, v1=seen))
    assert view.seen_by("a") == {}
    view.take(b"evidence/a", None)
    assert view.seen == {}

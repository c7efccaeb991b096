from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.inference.batcher import MicroBatch, MicroBatcher
from streams.inference.outbox import Outbox
from streams.inference.scorer import REJECTED_SCORES, Scored


@dataclass(eq=False)
class Chunk:
    name: int


def score(batch: MicroBatch[Chunk]) -> Scored:
    """Of three rows make a score, a dead letter, and nothing: by the value of the row."""
    values = batch.rows["value"].to_numpy()
    scored_rows = np.flatnonzero(values % 3 == 0)
    rejected = np.flatnonzero(values % 3 == 1)
    dead_letters = [{"_row": int(row), "reason": "why", "detail": str(values[row])} for row in rejected]
    return Scored(
        scores=pa.table({"value": values[scored_rows]}),
        dead_letters=pa.Table.from_pylist(dead_letters, schema=REJECTED_SCORES),
        ignored={"closing_pane": int((values % 3 == 2).sum())},
        scored_rows=scored_rows,
        fallen=Counter({("error", "rules"): len(scored_rows)}),
    )


def test_rows_of_a_chunk_wait_until_all_of_it_is_scored():
    batcher, outbox = MicroBatcher[Chunk](max_rows=4, max_bytes=1_000, max_wait_us=0), Outbox[Chunk]()
    first, second = Chunk(1), Chunk(2)
    batches = batcher.add(pa.table({"value": [0, 3, 6]}), chunk=first, now_us=0)
    batches += batcher.add(pa.table({"value": [9, 12, 15]}), chunk=second, now_us=0)
    rest = batcher.take()
    assert rest is not None

    (part,) = outbox.add(batches[0], score(batches[0]))
    assert part.scored.scores["value"].to_pylist() == [0, 3, 6]
    assert part.scored.scored_rows.tolist() == [0, 1, 2]

    held, last = outbox.add(rest, score(rest))
    assert held.scored.scores["value"].to_pylist() == [9]
    assert held.scored.scored_rows.tolist() == [3]
    assert last.scored.scores["value"].to_pylist() == [12, 15]


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.integers(0, 13), min_size=1, max_size=12), max_rows=st.integers(1, 7))
def test_whole_chunks_leave_in_their_order_and_nothing_is_lost_or_doubled(chunks: list[int], max_rows: int):
    batcher = MicroBatcher[Chunk](max_rows=max_rows, max_bytes=1_000_000, max_wait_us=0)
    outbox = Outbox[Chunk]()
    made = [Chunk(number) for number in range(len(chunks))]
    ends = np.cumsum([0, *chunks])
    batches: list[MicroBatch[Chunk]] = []
    for chunk in made:
        values = np.arange(ends[chunk.name], ends[chunk.name + 1])
        batches += batcher.add(pa.table({"value": values}), chunk=chunk, now_us=0)
    if (rest := batcher.take()) is not None:
        batches.append(rest)

    scores: list[int] = []
    letters: list[int] = []
    ignored, fallen, n_done = 0, 0, 0
    for batch in batches:
        for part in outbox.add(batch, score(batch)):
            values = part.batch.rows["value"].to_numpy()
            found = part.scored.scores["value"].to_pylist()
            assert values[part.scored.scored_rows].tolist() == found
            scores += found
            letters += values[part.scored.dead_letters["_row"].to_numpy()].tolist()
            ignored += sum(part.scored.ignored.values())
            fallen += sum(part.scored.fallen.values())
        n_done += len(batch.completed)
        until = ends[n_done]
        assert scores == list(range(0, until, 3)), "exactly the rows of the chunks that are complete"
        assert letters == list(range(1, until, 3))
    assert n_done == len(chunks)
    assert (ignored, fallen) == (len(range(2, ends[-1], 3)), len(scores))

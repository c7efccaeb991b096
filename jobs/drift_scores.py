"""What a model has answered of late, next to what it answered in training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.topic_reader import read_topic
from offline.card import ModelCard
from offline.drift import Drift, judge_inputs, low_confidence_share
from offline.profile import FeatureProfile
from schemas.model import ModelSpec
from schemas.row import TIMESTAMP
from schemas.score import Arm, ServedBy
from streams.wire import decode_rows

_BY_MODEL: Final = pa.array([str(ServedBy.MODEL), str(ServedBy.CACHE)])


@dataclass(frozen=True, kw_only=True)
class ScoreWindow:
    """A model's scores with event times in ``[start, end)``, those of a shadow left out.

    Attributes:
        start_us: Its first microsecond.
        end_us: The one after its last.
        rows: Scores, by whatever version or rung.
        judged_rows: Those of them that the version made.
        fallback_share: Share of ``rows`` that the light model or rules made.
        incomplete_share: Share of ``rows`` that lacked an input.
        outputs: What the version answered, by output column.
        low_confidence_shares: Share of ``judged_rows`` of low confidence, by output column that is a probability; None
            of no rows.
    """

    start_us: int
    end_us: int
    rows: int
    judged_rows: int
    fallback_share: float
    incomplete_share: float
    outputs: Mapping[str, Drift]
    low_confidence_shares: Mapping[str, float | None]


def read_score_windows(
    brokers: str,
    spec: ModelSpec,
    card: ModelCard,
    profiles: Mapping[str, FeatureProfile],
    *,
    since_us: int,
    until_us: int | None,
    width_us: int,
    confidence: float,
) -> list[ScoreWindow]:
    """Read a model's scores from its topic, and judge them window by window; windows without scores are left out.

    Args:
        brokers: Kafka bootstrap servers.
        spec: The model.
        card: The version that is judged.
        profiles: Its answers in training, by output column.
        since_us: First event time.
        until_us: The event time after the last; None for all there is.
        width_us: Length of a window, which are aligned to the epoch.
        confidence: Probability of the likelier answer below which confidence is low.

    Raises:
        ServiceError: Kafka cannot be read.
        DecodeError: A record of the topic is no score.
    """
    published = {output.column: output for output in spec.outputs if output.is_published}
    profiles = {column: profile for column, profile in profiles.items() if column in published}
    schema = pa.schema(
        [
            *(pa.field(name, pa.string()) for name in ("model_version", "arm", "served_by")),
            pa.field("complete", pa.bool_()),
            pa.field("event_time", TIMESTAMP),
            *(pa.field(column, pa.float64()) for column in profiles),
        ]
    )
    tables = [schema.empty_table(), *_scores(brokers, spec.topic, schema)]
    scores = pa.concat_tables(tables)
    times = scores["event_time"].cast(pa.int64()).to_numpy()
    is_in = (times >= since_us) & (times < (np.iinfo(np.int64).max if until_us is None else until_us))
    starts = times // width_us * width_us
    found = []
    for start in np.unique(starts[is_in]):
        part = scores.filter(pa.array(is_in & (starts == start)))
        is_by_model = pc.is_in(part["served_by"], value_set=_BY_MODEL)
        own = part.filter(pc.and_(is_by_model, pc.equal(part["model_version"], str(card.version))))
        answers = np.empty((own.num_rows, len(profiles)))
        for place, column in enumerate(profiles):
            values = own[column].to_numpy()
            # As the profile has them: 0.1 of JSON is another number than that of float32.
            answers[:, place] = values.astype(np.float32) if published[column].type == "number" else values
        found.append(
            ScoreWindow(
                start_us=int(start),
                end_us=int(start) + width_us,
                rows=part.num_rows,
                judged_rows=own.num_rows,
                fallback_share=1 - pc.sum(is_by_model).as_py() / part.num_rows,
                incomplete_share=1 - pc.sum(part["complete"]).as_py() / part.num_rows,
                outputs=judge_inputs(profiles, answers),
                low_confidence_shares={
                    output.column: low_confidence_share(own[output.column].to_numpy(), confidence)
                    for output in spec.outputs
                    if output.column in profiles and (output.minimum, output.maximum) == (0, 1)
                },
            )
        )
    return found


def _scores(brokers: str, topic: str, schema: pa.Schema) -> Iterator[pa.Table]:
    for batch in read_topic(brokers, topic):
        scores = decode_rows(batch.values, schema)
        yield scores.filter(pc.not_equal(scores["arm"], str(Arm.SHADOW)))

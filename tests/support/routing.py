"""Rows on their way through a repartition topic, without a Kafka."""

import numpy as np

from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.repartition import Router


def as_read(view: FeatureView, batch: RawBatch) -> RawBatch:
    """What a view over one source reads of a batch of its only partition: the batch, or what is routed of it."""
    if not view.input.is_repartitioned:
        return batch
    (source,) = view.sources
    router = Router(source, view.input, partition=batch.partition, n_partitions=1)
    pipeline = PartitionPipeline(source, [], partition=batch.partition, routers={router: []})
    processed = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1)
    routed = processed.routed[router.topic]
    n_rows = len(routed.values)
    return RawBatch(
        topic=view.input.topic,
        partition=0,
        offsets=np.arange(n_rows),
        broker_time_us=np.zeros(n_rows, np.int64),
        keys=routed.keys,
        values=routed.values,
        headers=[None] * n_rows,
        next_offset=n_rows,
    )

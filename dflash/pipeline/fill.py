"""Features that a run relies on and its store lacks: computed again as they were, from their own micro-batches."""

import logging

from cache.gather import Buffers
from dflash.checkpoint import State
from dflash.features import FeatureStore
from dflash.pipeline.ranks import ALONE, Ranks
from dflash.pipeline.stages import HasFeatures, batch_features
from dflash.pipeline.work import Plan
from dflash.run import Progress, RunDirectory

log = logging.getLogger(__name__)


def fill_features(
    features: FeatureStore, plan: Plan, target: HasFeatures, start: State, run: RunDirectory, ranks: Ranks = ALONE
) -> None:
    """Compute what the store lacks of the part of the first epoch that is already trained; each process its share."""
    lacking = [
        (position, rows)
        for position, rows in plan.micro_batches(0, 0, 1)
        if (position.epoch, position.step) < (start.epoch, start.step) and not features.has(rows)
    ]
    if not any(ranks.gather(bool(lacking))):
        return
    log.info("features of %d micro-batches are missing: computing them again", len(lacking))
    progress = Progress(run, "features", len(lacking), "micro-batches") if ranks.leads else None
    buffers = Buffers(plan.buffer_tokens)
    for position, row_ids in lacking:
        batch = plan.make_batch(position, row_ids, buffers)
        batch_features(target, features, batch, batch.ids.to(target.devices[0]))
        if progress is not None:
            progress.advance()
    ranks.wait()
    if ranks.leads:
        features.flush()

"""The features that a run keeps on disk: opened under what they depend on, and filled where they are missing.

What a killed run had computed and not yet stored is computed again, in the passes of this start.
"""

import logging

from cache.batches.gather import Buffers
from dflash.distributed import ALONE, Ranks
from dflash.errors import ConfigMismatch
from dflash.pipeline.feature_store import FeatureStore, is_complete
from dflash.pipeline.stages import HasFeatures, batch_features
from dflash.pipeline.train_plan import TrainPlan
from dflash.run_directory import ProgressFile, RunDirectory
from dflash.training.checkpoint import State
from dflash.training.open_run import OpenRun

log = logging.getLogger(__name__)


def open_features(opened: OpenRun, ranks: Ranks = ALONE) -> FeatureStore:
    """The run's own store of features, keyed by all that its values depend on.

    Raises ConfigMismatch when processes on several machines would have to fill it.
    """
    settings = opened.settings()
    names = (
        "token cache",
        "target.model",
        "target.dtype",
        "drafter.taps",
    )
    directory, offsets, width = opened.run.path / "features", opened.store.offsets, opened.feature_width
    key = {name: settings[name] for name in names}
    if ranks.local_size < ranks.size and not is_complete(directory, key, offsets, width, opened.store.rows(0)):
        raise ConfigMismatch(
            f"training.features=reuse with {ranks.size} processes, {ranks.local_size} of them on this machine: they "
            f"fill a store together on one machine only, and {directory} is not filled yet. Train the first epoch on "
            "one machine (training.epochs_per_run=1), or set training.features=stream."
        )
    if ranks.leads:
        FeatureStore.make(directory, offsets, width, key)
    ranks.wait()
    return FeatureStore(directory, offsets, width)


def fill_features(
    features: FeatureStore, plan: TrainPlan, target: HasFeatures, start: State, run: RunDirectory, ranks: Ranks = ALONE
) -> None:
    """Compute what the store lacks of the part of the first epoch that is already trained; each process its share."""
    lacking = [
        (position, rows)
        for position, rows in plan.passes(0, 0, 1)
        if (position.epoch, position.step) < (start.epoch, start.step) and not features.has(rows)
    ]
    if not any(ranks.gather(bool(lacking))):
        return
    log.info("features of %d passes are missing: computing them again", len(lacking))
    progress = ProgressFile(run, "features", len(lacking), "passes", within="train") if ranks.leads else None
    buffers = Buffers(plan.buffer_tokens)
    for position, row_ids in lacking:
        batch = plan.make_batch(position, row_ids, buffers)
        batch_features(target, features, batch, batch.ids.to(target.devices[0]))
        if progress is not None:
            progress.advance()
    ranks.wait()
    if ranks.leads:
        features.flush()

"""Plans over the tiny token cache."""

from pathlib import Path
from typing import Any

from cache.disk.store import TokenCache
from dflash.config import DrafterConfig, RunConfig, TargetConfig, TrainingConfig
from dflash.pipeline.train_plan import TrainPlan


def new_plan(tokens: Path, rank: int = 0, ranks: int = 1, **training: Any) -> TrainPlan:
    settings = TrainingConfig(**{"tokens_per_step": 40, "epochs": 3, "anchors": 4, **training})
    drafter = DrafterConfig(block_size=4)
    return TrainPlan(
        TokenCache.open(tokens),
        RunConfig(target=TargetConfig(model="-"), drafter=drafter, training=settings),
        rank,
        ranks,
    )

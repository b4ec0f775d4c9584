"""Micro-batches and trainers without a target: random features, and labels that are chosen by the test."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash.anchors import LENGTH_BINS
from dflash.batch import FeatureBatch, Position, Step, TrainBatch
from dflash.config import TrainingConfig
from dflash.distributed import ALONE, Ranks
from dflash.model.drafter import Drafter, DrafterShape
from dflash.model.head import Head
from dflash.training.step import Trainer

SHAPE = DrafterShape(
    hidden_size=8,
    intermediate_size=12,
    num_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    num_layers=1,
    block_size=4,
    taps=(1,),
    num_target_layers=4,
    vocab_size=16,
    mask_token_id=15,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)


def config(**changes: Any) -> TrainingConfig:
    """A rate that does not rise or fall much, no clipping."""
    return TrainingConfig(**{"epochs": 1, "warmup": 0.0, "lr": 1e-3, "min_lr": 1e-3, "clip": 1e9, **changes})


def new_trainer(ranks: Ranks = ALONE, dtype: torch.dtype = torch.float64, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    drafter = Drafter(SHAPE).to(dtype)
    for name, parameter in drafter.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.3)
    embedding = nn.Embedding(16, 8, dtype=dtype).requires_grad_(False)
    return Trainer(drafter, embedding, Head(torch.randn(16, 8, dtype=dtype)), config(**changes), ranks)


def rows(count: int, seed: int = 0, supervised: float = 0.7) -> FeatureBatch:
    """A micro-batch of `count` rows of 12 tokens with 3 anchors each; a share of its slots counts."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 15, (count, 3, 4), generator=generator, dtype=torch.int32)
    weights = (torch.rand(count, 3, 4, generator=generator) < supervised).float()
    weights[..., 0] = 0
    return item(torch.randn(count, 12, 8, generator=generator).bfloat16(), labels, weights)


def item(features: Tensor, labels: Tensor, weights: Tensor) -> FeatureBatch:
    count = labels.shape[0]
    batch = TrainBatch(
        position=Position(0, 0, 0),
        row_ids=np.arange(count),
        ids=torch.zeros(0, dtype=torch.int32),
        lengths=np.full(count, 12, dtype=np.int32),
        anchor=torch.tensor([[2, 5, 9]], dtype=torch.int32).expand(count, 3),
        labels=labels,
        weights=weights,
        counted=torch.nonzero(weights.flatten()).squeeze(1),
        slots=12 * count,
        coverage=np.zeros((2, LENGTH_BINS), dtype=np.int64),
    )
    return FeatureBatch(batch, features)


def join(*items: FeatureBatch) -> FeatureBatch:
    """Several micro-batches as one."""
    return item(
        torch.cat([i.features for i in items]),
        torch.cat([i.batch.labels for i in items]),
        torch.cat([i.batch.weights for i in items]),
    )


def at(step: int = 0, of: int = 10, epoch: int = 0) -> Step:
    return Step(epoch, step, of, 1)


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.parameters.values()])

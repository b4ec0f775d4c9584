"""What every command needs of a run before it begins: parameters, rows, shape, and that they fit together."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cache.disk.store import TokenCache
from dflash.config import NOT_LEARNED, RunConfig
from dflash.distributed import ALONE, Ranks
from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.model.drafter import DrafterShape
from dflash.model.loss import NEEDS_STATES
from dflash.pipeline.train_plan import RowCost, TrainPlan
from dflash.run_directory import CONFIG, RunDirectory
from dflash.target.flops import Flops, flops
from dflash.target.frozen import Target, drafter_shape, stop_tokens, text_config
from dflash.target.identity import fingerprint
from dflash.target.placement import Replica
from dflash.target.tokenizer import check_tokenizer


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose parts have been checked against each other."""

    run: RunDirectory
    config: RunConfig
    store: TokenCache
    shape: DrafterShape
    flops: Flops

    @property
    def feature_width(self) -> int:
        """Values of one token's features: its taps, and the final state where the loss needs it."""
        return (len(self.shape.taps) + self._needs_final) * self.shape.hidden_size

    def plan(self, ranks: Ranks = ALONE) -> TrainPlan:
        """The steps of all epochs, and this process's share of them."""
        cost = RowCost(self.flops.target_token + self.flops.drafter_token, self.flops.drafter_slot)
        return TrainPlan(self.store, self.config, ranks.rank, ranks.size, cost=cost)

    def load_target(self, replica: Replica) -> Target:
        """The frozen target with the taps, and the depth, that training needs."""
        return Target.load(self.config.target, self.shape.taps, replica, final=self._needs_final)

    @property
    def _needs_final(self) -> bool:
        return self.config.training.loss in NEEDS_STATES

    def settings(self) -> dict[str, Any]:
        """Everything that the curve depends on, by field name."""
        training = self.config.training.model_dump(mode="json", exclude=set(NOT_LEARNED))
        return {
            "token cache": self.store.key,
            "target.model": fingerprint(self.config.target),
            "target.dtype": self.config.target.dtype,
            "drafter.init": self.config.drafter.init,
            **{f"drafter.{name}": value for name, value in self.shape.to_json().items()},
            **{f"training.{name}": value for name, value in training.items()},
        }


def open_run(path: Path, tokens: Path, config_name: str = CONFIG) -> OpenRun:
    """Read and check. Raises ConfigMismatch, TargetMismatch or a CacheError before any weight is loaded."""
    run = RunDirectory(path, config_name)
    config = run.config()
    store = TokenCache.open(tokens)
    text = text_config(config.target)
    shape = drafter_shape(config.drafter, text, stop_tokens(config.target))
    if store.manifest.vocabulary and store.manifest.vocabulary > shape.vocab_size:
        raise TargetMismatch(
            f"token cache {tokens.name} was made for a vocabulary of {store.manifest.vocabulary} ids, the target's "
            f"embedding has {shape.vocab_size} rows. Prepare the rows again with target.model={config.target.model}."
        )
    check_tokenizer(store.manifest, config.target)
    if not store.rows(0).size:
        raise ConfigMismatch(f"token cache {tokens.name} has no training rows: all are held out. Lower rows.held_out.")
    return OpenRun(run, config, store, shape, flops(text, shape, final=config.training.loss in NEEDS_STATES))


def changed_settings(stored: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ from those a run was started with: name → (then, now)."""
    stored, current = json.loads(json.dumps([stored, current]))
    names = sorted(stored.keys() | current.keys())
    pairs = {name: (stored.get(name), current.get(name)) for name in names}
    # 1 anchor a row is not the share 1.0 of them, though Python says that they are equal.
    spelled = partial(json.dumps, sort_keys=True)
    return {name: pair for name, pair in pairs.items() if spelled(pair[0]) != spelled(pair[1])}


def refuse_changed(changed: dict[str, tuple[Any, Any]], *, override: bool) -> None:
    """Raise ConfigMismatch by the names of the fields; `override` allows all but what makes the drafter's tensors."""
    if override:
        changed = {name: pair for name, pair in changed.items() if name.startswith("drafter.")}
    if changed:
        fields = "; ".join(f"{name}: started with {then!r}, now {now!r}" for name, (then, now) in changed.items())
        raise ConfigMismatch(
            f"settings that change the curve differ from those this run was started with: {fields}. "
            "Set them back, or start a run of another name"
            + (
                "; no --override changes what a drafter is."
                if override
                else ", or accept another curve with --override."
            )
        )

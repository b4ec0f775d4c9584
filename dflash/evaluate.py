"""How good the drafter is: τ on held-out rows before and after training, and real decoding against the target alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cache.gather import Buffers, gather
from cache.plan import plan_epoch
from dflash import checkpoint
from dflash.checkpoint import Checkpoint
from dflash.decode import Decoded, Sampling, plain, speculate
from dflash.drafter import Drafter
from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.loss import Head
from dflash.opening import OpenRun, cpu_threads, open_run, place
from dflash.report import write_report
from dflash.run import Progress
from dflash.target import Target
from dflash.tau import CONVENTION, RowWalk, acceptance_by_slot, accepted_by_anchor, tau, walk
from dflash.training import load_drafter

# Float32 sums in another order differ by about this much in a logit: below it, two tokens are a tie.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded twice."""

    prompt: tuple[int, ...]
    plain: Decoded
    speculative: Decoded

    @property
    def identical(self) -> bool:
        return self.plain.ids == self.speculative.ids

    @property
    def near_tie(self) -> bool:
        """Whether the texts part at a token where the target's two best logits were nearly equal."""
        pairs = zip(self.plain.ids, self.speculative.ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return first is not None and self.plain.gaps[first] < NEAR_TIE


def evaluate(path: Path, tokens: Path) -> None:
    """Write evaluation.json and report.html of the run's newest checkpoint.

    Raises ConfigMismatch without held-out rows, CheckpointCorrupt without a checkpoint.
    """
    opened = open_run(path, tokens)
    after = checkpoint.newest(opened.run.checkpoints)
    if after is None:
        raise CheckpointCorrupt(f"{opened.run.checkpoints} holds no checkpoint. Train the run first.")
    before = checkpoint.first(opened.run.checkpoints)
    held_out = opened.store.rows(1)
    if not held_out.size:
        raise ConfigMismatch("the token cache has no held-out rows. Raise rows.held_out and prepare the rows again.")
    torch.set_num_threads(cpu_threads())
    device = place(opened.config.target).drafter
    target = Target.load(opened.config.target, opened.shape.taps, device)
    ends = target.ends(device)
    drafters = [load_drafter(opened.shape, c).to(device).eval() for c in (before, after)]
    total = held_out.size + min(held_out.size, opened.config.evaluation.prompts)
    progress = Progress(opened.run, "evaluate", total, "rows")
    walks = walk_rows(opened, target, drafters, ends, held_out, progress)
    compared = decode_prompts(opened, target, drafters[1], ends, held_out, progress)
    tokenizer = AutoTokenizer.from_pretrained(
        opened.config.target.model,
        revision=opened.config.target.revision,
        trust_remote_code=opened.config.target.trust_remote_code,
    )
    value = _result(opened, after, held_out, walks, compared, tokenizer)
    opened.run.write("evaluation.json", value)
    write_report(opened.run, value)


def walk_rows(
    opened: OpenRun,
    target: Target,
    drafters: list[Drafter],
    ends: tuple[nn.Module, Head],
    row_ids: np.ndarray,
    progress: Progress,
) -> list[list[RowWalk]]:
    """Teacher-forced passes over rows, for each drafter; one target pass a micro-batch serves them all."""
    store, training = opened.store, opened.config.training
    plan = plan_epoch(store.lengths, row_ids, tokens_per_batch=training.tokens_per_batch, seed=0, epoch=0)
    buffers = Buffers(max(training.tokens_per_batch, int(store.lengths.max())))
    walks: list[dict[int, RowWalk]] = [{} for _ in drafters]
    for index in range(plan.num_batches):
        batch = plan.batch(index)
        rows = gather(store, batch, buffers)
        features = target.features(torch.from_numpy(rows.ids).to(target.device))
        for b, (row, length) in enumerate(zip(batch.tolist(), rows.lengths.tolist(), strict=True)):
            ids, mask = rows.ids[b, :length], rows.mask[b, :length]
            for drafter, found in zip(drafters, walks, strict=True):
                found[row] = walk(mask, accepted_by_anchor(drafter, ends, ids, mask, features[b, :length]))
            progress.advance("teacher-forced τ")
    return [[found[row] for row in row_ids.tolist()] for found in walks]


def decode_prompts(
    opened: OpenRun,
    target: Target,
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    row_ids: np.ndarray,
    progress: Progress,
) -> list[Comparison]:
    """Held-out prompts, up to their first answer, decoded by the target alone and with the drafter."""
    config, store = opened.config.evaluation, opened.store
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    stop_ids = stop_tokens(target)
    order = np.random.default_rng(config.seed).permutation(row_ids)[: config.prompts]
    compared = []
    for index, row in enumerate(order.tolist()):
        piece = slice(store.offsets[row], store.offsets[row + 1])
        prompt = torch.from_numpy(store.ids[piece][: int(np.argmax(store.mask[piece]))].astype(np.int64))
        limit, seed = config.max_new_tokens, config.seed + index
        alone = plain(target, prompt, max_new_tokens=limit, stop_ids=stop_ids, choose=sampling.chooser(seed))
        helped = speculate(
            target, drafter, ends, prompt, max_new_tokens=limit, stop_ids=stop_ids, choose=sampling.chooser(seed)
        )
        compared.append(Comparison(tuple(prompt.tolist()), alone, helped))
        progress.advance(f"decoding, τ {helped.tau:.2f}")
    return compared


def stop_tokens(target: Target) -> frozenset[int]:
    """The ids that end an answer, by the target's generation config."""
    stop = target.model.generation_config.eos_token_id
    return frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])


def _result(
    opened: OpenRun,
    after: Checkpoint,
    row_ids: np.ndarray,
    walks: list[list[RowWalk]],
    compared: list[Comparison],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    names, groups = opened.store.manifest.group_names, opened.store.group[row_ids]
    by_group = {}
    for group in np.unique(groups).tolist():
        chosen = [w for w, g in zip(walks[1], groups.tolist(), strict=True) if g == group]
        by_group[names[group] if names else "all"] = _tau(chosen) | {"rows": len(chosen)}
    size = opened.shape.block_size
    return {
        "checkpoint": str(after.path),
        "tau": {
            "before": _tau(walks[0]),
            "after": _tau(walks[1]),
            "rows": len(row_ids),
            "convention": CONVENTION,
        },
        "accepted_by_slot": {
            "before": acceptance_by_slot(walks[0], size),
            "after": acceptance_by_slot(walks[1], size),
        },
        "by_group": by_group,
        "decode": _decode_facts(opened, compared),
        "samples": [_sample(c, tokenizer) for c in compared[:3]],
    }


def _tau(walks: list[RowWalk]) -> dict[str, Any]:
    value = tau(walks)
    return {"value": _number(value.value), "se": _number(value.standard_error)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _decode_facts(opened: OpenRun, compared: list[Comparison]) -> dict[str, Any]:
    config = opened.config.evaluation
    emitted = sum(sum(c.speculative.emitted) for c in compared)
    passes = sum(len(c.speculative.emitted) for c in compared)
    accepted = sum(sum(c.speculative.accepted) for c in compared)
    alone = sum(len(c.plain.ids) for c in compared) / sum(c.plain.seconds for c in compared)
    helped = sum(len(c.speculative.ids) for c in compared) / sum(c.speculative.seconds for c in compared)
    identical = sum(c.identical for c in compared)
    near_ties = sum(c.near_tie for c in compared)
    return {
        "prompts": len(compared),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "identical": identical,
        "near_ties": near_ties,
        # Two draws of one law need not agree: at a temperature above 0 the texts say nothing about losslessness.
        "lossless": identical + near_ties == len(compared) if config.temperature == 0 else None,
        "tau": emitted / passes if passes else None,
        "accepted_per_pass": accepted / passes if passes else None,
        "plain_tokens_per_s": alone,
        "speculative_tokens_per_s": helped,
        "speedup": helped / alone,
    }


def _sample(compared: Comparison, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A decoded answer in runs: the tokens of one target pass each, the first of them given by the prompt's pass."""
    ids, runs, position = compared.speculative.ids, [], 1
    runs.append({"text": tokenizer.decode(list(ids[:1])), "accepted": 0})
    for count, accepted in zip(compared.speculative.emitted, compared.speculative.accepted, strict=True):
        texts = [tokenizer.decode([token]) for token in ids[position : position + count]]
        runs.append({"text": "".join(texts), "accepted": accepted, "tokens": texts})
        position += count
    return {"prompt": tokenizer.decode(list(compared.prompt)), "runs": runs}

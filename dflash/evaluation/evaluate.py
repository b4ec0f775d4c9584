"""How good the drafter is: τ on held-out rows before and after training, and real decoding against the target alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from cache.disk.manifest import Manifest
from dflash.decoding.cost import measure_cost
from dflash.decoding.tau import CONVENTION, RowWalk, acceptance_by_slot, tau, walk_rows
from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.evaluation.comparison import Comparison, compare, facts, finite, sample
from dflash.evaluation.report import write_report
from dflash.host import cpu_threads
from dflash.model.few_rows import decode_with_few_rows
from dflash.run_directory import CONFIG, ProgressFile
from dflash.target.frozen import Target
from dflash.target.identity import refuse_other_target
from dflash.target.placement import place
from dflash.training import checkpoint
from dflash.training.checkpoint import Checkpoint
from dflash.training.initial_drafter import load_drafter
from dflash.training.open_run import OpenRun, open_run


def evaluate(path: Path, tokens: Path, config_name: str = CONFIG) -> None:
    """Write evaluation.json and report.html of the run's best checkpoint.

    Raises ConfigMismatch without held-out rows, CheckpointCorrupt without a checkpoint, and what `open_run` does.
    """
    opened = open_run(path, tokens, config_name)
    after = checkpoint.best(opened.run.checkpoints)
    if after is None:
        raise CheckpointCorrupt(f"{opened.run.checkpoints} holds no checkpoint. Train the run first.")
    refuse_other_target(opened.config.target, after.state.settings)
    before = checkpoint.first(opened.run.checkpoints)
    held_out = opened.store.rows(1)
    if not held_out.size:
        raise ConfigMismatch("the token cache has no held-out rows. Raise rows.held_out and prepare the rows again.")
    config = opened.config.target
    tokenizer = AutoTokenizer.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    torch.set_num_threads(cpu_threads())
    devices = place(config)
    device = devices.drafter
    # A target that needs several devices lies on them; any other beside the drafter.
    target = Target.load(
        config,
        opened.shape.taps,
        devices.targets[0] if len(devices.targets[0]) > 1 else device,
        known=tokenizer.get_vocab().values(),
    )
    ends = target.ends(device)
    drafters = [load_drafter(opened.shape, c).to(device).eval() for c in (before, after)]
    for model in (target.model, *drafters):
        decode_with_few_rows(model)
    prompts = held_out_prompts(opened, held_out)
    progress = ProgressFile(opened.run, "evaluate", held_out.size + len(prompts), "rows")
    walks = walk_rows(
        opened.store,
        held_out,
        target,
        ends,
        drafters,
        on_row=lambda: progress.advance("teacher-forced τ"),
    )
    compared = compare(
        target,
        drafters[1],
        ends,
        prompts,
        opened.config.evaluation,
        stop_tokens(target, opened.store.manifest),
        lambda decoded: progress.advance(f"decoding, τ {decoded.tau:.2f}"),
    )
    value = _result(opened, after, held_out, walks, compared)
    cost = measure_cost(target, drafters[1], ends, prompts[0][1])
    value["decode"]["cost"] = {"pass_s": cost.passes, "block_s": cost.block, "break_even_tau": cost.break_even}
    value["decode"]["convention"] = convention(opened, target)
    value["samples"] = [sample(one, tokenizer) for one in compared[:3]]
    opened.run.write("evaluation.json", value)
    write_report(opened.run, value)


def held_out_prompts(opened: OpenRun, row_ids: np.ndarray) -> list[tuple[str, torch.Tensor]]:
    """Some held-out rows up to their first answer, with their groups; the same for the same seed."""
    config, store = opened.config.evaluation, opened.store
    prompts = []
    for row in np.random.default_rng(config.seed).permutation(row_ids)[: config.prompts].tolist():
        piece = slice(store.offsets[row], store.offsets[row + 1])
        ids = store.ids[piece][: int(np.argmax(store.mask[piece]))]
        if ids.size:  # a row that opens with an answer has no prompt
            prompts.append((_group(store.manifest, int(store.group[row])), torch.from_numpy(ids.astype(np.int64))))
    if not prompts:
        raise ConfigMismatch("no held-out row has tokens before its first answer; expected prompts to decode from.")
    return prompts


def stop_tokens(target: Target, manifest: Manifest) -> frozenset[int]:
    """The ids that end an answer: the target's own, and those that ended the answers it was shown."""
    generation = getattr(target.model, "generation_config", None)
    stop = getattr(generation, "eos_token_id", None)
    own = stop if isinstance(stop, list) else [] if stop is None else [stop]
    return frozenset(own) | frozenset(manifest.tokenizer.get("stop_ids", ()))


def convention(opened: OpenRun, target: Target) -> str:
    """One sentence that says how the numbers of decoding were taken, so that they can be compared with others."""
    config, parts = opened.config.evaluation, opened.store.manifest.key_parts
    arguments = json.loads(parts.get("template_arguments") or "{}")
    think = arguments.get("enable_thinking")
    law = "greedy (temperature 0)"
    if config.temperature > 0:
        law = f"sampled (temperature {config.temperature}, top_p {config.top_p}, top_k {config.top_k})"
    return (
        f"{law}, seed {config.seed}; held-out prompts up to their first answer; prompt template: "
        f"{parts.get('template', 'none, the rows came tokenised')}, arguments {json.dumps(arguments)}, thinking "
        f"{'as the template has it' if think is None else 'on' if think else 'off'}; at most {config.max_new_tokens} "
        f"new tokens; block size {opened.shape.block_size}; {opened.config.target.dtype} on {target.device.type}, one "
        "prompt at a time, both ways with the same kind of cache; τ = tokens emitted by a target pass, bonus token "
        "included; accepted drafts a round leave it out; the prompt's own pass is not a round; seconds are wall clock, "
        "the prompt's pass included"
    )


def _result(
    opened: OpenRun,
    after: Checkpoint,
    row_ids: np.ndarray,
    walks: list[list[RowWalk]],
    compared: list[Comparison],
) -> dict[str, Any]:
    groups = opened.store.group[row_ids]
    by_group = {}
    for group in np.unique(groups).tolist():
        chosen = [w for w, g in zip(walks[1], groups.tolist(), strict=True) if g == group]
        by_group[_group(opened.store.manifest, group)] = _tau(chosen) | {"rows": len(chosen)}
    size = opened.shape.block_size
    return {
        "checkpoint": str(after.path),
        "tau": {
            "before": _tau(walks[0]),
            "after": _tau(walks[1]),
            "rows": len(row_ids),
            "convention": CONVENTION,
        },
        "accepted_by_slot": acceptance_by_slot(walks[1], size),
        "accepted_by_slot_before": acceptance_by_slot(walks[0], size),
        "by_group": by_group,
        "decode": facts(compared, opened.config.evaluation, size),
    }


def _group(manifest: Manifest, group: int) -> str:
    return manifest.group_names[group] if manifest.group_names else "all"


def _tau(walks: list[RowWalk]) -> dict[str, Any]:
    value = tau(walks)
    passes = sum(len(w.accepted) for w in walks)
    return {
        "value": finite(value.value),
        "se": finite(value.standard_error),
        "accepted_per_round": sum(sum(w.accepted) for w in walks) / passes if passes else None,
    }

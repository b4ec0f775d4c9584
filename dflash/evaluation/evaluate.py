"""How good the drafter is: τ on held-out rows, and real decoding against the target alone."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from cache.disk.manifest import Manifest
from dflash.decoding.cost import measure_cost
from dflash.decoding.tau import CONVENTION, RowWalk, acceptance_by_slot, tau
from dflash.distributed import Ranks, joined
from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.evaluation.comparison import Comparison, compare, facts, finite, sample
from dflash.evaluation.held_out import HeldOut, most_rows, walk_held_out
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
    """Write evaluation.json and report.html of the run's best checkpoint; several processes share the work.

    Raises ConfigMismatch without held-out rows, CheckpointCorrupt without a checkpoint, and what `open_run` does.
    """
    with joined() as ranks:
        _evaluate(open_run(path, tokens, config_name), ranks)


def _evaluate(opened: OpenRun, ranks: Ranks) -> None:
    chosen = checkpoint.best(opened.run.checkpoints)
    if chosen is None:
        raise CheckpointCorrupt(f"{opened.run.checkpoints} holds no checkpoint. Train the run first.")
    refuse_other_target(opened.config.target, chosen.state.settings)
    if not opened.store.rows(1).size:
        raise ConfigMismatch("the token cache has no held-out rows. Raise rows.held_out and prepare the rows again.")
    config, evaluation = opened.config.target, opened.config.evaluation
    tokenizer = AutoTokenizer.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    torch.set_num_threads(cpu_threads())
    devices = place(config, ranks)
    devices.enter()
    device = devices.drafter
    # A target that needs several devices lies on them; any other beside the drafter.
    target = Target.load(
        config,
        opened.shape.taps,
        devices.targets[0] if len(devices.targets[0]) > 1 else device,
        known=tokenizer.get_vocab().values(),
    )
    ends = target.ends(device)
    checkpoints = [chosen, *([checkpoint.first(opened.run.checkpoints)] if evaluation.before else [])]
    # Servers load the drafter in the target's dtype.
    drafters = [load_drafter(opened.shape, one).to(device, getattr(torch, config.dtype)).eval() for one in checkpoints]
    for model in (target.model, *drafters):
        decode_with_few_rows(model)
    prompts = held_out_prompts(opened, opened.store.rows(1))
    most = most_rows(opened.store, evaluation.rows)
    progress = ProgressFile(opened.run, "evaluate", most + len(prompts), "rows") if ranks.leads else None

    def say(done: int, message: str) -> None:
        if progress is not None:
            progress.update(done, message)

    held_out = walk_held_out(
        opened.store,
        evaluation.rows,
        evaluation.seed,
        target,
        ends,
        drafters,
        ranks=ranks,
        on_row=lambda done: say(done, "teacher-forced τ"),
    )
    prompts_done = count(1)
    compared = compare(
        target,
        drafters[0],
        ends,
        prompts,
        evaluation,
        stop_tokens(target, opened.store.manifest),
        lambda one: say(most + min(next(prompts_done) * ranks.size, len(prompts)), f"decoding, τ {one.tau:.2f}"),
        ranks,
    )
    if not ranks.leads:
        return
    value = _result(opened, chosen, held_out, compared)
    cost = measure_cost(target, drafters[0], ends, prompts[0][1])
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
    chosen: Checkpoint,
    held_out: HeldOut,
    compared: list[Comparison],
) -> dict[str, Any]:
    after, *before = held_out.walks
    groups = opened.store.group[held_out.row_ids]
    by_group = {}
    for group in np.unique(groups).tolist():
        walks = [w for w, g in zip(after, groups.tolist(), strict=True) if g == group]
        by_group[_group(opened.store.manifest, group)] = _tau(walks) | {"rows": len(walks)}
    size = opened.shape.block_size
    return {
        "checkpoint": str(chosen.path),
        "tau": {
            "before": _tau(before[0]) if before else None,
            "after": _tau(after),
            "rows": len(held_out.row_ids),
            "rows_held_out": int(opened.store.rows(1).size),
            "convention": CONVENTION,
        },
        "accepted_by_slot": acceptance_by_slot(after, size),
        "accepted_by_slot_before": acceptance_by_slot(before[0], size) if before else None,
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

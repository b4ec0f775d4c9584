"""One checkpoint → the layouts that servers load: config.json and model.safetensors of a `DFlashDraftModel`.

Nothing appears under a final name before the gate has passed: a fresh process loads what was written and gets the
trainer's logits, no tensor and no config key can be missing unnoticed, and every tensor has a part in the logits.
"""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cache.json_file import read_json, write_json
from cache.locks import held
from dflash.errors import CheckpointCorrupt, ConfigMismatch, TargetMismatch
from dflash.export.gguf_drafter import load_gguf_drafter, rounded_drafter
from dflash.export.gguf_layout import DRAFTER, TARGET, gguf_type, write_gguf_layout
from dflash.export.written_out import probe, written_out
from dflash.files import checksum, durable_directory
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.model.layouts import (
    Json,
    TargetFacts,
    check_config,
    check_tensors,
    layout_config,
    load_exported,
    read_drafter,
    written_dtype,
)
from dflash.run_directory import CONFIG, ProgressFile, RunDirectory
from dflash.target.frozen import Target, drafter_shape, stop_tokens, text_config
from dflash.target.identity import refuse_other_target
from dflash.training import checkpoint
from dflash.training.initial_drafter import load_drafter

ORIGIN = "origin.json"  # in an export: which run and checkpoint it is of
TOLERANCE = 1e-5  # float32 logits, the same weights in two processes


def export(path: Path, config_name: str = CONFIG) -> None:
    """Write the best checkpoint as RUN/export/LAYOUT/ (or export.path/LAYOUT), and export.json.

    Raises CheckpointCorrupt without a checkpoint or when what was written does not pass the gate, ConfigMismatch for a
    mask token that is missing or has another meaning or a directory that this run did not write, TargetMismatch for
    another target or a layout that cannot serve this one.
    """
    run = RunDirectory(path, config_name)
    config = run.config()
    found = checkpoint.best(run.checkpoints)
    if found is None:
        raise CheckpointCorrupt(f"{run.checkpoints} holds no checkpoint. Train the run first.")
    refuse_other_target(config.target, found.state.settings)
    target_config = text_config(config.target)
    shape = drafter_shape(config.drafter, target_config, stop_tokens(config.target))
    base = Path(config.export.path) if config.export.path else path / "export"
    layouts = list(dict.fromkeys(config.export.layouts))
    progress = ProgressFile(run, "export", 2 * len(layouts), "parts")
    drafter = load_drafter(shape, found).eval()
    cpu = torch.device("cpu")
    target = Target.load(config.target, shape.taps, cpu)
    embedding, head = target.ends(cpu)
    drafter = written_out(drafter, (embedding, head))
    facts = target_facts(config.target.model, target_config, config.target.dtype)
    origin = {"run": str(path.resolve()), "checkpoint": checksum(found.path / "state.json")}
    written: dict[str, Json] = {}
    for layout in layouts:
        if layout == "speculators":
            refuse_other_ends(embedding, head)
        final = base / layout
        with owned_directory(final, origin) as partial:
            more: Json = {}
            if layout == "gguf":
                kind = gguf_type(config.export, config.target)
                beside = write_gguf_layout(partial, drafter, target.model, config.target, kind)
                more = {
                    "type": kind,
                    "drafter": str(final / DRAFTER),
                    "target": str(beside or final / TARGET),
                    "drafts": shape.block_size - 1,
                    "positions": shape.max_position_embeddings,
                }
                progress.advance("gguf written")
                difference = compare_hidden(rounded_drafter(drafter, kind), head, partial)
            else:
                write_layout(partial, drafter, layout_config(layout, drafter.shape, facts))
                progress.advance(f"{layout} written")
                difference = gate(drafter, head, partial)
        progress.advance(f"{layout} loaded back")
        written[layout] = {
            "path": str(final),
            "origin": origin,
            "max_logit_difference": difference,
            "tensors": len(drafter.state_dict()),
            "size_bytes": sum(file.stat().st_size for file in final.iterdir()),
            **more,
        }
    first = layouts[0]
    run.write("export.json", {**written[first], "layout": first, "checkpoint": str(found.path), "layouts": written})


@contextmanager
def owned_directory(final: Path, origin: Json) -> Iterator[Path]:
    """As `durable_directory`, for one run alone: what another run, or nobody known, wrote there is not replaced."""
    with held(final.with_name(f".{final.name}.lock")):  # two runs may export to one place at once
        is_own = final.resolve().is_relative_to(origin["run"])  # a run may have been moved, with what is in it
        if not is_own and final.exists() and any(final.iterdir()):
            before = read_json(final / ORIGIN)
            if before is None or before.get("run") != origin["run"]:
                whose = "no run of ours wrote it" if before is None else f"the run {before.get('run')} wrote it"
                raise ConfigMismatch(
                    f"export.path: {final} is not empty, and {whose}. Nothing was replaced: choose another "
                    "export.path, or remove that directory."
                )
        for left in final.parent.glob(f"{final.name}.tmp-*"):  # by an export that was killed
            shutil.rmtree(left, ignore_errors=True)
        with durable_directory(final) as partial:
            write_json(partial / ORIGIN, origin)
            yield partial


def target_facts(name: str, config: PreTrainedConfig, dtype: str) -> TargetFacts:
    """What the layouts say of the target."""
    return TargetFacts(
        name=name,
        architectures=list(getattr(config, "architectures", None) or []),
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=getattr(config, "eos_token_id", None),
        dtype=dtype,
    )


def refuse_other_ends(embedding: nn.Module, head: Head) -> None:
    """Raise TargetMismatch where `speculators`, which reads the two weights alone, would compute something else."""
    ids = torch.arange(min(16, head.weight.shape[0]))
    weight = embedding.get_parameter("weight")
    if head.bias is not None or not torch.equal(embedding(ids), weight[ids]):
        raise TargetMismatch(
            "export.layouts: speculators takes the target's embedding and head as bare weights; this target's "
            f"{'head has a bias' if head.bias is not None else 'embedding is scaled'}, so its drafts would be others. "
            "Export the dflash layout only."
        )


def write_layout(directory: Path, drafter: Drafter, config: Json) -> None:
    """model.safetensors and config.json of one layout."""
    dtype = written_dtype(config)
    # A view or a transposed tensor is a good weight but no good file.
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in drafter.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)


def load_any(directory: Path) -> Drafter:
    """A drafter from any served layout alone; raises what `load_exported` does."""
    file = directory / DRAFTER
    return load_gguf_drafter(file) if file.is_file() else load_exported(directory)


def gate(drafter: Drafter, head: Head, directory: Path) -> float:
    """Largest difference of logits between the trainer's drafter and what a fresh process loads from `directory`.

    The trainer's weights are rounded as the config says they were written; both compute in float32.

    Raises CheckpointCorrupt when there is one, or when something in the directory could be lost without notice.
    """
    config = json.loads((directory / "config.json").read_text())
    difference = compare_hidden(copy.deepcopy(drafter).to(written_dtype(config)).float(), head, directory)
    refuse_silent_losses(config, load_file(directory / "model.safetensors"))
    return difference


def compare_hidden(drafter: Drafter, head: Head, directory: Path) -> float:
    """Largest difference of logits between a drafter in float32 and what a fresh process loads from `directory`.

    Raises CheckpointCorrupt when there is one.
    """
    out = directory / "probe.safetensors"
    command = [sys.executable, "-m", "dflash", "probe", str(directory), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckpointCorrupt(f"a fresh process could not load the exported drafter: {done.stderr[-2000:]}")
    head = head.to(torch.float32)
    with torch.no_grad():
        found, expected = load_file(out), probe(drafter)
        difference = float((head.logits(found.pop("hidden")) - head.logits(expected.pop("hidden"))).abs().max())
        difference = max([difference, *(float((found[name] - expected[name]).abs().max()) for name in expected)])
    out.unlink()
    if not difference <= TOLERANCE:
        raise CheckpointCorrupt(
            f"the exported drafter differs from the trainer's by {difference:.2e}, expected at most {TOLERANCE:.0e}. "
            "Nothing was exported."
        )
    return difference


def refuse_silent_losses(config: Json, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointCorrupt when a config key or a tensor can be removed unnoticed, or a tensor is never used."""
    loaded = read_drafter(config, tensors)
    unnoticed = []
    for path in _key_paths(config):
        lacking = copy.deepcopy(config)
        place = lacking
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        if _is_read(lacking, tensors):
            unnoticed.append(".".join(path))
    unnoticed += [name for name in tensors if _is_read(config, {k: v for k, v in tensors.items() if k != name})]
    # Not squared: of untrained tables, which are zero, the other factor must be seen, too.
    torch.stack([one.square().sum() + one.sum() for one in probe(loaded).values()]).sum().backward()  # type: ignore[no-untyped-call]
    unused = [name for name, p in loaded.named_parameters() if p.grad is None or not bool(p.grad.any())]
    if unnoticed or unused:
        raise CheckpointCorrupt(
            f"the exported drafter would load without {unnoticed}, and does not use {unused}; expected neither. "
            "Nothing was exported."
        )


def _key_paths(config: Json, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _key_paths(value, (*before, key))


def _is_read(config: Json, tensors: dict[str, Tensor]) -> bool:
    try:
        check_tensors(check_config(config), tensors, written_dtype(config))
    except (CheckpointCorrupt, ConfigMismatch):
        return False
    return True

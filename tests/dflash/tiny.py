"""A target and rows so small that a whole run takes a second: what tests of training need, built in a second.

Child processes come from a server that has imported everything once (`multiprocessing`'s forkserver), because an import
of torch takes longer than such a run.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from cache.build import build
from cache.config import RowsConfig

VOCABULARY = 61
MASK_TOKEN = 60

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores
_CONTEXT = multiprocessing.get_context("forkserver")
# All that a run imports, at its start or on the way. The server passes over a name that is not there.
PRELOADED = (
    "dflash.training.train",
    "dflash.training.check",
    "dflash.evaluation.evaluate",
    "dflash.export.export",
    "dflash.answers.generate",
    "transformers.models.llama.modeling_llama",
    "torch.utils.tensorboard",
    "pytest",
)
_CONTEXT.set_forkserver_preload(list(PRELOADED))


def make_target(directory: Path, layers: int = 5) -> Path:
    """A random Llama of a few thousand weights with a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


def make_rows(home: Path, rows: int = 48, longest: int = 28, held_out: float = 0.1) -> Path:
    """A token cache of counting sequences: a prompt of 4 tokens, then an answer that a drafter can learn."""
    random = np.random.default_rng(0)
    lengths = random.integers(10, longest + 1, rows)
    ids = [
        [2 + (int(start) + k) % (VOCABULARY - 4) for k in range(n)]
        for start, n in zip(random.integers(0, 50, rows), lengths, strict=True)
    ]
    mask = [[int(k >= 4) for k in range(n)] for n in lengths.tolist()]
    table = pa.table({"input_ids": ids, "loss_mask": mask})
    config = RowsConfig(source="in memory", vocabulary=VOCABULARY, held_out=held_out, max_dropped=1.0)
    return build(config, home=home, tokenizer=None, vocabulary=VOCABULARY, data=table)


def make_run(path: Path, model: Path, /, **training: Any) -> Path:
    """A run directory with config.json; keywords are fields of `training`, others with their group: `drafter={…}`."""
    groups = {name: training.pop(name) for name in ("target", "drafter", "evaluation") if name in training}
    config = {
        "name": path.name,
        "home": str(path.parent),
        "target": {"model": str(model), "dtype": "float32"} | groups.get("target", {}),
        "drafter": {"layers": 1, "block_size": 4, "taps": [1, 3], "mask_token_id": MASK_TOKEN}
        | groups.get("drafter", {}),
        "training": {
            "epochs": 2,
            "tokens_per_step": 128,
            "anchors": 8,
            "lr": 5e-3,
            "checkpoint_every_steps": 4,
            "log_every_steps": 3,
        }
        | training,
        "evaluation": {"prompts": 2, "max_new_tokens": 8} | groups.get("evaluation", {}),
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclass(frozen=True)
class Command:
    """A `python -m dflash …` that is running."""

    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code; minus the signal where one ended it."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s: {self.log.read_text()[-3000:]}")
        return int(self.process.exitcode)


def start(arguments: Sequence[str | Path], log: Path, before: Callable[[], None] | None = None) -> Command:
    """Start `python -m dflash ARGUMENTS` in a process of its own; what it says goes to `log`.

    `before` runs in that process first: tests inject faults and delays with it.
    """
    process = _CONTEXT.Process(target=_main, args=([str(a) for a in arguments], str(log), before))
    process.start()
    return Command(process, log)


def run(
    arguments: Sequence[str | Path], log: Path, expected: int = 0, before: Callable[[], None] | None = None
) -> None:
    """`start`, wait, and check its exit code."""
    code = start(arguments, log, before).wait()
    assert code == expected, f"exit code {code}, expected {expected}: {log.read_text()[-3000:]}"


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Drafter and optimizer of the furthest checkpoint."""
    newest = sorted((run / "checkpoints").glob("epoch-???-step-??????"))[-1]
    return {
        f"{name}.{key}": value
        for name in ("drafter", "optimizer")
        for key, value in load_file(newest / f"{name}.safetensors").items()
    }


def assert_equal(left: Path, right: Path) -> None:
    """Both runs ended at the same position with the same bits."""
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ: {different[:5]}"


def slow_steps() -> None:
    """For `before`: a step takes 20 ms longer, so that a test can stop a run in the middle."""
    from dflash.training.step import Trainer

    step = Trainer.step

    def slow(self: Trainer, *arguments: Any) -> Any:
        time.sleep(0.02)
        return step(self, *arguments)

    Trainer.step = slow  # type: ignore[method-assign]


def wait_for(path: Path, timeout_s: float = 60.0) -> None:
    """Return when `path` is there."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {timeout_s} s"
        time.sleep(0.002)


def _main(arguments: list[str], log: str, before: Callable[[], None] | None) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["dflash", *arguments]
    from dflash.__main__ import main

    if before is not None:
        before()

    sys.exit(main())

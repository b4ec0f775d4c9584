"""evaluation.json: what was measured, under which convention, and that it cannot be measured with other words."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding_toys import Toy, prompts, taught
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash.config import EvaluationConfig
from dflash.errors import CheckpointCorrupt
from dflash.evaluation import evaluate as evaluation
from dflash.evaluation.comparison import compare, facts, token_texts
from dflash.evaluation.evaluate import evaluate, stop_tokens
from dflash.target.frozen import Target
from dflash.training import checkpoint
from dflash.training.checkpoint import State
from dflash.training.initial_drafter import new_drafter
from dflash.training.open_run import open_run

MakeRun = Callable[..., Path]


@pytest.fixture
def run(make_run: MakeRun, tokens: Path) -> Path:
    """A run before its first step."""
    path = make_run("evaluated", evaluation={"prompts": 3, "max_new_tokens": 9})
    save_first(path, tokens)
    return path


def save_first(path: Path, tokens: Path) -> None:
    opened = open_run(path, tokens)
    target = Target.load(opened.config.target, opened.shape.taps, "cpu")
    drafter = new_drafter(opened.shape, opened.config.drafter, target, 0)
    state = State(epoch=0, step=0, steps_total=0, settings=opened.settings(), threads=1)
    checkpoint.save(opened.run.checkpoints, state, dict(drafter.state_dict()), {})


def test_everything_is_said_with_its_convention(run: Path, tokens: Path) -> None:
    evaluate(run, tokens)
    said = json.loads((run / "evaluation.json").read_text())
    held_out = open_run(run, tokens).store.rows(1).size
    assert said["tau"]["before"] is None
    assert said["accepted_by_slot_before"] is None
    assert said["tau"]["rows"] == said["tau"]["rows_held_out"] == held_out, "the error is above 0.01 with all of them"
    assert said["tau"]["after"]["value"] == pytest.approx(1 + said["tau"]["after"]["accepted_per_round"])
    assert "bonus token included" in said["tau"]["convention"]
    assert sum(group["rows"] for group in said["by_group"].values()) == held_out
    decode = said["decode"]
    assert len(said["accepted_by_slot"]) == len(decode["accepted_by_slot"]) == 3
    assert decode["prompts"] == sum(group["answers"] for group in decode["by_group"].values()) == min(3, held_out)
    assert decode["lossless"] is True
    assert decode["identical"] + decode["near_ties"] == decode["prompts"]
    assert decode["speedup"] == decode["speculative_tokens_per_s"] / decode["plain_tokens_per_s"] > 0
    for part in (
        "greedy (temperature 0)", "prompt template:", "thinking", "at most 9 new tokens", "block size 4",
        "same kind of cache", "bonus token included", "accepted drafts a round leave it out",
    ):  # fmt: skip
        assert part in decode["convention"], part
    assert len(said["samples"]) == min(3, held_out)
    assert all("".join(run["tokens"]) == run["text"] for sample in said["samples"] for run in sample["runs"])
    assert (run / "report.html").read_text().count('class="answer"') == len(said["samples"])


def set_evaluation(run: Path, **changes: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["evaluation"] |= changes
    (run / "config.json").write_text(json.dumps(config))


def test_before_is_measured_on_the_same_rows_when_asked(run: Path, tokens: Path) -> None:
    set_evaluation(run, rows=2, before=True)
    evaluate(run, tokens)
    said = json.loads((run / "evaluation.json").read_text())
    assert said["tau"]["before"] == said["tau"]["after"], "the first checkpoint is also the newest"
    assert said["accepted_by_slot_before"] == said["accepted_by_slot"]
    assert said["tau"]["rows"] == sum(group["rows"] for group in said["by_group"].values()) == 2
    assert "2 held-out rows drawn from" in (run / "report.html").read_text()


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_the_drafter_is_measured_in_the_dtype_that_servers_give_it(
    kind: str, make_run: MakeRun, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(
        "served", drafter={"kind": kind, "rank": 4}, target={"dtype": "bfloat16"},
        evaluation={"prompts": 1, "max_new_tokens": 6},
    )  # fmt: skip
    save_first(path, tokens)
    seen = []
    walked = evaluation.walk_held_out

    def look(*arguments: Any, **options: Any) -> Any:
        seen.extend({p.dtype for drafter in arguments[5] for p in drafter.parameters()})
        return walked(*arguments, **options)

    monkeypatch.setattr(evaluation, "walk_held_out", look)
    evaluate(path, tokens)
    assert seen == [torch.bfloat16]
    decode = json.loads((path / "evaluation.json").read_text())["decode"]
    assert decode["lossless"] is True
    assert "bfloat16 on cpu" in decode["convention"]


def test_at_a_temperature_texts_prove_nothing(run: Path, tokens: Path) -> None:
    set_evaluation(run, temperature=0.7, top_p=0.9)
    evaluate(run, tokens)
    decode = json.loads((run / "evaluation.json").read_text())["decode"]
    assert decode["lossless"] is None
    assert "sampled (temperature 0.7, top_p 0.9, top_k 0)" in decode["convention"]


def test_the_tokenizers_ids_are_the_only_ones_that_are_said(
    run: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 61 rows beside a tokenizer of 30 ids."""
    said: list[Any] = []
    few = SimpleNamespace(get_vocab=lambda: {f"w{i}": i for i in range(30)})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: few)
    monkeypatch.setattr(evaluation, "sample", lambda one, _: said.extend([*one.plain.ids, *one.speculative.ids]))
    monkeypatch.setattr(evaluation, "write_report", lambda *_: None)
    evaluate(run, tokens)
    assert said
    assert max(said) < 30


def test_without_a_checkpoint_there_is_nothing_to_evaluate(make_run: MakeRun, tokens: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="Train the run first"):
        evaluate(make_run("untrained"), tokens)


@pytest.fixture(scope="module")
def one() -> Toy:
    return taught()


def test_comparison_counts_what_both_ways_emitted(one: Toy) -> None:
    config = EvaluationConfig(max_new_tokens=20)
    asked = list(zip(["a", "b", "a"], prompts(6, 9, 4, seed=5), strict=True))
    seen: list[Any] = []
    compared = compare(one.target, one.drafter, one.ends, asked, config, frozenset(), seen.append)
    assert [c.speculative for c in compared] == seen
    assert all(c.identical and not c.near_tie for c in compared)
    said = facts(compared, config, 4)
    rounds = sum(len(c.speculative.emitted) for c in compared)
    assert said["tau"] == pytest.approx(3 * 19 / rounds)
    assert said["rounds"] == rounds == sum(group["rounds"] for group in said["by_group"].values())
    assert said["tau"] > 1.3
    # The last round of an answer may end, by the limit, with an accepted draft instead of a token of the target's own.
    assert 1 + said["accepted_per_round"] >= said["tau"]
    assert said["accepted_per_round"] == pytest.approx(sum(said["accepted_by_slot"]))
    assert (said["identical"], said["near_ties"], said["lossless"]) == (3, 0, True)
    assert {name: group["answers"] for name, group in said["by_group"].items()} == {"a": 2, "b": 1}
    assert said["plain_tokens_per_s"] == pytest.approx(60 / sum(c.plain.seconds for c in compared))


def test_a_text_that_parts_without_a_tie_is_not_lossless(one: Toy) -> None:
    config = EvaluationConfig(max_new_tokens=6)
    (fine,) = compare(one.target, one.drafter, one.ends, [("a", prompts(6)[0])], config, frozenset(), lambda _: None)
    broken = dataclasses.replace(
        fine, speculative=dataclasses.replace(fine.speculative, ids=(*fine.speculative.ids[:-1], 23))
    )
    assert facts([fine], config, 4)["lossless"] is True
    assert facts([fine, broken], config, 4)["lossless"] is False


def manifest(**tokenizer: Any) -> Any:
    return SimpleNamespace(tokenizer=tokenizer)


def test_token_texts_join_to_the_text_when_letters_are_split() -> None:
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel as Decoder

    backend.decoder = Decoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = tokenizer("né 😀!")["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert texts == ["n", "", "é", " ", "", "", "", "😀", "!"]
    assert token_texts(tokenizer, ids[:-2])[-1] == "\ufffd", "a text that ends inside a letter says so"
    assert token_texts(tokenizer, []) == []


def test_stop_tokens_are_the_targets_and_those_of_the_rows() -> None:
    def target(stop: Any) -> Any:
        return SimpleNamespace(model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=stop)))

    assert stop_tokens(target(2), manifest(stop_ids=[5])) == {2, 5}
    assert stop_tokens(target([2, 3]), manifest()) == {2, 3}
    assert stop_tokens(target(None), manifest()) == frozenset()


def test_prompts_are_the_same_for_the_same_seed(run: Path, tokens: Path) -> None:
    from dflash.evaluation.evaluate import held_out_prompts

    opened = open_run(run, tokens)
    rows = opened.store.rows(1)
    once, again = held_out_prompts(opened, rows), held_out_prompts(opened, rows)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(once, again, strict=True))
    for _, prompt in once:
        pieces = [opened.store.ids[opened.store.offsets[r] : opened.store.offsets[r + 1]] for r in rows]
        assert any(np.array_equal(piece[: prompt.numel()], prompt.numpy()) for piece in pieces)

"""Rows of another tokenizer are refused before a weight is loaded: equal sizes and an equal probe prove nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from cache.build import build
from cache.config import RowsConfig
from cache.key.tokenizer_files import hash_vocabulary, probe_ids
from dflash.config import TargetConfig
from dflash.errors import TargetMismatch
from dflash.target.tokenizer import check_tokenizer
from dflash.training.open_run import open_run

# Ids 1 to 5 are of words of the probe text, the others are not.
WORDS = ["[UNK]", "The", "12", "quick", "foxes'", "naïve", *(f"w{i}" for i in range(6, tiny.VOCABULARY))]


def tokenizer_at(directory: Path, words: list[str]) -> Path:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return directory


def swapped(one: int, other: int) -> list[str]:
    words = list(WORDS)
    words[one], words[other] = words[other], words[one]
    return words


def manifest(tokenizer: Path) -> Any:
    return SimpleNamespace(tokenizer={"probe": probe_ids(tokenizer), "vocabulary": hash_vocabulary(tokenizer)})


def target(directory: Path) -> TargetConfig:
    return TargetConfig(model=str(directory))


def test_a_probe_that_reads_otherwise_is_refused(tmp_path: Path) -> None:
    right, other = tokenizer_at(tmp_path / "right", WORDS), tokenizer_at(tmp_path / "other", swapped(2, 3))
    check_tokenizer(manifest(right), target(right))
    with pytest.raises(TargetMismatch, match=r"not the target's.*\[2, 3, .*at token 1.*other gives \[3, 2, "):
        check_tokenizer(manifest(right), target(other))


def test_ids_10_and_11_swapped_behind_an_equal_probe_are_refused(tmp_path: Path) -> None:
    right, other = tokenizer_at(tmp_path / "right", WORDS), tokenizer_at(tmp_path / "other", swapped(10, 11))
    assert probe_ids(right) == probe_ids(other)
    with pytest.raises(TargetMismatch, match=r"not the target's: the texts of all its ids hash to .*other"):
        check_tokenizer(manifest(right), target(other))


def test_an_added_token_counts(tmp_path: Path) -> None:
    right, other = tokenizer_at(tmp_path / "right", WORDS), tokenizer_at(tmp_path / "other", WORDS)
    backend = Tokenizer.from_file(str(other / "tokenizer.json"))
    backend.add_tokens(["one more"])
    backend.save(str(other / "tokenizer.json"))
    with pytest.raises(TargetMismatch):
        check_tokenizer(manifest(right), target(other))


def test_rows_that_say_nothing_of_their_tokenizer_are_taken(tmp_path: Path) -> None:
    other = tokenizer_at(tmp_path / "other", swapped(10, 11))
    check_tokenizer(SimpleNamespace(tokenizer={}), target(other))  # type: ignore[arg-type]
    no_files = SimpleNamespace(tokenizer={"probe": [], "vocabulary": "", "stop_ids": []})
    check_tokenizer(no_files, target(other))  # type: ignore[arg-type]


def test_a_run_on_rows_of_another_tokenizer_does_not_open(tmp_path: Path) -> None:
    model = tiny.make_target(tmp_path / "target")
    tokenizer_at(model, WORDS)
    table = pa.table({"input_ids": [[2, 3, 4, 5, 6, 7]], "loss_mask": [[0, 0, 1, 1, 1, 1]]})
    rows = RowsConfig(source="in memory", vocabulary=tiny.VOCABULARY, held_out=0.0)

    def opened(words: list[str]) -> None:
        made_with = tokenizer_at(tmp_path / "rows", words)
        tokens = build(rows, home=tmp_path / "home", tokenizer=made_with, vocabulary=tiny.VOCABULARY, data=table)
        open_run(tiny.make_run(tmp_path / f"run-{words[10]}", model), tokens)

    opened(WORDS)
    with pytest.raises(TargetMismatch, match="not the target's"):
        opened(swapped(10, 11))

"""A slice is what its own rows, tokenizer and template make it, whatever was made before or changes meanwhile."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from letters import OneIdACharacter, conversation, put
from toy import PLAIN, save_tokenizer

from cache.build import build
from cache.config import RowsConfig
from cache.errors import BadRow, BadSource, CacheMismatch
from cache.key.content import content_key
from cache.slices import cut as cuts
from cache.slices import make as making
from cache.slices import plan as planning
from cache.slices.make import Tokeniser
from cache.slices.plan import SlicePlan, plan_slices
from cache.source.find import find_files
from cache.source.open import open_source

# Long answers are written short once they are not the last one: a conversation of short ones is as it was said.
SHORTENING = PLAIN.replace(
    "{{ m.content }}", "{{ m.content[:2] if m.role == 'assistant' and not loop.last else m.content }}"
)


def planned(source: Path, home: Path, tokenizer: Path, **rows: Any) -> SlicePlan:
    config = RowsConfig(source=str(source), **rows)
    parts = find_files(config)
    key = content_key(config, tokenizer, home=home)
    return plan_slices(open_source(parts, config), config, tokenizer, key.parts, home)


def made(plan: SlicePlan, tokenisers: Callable[[], Tokeniser]) -> list[bytes]:
    for one in plan.slices:
        tokenisers().make(one)
    return [plan.path(one).read_bytes() for one in plan.slices]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "SLICE_ROWS", 4)


def test_a_slice_has_the_same_bytes_after_others_and_alone(tmp_path: Path, small: None) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", SHORTENING)
    source = put(tmp_path / "chat.jsonl", [_talk(i) for i in range(9)])
    together, alone = (planned(source, tmp_path / home, tokenizer) for home in ("together", "alone"))
    assert [one.key for one in together.slices] == [one.key for one in alone.slices]
    one = Tokeniser(together)
    assert made(together, lambda: one) == made(alone, lambda: Tokeniser(alone))


def _talk(number: int) -> dict[str, Any]:
    said = [("user", f"{number}?"), ("assistant", "no"), ("user", "go"), ("assistant", "ok")]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_cut_leaves_no_slice(
    kind: str, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _write(tmp_path / f"chat.{kind}", "yes")
    cut = planning.cuts_of_files

    def cut_and_change(*given: Any) -> Any:
        yield from cut(*given)
        _write(source, "not")
        os.utime(source, (1, 1))

    monkeypatch.setattr(planning, "cuts_of_files", cut_and_change)
    monkeypatch.setattr(making, "load_chat", OneIdACharacter)
    config = RowsConfig(source=str(source), vocabulary=1000)
    with pytest.raises(BadSource, match="changed while"):
        build(config, home=tmp_path / "home", tokenizer=None, vocabulary=None)
    assert list(tmp_path.glob("home/tokens/.slices/**/*.arrow")) == []


def _write(path: Path, answer: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [conversation(f"q{i}", answer) for i in range(3)]
    if path.suffix == ".jsonl":
        return put(path, rows)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("edited", ["template", "tokenizer"])
def test_a_tokenizer_or_template_that_changed_since_the_plan_makes_nothing(edited: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    template = tmp_path / "chat.jinja"
    template.write_text(PLAIN)
    plan = planned(put(tmp_path / "chat.jsonl", [_talk(0)]), tmp_path / "home", tokenizer, template=str(template))
    if edited == "template":
        template.write_text(PLAIN.replace("[U]", "[U] "))
    else:
        file = tokenizer / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}))
    with pytest.raises(CacheMismatch, match=f"{edited}.*changed"):
        Tokeniser(plan).make(plan.slices[0])
    assert list(plan.directory.glob("*.arrow*")) == []


def test_a_process_of_other_code_makes_nothing(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    plan = planned(put(tmp_path / "chat.jsonl", [_talk(0)]), tmp_path / "home", tokenizer)
    with pytest.raises(CacheMismatch, match="is not the one that this slice was asked with"):
        Tokeniser(replace(plan, code="another")).make(plan.slices[0])
    assert list(plan.directory.glob("*.arrow*")) == []


def test_each_tokenizer_has_slices_of_its_own(tmp_path: Path, small: None) -> None:
    source = put(tmp_path / "chat.jsonl", [_talk(i) for i in range(9)])
    plans = [
        planned(source, tmp_path / "home", save_tokenizer(tmp_path / str(i), words=words))
        for i, words in enumerate(((), ("<t>",)))
    ]
    keys = [{one.key for one in plan.slices} for plan in plans]
    assert [len(of) for of in keys] == [3, 3]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize("slice_rows", [4, 1000])
@pytest.mark.parametrize("bad", range(9))
@pytest.mark.parametrize("refused_by", ["the tokenizer", "the vocabulary"])
def test_errors_name_any_line_where_file_and_slices_begin_with_blank_ones(
    refused_by: str, bad: int, slice_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "SLICE_ROWS", slice_rows)
    monkeypatch.setattr(making, "load_chat", OneIdACharacter)
    question, answer = ("worse", "no") if refused_by == "the tokenizer" else ("q", "yes")
    rows = [conversation(question, answer) if i == bad else conversation(f"q{i}", "no") for i in range(9)]
    lines = ["", " ", *(json.dumps(row) for row in rows)]
    lines[4:4] = ["", ""]  # line 5 is where the second slice of four begins
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(lines) + "\n")
    at = lines.index(json.dumps(rows[bad])) + 1
    config = RowsConfig(source=str(source), vocabulary=120, held_out=0.0, max_dropped=1.0)  # y is 121
    with pytest.raises(BadRow, match=f"line {at} of "):
        build(config, home=tmp_path / "home", tokenizer=None, vocabulary=None)


def test_a_source_that_is_gone_is_not_told_as_a_damaged_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(making, "load_chat", OneIdACharacter)
    source = _write(tmp_path / "chat.jsonl", "yes")
    plan = planned(source, tmp_path / "home", save_tokenizer(tmp_path / "tokenizer"), vocabulary=1000)
    source.unlink()
    with caplog.at_level(logging.WARNING, "cache"), pytest.raises(FileNotFoundError):
        list(Tokeniser(plan).pieces(plan.slices[0]))
    assert "damaged" not in caplog.text


def test_a_slice_that_is_cleaned_away_before_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(making, "load_chat", lambda _: OneIdACharacter())
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    plan = planned(_write(tmp_path / "chat.jsonl", "yes"), tmp_path / "home", tokenizer, vocabulary=1000)
    read, cleaned = making.read_pieces, []

    def clean_first(path: Path) -> Any:
        if not cleaned:
            path.unlink()
        cleaned.append(path)
        return read(path)

    monkeypatch.setattr(making, "read_pieces", clean_first)
    with caplog.at_level(logging.WARNING, "cache"):
        assert sum(piece.facts.source_rows for piece in Tokeniser(plan).pieces(plan.slices[0])) == 3
    assert len(cleaned) == 2
    assert caplog.text == ""

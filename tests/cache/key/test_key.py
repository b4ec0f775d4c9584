"""Equal content, equal key; any change that could change a token, another key; nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from arrow_rows import table
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import cache
from cache.config import RowsConfig
from cache.key import file_hashes as fingerprint
from cache.key.code import hash_code
from cache.key.content import content_key
from cache.key.tokenizer_files import probe_ids, resolve_vocabulary

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def key_of(source: Any, home: Path, tokenizer: Path | None = None, data: Any = None, **rows: Any) -> str:
    config = RowsConfig(source=source if isinstance(source, list) else str(source), **{"vocabulary": 1000} | rows)
    return content_key(config, tokenizer, home=home, data=data).hex


def put(path: Path, rows: list[list[int]] = ROWS) -> Path:
    data = table(rows)
    with pa.ipc.new_stream(path, data.schema) as writer:
        writer.write_table(data)
    return path


def tokenizer_at(path: Path, *, bos: bool = False) -> Path:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "The": 1, "12": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    return path


def test_a_moved_copied_or_touched_source_has_the_same_key(tmp_path: Path) -> None:
    home, first = tmp_path / "home", put(tmp_path / "a.arrow")
    key = key_of(first, home)
    assert len(key) == 32
    copied = shutil.copy(first, tmp_path / "other name.arrow")
    os.utime(copied, (1, 1))
    assert key_of(copied, home) == key
    moved = first.rename(tmp_path / "b.arrow")
    assert key_of(moved, tmp_path / "another home") == key


def test_every_flipped_byte_gives_another_key(tmp_path: Path) -> None:
    path = put(tmp_path / "a.arrow")
    content = path.read_bytes()
    keys = {key_of(path, tmp_path)}
    positions = range(8, len(content), 97)
    for position in positions:
        broken = bytearray(content)
        broken[position] ^= 1
        path.write_bytes(broken)
        keys.add(fingerprint.hash_file(path, tmp_path))
    assert len(keys) == 1 + len(positions)


def test_a_flipped_byte_is_seen_though_size_and_mtime_are_put_back(tmp_path: Path) -> None:
    path = put(tmp_path / "a.arrow")
    old = time.time() - 3600
    os.utime(path, (old, old))
    before = key_of(path, tmp_path)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, (old, old))
    assert key_of(path, tmp_path) != before


def test_the_sidecar_saves_a_second_hash_once_the_file_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = put(tmp_path / "a.arrow"), []
    blocks = fingerprint.read_blocks
    monkeypatch.setattr(fingerprint, "read_blocks", lambda given: read.append(given) or blocks(given))
    first = key_of(path, tmp_path)
    assert key_of(path, tmp_path) == first
    assert len(read) == 2  # too young to be believed
    monkeypatch.setattr(fingerprint, "SETTLED_S", 0.0)
    for _ in range(3):
        assert key_of(path, tmp_path) == first
    assert len(read) == 3
    for sidecar in (tmp_path / "tokens" / ".hashes").iterdir():
        sidecar.write_text('{"path": ')  # a torn write
    assert key_of(path, tmp_path) == first
    assert len(read) == 4


def test_a_datasets_directory_counts_by_the_files_its_state_names(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = tmp_path / "saved"
    datasets.Dataset(table(ROWS)).save_to_disk(path, num_shards=2)
    key = key_of(path, home)
    datasets.load_from_disk(path).map(lambda row: {"input_ids": row["input_ids"][::-1]})  # leaves cache-*.arrow
    (path / "dataset_info.json").write_text("{}")
    assert key_of(path, home) == key
    assert key_of(shutil.copytree(path, tmp_path / "moved"), home) == key
    file = path / "data-00001-of-00002.arrow"
    content = bytearray(file.read_bytes())
    content[-30] ^= 1
    file.write_bytes(content)
    assert key_of(path, home) != key


def test_files_count_in_order(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a.arrow"), put(tmp_path / "b.arrow", ROWS[:2])
    assert key_of([str(first), str(second)], tmp_path) != key_of([str(second), str(first)], tmp_path)


def test_a_table_in_memory_counts_by_what_it_shows(tmp_path: Path) -> None:
    whole = table([[9, 9], *ROWS, [8, 8]])
    key = key_of("memory", tmp_path, data=table(ROWS))
    assert key_of("memory", tmp_path, data=whole.slice(1, 3)) == key
    assert key_of("memory", tmp_path, data=datasets.Dataset(table(ROWS))) == key
    assert key_of("memory", tmp_path, data=whole) != key
    shuffled = datasets.Dataset(table(ROWS)).select([2, 0, 1])
    assert key_of("memory", tmp_path, data=shuffled) != key


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 8}, {"overflow": "drop"}, {"supervise": "last"}, {"held_out": 0.5}, {"groups": ["a"]},
        {"vocabulary": 999}, {"columns": {"group": "kind"}},
    ],
)  # fmt: skip
def test_every_rule_is_in_the_key(tmp_path: Path, change: dict[str, Any]) -> None:
    data = table(ROWS, domain=["a", "b", "a"], kind=["x", "y", "z"])
    assert key_of("memory", tmp_path, data=data, **change) != key_of("memory", tmp_path, data=data)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"max_dropped": 0.9}, {}),
        ({"columns": {"ids": "input_ids", "mask": "loss_mask"}}, {}),
        ({"groups": ["a", "b"]}, {"groups": ["b", "a", "b"]}),
        ({"template_arguments": {"a": 1}}, {}),  # of rows that came tokenised
    ],
)
def test_what_changes_no_token_is_not(tmp_path: Path, one: dict[str, Any], same: dict[str, Any]) -> None:
    data = table(ROWS, domain=["a", "b", "a"])
    assert key_of("memory", tmp_path, data=data, **one) == key_of("memory", tmp_path, data=data, **same)


def test_the_same_files_have_the_same_key_whoever_names_them(tmp_path: Path) -> None:
    home, source = tmp_path / "home", tmp_path / "source"
    source.mkdir()
    first, second = put(source / "train-0.arrow"), put(source / "train-1.arrow", ROWS[:2])
    keys = [
        key_of(source, home),
        key_of(source, home, split="train"),
        key_of(source / "*.arrow", home),
        key_of([str(first), str(second)], home),
    ]
    assert len(set(keys)) == 1
    assert key_of([str(second), str(first)], home) not in keys


def test_another_machine_of_a_shared_home_finds_the_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = put(tmp_path / "a.arrow"), []
    monkeypatch.setattr(fingerprint, "SETTLED_S", 0.0)
    key = key_of(path, tmp_path)
    blocks = fingerprint.read_blocks
    monkeypatch.setattr(fingerprint, "read_blocks", lambda given: read.append(given) or blocks(given))
    assert key_of(path, tmp_path) == key
    assert read == []
    assert len(fingerprint.state_of(path)) == 4, "each machine counts its devices otherwise"


def chat(path: Path) -> Path:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Don't  stop 42."}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    return path


def test_the_template_counts_by_its_text(tmp_path: Path) -> None:
    path = chat(tmp_path / "a.jsonl")
    one, same, other = (tmp_path / name for name in ("1.jinja", "2.jinja", "3.jinja"))
    one.write_text("x")
    same.write_text("x")
    other.write_text("y")
    keys = [key_of(path, tmp_path, template=str(file)) for file in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert key_of(path, tmp_path, template=str(one), template_arguments={"a": 1}) not in keys


def test_beside_tokenised_rows_a_tokenizer_counts_by_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "a.arrow")
    plain, bos = tokenizer_at(tmp_path / "plain"), tokenizer_at(tmp_path / "bos", bos=True)
    keys = [key_of(path, tmp_path, tokenizer) for tokenizer in (None, plain, bos)]
    assert len(set(keys)) == 3
    assert probe_ids(bos)[0] == 0 != probe_ids(plain)[0]
    (plain / "generation_config.json").write_text('{"temperature": 0.7}')
    (plain / "chat_template.jinja").write_text("x")
    assert key_of(path, tmp_path, shutil.copytree(plain, tmp_path / "copy")) == keys[1]


def test_the_code_counts_by_its_syntax(tmp_path: Path) -> None:
    package = shutil.copytree(Path(cache.__file__).parent, tmp_path / "cache")

    def edited(module: str, old: str, new: str) -> str:
        """Hash of a copy in which a module is edited."""
        copy = Path(shutil.copytree(package, tmp_path / f"{time.monotonic_ns()}"))
        text = (copy / module).read_text()
        assert old in text
        (copy / module).write_text(text.replace(old, new, 1))
        return hash_code(copy)

    key = hash_code(package)
    assert edited("rows/split.py", "SAMPLES = 16", "SAMPLES = 15") != key
    assert edited("ragged.py", "MIN_TOKENS = 2", "MIN_TOKENS = 3") != key
    assert edited("rows/rules.py", '"""The written rules', '"""Other words') == key
    assert edited("rows/split.py", "SAMPLES = 16", "SAMPLES  =  16  # a comment\n") == key
    assert edited("batches/epoch.py", "WINDOW_GROUPS = 256", "WINDOW_GROUPS = 64") == key
    added = Path(shutil.copytree(package, tmp_path / "added"))
    (added / "new_helper.py").write_text("x = 1\n")
    assert hash_code(added) != key


def test_the_vocabulary_is_told_or_read_from_the_target(tmp_path: Path) -> None:
    tokenizer = tokenizer_at(tmp_path / "t")
    rows = RowsConfig(source="x")
    assert resolve_vocabulary(rows, tokenizer, None) == 4
    (tokenizer / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 263}}))
    assert resolve_vocabulary(rows, tokenizer, None) == 263
    (tokenizer / "config.json").write_text(json.dumps({"vocab_size": 262}))
    assert resolve_vocabulary(rows, tokenizer, None) == 262
    assert resolve_vocabulary(rows, tokenizer, 270) == 270
    assert resolve_vocabulary(rows.model_copy(update={"vocabulary": 280}), tokenizer, 270) == 280


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    source, tokenizer = put(tmp_path / "a.arrow"), tokenizer_at(tmp_path / "t")
    code = f"""
import sys
from pathlib import Path
from cache.config import RowsConfig
from cache.build import build
from cache.disk.store import TokenCache
import cache.batches.gather, cache.batches.epoch, cache.__main__
rows = RowsConfig(source={str(source)!r}, vocabulary=1000)
TokenCache.open(build(rows, home=Path({str(tmp_path)!r}), tokenizer=Path({str(tokenizer)!r}), vocabulary=None))
print([name for name in ("torch", "transformers", "datasets", "prefect") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(cache.__file__).parents[1]
    )
    assert done.stdout.strip() == "[]", done.stderr

"""A key covers what makes the ids: transformers builds a tokenizer from more than its files, and changes by release."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy import PLAIN, save_tokenizer

import cache
from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadSource, CacheMismatch
from cache.key import behaviour as asked
from cache.key.content import content_key
from cache.slices import make as making

SAID = [{"role": "user", "content": "hi  there"}, {"role": "assistant", "content": "Don't  stop 42."}]


@pytest.fixture
def source(tmp_path: Path) -> RowsConfig:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": [*SAID, *SAID[:i]][: 2 * (1 + i // 2)]}) + "\n" for i in range(4)))
    return RowsConfig(source=str(path), held_out=0.0, vocabulary=300)


def key(rows: RowsConfig, tokenizer: Path, home: Path) -> str:
    return content_key(rows, tokenizer, home=home).hex


def test_the_class_that_transformers_picks_counts(tmp_path: Path, source: RowsConfig) -> None:
    """The same tokenizer files: another `model_type` gives other ids, and so another cache."""
    tokenizer, home = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "home"
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    made = {}
    for model_type in ("qwen2", "llama"):
        (tokenizer / "config.json").write_text(json.dumps({"model_type": model_type}))
        path = build(source, home=home, tokenizer=tokenizer, vocabulary=None)
        made[path.name] = TokenCache.open(path).ids.tolist()
    assert len(made) == 2


def test_what_the_tokenizer_does_counts_though_no_file_changed(
    tmp_path: Path, source: RowsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade: other versions ask again, and another answer is another key."""
    from cache.chat.token_places import Speller

    tokenizer, home = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "home"
    before = key(source, tokenizer, home)
    monkeypatch.setattr(asked, "versions", lambda: {"transformers": "99"})
    assert key(source, tokenizer, home) == before, "another version that does the same"
    encode = Speller.encode
    monkeypatch.setattr(
        Speller, "encode", lambda self, texts: encode(self, [[t.replace("  ", " ") for t in of] for of in texts])
    )
    assert key(source, tokenizer, home) == before, "remembered: these versions have been asked"
    monkeypatch.setattr(asked, "versions", lambda: {"transformers": "100"})
    assert key(source, tokenizer, home) != before


def test_a_cached_rerun_imports_nothing_heavy(tmp_path: Path, source: RowsConfig) -> None:
    tokenizer, home = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "home"
    path = build(source, home=home, tokenizer=tokenizer, vocabulary=None)
    code = f"""
import sys
from pathlib import Path
from cache.config import RowsConfig
from cache.build import build
rows = RowsConfig(source={source.source!r}, held_out=0.0, vocabulary=300)
print(build(rows, home=Path({str(home)!r}), tokenizer=Path({str(tokenizer)!r}), vocabulary=None))
print([name for name in ("torch", "transformers", "tokenizers", "zarr", "prefect") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(cache.__file__).parents[1]
    )
    assert done.stdout.splitlines() == [str(path), "[]"], done.stderr


def test_the_manifest_says_versions_and_source_beside_the_key(tmp_path: Path, source: RowsConfig) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    manifest = TokenCache.open(build(source, home=tmp_path / "home", tokenizer=tokenizer, vocabulary=None)).manifest
    assert manifest.versions == asked.versions()
    assert manifest.versions["transformers"][0].isdigit()
    assert manifest.sources == [source.source]
    assert "versions" not in manifest.key_parts


def test_a_worker_with_other_versions_makes_nothing(
    tmp_path: Path, source: RowsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr(making, "versions", lambda: {"transformers": "4.1", "tokenizers": "1", "jinja2": "2"})
    with pytest.raises(CacheMismatch, match=r"has transformers 4\.1.*expected transformers .* make other tokens"):
        build(source, home=tmp_path / "home", tokenizer=tokenizer, vocabulary=None)


@pytest.mark.parametrize("trusts", [False, True])
def test_code_that_comes_with_a_tokenizer_runs_only_where_it_is_trusted_and_nobody_is_asked(
    tmp_path: Path, source: RowsConfig, monkeypatch: pytest.MonkeyPatch, trusts: bool
) -> None:
    tokenizer, home = save_tokenizer(tmp_path / "tokenizer", PLAIN), tmp_path / "home"
    (tokenizer / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    own: dict[str, Any] = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | own))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody can press a key here"))
    given = {"home": home, "tokenizer": tokenizer, "vocabulary": None, "trust_remote_code": trusts}
    if trusts:
        first = build(source, **given)
        (tokenizer / "own.py").write_text((tokenizer / "own.py").read_text() + "# edited\n")
        assert build(source, **given) != first
    else:
        with pytest.raises(BadSource, match=r"code of its own.*set target.trust_remote_code=true"):
            build(source, **given)


def test_files_that_come_while_a_cache_is_named_are_not_left_out(
    tmp_path: Path, source: RowsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache is never named after files that it does not hold."""
    import cache.build as building

    directory = tmp_path / "source"
    directory.mkdir()
    one = Path(source.source if isinstance(source.source, str) else source.source[0])
    (directory / "a.jsonl").write_text(one.read_text())
    rows = source.model_copy(update={"source": str(directory)})
    find, calls = building.find_files, []

    def land_one_more(given: RowsConfig) -> Any:
        found = find(given)
        calls.append(1)
        if len(calls) == 1:
            (directory / "b.jsonl").write_text(one.read_text())
        return found

    monkeypatch.setattr(building, "find_files", land_one_more)
    tokenizer, home = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "home"
    with pytest.raises(BadSource, match="changed while it was read"):
        build(rows, home=home, tokenizer=tokenizer, vocabulary=None)
    assert TokenCache.open(build(rows, home=home, tokenizer=tokenizer, vocabulary=None)).manifest.source_rows == 8

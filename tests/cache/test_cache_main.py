"""`python -m cache`: what people see of token caches, and what they can do to them."""

import io
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from arrow_rows import table
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from toy import save_tokenizer

from cache.__main__ import main
from cache.build import BuildProgress, build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.locks import held
from cache.progress_bar import describe, progress_bar
from cache.show import row, size_of

ROWS = [[1, 2, 3, 4], [5, 6], [7]]
MASKS = [[0, 0, 1, 1], [1, 1], [1]]


@pytest.fixture
def home(make: Any, tmp_path: Path) -> Path:
    make(data=table(ROWS, MASKS, domain=["math", "code", "code"]))
    return tmp_path / "home"


def key_in(home: Path) -> str:
    return next(path.name for path in (home / "tokens").iterdir() if not path.name.startswith("."))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_inspect_tells_what_a_person_wants_to_know(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", key_in(home)[:6], "--home", home)
    assert code == 0
    for fact in (
        "2 (0 held out) of 3 in the source",
        "6 as uint16, vocabulary 1,000",
        "4 (66.7%) in 2 answers",
        "mean 3, longest 4",
        "dropped and noted",
        "too_short",
        "length histogram",
        "math",
        "what the key is made of",
        key_in(home),
        "1 2 3 4",
    ):
        assert fact in out, fact


def test_a_row_is_shown_with_its_mask_in_colour(home: Path, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    out = io.StringIO()
    cache = TokenCache.open(home / "tokens" / key_in(home))
    Console(file=out, force_terminal=True, color_system="standard").print(row(cache, 0, tmp_path))
    assert "\x1b[2mw1 w2" in out.getvalue()
    assert "\x1b[1;32mw3 w4" in out.getvalue()


def test_verify_names_the_damaged_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "tokens" / key_in(home)
    assert run(capsys, "verify", path)[0] == 0
    file = path / "mask/c/0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    code, _, err = run(capsys, "verify", path)
    assert code == 1
    assert "mask/c/0: checksum" in err


def test_list_shows_sizes_and_what_does_not_open(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "tokens" / f"{'0' * 32}.tmp-1").mkdir()
    code, out, _ = run(capsys, "list", "--home", home)
    assert code == 0
    assert key_in(home) in out
    assert "not finished" in out
    assert "in all" in out
    assert run(capsys, "list", "--home", home / "nowhere")[0] == 0


def test_list_says_what_a_key_is(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "other"):
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "stages.json").write_text(json.dumps({"prepare": {"key": key_in(home)}}))
    (home / "runs" / "damaged").mkdir()
    (home / "runs" / "damaged" / "stages.json").write_text("{")
    _, out, _ = run(capsys, "list", "--home", home)
    out = "".join(out.split())
    (source,) = TokenCache.open(home / "tokens" / key_in(home)).manifest.sources
    assert f"{source};".replace(" ", "") in out
    assert "usedbymine,other" in out
    assert datetime.now().strftime("%Y-%m-") in out


def test_reasons_are_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": said, "mood": "good"}] * 3 + [{"messages": said[:1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    config = RowsConfig(source=str(tmp_path / "rows.jsonl"), held_out=0.0, max_dropped=0.5)
    path = build(config, home=tmp_path, tokenizer=tokenizer, vocabulary=None)
    _, out, _ = run(capsys, "inspect", path)
    assert re.search(r"^noted +key of a row that is not read: mood +3$", out, re.MULTILINE)
    assert re.search(r"^dropped +\w+ +1$", out, re.MULTILINE)


def test_remove_asks_first(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_in(home)
    assert run(capsys, "remove", key, "--home", home)[:2][0] == 1, "nobody can answer here"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert run(capsys, "remove", key, "--home", home)[:1] == (1,)
    assert (home / "tokens" / key).is_dir()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    code, out, _ = run(capsys, "remove", key, "--home", home)
    assert code == 0
    assert "2 rows" in out
    assert not [path for path in (home / "tokens").iterdir() if not path.name.startswith(".")]


def test_remove_takes_nothing_that_no_build_wrote(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, tokens = key_in(home), home / "tokens"
    precious = [tmp_path / "precious", tmp_path / key[:4], tokens / "precious", tokens / f"{'0' * 32}", home]
    for place in precious[:-1]:
        place.mkdir()
        (place / "thesis.txt").write_text("x")
    (tmp_path / "link").symlink_to(tokens / key)
    (tokens / f"{'1' * 32}").symlink_to(precious[0])
    monkeypatch.chdir(tmp_path)
    for name in (
        "./precious",
        *map(str, precious),
        tokens / "precious",
        "0" * 32,
        "1" * 32,
        tokens / ("1" * 32),
        "",
        "*",
    ):
        code, _, err = run(capsys, "remove", name, "--home", home, "--yes")
        assert code == 1, name
        assert "precious" in err or str(name) in err
    assert all((place / "thesis.txt").exists() for place in precious[:-1])
    assert (tokens / key / "zarr.json").exists()
    assert run(capsys, "remove", key[:4], "--home", home, "--yes")[0] == 0, "a key comes before a directory"
    assert (tmp_path / key[:4] / "thesis.txt").exists()


def test_remove_keeps_what_is_read_or_built(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = key_in(home)
    cache = TokenCache.open(home / "tokens" / key)
    code, _, err = run(capsys, "remove", key, "--home", home, "--yes")
    assert (code, "reads it now" in err) == (1, True)
    cache.verify()
    del cache
    with held(home / "tokens/.locks" / key):
        code, _, err = run(capsys, "remove", key, "--home", home, "--yes")
    assert (code, "builds it now" in err) == (1, True)
    assert run(capsys, "remove", key, "--home", home, "--yes")[0] == 0


def test_slices_are_listed_counted_and_dropped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slices = home / "tokens/.slices/ab"
    slices.mkdir(parents=True)
    for name in ("a.arrow", "b.arrow", "c.arrow.tmp-h-1-2"):
        (slices / name).write_bytes(b"x" * 1000)
    assert "3 of conversations" in run(capsys, "list", "--home", home)[1]
    assert run(capsys, "remove", "--slices", "--home", home)[0] == 1
    assert len(list(slices.glob("*.arrow*"))) == 3
    with held(slices / ".locks/c"):
        code, out, _ = run(capsys, "remove", "--slices", "--home", home, "--yes")
    assert (code, "Removed 2 slices, 2.0 kB" in out) == (0, True)
    assert [path.name for path in slices.glob("*.arrow*")] == ["c.arrow.tmp-h-1-2"]


def test_build_makes_a_cache_and_finds_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"input_ids": [1, 2, 3]}\n')
    given = ("build", source, "--vocabulary", "10", "--home", tmp_path, "--set", "supervise_all=true")
    first, second = run(capsys, *given), run(capsys, *given)
    assert first[0] == second[0] == 0
    path = first[1].strip().splitlines()[-1]
    assert second[1].strip().splitlines()[-1] == path
    assert TokenCache.open(path).ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nope"), "nope: no such cache"),
        (("build", "nowhere.jsonl"), "nothing at 'nowhere.jsonl'"),
        (("build", "x", "--set", "max_token=3"), "max_token"),
    ],
)
def test_mistakes_are_said_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *arguments, "--home", tmp_path)
    assert code == 1
    assert message in err


def test_a_row_that_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "inspect", key_in(home), "--home", home, "--row", "7")
    assert code == 1
    assert "--row 7: expected 0..1" in err


def test_progress_shows_rows_speed_and_time_left() -> None:
    progress = BuildProgress(rows=1500, total_rows=3000, bytes=3 * 10**9, seconds=2.0, share=0.5)
    assert describe(progress) == "1,500 of 3,000 rows  750 rows/s  1.50 GB/s"
    out = io.StringIO()
    with progress_bar(Console(file=out, force_terminal=True, width=120)) as report:
        report(progress)
    assert "1,500 of 3,000 rows" in out.getvalue()


def test_sizes() -> None:
    assert [size_of(size) for size in (12, 1500, 2 * 10**6, 3 * 10**9)] == ["12 bytes", "1.5 kB", "2.0 MB", "3.0 GB"]

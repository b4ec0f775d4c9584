"""What `flows clean` lists, that it deletes nothing else, nothing unasked, and nothing that is in use."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from cache.locks import held, lock_of
from flows.cli.clean import main
from flows.errors import BadParameter
from flows.runs.directory import in_use

KEYS = {name: name * 32 for name in ("a", "b", "c", "d")}
OLD, NEW = KEYS["c"], KEYS["d"]


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A home with two runs and their needs, an old and a new token cache that nobody needs, and strangers' files."""
    for key in KEYS.values():
        (tmp_path / "tokens" / key / "ids/c").mkdir(parents=True)
        (tmp_path / "tokens" / key / "ids/c/0").write_text("x")
    for target in ("t", "u"):
        (tmp_path / "targets" / target).mkdir(parents=True)
        (tmp_path / "targets" / target / "source.json").write_text("{}")
    for place in ("tokens/precious", "targets/mine", f"tokens/{'e' * 32}", "tokens/.records"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "thesis.txt").write_text("x")
    for run, tokens, target in (("one", KEYS["a"], "t"), ("two", KEYS["b"], "t")):
        directory = tmp_path / "runs" / run
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"target": {"model": f"/elsewhere/targets/{target}"}}))
        (directory / "stages.json").write_text(json.dumps({"prepare": {"seconds": 1, "key": tokens}}))
    long_ago = time.time() - 30 * 86_400
    for path in tmp_path.glob("t*/*"):
        if path.name != NEW:
            os.utime(path, (long_ago, long_ago))
    return tmp_path


def left(home: Path) -> set[str]:
    found = [path for place in ("tokens/[!.]*", "targets/[!.]*", "runs/[!.]*") for path in home.glob(place)]
    return {str(path.relative_to(home)) for path in found}


@pytest.mark.parametrize(("answer", "is_terminal"), [("n", True), ("y", False)])
def test_it_lists_and_deletes_nothing_unless_it_is_told_to(
    used: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, is_terminal: bool
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_terminal, raising=False)
    before = left(used)
    assert main(["--home", str(used)]) == 0
    assert left(used) == before
    said = capsys.readouterr().out
    assert OLD in said
    assert "2 directories and 0 slices are not needed; nothing was deleted. Add --yes" in said


def test_what_no_run_needs_goes_once_it_is_old(used: Path) -> None:
    before = left(used)
    assert main(["--home", str(used), "--yes"]) == 0
    assert before - left(used) == {f"tokens/{OLD}", "targets/u"}


def test_named_run_goes_with_what_only_it_needed(used: Path) -> None:
    before = left(used)
    main(["--home", str(used), "--yes", "--run", "two"])
    assert before - left(used) == {f"tokens/{OLD}", "targets/u", "runs/two", f"tokens/{KEYS['b']}"}


def test_what_a_process_is_at_is_kept_and_said(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run by a flow or by its own lock, a cache by its reader, a build of a week by its lock."""
    tokens, before = used / "tokens", left(used)
    building = tokens / f"{'f' * 32}.tmp-host-1-ab"
    building.mkdir()
    os.utime(building, (1, 1))
    (used / "runs/two/lock").touch()
    with (
        in_use(used / "runs/one"),
        held(used / "runs/two/lock"),
        held(lock_of(building)),
        held(lock_of(used / "targets/u")),
        (tokens / OLD / "ids/c/0").open("rb") as read,
    ):
        fcntl.flock(read, fcntl.LOCK_SH)
        assert main(["--home", str(used), "--yes", "--days", "0.5", "--run", "one", "--run", "two"]) == 1
    assert left(used) == before | {f"tokens/{building.name}"}
    assert capsys.readouterr().out.count("Kept: ") == 8, "two runs and the three things they need, and three others"


def test_what_is_used_again_while_one_is_asked_is_kept(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: str) -> str:
        os.utime(used / "tokens" / OLD)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    before = left(used)
    assert main(["--home", str(used)]) == 1
    assert before - left(used) == {"targets/u"}


def test_unknown_run_is_refused_before_anything_is_deleted(used: Path) -> None:
    before = left(used)
    (used / "runs/photos").mkdir()
    for name in ("three", "photos"):
        with pytest.raises(BadParameter, match=name):
            main(["--home", str(used), "--yes", "--run", name])
    assert left(used) - {"runs/photos"} == before


@pytest.mark.parametrize("name", ["", ".", "..", "{home}/tokens", "one/..", "a/../..", "one/", "one\n", ".dry-run-x"])
def test_what_is_no_name_of_a_run_is_refused_before_anything_is_deleted(used: Path, name: str) -> None:
    (used / "runs/.dry-run-x").mkdir()
    before = left(used)
    with pytest.raises(BadParameter, match="no name of a run"):
        main(["--home", str(used), "--yes", "--run", "two", "--run", name.format(home=used)])
    assert left(used) == before


def test_slices_go_once_no_build_has_used_them_for_long(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slices = used / "tokens/.slices/ab"
    (slices / ".locks").mkdir(parents=True)
    for name in ("old.arrow", "new.arrow", "left.arrow.tmp-h-1-2", "made.arrow.tmp-h-1-3"):
        (slices / name).write_text("x")
        (slices / ".locks" / name.split(".")[0]).touch()
        if name != "new.arrow":
            os.utime(slices / name, (1, 1))
    with held(slices / ".locks/made"):
        main(["--home", str(used), "--yes"])
    assert "2 slices deleted" in capsys.readouterr().out
    # Locks stay: a builder may have opened one just now, and would hold another than the next one.
    assert {path.name for path in slices.iterdir()} == {".locks", "new.arrow", "made.arrow.tmp-h-1-3"}
    assert {path.name for path in (slices / ".locks").iterdir()} == {"old", "new", "left", "made"}

"""What `python -m flows clean` lists, and that it deletes nothing else."""

import json
import os
import time
from pathlib import Path

import pytest

from flows.cli.clean import main
from flows.errors import BadParameter


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A home with two runs and what they need, and an old and a new token cache that nobody needs."""
    for name in ("tokens/a", "tokens/b", "tokens/old", "tokens/new", "tokens/.records", "targets/t", "targets/u"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    for run, tokens, target in (("one", "a", "t"), ("two", "b", "t")):
        directory = tmp_path / "runs" / run
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"target": {"model": f"/elsewhere/targets/{target}"}}))
        (directory / "stages.json").write_text(json.dumps({"prepare": {"seconds": 1, "key": tokens}}))
    long_ago = time.time() - 30 * 86_400
    for path in tmp_path.glob("t*/*"):
        if path.name != "new":
            os.utime(path, (long_ago, long_ago))
    return tmp_path


def left(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for place in ("tokens/*", "targets/*", "runs/*") for path in home.glob(place)}


def test_dry_run_lists_and_deletes_nothing(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(used)
    assert main(["--dry-run", "--home", str(used)]) == 0
    assert left(used) == before
    assert "2 directories and 0 slices would be deleted" in capsys.readouterr().out


def test_what_no_run_needs_goes_once_it_is_old(used: Path) -> None:
    before = left(used)
    main(["--home", str(used)])
    assert before - left(used) == {"tokens/old", "targets/u"}


def test_named_run_goes_with_what_only_it_needed(used: Path) -> None:
    before = left(used)
    main(["--home", str(used), "--run", "two"])
    assert before - left(used) == {"tokens/old", "targets/u", "runs/two", "tokens/b"}


def test_unknown_run_is_refused_before_anything_is_deleted(used: Path) -> None:
    before = left(used)
    with pytest.raises(BadParameter, match="three"):
        main(["--home", str(used), "--run", "three"])
    assert left(used) == before


@pytest.mark.parametrize("name", ["", ".", "..", "{home}/tokens", "one/..", "a/../..", "one/", "one\n", ".dry-run-x"])
def test_what_is_no_name_of_a_run_is_refused_before_anything_is_deleted(used: Path, name: str) -> None:
    (used / "runs/.dry-run-x").mkdir()
    before = left(used)
    with pytest.raises(BadParameter, match="no name of a run"):
        main(["--home", str(used), "--run", "two", "--run", name.format(home=used)])
    assert left(used) == before


def test_slices_go_once_no_build_has_used_them_for_long(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slices = used / "tokens/.slices"
    (slices / ".locks").mkdir(parents=True)
    for name in ("old.arrow", "new.arrow", "left.arrow.tmp-1-2"):
        (slices / name).write_text("x")
        (slices / ".locks" / name.split(".")[0]).touch()
        if name != "new.arrow":
            os.utime(slices / name, (1, 1))
    assert main(["--dry-run", "--home", str(used)]) == 0
    assert "2 slices would be deleted" in capsys.readouterr().out
    assert len(list(slices.glob("*.arrow*"))) == 3
    main(["--home", str(used)])
    # Locks stay: a builder may have opened one just now, and would hold another than the next one.
    assert sorted(path.name for path in slices.rglob("*")) == [".locks", "left", "new", "new.arrow", "old"]

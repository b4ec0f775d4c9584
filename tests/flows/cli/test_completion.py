"""The completion script in a real bash: commands, options, fields and runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

import flows.__main__ as flows_cli


def completed(script: Path, home: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    code = (
        f"export DFLASH_HOME={home}; compopt() {{ :; }}; source {script}; COMP_WORDS=({typed}); "
        f'COMP_CWORD={len(words) - 1}; _dflash_train; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_fields_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert flows_cli.main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert completed(script, tmp_path, "dflash-train", "st") == ["status"]
    assert {"train", "full", "demo", "compare", "completion"} <= set(completed(script, tmp_path, "dflash-train", ""))
    assert completed(script, tmp_path, "dflash-train", "status", "") == ["mine", "other"]
    assert completed(script, tmp_path, "dflash-train", "train", "--dr") == ["--dry-run"]
    assert completed(script, tmp_path, "dflash-train", "train", "--set", "training.ep") == [
        "training.epochs=",
        "training.epochs_per_run=",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_is_one_that_the_shell_reads(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flows_cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "training.epochs=" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)

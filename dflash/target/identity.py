"""Which model a target is, by its content: another one under the same name, or at the same place, is another.

Imports nothing heavy: a flow asks before it starts anything.
"""

from pathlib import Path
from typing import Any

import xxhash

from dflash.config import TargetConfig
from dflash.errors import TargetMismatch

_SAMPLE = 1 << 16


def fingerprint(target: TargetConfig) -> str:
    """Identity of the target's content: its config, and of each weight file the size and samples of its bytes.

    A hub name is identified by name and revision: the hub's own names for content.
    """
    directory = Path(target.model)
    if not directory.is_dir():
        return f"{target.model}@{target.revision or 'main'}"
    digest = xxhash.xxh3_128()
    for file in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for offset in sorted({0, *range(0, size, max(1, size // 16)), max(0, size - _SAMPLE)}):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE))
    digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()


def refuse_other_target(target: TargetConfig, settings: dict[str, Any]) -> None:
    """Raise TargetMismatch when a checkpoint with these settings was trained for another target than this one."""
    then, now = settings.get("target.model"), fingerprint(target)
    if then is not None and then != now:
        raise TargetMismatch(
            f"target.model={target.model}: this run's drafter was trained for another target (its content is {then}, "
            f"here {now}). Put that one back, or train a run of another name."
        )

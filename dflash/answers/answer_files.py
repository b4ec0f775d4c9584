"""AnswerFiles on disk: shards that only grow, a header that says how they came to be, and one file in order at the end.

header.json       what the answers depend on; a rerun with another value is refused by the name of its field
shard-00000.jsonl one line a finished row, in the order in which rows finished, written by one call
answers.jsonl     the lines of all rows in the order of the source, once nothing is left
answers.json      counts

A killed process leaves at most half a line at the end of the newest shard, which is cut off; every other row is there
once, found again by its number.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cache.errors import BadSource
from cache.json_file import write_json
from cache.key.file_hashes import hash_sources
from cache.source.find import find_files
from dflash.answers.parameters import AnswersConfig
from dflash.errors import ConfigMismatch
from dflash.target.identity import fingerprint
from dflash.training.open_run import changed_settings

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 28
_ROW = re.compile(rb'\{"row": (\d+),')


@dataclass(frozen=True, slots=True)
class _Place:
    shard: Path
    start: int
    size: int


def read_config(file: Path) -> AnswersConfig:
    """The parameters in a config.json; name and home are the flow's. Raises ConfigMismatch by the name of the field."""
    try:
        tree = json.loads(file.read_text())
        return AnswersConfig.model_validate({k: v for k, v in tree.items() if k not in ("name", "home")})
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigMismatch(f"{file} cannot be read: {error}. It holds rows, target and generation.") from error
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigMismatch(f"{file}: {fields}") from error


def settings_of(config: AnswersConfig, template: str, path: Path) -> dict[str, Any]:
    """What the answers depend on, by field name."""
    given = config.generation
    names = ["engine", "max_new_tokens", "temperature", "top_p", "top_k", "seed"]
    if given.engine == "openai":
        names += ["api", "served_model"]
    return {
        "rows.source": hash_sources(find_files(config.rows), path / "hashes"),
        "rows.template": template,
        "rows.template_arguments": config.rows.template_arguments,
        "target.model": {"name": Path(config.target.model).name, "fingerprint": fingerprint(config.target)},
        "target.dtype": config.target.dtype,
        **{f"generation.{name}": getattr(given, name) for name in names},
    }


class AnswerFiles:
    """The directory of the answers, open for the one process that holds its lock."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises ConfigMismatch when the answers that are there were made with other settings."""
        self._path = path
        self._places: dict[int, _Place] = {}
        _check_header(path / "header.json", settings)
        shards = sorted(path.glob("shard-*.jsonl"))
        for shard in shards:
            end = self._index(shard)
            if shard == shards[-1] and end < shard.stat().st_size:
                log.warning("%s: half a line at its end is cut off; its row is answered again", shard.name)
                os.truncate(shard, end)
        self._shard = shards[-1] if shards else path / "shard-00000.jsonl"
        self._file = os.open(self._shard, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def rows(self) -> frozenset[int]:
        """Rows that are finished."""
        return frozenset(self._places)

    def append(self, row: int, lines: list[dict[str, Any]], refused: str | None) -> None:
        """Store a finished row: what it gave, and why not more where something was refused."""
        value = {"row": row, "parts": lines} | ({} if refused is None else {"refused": refused})
        text = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        start = os.fstat(self._file).st_size
        if start > SHARD_BYTES:
            self.close()
            number = int(self._shard.stem.split("-")[1]) + 1
            self._shard = self._path / f"shard-{number:05d}.jsonl"
            self._file, start = os.open(self._shard, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 0
        view = memoryview(text)
        while view:
            view = view[os.write(self._file, view) :]
        self._places[row] = _Place(self._shard, start, len(text))

    def close(self) -> None:
        """Flush to disk."""
        os.fsync(self._file)
        os.close(self._file)

    def finish(self, rows: Iterable[int], max_dropped: float) -> "AnswerCounts":
        """Write answers.jsonl: the lines of these rows in this order. Raises BadSource where too few have any."""
        counts = AnswerCounts()
        partial = self._path / "answers.jsonl.tmp"
        open_shards = {shard: shard.open("rb") for shard in {place.shard for place in self._places.values()}}
        try:
            with partial.open("w", encoding="utf-8") as out:
                for row in rows:
                    place = self._places[row]
                    open_shards[place.shard].seek(place.start)
                    value = json.loads(open_shards[place.shard].read(place.size))
                    counts.add(value)
                    for line in value["parts"]:
                        out.write(json.dumps(line, ensure_ascii=False) + "\n")
                out.flush()
                os.fsync(out.fileno())
        finally:
            for stream in open_shards.values():
                stream.close()
        counts.refuse_drops(max_dropped)
        partial.replace(self._path / "answers.jsonl")
        return counts

    def _index(self, shard: Path) -> int:
        """Note where each row of a shard lies; the end of its last whole line."""
        end = at = 0
        with shard.open("rb") as stream:
            for line in stream:
                match = _ROW.match(line)
                if match and line.endswith(b"}\n"):
                    self._places.setdefault(int(match[1]), _Place(shard, at, len(line)))
                    end = at + len(line)
                at += len(line)
        return end


@dataclass(slots=True)
class AnswerCounts:
    """What the finished rows hold."""

    rows: int = 0
    lines: int = 0
    answers: int = 0
    cut: int = 0  # answers that a limit cut
    tokens: int = 0  # generated
    ids_from: Counter[str] = field(default_factory=Counter)  # answers by where their ids came from
    refused: Counter[str] = field(default_factory=Counter)  # rows without any answer, by reason
    ended_early: Counter[str] = field(default_factory=Counter)  # rows with fewer answers than asked, by reason

    def add(self, value: dict[str, Any]) -> None:
        """Count one finished row."""
        self.rows += 1
        self.lines += len(value["parts"])
        for line in value["parts"]:
            self.answers += len(line["finish_reasons"])
            self.cut += line["finish_reasons"].count("length")
            self.tokens += sum(line["loss_mask"])
            self.ids_from[line["ids_from"]] += len(line["finish_reasons"])
        if "refused" in value:
            (self.ended_early if value["parts"] else self.refused)[value["refused"]] += 1

    def refuse_drops(self, max_dropped: float) -> None:
        lost = sum(self.refused.values())
        if lost > max_dropped * self.rows:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.refused.most_common(5))
            raise BadSource(
                f"{lost} of {self.rows} rows got no answer ({reasons}), expected at most rows.max_dropped="
                f"{max_dropped:g} of them. Correct the source or the template, or raise rows.max_dropped."
            )

    def to_json(self) -> dict[str, Any]:
        counters = {name: dict(getattr(self, name)) for name in ("ids_from", "refused", "ended_early")}
        plain = {name: getattr(self, name) for name in ("rows", "lines", "answers", "cut", "tokens")}
        return plain | counters


def _check_header(file: Path, settings: dict[str, Any]) -> None:
    try:
        stored = json.loads(file.read_text())
    except FileNotFoundError:
        write_json(file, settings)
        return
    changed = changed_settings(stored, settings)
    if changed:
        fields = "; ".join(f"{name}: started with {then!r}, now {now!r}" for name, (then, now) in changed.items())
        raise ConfigMismatch(
            f"the answers in {file.parent} were made with other settings: {fields}. Set them back, or choose another "
            "name; generation.only_missing answers what earlier answers lack."
        )

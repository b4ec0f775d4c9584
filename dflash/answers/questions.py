"""Rows of any accepted source → what is asked of the target: system and user turns, by written rules.

    [system user] answer [user] answer [user]        a conversation: each stretch of turns gets one answer
    prompt                                           text: one user turn

Answers of the source are left out, as is an assistant message that opens a conversation. A conversation ends before
its first tool message: nobody is there to reply to a new call. What has no user turn is refused and counted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from cache.chat.conversation import messages_of, tools_of, with_system
from cache.chat.message import Message, Refused, SchemaError
from cache.chat.raw_rows import beside, raw_rows, text_of, values_of
from cache.config import RowsConfig
from cache.errors import BadRow, BadSource
from cache.source.chunks import Chunk
from cache.source.columns import INPUT, SYSTEM, USUAL
from cache.source.find import find_files
from cache.source.open import Source, column_names, open_source
from dflash.answers.parameters import GenerationConfig

PROMPTS = ("prompt", "instruction")


@dataclass(frozen=True, slots=True)
class Question:
    """One row of the source. `stretches` are the turns before each answer; empty where the row is refused."""

    row: int
    stretches: tuple[tuple[Message, ...], ...]
    tools: list[Message] | None
    domain: str | None
    identity: str | None
    refused: str | None = None

    @property
    def key(self) -> str:
        """What is asked, as 32 hex digits: equal for equal turns, wherever they came from."""
        return key_of([message for stretch in self.stretches for message in stretch], self.tools)


def key_of(turns: Iterable[Message], tools: list[Message] | None) -> str:
    """Hash of system and user turns and tools."""
    said = [(turn["role"], turn["content"]) for turn in turns]
    return xxhash.xxh3_128_hexdigest(json.dumps([said, tools], sort_keys=True).encode())


def questions(rows: RowsConfig) -> Iterator[Question]:
    """All rows of the chosen domains, in the order of the source; row numbers count every row of it."""
    source = _open(rows)
    first = 0
    for chunk in source.chunks():
        group = values_of(chunk.batch, source.layout.group) if source.layout.group else None
        around = {name: values_of(chunk.batch, name) for name in source.layout.beside}
        for index, raw in enumerate(raw_rows(chunk.batch, source.layout.columns(), chunk.place.file)):
            domain = None if group is None or group[index] is None else str(group[index])
            if rows.groups is not None and domain not in rows.groups:
                continue
            found = {name: beside(values, index, are_json=chunk.place.are_json) for name, values in around.items()}
            yield _question(first + index, raw, found, domain, chunk, index)
        first += chunk.batch.num_rows


def rows_wanted(rows: RowsConfig, given: GenerationConfig) -> set[int]:
    """Numbers of the rows to answer, those that are done already included."""
    earlier = earlier_keys(Path(given.only_missing)) if given.only_missing else None
    wanted: set[int] = set()
    for question in questions(rows):
        if given.rows is not None and len(wanted) == given.rows:
            break
        if earlier is not None and question.stretches:
            key = question.key
            if earlier[key] > 0:
                earlier[key] -= 1
                continue
        wanted.add(question.row)
    return wanted


def chosen(rows: RowsConfig, numbers: set[int]) -> Iterator[Question]:
    """The rows of these numbers, in order."""
    last = max(numbers)
    for question in questions(rows):
        if question.row in numbers:
            yield question
        if question.row >= last:
            return


def earlier_keys(path: Path) -> Counter[str]:
    """How often each question has an answer in earlier answers: a directory of shards, or JSONL of conversations."""
    files = sorted(path.glob("shard-*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise BadSource(
            f"generation.only_missing: no answers in {path}, expected a directory of them, or a JSONL file."
        )
    found: Counter[str] = Counter()
    seen: set[tuple[int, str]] = set()
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream):
                key = _earlier_key(line, seen, f"line {number + 1} of {file}", is_last_torn=not line.endswith(b"\n"))
                if key is not None:
                    found[key] += 1
    return found


def _earlier_key(line: bytes, seen: set[tuple[int, str]], place: str, *, is_last_torn: bool) -> str | None:
    """The key of a line of a shard, of answers.jsonl (where a conversation may be several lines), or of others."""
    try:
        value = json.loads(line)
    except ValueError:
        if is_last_torn or not line.strip():
            return None
        raise BadSource(f"{place}: not JSON. Correct generation.only_missing, or repair the file.") from None
    if "parts" in value:
        return value["parts"][0]["question"] if value["parts"] else None
    if "question" in value:
        pair = (value["row"], value["question"])
        return None if pair in seen or seen.add(pair) else value["question"]  # type: ignore[func-returns-value]
    name = next((name for name in USUAL["messages"] if name in value), None)
    try:
        messages = [] if name is None else messages_of(value[name], Counter())
    except (Refused, SchemaError):
        return None
    if not any(message["role"] == "assistant" for message in messages):
        return None
    asked = [turn for stretch in _stretches(messages) for turn in stretch]
    return key_of(asked, tools_of(value.get("tools"))) if asked else None


def _open(rows: RowsConfig) -> Source:
    """The source read as conversations, also where it has token ids beside them, with `id` where it has that."""
    parts = find_files(rows)
    names = column_names(parts)
    wanted = (rows.columns.messages,) if rows.columns.messages else (*USUAL["messages"], *PROMPTS)
    column = next((name for name in wanted if name in names), None)
    if column is None:
        usual = ", ".join(USUAL["messages"])
        raise BadSource(
            f"{parts[0].files[0].path}: columns {', '.join(names)}, expected conversations in {usual}, "
            f"or prompts in {' or '.join(PROMPTS)}. Name the column in rows.columns.messages."
        )
    columns = rows.columns.model_copy(update={"messages": column, "ids": None, "mask": None})
    source = open_source(parts, rows.model_copy(update={"columns": columns}))
    more = ("id", INPUT) if column == "instruction" else ("id",)
    return replace(source, layout=replace(source.layout, beside=(*source.layout.beside, *more)))


def _question(row: int, raw: Any, around: dict[str, Any], domain: str | None, chunk: Chunk, index: int) -> Question:
    """`around` has what stands beside the conversation, by column."""
    identity = None if around.get("id") is None else str(around["id"])
    try:
        messages = messages_of(_conversation(raw, is_json=chunk.place.are_json), Counter())
        if more := text_of(around.get(INPUT), INPUT):
            messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{more}"}
        stretches = _stretches(with_system([around.get(name) for name in SYSTEM], messages))
        if not stretches:
            raise Refused("no_user_turn")
        return Question(row, stretches, tools_of(around.get("tools")), domain, identity)
    except Refused as refused:
        return Question(row, (), None, domain, identity, str(refused))
    except SchemaError as error:
        raise BadRow(
            f"{chunk.place(index)}: {error}. Correct or remove the row, or name the right column in"
            " rows.columns.messages."
        ) from None


def _conversation(raw: Any, *, is_json: bool) -> Any:
    """Text that is no list of messages is a prompt. Lines of JSON come as JSON; a text column may hold either."""
    if not isinstance(raw, str):
        return raw
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if is_json and not isinstance(value, str):
        return raw  # decoded again by `messages_of`, which repairs half surrogate pairs
    text = value if is_json else raw
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return raw
    return [{"role": "user", "content": text}]


def _stretches(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    """Runs of turns that an answer is due after: each ends before an assistant message or at the end."""
    found: list[tuple[Message, ...]] = []
    run: list[Message] = []
    for message in [*messages, {"role": "assistant"}]:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            run.append({"role": message["role"], "content": message.get("content", "")})
        elif any(turn["role"] == "user" for turn in run):
            found.append(tuple(run))
            run = []
    return tuple(found)

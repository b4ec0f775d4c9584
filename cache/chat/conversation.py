"""A batch of any accepted shape → conversations, by the written rules of docs/chat.md; what they drop is counted."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from cache.chat.message import Message, Refused, SchemaError, standard_message
from cache.config import Columns
from cache.errors import BadRow
from cache.source.columns import PAIRS
from cache.source.place import Place

MESSAGES = ("messages", "conversations", "conversation")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the template sees, and which of its messages are supervised answers."""

    index: int  # in the batch
    messages: list[Message]  # ends with the last answer
    answers: tuple[int, ...]  # positions in `messages`, rising
    tools: list[Message] | None
    finished: bool  # False: a limit cut the last answer, so it has no end of turn
    split_text: str
    is_broken: bool = False  # whether text that reads like a control token was broken in it


@dataclass(slots=True)
class ReadCounts:
    """Numbers by reason: conversations that were dropped, and changes in conversations that were kept."""

    dropped: Counter[str]
    noted: Counter[str]
    messages: Counter[tuple[str, str]]  # by role and what became of them

    def count(self, messages: list[Message], fate: str) -> None:
        for message in messages:
            self.messages[message["role"], fate] += 1

    def by_role(self) -> dict[str, int]:
        """`role: what became of it` → number of messages."""
        return {f"{role}: {fate}": number for (role, fate), number in self.messages.items()}


def read_conversations(
    batch: pa.RecordBatch | pa.Table,
    columns: Columns,
    supervise: Literal["all", "last"],
    counts: ReadCounts,
    place: Place,
) -> list[Conversation]:
    """The conversations of a batch that the rules keep, in order."""
    kept: list[Conversation] = []
    rows = raw_rows(batch, columns, place.file, are_json=place.lines)
    tools = values_of(batch, "tools")
    finished = values_of(batch, "finished")
    for index, raw in enumerate(rows):
        messages: list[Message] = []
        try:
            messages = messages_of(raw, counts.noted)
            counts.count(messages, "read")
            last_answered, answers = _answers(messages, supervise, counts.noted)
            counts.count(messages[answers[-1] + 1 :], "cut")
            kept.append(
                Conversation(
                    index,
                    messages[: answers[-1] + 1],
                    answers,
                    tools_of(tools[index]) if tools else None,
                    not (finished and finished[index] is False and answers[-1] == last_answered),
                    next((m["content"] for m in messages if m["role"] == "user"), messages[0].get("content", "")),
                )
            )
        except Refused as refused:
            counts.dropped[str(refused)] += 1
            counts.count(messages, "dropped")
        except SchemaError as error:
            raise BadRow(
                f"{place(index)}: {error}. Correct or remove the row, or name the right column in"
                " rows.columns.messages."
            ) from None
    return kept


def messages_of(raw: Any, noted: Counter[str]) -> list[Message]:
    """One row's value, from JSON text or from Arrow, as messages in the standard shape."""
    if isinstance(raw, _Pair):
        raw = raw.joined(noted)
    elif isinstance(raw, str):
        raw = _decoded(raw, noted)
    if raw is None:
        raise Refused("empty")
    if not isinstance(raw, list):
        raise SchemaError(f"a conversation is a {type(raw).__name__}, expected a list of messages")
    messages: list[Message] = []
    num_calls = 0
    for value in raw:
        message = standard_message(value, num_calls)
        num_calls += len(message.get("tool_calls", ()))
        messages.append(message)
    if not any("tool_calls" in message or message["content"].strip() for message in messages):
        raise Refused("empty")
    return messages


def _answers(
    messages: list[Message], supervise: Literal["all", "last"], noted: Counter[str]
) -> tuple[int, tuple[int, ...]]:
    """Position of the last assistant message, and positions of the answers to supervise."""
    opening = next((i for i, message in enumerate(messages) if message["role"] != "assistant"), len(messages))
    if opening:
        noted["assistant message that opens a conversation, not supervised"] += opening
    assistant = [i for i in range(opening, len(messages)) if messages[i]["role"] == "assistant"]
    answers = [i for i in assistant if "tool_calls" in messages[i] or messages[i]["content"].strip()]
    if len(answers) < len(assistant):
        noted["empty answer, not supervised"] += len(assistant) - len(answers)
    if not answers:
        raise Refused("no_answer")
    if answers[-1] + 1 < len(messages):
        noted["messages after the last answer, cut"] += len(messages) - answers[-1] - 1
    return assistant[-1], tuple(answers if supervise == "all" else answers[-1:])


@dataclass(frozen=True, slots=True)
class _Pair:
    """A prompt and its completion, each as text or as messages; from a file of lines, each as JSON text."""

    prompt: Any
    completion: Any
    are_json: bool

    def joined(self, noted: Counter[str]) -> list[Any] | None:
        parts: list[Any] = []
        for role, part in (("user", self.prompt), ("assistant", self.completion)):
            value = _decoded(part, noted) if self.are_json and isinstance(part, str) else part
            if value is None:
                return None
            if not isinstance(value, str | list):
                raise SchemaError(f"a prompt or completion is a {type(value).__name__}, expected text or messages")
            parts += [{"role": role, "content": value}] if isinstance(value, str) else value
        return parts


def raw_rows(
    batch: pa.RecordBatch | pa.Table, columns: Columns, source: str, *, are_json: bool = False
) -> Iterable[Any]:
    """Each row's conversation as the file has it, for `messages_of`. `are_json`: prompts and completions are JSON."""
    names = batch.schema.names
    wanted = (columns.messages,) if columns.messages else MESSAGES
    column = next((name for name in wanted if name in names), None)
    if column is not None:
        return _conversations(batch.column(column))
    for prompt, completion in PAIRS:
        if prompt in names and completion in names and not columns.messages:
            pairs = zip(_conversations(batch.column(prompt)), _conversations(batch.column(completion)), strict=True)
            return [_Pair(*pair, are_json=are_json) for pair in pairs]
    raise BadRow(
        f"{source} has the columns {', '.join(names)}; expected conversations in {' or '.join(wanted)}, or prompt and"
        " completion. Name the column in rows.columns.messages."
    )


def _conversations(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """A column as Python values; a list of structs goes through its flat fields, which is many times faster."""
    if isinstance(column, pa.ChunkedArray):
        return [row for chunk in column.chunks for row in _conversations(chunk)]
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return list(column.to_pylist())
    flat = column.flatten()  # honours slices and null rows
    names = [field.name for field in kind.value_type]
    fields = [_without_nulls(part.to_pylist(), part.type) for part in flat.flatten()]
    messages = [dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)]
    rows: list[Any] = []
    end = 0
    for length in column.value_lengths().to_pylist():
        start, end = end, end + (length or 0)
        rows.append(None if length is None else messages[start:end])
    return rows


def _without_nulls(values: list[Any], kind: pa.DataType) -> list[Any]:
    """Arrow gives every struct the keys of all others, as nulls: take them out again where structs are nested."""
    return [_dropped_nulls(value) for value in values] if pa.types.is_nested(kind) else values


def _dropped_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dropped_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_dropped_nulls(item) for item in value]
    return value


def values_of(batch: pa.RecordBatch | pa.Table, name: str) -> list[Any] | None:
    """A column that may be missing, as Python values."""
    if name not in batch.schema.names:
        return None
    column = batch.column(name)
    return _without_nulls(column.to_pylist(), column.type)


def tools_of(value: Any) -> list[Message] | None:
    """A row's tools, from JSON text or from Arrow."""
    tools = json.loads(value) if isinstance(value, str) and value else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SchemaError(f"tools is a {type(tools).__name__}, expected a list of objects")
    return tools


def _decoded(text: str, noted: Counter[str]) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SchemaError(f"the conversation is not JSON ({error})") from None
    if _SURROGATE.search(text):
        value, changed = _repaired(value)
        if changed:
            noted["half of a surrogate pair, replaced by U+FFFD"] += 1
    return value


def _repaired(value: Any) -> tuple[Any, bool]:
    """Halves of surrogate pairs, which no encoding can hold, as U+FFFD."""
    if isinstance(value, str):
        good = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return good, good != value
    if isinstance(value, list):
        items = [_repaired(item) for item in value]
        return [item for item, _ in items], any(changed for _, changed in items)
    if isinstance(value, dict):
        pairs = {key: _repaired(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, any(changed for _, changed in pairs.values())
    return value, False

"""A batch of any accepted shape → conversations, by the written rules of docs/chat.md; what they drop is counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from cache.chat.message import Message, Refused, SchemaError, is_learned, standard_message
from cache.chat.raw_rows import Pair, beside, is_unfinished, json_text, raw_rows, text_of, values_of
from cache.config import Columns
from cache.errors import BadRow
from cache.source.columns import BESIDE_MESSAGES, SYSTEM, UNREAD
from cache.source.first_text import beginning
from cache.source.json_text import decoded, is_missing
from cache.source.place import Place


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


@dataclass(slots=True)
class _Columns:
    """What stands beside the conversations of a batch, row by row."""

    batch: pa.RecordBatch | pa.Table
    are_json: bool
    values: dict[str, list[Any] | None] = field(init=False)
    unread: list[Any] | None = field(init=False)

    def __post_init__(self) -> None:
        self.values = {name: values_of(self.batch, name) for name in BESIDE_MESSAGES}
        self.unread = values_of(self.batch, UNREAD)

    def __call__(self, name: str, index: int) -> Any:
        return beside(self.values[name], index, are_json=self.are_json)

    def note_unread(self, index: int, noted: Counter[str]) -> None:
        if self.unread and self.unread[index]:
            for key in self.unread[index].split(", "):
                noted[f"key of a row that is not read: {key}"] += 1


def read_conversations(
    batch: pa.RecordBatch | pa.Table,
    columns: Columns,
    supervise: Literal["all", "last"],
    counts: ReadCounts,
    place: Place,
) -> list[Conversation]:
    """The conversations of a batch that the rules keep, in order."""
    kept: list[Conversation] = []
    rows = raw_rows(batch, columns, place.file, are_json=place.are_json)
    around = _Columns(batch, place.are_json)
    for index, raw in enumerate(rows):
        messages: list[Message] = []
        switched_off: set[int] = set()
        try:
            messages = messages_of(raw, counts.noted, switched_off)
            messages = with_system([around(name, index) for name in SYSTEM], messages, switched_off)
            counts.count(messages, "read")
            last_answered, answers = _answers(messages, supervise, counts.noted, switched_off)
            counts.count(messages[answers[-1] + 1 :], "cut")
            is_cut = is_unfinished(around("finished", index))
            kept.append(
                Conversation(
                    index,
                    messages[: answers[-1] + 1],
                    answers,
                    tools_of(around("tools", index)),
                    not (is_cut and answers[-1] == last_answered),
                    _beginning(messages),
                )
            )
            around.note_unread(index, counts.noted)
        except Refused as refused:
            counts.dropped[str(refused)] += 1
            counts.count(messages, "dropped")
        except SchemaError as error:
            raise BadRow(
                f"{place(index)}: {error}. Correct or remove the row, or name the right column in"
                " rows.columns.messages."
            ) from None
    return kept


def _beginning(messages: list[Message]) -> str:
    system = messages[0]["content"] if messages[0]["role"] == "system" and len(messages) > 1 else None
    user = next((m["content"] for m in messages if m["role"] == "user"), None)
    return beginning(system, user) if user is not None else str(messages[0].get("content", ""))


def messages_of(raw: Any, noted: Counter[str], switched_off: set[int] | None = None) -> list[Message]:
    """One row's value, from JSON text or from Arrow, as messages in the standard shape.

    `switched_off` is given the positions of messages whose own flags say that they are not to be learned.
    """
    if isinstance(raw, Pair):
        raw = raw.joined(noted)
    for _ in range(2):  # a conversation may be JSON text in a line of JSON
        if isinstance(raw, str):
            raw = json_text(raw, noted)
    if is_missing(raw):
        raise Refused("empty")
    if not isinstance(raw, list):
        raise SchemaError(f"a conversation is a {type(raw).__name__}, expected a list of messages")
    messages: list[Message] = []
    num_calls = 0
    open_calls: list[str] = []  # ids of calls that no tool message has answered yet
    for value in raw:
        message = standard_message(value, num_calls, noted)
        if message is not value and not is_learned(value, message["role"], noted) and switched_off is not None:
            switched_off.add(len(messages))
        calls = message.get("tool_calls", ())
        num_calls += len(calls)
        open_calls += [call["id"] for call in calls]
        if message["role"] == "tool" and open_calls:
            message = {"tool_call_id": open_calls[0]} | message
            open_calls = [identity for identity in open_calls if identity != message["tool_call_id"]]
        messages.append(message)
    if not any("tool_calls" in message or message["content"].strip() for message in messages):
        raise Refused("empty")
    return messages


def with_system(texts: list[Any], messages: list[Message], switched_off: set[int] | None = None) -> list[Message]:
    """The messages with system text from columns of its own in front; refused where it is not theirs, too."""
    said = {
        text.strip(): text for name, value in zip(SYSTEM, texts, strict=True) if (text := text_of(value, name)).strip()
    }
    if not said:
        return messages
    own = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if len(said) > 1 or own not in (None, *said):
        raise Refused("system_texts_differ")
    if own is not None:
        return messages
    if switched_off:
        moved = {position + 1 for position in switched_off}
        switched_off.clear()
        switched_off |= moved
    return [{"role": "system", "content": next(iter(said.values()))}, *messages]


def _answers(
    messages: list[Message], supervise: Literal["all", "last"], noted: Counter[str], switched_off: set[int]
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
    learned = [i for i in answers if i not in switched_off]
    if len(learned) < len(answers):
        noted["answer switched off by its message, not supervised"] += len(answers) - len(learned)
    if not learned:
        raise Refused("every_answer_switched_off")
    if learned[-1] + 1 < len(messages):
        noted["messages after the last answer, cut"] += len(messages) - learned[-1] - 1
    return assistant[-1], tuple(learned if supervise == "all" else learned[-1:])


def tools_of(value: Any) -> list[Message] | None:
    """A row's tools, from JSON text or from Arrow; each of them may be JSON text as well."""
    tools = _tools_text(value) if isinstance(value, str) else value
    if tools in (None, "", []) or is_missing(tools):
        return None
    if isinstance(tools, list):
        tools = [_tools_text(tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SchemaError(f"tools is a {type(tools).__name__}, expected a list of objects")
    return tools


def _tools_text(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return decoded(text)
    except ValueError as error:
        raise SchemaError(f"tools is not JSON ({error})") from None

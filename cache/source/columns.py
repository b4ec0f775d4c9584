"""Which columns of the source mean what: named by the user, else found by the names that are usual in the field.

A column that rows may do without (tools, system text, a domain) is read wherever a file or a line has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cache.config import Columns, RowsConfig
from cache.errors import BadSource
from cache.source.message_keys import ROLE_AND_TEXT, unread_keys

USUAL = {
    "ids": ("input_ids", "ids", "tokens"),
    "mask": ("loss_mask", "assistant_masks", "completion_mask", "labels"),
    "messages": ("messages", "conversations", "conversation"),
    "group": ("domain", "group"),
}
PAIRS = (  # a conversation in two columns
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
SYSTEM = ("system", "system_prompt")  # system text beside a conversation
INPUT = "input"  # what an instruction is about, beside it
BESIDE_MESSAGES = ("finished", "tools", *SYSTEM)  # what conversations may have beside them
UNREAD = "keys that are not read"  # a column of our own: their names, a row's in one text


@dataclass(frozen=True, slots=True)
class Layout:
    """The source's columns by meaning."""

    kind: Literal["tokens", "conversations"]
    ids: str | None = None
    mask: str | None = None
    messages: str | None = None
    group: str | None = None
    pair: tuple[str, str] | None = None  # instead of messages
    beside: tuple[str, ...] = ()
    said: str | None = None  # beside ids: what they were made of, whose first user text draws the side of the split
    is_group_named: bool = False  # by the user; else any usual name of it is read

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        named = [self.ids, self.mask, self.messages, self.group, self.said]
        return [name for name in named if name is not None] + [*(self.pair or ()), *self.beside]

    @property
    def required(self) -> list[str]:
        """Columns without which there are no rows; a file or a line may lack the others."""
        return [name for name in (self.ids, self.mask, self.messages, *(self.pair or ())) if name is not None]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names under which a file or a line may have the domain, the first that is there counting."""
        if self.group is None or self.is_group_named:
            return () if self.group is None else (self.group,)
        return (self.group, *(name for name in USUAL["group"] if name != self.group))

    @property
    def rows(self) -> str:
        """The column of rows, to name it in an error."""
        return self.ids or self.messages or " and ".join(self.pair or ())

    @property
    def mask_is_labels(self) -> bool:
        """Labels repeat the id where it is supervised and hold -100 elsewhere."""
        return self.mask is not None and self.mask.endswith("labels")

    def columns(self) -> Columns:
        prompt, completion = self.pair or (None, None)
        return Columns(
            ids=self.ids,
            mask=self.mask,
            messages=self.messages,
            group=self.group,
            prompt=prompt,
            completion=completion,
        )

    def unread(self, keys: Sequence[str]) -> str | None:
        """The keys of a row that nothing reads though they might say what is to be learned, as one text."""
        found = unread_keys(keys, (*self.names, *self.groups)) if self.kind == "conversations" else []
        return ", ".join(found) or None


def resolve(names: Sequence[str], rows: RowsConfig, file: str, *, are_lines: bool = False) -> Layout:
    """Find the columns among a file's `names`; tokens win over conversations where a file has both.

    `are_lines`: other lines of the file may have more keys than these.
    """
    ids = _find("ids", rows.columns.ids, names, file)
    messages = _find("messages", rows.columns.messages, names, file)
    group = _group(rows, names, file, are_lines=are_lines)
    named = bool(rows.columns.group)
    if ids is not None and (rows.columns.ids is not None or rows.columns.messages is None):
        mask = _find("mask", rows.columns.mask, names, file, several=True)
        if mask is None and not rows.supervise_all:
            raise BadSource(
                f"{file}: ids in column {ids}, but no loss mask (usual names: {', '.join(USUAL['mask'])}) among "
                f"{', '.join(names)}. Set rows.columns.mask, or rows.supervise_all=true to supervise every token."
            )
        said = next((name for name in (messages, "prompt") if name in names), None) if rows.held_out else None
        return Layout("tokens", ids=ids, mask=mask, group=group, said=said, is_group_named=named)
    pair = None if messages else _pair(rows.columns, names, file)
    if messages is not None or pair is not None:
        optional = BESIDE_MESSAGES if pair is None or pair[0] != "instruction" else (*BESIDE_MESSAGES, INPUT)
        used = (messages, *(pair or ()))
        beside = tuple(name for name in optional if (are_lines or name in names) and name not in used)
        return Layout("conversations", messages=messages, group=group, pair=pair, beside=beside, is_group_named=named)
    raise BadSource(
        f"{file}: neither token ids ({', '.join(USUAL['ids'])}) nor conversations ({', '.join(USUAL['messages'])}, or "
        f"{', or '.join(' and '.join(pair) for pair in PAIRS)}) among its columns {', '.join(names)}. "
        f"{_advice(names, file)}"
    )


def common(layouts: Sequence[tuple[str, Layout]]) -> Layout:
    """The one layout of all files, given with their names: what is optional is read where it is there.

    What ids were made of is read only if all files tell it.
    """
    first, layout = layouts[0]
    groups = [other.group for _, other in layouts if other.group is not None]
    said = {other.said for _, other in layouts}
    beside = tuple(dict.fromkeys(name for _, other in layouts for name in other.beside))
    told = said.pop() if len(said) == 1 else None

    def merged(one: Layout) -> Layout:
        return replace(one, group=next(iter(groups), None), beside=beside, said=told)

    found = merged(layout)
    for file, other in layouts:
        if merged(other) != found:
            raise BadSource(
                f"{file}: columns {', '.join(other.required)}, but {first} has {', '.join(layout.required)}. Prepare "
                "files with other columns apart."
            )
    return found


def _group(rows: RowsConfig, names: Sequence[str], file: str, *, are_lines: bool) -> str | None:
    if rows.columns.group == "":  # switched off
        return None
    if rows.columns.group is not None and are_lines:
        return rows.columns.group
    group = _find("group", rows.columns.group, names, file)
    if group is None and are_lines:
        return USUAL["group"][0]
    if rows.groups is not None and group is None:
        raise BadSource(
            f"{file}: rows.groups is set, but no column tells a row's domain. Set rows.columns.group; "
            f"the columns are {', '.join(names)}."
        )
    return group


def _pair(columns: Columns, names: Sequence[str], file: str) -> tuple[str, str] | None:
    if (columns.prompt is None) != (columns.completion is None):
        raise BadSource("rows.columns: prompt and completion are columns of one pair, expected both or none of them.")
    if columns.prompt is None or columns.completion is None:
        return next((pair for pair in PAIRS if pair[0] in names and pair[1] in names), None)
    for what, name in (("prompt", columns.prompt), ("completion", columns.completion)):
        _find(what, name, names, file)
    return columns.prompt, columns.completion


def _find(what: str, named: str | None, names: Sequence[str], file: str, several: bool = False) -> str | None:
    if named is not None:
        if named not in names:
            raise BadSource(f"{file}: rows.columns.{what} is {named!r}, expected one of {', '.join(names)}.")
        return named
    found = [name for name in USUAL[what] if name in names]
    if several and len(found) > 1:  # two masks may differ, and nothing says which one is meant
        raise BadSource(f"{file}: several loss masks, {' and '.join(found)}. Set rows.columns.{what} to one of them.")
    return found[0] if found else None


def _advice(names: Sequence[str], file: str) -> str:
    """What to do about columns that are no rows: some files hold their rows one level deeper, or one higher."""
    if any({*keys} <= {*names} for keys in ROLE_AND_TEXT):
        return f"These are messages without their conversation: jq -c '{{messages: .}}' '{file}' > rows.jsonl"
    if len(names) == 1:
        return f"If the rows are in {names[0]}: jq -c '.[\"{names[0]}\"][]' '{file}' > rows.jsonl"
    return (
        "Set rows.columns.messages, rows.columns.prompt and .completion, or rows.columns.ids; if it is no data, name "
        "the data files in rows.source."
    )

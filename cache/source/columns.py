"""Which columns of the source mean what: named by the user, else found by the names that are usual in the field."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cache.config import Columns, RowsConfig
from cache.errors import BadSource

USUAL = {
    "ids": ("input_ids", "ids", "tokens"),
    "mask": ("loss_mask", "assistant_masks", "completion_mask", "labels"),
    "messages": ("messages", "conversations"),
    "group": ("domain", "group"),
}
PAIRS = (("prompt", "completion"), ("prompt", "response"))  # a conversation in two columns
BESIDE_MESSAGES = ("finished", "tools")  # what conversations may have beside them


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

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        named = [self.ids, self.mask, self.messages, self.group, self.said]
        return [name for name in named if name is not None] + [*(self.pair or ()), *self.beside]

    @property
    def rows(self) -> str:
        """The column of rows, to name it in an error."""
        return self.ids or self.messages or " and ".join(self.pair or ())

    @property
    def mask_is_labels(self) -> bool:
        """Labels repeat the id where it is supervised and hold -100 elsewhere."""
        return self.mask is not None and self.mask.endswith("labels")

    def columns(self) -> Columns:
        return Columns(ids=self.ids, mask=self.mask, messages=self.messages, group=self.group)


def resolve(names: Sequence[str], rows: RowsConfig, file: str) -> Layout:
    """Find the columns among a file's `names`; tokens win over conversations where a file has both."""
    ids = _find("ids", rows.columns.ids, names, file)
    messages = _find("messages", rows.columns.messages, names, file)
    group = _find("group", rows.columns.group, names, file)
    if rows.groups is not None and group is None:
        raise BadSource(
            f"{file}: rows.groups is set, but no column tells a row's domain. Set rows.columns.group; "
            f"the columns are {', '.join(names)}."
        )
    if ids is not None and (rows.columns.ids is not None or rows.columns.messages is None):
        mask = _find("mask", rows.columns.mask, names, file, several=True)
        if mask is None and not rows.supervise_all:
            raise BadSource(
                f"{file}: ids in column {ids}, but no loss mask (usual names: {', '.join(USUAL['mask'])}) among "
                f"{', '.join(names)}. Set rows.columns.mask, or rows.supervise_all=true to supervise every token."
            )
        said = next((name for name in (messages, "prompt") if name in names), None) if rows.held_out else None
        return Layout("tokens", ids=ids, mask=mask, group=group, said=said)
    pair = None if messages else next((pair for pair in PAIRS if pair[0] in names and pair[1] in names), None)
    if messages is not None or pair is not None:
        beside = tuple(name for name in BESIDE_MESSAGES if name in names)
        return Layout("conversations", messages=messages, group=group, pair=pair, beside=beside)
    raise BadSource(
        f"{file}: neither token ids ({', '.join(USUAL['ids'])}) nor conversations ({', '.join(USUAL['messages'])}, "
        f"prompt and completion) among its columns {', '.join(names)}. Set rows.columns.ids or rows.columns.messages."
    )


def _find(what: str, named: str | None, names: Sequence[str], file: str, several: bool = False) -> str | None:
    if named is not None:
        if named not in names:
            raise BadSource(f"{file}: rows.columns.{what} is {named!r}, expected one of {', '.join(names)}.")
        return named
    found = [name for name in USUAL[what] if name in names]
    if several and len(found) > 1:  # two masks may differ, and nothing says which one is meant
        raise BadSource(f"{file}: several loss masks, {' and '.join(found)}. Set rows.columns.{what} to one of them.")
    return found[0] if found else None

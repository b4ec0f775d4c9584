"""What a person checks of conversations that became rows: how much of one is supervised, how many answers, which roles.

And what stops a build, because no data set looks like that: nothing or everything supervised, or a token by which the
template ends or opens turns that is in no row.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cache.errors import BadSource
from cache.ragged import Spans, offsets_of
from cache.rows.rules import Rows
from cache.slices.pieces import Facts

Histogram = tuple[tuple[int, int], ...]


MOST_QUOTED = 20  # reasons of one kind, in a manifest and so in messages: a source may have thousands of names


@dataclass(slots=True)
class Audit:
    """Counts of the rows that are kept; `messages` counts all conversations, dropped ones included."""

    shares: Counter[int] = field(default_factory=Counter)  # tenth of the row that is supervised, 1 to 10 → rows
    answers: Counter[int] = field(default_factory=Counter)  # answers in a row → rows
    messages: Counter[str] = field(default_factory=Counter)  # `role: what became of it` → messages
    missing: dict[str, int] = field(default_factory=dict)  # tokens of turns that no row has yet: text → id
    _is_new: bool = True

    def add(self, rows: Rows, facts: Facts) -> None:
        """Rows of one piece."""
        if self._is_new:
            self._is_new, self.missing = False, dict(facts.turn_tokens)
        self.messages.update(facts.messages)
        if not rows.row.size:
            return
        ids = rows.ids.flat()
        self.missing = {text: identity for text, identity in self.missing.items() if not (ids == identity).any()}
        supervised, runs = _by_row(rows.mask)
        length = rows.mask.length
        self.shares.update((-(-10 * supervised // length)).tolist())
        self.answers.update(runs.tolist())

    def refuse(self, source: str, tokens: int, supervised: int) -> None:
        """Raise what is implausible in all rows together."""
        if tokens and supervised == tokens:
            raise BadSource(
                f"{source}: every token of every row is supervised, expected questions beside the answers. Look at "
                "what the chat template marks as an answer, and at rows.max_tokens; or name another in rows.template."
            )
        if tokens and self.missing:
            texts = ", ".join(f"{text} ({identity})" for text, identity in self.missing.items())
            raise BadSource(
                f"{source}: {texts}: written around answers by the chat template, but in no row, expected in every. A "
                "drafter would never learn where turns end. If all rows are cut before it, raise rows.max_tokens."
            )


def counted(counts: Counter[str]) -> dict[str, int]:
    """By reason; of those that quote the source (`unknown_role: …`) the most frequent, the others of a kind as one."""
    told: Counter[str] = Counter()
    quoted: Counter[str] = Counter()
    for reason, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        kind, colon, _ = reason.partition(": ")
        quoted[kind] += bool(colon)
        told[reason if quoted[kind] <= MOST_QUOTED or not colon else f"{kind}: others"] += number
    return {reason: number for reason, number in sorted(told.items()) if number}


def histogram(counts: Counter[int]) -> Histogram:
    return tuple(sorted(counts.items()))


def _by_row(mask: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Supervised tokens and runs of them, of each row; no row is empty."""
    flat, start = mask.flat(), offsets_of(mask.length)[:-1]
    opens = flat.copy()
    opens[1:] &= flat[:-1] ^ 1
    opens[start] = flat[start]
    return np.add.reduceat(flat, start, dtype=np.int64), np.add.reduceat(opens, start, dtype=np.int64)

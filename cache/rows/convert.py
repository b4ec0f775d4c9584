"""A chunk of the source that came tokenised, or a piece of tokenised conversations → rows for the token cache."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64, UInt8, UInt64
from numpy import ndarray

from cache.config import RowsConfig
from cache.errors import BadSource
from cache.ragged import Spans, last_runs, offsets_of, spans_of
from cache.rows.audit import Audit
from cache.rows.rules import RowCounts, Rows, fit, usable
from cache.rows.split import Balance, hashes_of_ids, sides
from cache.slices.pieces import Piece, PlacedPiece
from cache.source.chunks import Chunk
from cache.source.columns import Layout
from cache.source.first_text import first_texts, hashes_of_texts
from cache.source.groups import NO_GROUP, ONLY_GROUP, Groups
from cache.source.list_columns import equal_lengths, mask_of, mask_of_labels, spans_of_list


@dataclass(frozen=True, slots=True)
class Converted:
    """What a chunk adds to the cache."""

    rows: Rows  # kept; `row` counts from the chunk's first row
    side: UInt8[ndarray, "R"]
    group: Int64[ndarray, "R"]


@dataclass(slots=True)
class Converter:
    """Applies the rules chunk by chunk; holds the counts and the group names met so far."""

    layout: Layout
    policy: RowsConfig
    counts: RowCounts = field(default_factory=RowCounts)
    audit: Audit = field(default_factory=Audit)  # of conversations
    stop_ids: list[int] = field(default_factory=list)  # of the tokenizer that made the pieces
    balance: Balance = field(default_factory=Balance)  # of the split
    _groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        self._groups = Groups(self.layout.group)

    def __call__(self, chunk: Chunk | PlacedPiece) -> Converted:
        self.counts.source_rows += chunk.num_rows
        return self._conversations(chunk.piece) if isinstance(chunk, PlacedPiece) else self._tokens(chunk)

    @property
    def group_names(self) -> list[str]:
        """Names of the groups, by their number. Raises BadSource where a column was named that no row has."""
        names = self._groups.names
        if names != [NO_GROUP]:
            return names
        if self.policy.columns.group:
            raise BadSource(
                f"{self.policy.source}: rows.columns.group is {self.policy.columns.group!r}, but no row has a value in "
                "it. Correct the name."
            )
        return [ONLY_GROUP]

    def _tokens(self, chunk: Chunk) -> Converted:
        layout, place = self.layout, chunk.place
        group = self._groups.of(chunk.batch)
        wanted = self._groups.are_wanted(group, self.policy.groups)
        self.counts.dropped["other_group"] += int(np.count_nonzero(~wanted))
        assert layout.ids is not None
        ids, valid = spans_of_list(chunk.batch.column(layout.ids), layout.ids, place)
        mask = None
        if layout.mask is not None:
            mask, has_mask = spans_of_list(chunk.batch.column(layout.mask), layout.mask, place)
            valid = valid & has_mask
            equal_lengths(ids, mask, valid, (layout.ids, layout.mask), place)
        # Rows of other groups count as such and as nothing else.
        keep = usable(ids.length[wanted], valid[wanted], self.counts)
        row = np.flatnonzero(wanted)[keep].astype(np.int64, copy=False)
        ids = ids.select(row)
        rows = Rows(ids, self._mask(ids, mask and mask.select(row), row, chunk), row)
        side = np.zeros(chunk.batch.num_rows, dtype=np.uint8)
        if self.policy.held_out:
            side[row] = self._sides(self._hashes(ids, row, chunk))
        kept = fit(rows, self.policy, self.counts)
        self.balance.add(side[kept.row])
        return Converted(kept, side[kept.row], group[kept.row])

    def _sides(self, hashes: UInt64[ndarray, "R"]) -> UInt8[ndarray, "R"]:
        self.balance.meet(hashes)
        return sides(hashes, self.policy.held_out)

    def _hashes(self, ids: Spans, row: ndarray, chunk: Chunk) -> UInt64[ndarray, "R"]:
        """Hash of what each conversation begins with where the source has it beside the ids, else of the ids."""
        hashes = hashes_of_ids(ids)
        if self.layout.said is not None:
            of_all = first_texts(chunk.batch.column(self.layout.said))
            texts = [of_all[i] for i in row.tolist()]
            is_told = np.array([text is not None for text in texts], dtype=bool)
            hashes[is_told] = hashes_of_texts([text for text in texts if text is not None])
        return hashes

    def _mask(self, ids: Spans, mask: Spans | None, row: ndarray, chunk: Chunk) -> Spans:
        """The rows' mask as uint8 of 0 and 1, back to back."""
        offsets = offsets_of(ids.length)
        if mask is None:
            flat = np.ones(int(offsets[-1]), dtype=np.uint8)
        elif self.layout.mask_is_labels:
            flat = mask_of_labels(mask, ids, (str(self.layout.ids), str(self.layout.mask)), row, chunk.place)
        else:
            flat = mask_of(mask, str(self.layout.mask), row, chunk.place)
        spans = spans_of(flat, offsets)
        return last_runs(spans) if self.policy.supervise == "last" else spans

    def _conversations(self, piece: Piece) -> Converted:
        """A piece holds tokens of the wanted groups only; what depends on lengths and on the split is done here."""
        facts, row = piece.facts, piece.row
        self.counts.dropped.update(facts.dropped)
        self.counts.noted.update(facts.noted)
        self.stop_ids = facts.stop_ids
        names = np.array([self._groups.number(name) for name in facts.group_names], dtype=np.int64)
        group, side = np.zeros(facts.source_rows, dtype=np.int64), np.zeros(facts.source_rows, dtype=np.uint8)
        group[row] = names[piece.group]
        side[row] = self._sides(piece.split_hash)
        tokens = piece.tokens
        rows = Rows(spans_of(tokens.values, tokens.offsets), spans_of(tokens.mask, tokens.offsets), row)
        long = usable(rows.ids.length, np.ones(row.size, dtype=bool), self.counts)
        kept = fit(rows.select(long), self.policy, self.counts)
        self.audit.add(kept, facts)
        self.balance.add(side[kept.row])
        return Converted(kept, side[kept.row], group[kept.row])

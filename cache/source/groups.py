"""The domains of rows: numbered as they are met, and which of them are wanted."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64
from numpy import ndarray

from cache.errors import BadSource

MAX_GROUPS = 1 << 16  # the group column is 16 bits wide
NO_GROUP = "none"
ONLY_GROUP = "all"  # where no row has one


@dataclass(slots=True)
class Groups:
    """The names met so far, in order: a group's number is its place."""

    column: str | None
    _numbers: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def of(self, batch: pa.RecordBatch) -> Int64[ndarray, "R"]:
        """The number of each row's group; a loop over distinct names only."""
        if self.column is None:
            return np.full(batch.num_rows, self.number(NO_GROUP), dtype=np.int64)
        column = batch.column(self.column)
        if pa.types.is_nested(column.type):
            raise BadSource(
                f"column {self.column} is {column.type}, expected the domain of a row as text. Name another in "
                'rows.columns.group, or set rows.columns.group="" to read none.'
            )
        if pa.types.is_floating(column.type):  # of pandas, where NaN is null
            column = pc.if_else(pc.is_nan(column), None, column)
        encoded = column.cast(pa.string()).fill_null(NO_GROUP).dictionary_encode()
        numbers = [self.number(name) for name in encoded.dictionary.to_pylist()]
        group: ndarray = np.array(numbers, dtype=np.int64)[np.asarray(encoded.indices)]
        return group

    def number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._numbers))
        if number >= MAX_GROUPS:
            raise BadSource(
                f"column {self.column}: more than {MAX_GROUPS} different domains, expected a few. It seems to "
                'hold something else: set rows.columns.group to another, or to "" to read none.'
            )
        return number

    def are_wanted(self, group: Int64[ndarray, "R"], wanted: list[str] | None) -> Bool[ndarray, "R"]:
        """Rows of the groups that are wanted, by their numbers; None: all are."""
        if wanted is None:
            return np.ones(group.size, dtype=bool)
        chosen: ndarray = np.array([name in wanted for name in self._numbers], dtype=bool)[group]
        return chosen

"""How many held-out rows τ is measured on, and that the number of processes changes neither them nor their walks."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash.decoding.tau import RowWalk, tau
from dflash.evaluation import held_out
from dflash.evaluation.held_out import HeldOut, walk_held_out

HELD_OUT = 1500


@dataclass
class Shared:
    """What threads that play processes gather: each puts its value, all read all."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def ranks(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait(10)
            values = [self.values[one] for one in range(self.size)]
            self.barrier.wait(10)
            return values

        return SimpleNamespace(rank=rank, size=self.size, gather=gather)


def walks(spread: int) -> Any:
    """Stands for `walk_rows`: walks that the row alone decides, of which τ varies by `spread`."""

    def walk_rows(store: Any, row_ids: np.ndarray, *arguments: Any, on_row: Any) -> list[list[RowWalk]]:
        found = []
        for row in row_ids.tolist():
            accepted = tuple((row * 7 + k) % (1 + spread * (row % 2)) for k in range(20))
            found.append(RowWalk(sum(accepted) + 20, accepted))
            on_row()
        return [found for _ in arguments[2]]

    return walk_rows


def held(size: int, rows: int | None, num_rows: int = HELD_OUT) -> list[HeldOut]:
    store: Any = SimpleNamespace(rows=lambda split: np.arange(num_rows))
    shared, found = Shared(size), [None] * size

    def one(rank: int) -> None:
        nothing: Any = None
        found[rank] = walk_held_out(store, rows, 3, nothing, nothing, [nothing], ranks=shared.ranks(rank))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("spread", "rows"), [(0, 64), (1, 640), (9, 1000)])
def test_rows_are_as_many_as_the_error_needs(spread: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "walk_rows", walks(spread))
    (found,) = held(1, None)
    assert len(found.row_ids) == len(set(found.row_ids.tolist())) == len(found.walks[0]) == rows
    assert (tau(found.walks[0]).standard_error < 0.01) == (rows < 1000)
    if rows > 64:
        assert tau(found.walks[0][: rows - 64]).standard_error >= 0.01, "a round less was not enough"


def test_a_number_of_rows_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "walk_rows", walks(0))
    assert [len(held(1, rows, 150)[0].row_ids) for rows in (1, 100, 150, 999)] == [1, 100, 150, 150]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_change_neither_rows_nor_walks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "walk_rows", walks(1))
    (alone,) = held(1, None)
    for one in held(size, None):
        assert np.array_equal(one.row_ids, alone.row_ids)
        assert one.walks == alone.walks

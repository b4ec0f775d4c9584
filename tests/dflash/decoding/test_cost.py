"""What a round costs: each part is timed where it stands in decoding, and leaves the cache as it was."""

import pytest
import torch
from decoding_toys import prompts, toy

from dflash.decoding import cost
from dflash.decoding.cost import Cost, measure_cost
from dflash.decoding.rollback import RowCache


def test_every_length_of_pass_is_measured_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one = toy(block_size=4)
    seen: list[int] = []
    extend = RowCache.extend

    def noted(self: RowCache, ids: torch.Tensor) -> object:
        assert self.lengths.tolist() == [9]
        seen.append(ids.shape[1])
        return extend(self, ids)

    monkeypatch.setattr(RowCache, "extend", noted)
    (prompt,) = prompts(9)
    measured = measure_cost(one.target, one.drafter, one.ends, prompt)
    assert seen == [count for count in (1, 2, 3, 4) for _ in range(cost.REPEATS + 1)]
    assert len(measured.passes) == 4
    assert min(*measured.passes, measured.block) > 0


def test_a_drafter_pays_from_the_tau_at_which_a_round_costs_its_tokens() -> None:
    assert Cost((0.5, 0.75, 0.75, 1.0), 0.25).break_even == 2.5

"""Speculative sampling keeps the target's law: by enumeration of every outcome, and by counting draws."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from decoding_toys import Toy, llama, toy
from torch import Tensor

from dflash.decoding.decode import DecodeLimits, plain, seeded, speculate
from dflash.decoding.sampling import Proposal, Sampling, SeededDice, residual
from dflash.model.selector import CandidateSelector

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
WARM = Sampling(1.0)


@dataclass
class EveryOutcome:
    """Dice that fall as a script says, and note the probability of it. Running all scripts is a proof, not a sample."""

    script: list[int]
    options: list[int] = field(default_factory=list)
    probability: float = 1.0

    def _next(self, chances: list[float]) -> int:
        possible = [outcome for outcome, chance in enumerate(chances) if chance > 0]
        at = len(self.options)
        self.options.append(len(possible))
        if at == len(self.script):
            self.script.append(0)
        outcome = possible[self.script[at]]
        self.probability *= chances[outcome]
        return outcome

    def draw(self, law: Tensor) -> Tensor:
        return torch.tensor([self._next(row) for row in law.tolist()])

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._next([1 - probability, probability]))

    def after(self) -> list[int] | None:
        """The next script, like the next number; None after the last."""
        script = self.script[: len(self.options)]
        while script and script[-1] + 1 == self.options[len(script) - 1]:
            script.pop()
        return [*script[:-1], script[-1] + 1] if script else None


def laws(run: "Run") -> dict[tuple[int, ...], float]:
    """Probability of each text, over every way the dice can fall."""
    found: dict[tuple[int, ...], float] = {}
    script: list[int] | None = []
    while script is not None:
        dice = EveryOutcome(script)
        text = run(dice)
        found[text] = found.get(text, 0.0) + dice.probability
        script = dice.after()
    return found


class Run:
    """How one text is made from dice."""

    def __call__(self, dice: EveryOutcome) -> tuple[int, ...]:
        raise NotImplementedError


@dataclass
class OneStep(Run):
    """One draft from q against p, then the token after it. A text is the first token that is emitted."""

    sampling: Sampling = WARM
    target: Tensor = field(default_factory=lambda: P)
    drafter: Tensor = field(default_factory=lambda: Q)

    def __call__(self, dice: EveryOutcome) -> tuple[int, ...]:
        proposal = self.sampling.propose(self.drafter.log()[None], dice)
        logits = torch.stack([self.target.log(), torch.zeros(3, dtype=torch.float64)])
        accepted, token = self.sampling.verify(logits, proposal, dice)
        return ((*proposal.tokens, token) if accepted else (token,))[:1]


@dataclass
class Decoding(Run):
    one: Toy
    prompt: Tensor
    limits: DecodeLimits
    sampling: Sampling
    alone: bool
    confidence: float = 0.0
    drafted: list[int] = field(default_factory=list)

    def __call__(self, dice: EveryOutcome) -> tuple[int, ...]:
        if self.alone:
            return plain(self.one.target, self.prompt, self.limits, self.sampling, dice).ids
        one = self.one
        (decoded,) = speculate(
            one.target, one.drafter, one.ends, [self.prompt], self.limits, self.sampling, [dice], self.confidence
        )
        self.drafted += decoded.accepted
        return decoded.ids


def test_the_emitted_token_has_the_targets_law() -> None:
    law = laws(OneStep())
    assert [law[(token,)] for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)


def test_acceptance_is_the_overlap_of_both_scaled_laws() -> None:
    for temperature, expected, p in (
        (1.0, 0.7, [0.5, 0.3, 0.2]),
        (0.5, 0.447368, [0.657895, 0.236842, 0.105263]),
    ):
        sampling = Sampling(temperature)
        assert sampling.law(P.log()).tolist() == pytest.approx(p, abs=1e-6)
        accepted = 0.0
        script: list[int] | None = []
        while script is not None:
            dice = EveryOutcome(script)
            proposal = sampling.propose(Q.log()[None], dice)
            count, _ = sampling.verify(torch.stack([P.log(), P.log()]), proposal, dice)
            accepted += count * dice.probability
            script = dice.after()
        assert accepted == pytest.approx(expected, abs=1e-6)
        law = laws(OneStep(sampling))
        assert [law[(token,)] for token in range(3)] == pytest.approx(p, abs=1e-6)


def test_ratio_and_draw_use_the_very_same_numbers() -> None:
    dice = SeededDice(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        proposal = WARM.propose(Q.log().to(dtype)[None], dice)
        assert proposal.law is not None
        assert proposal.law.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(proposal.law, WARM.law(Q.log().to(dtype)[None]))
    with_zero = Sampling(1.0, top_k=1).propose(Q.log()[None], dice)
    assert with_zero.tokens == (2,)
    assert with_zero.law is not None
    assert with_zero.law.tolist() == [[0.0, 0.0, 1.0]], "a draft that is sure of itself is drawn from a one-hot law"


@pytest.mark.parametrize("sampling", [WARM, Sampling(0.7, top_k=2)])
def test_every_text_of_decoding_has_the_targets_probability(sampling: Sampling) -> None:
    """All outcomes of real decoding with a real drafter, stop token and limit included: an exact proof on a toy."""
    torch.manual_seed(0)
    model = llama(vocab_size=3, eos_token_id=2, pad_token_id=None, bos_token_id=None, initializer_range=0.3)
    one = toy(1, model=model, block_size=3, mask=1)
    prompt = torch.tensor([0, 1])
    limits = DecodeLimits(3, frozenset({2}))
    expected = laws(Decoding(one, prompt, limits, sampling, alone=True))
    found = laws(Decoding(one, prompt, limits, sampling, alone=False))
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-12)
    assert found == pytest.approx(expected, abs=1e-12)
    assert len(expected) >= 4


@pytest.mark.parametrize(
    "parts",
    [
        {"kind": "dflash2", "rank": 4},
        {"kind": "dspark", "rank": 4, "markov": "gated", "confidence": True},
        {"kind": "dspark", "rank": 4, "tables": "free"},
    ],
    ids=["dflash2", "dspark with confidence", "dspark free"],
)
def test_every_text_has_the_targets_probability_when_drafts_look_back(parts: dict[str, Any]) -> None:
    """The same proof with random parts. Two candidates of three tokens: the third is never drafted, but said."""
    torch.manual_seed(0)
    model = llama(vocab_size=3, eos_token_id=2, pad_token_id=None, bos_token_id=None, initializer_range=0.3)
    one = toy(1, model=model, block_size=3, mask=1, **parts)
    if isinstance(one.drafter.look_back, CandidateSelector):
        one.drafter.look_back.count = 2
    prompt, limits = torch.tensor([0, 1]), DecodeLimits(3, frozenset({2}))
    expected = laws(Decoding(one, prompt, limits, WARM, alone=True))
    lengths = set()
    for confidence in (0.0, 0.5) if parts.get("confidence") else (0.0,):
        seen: list[int] = []
        found = laws(Decoding(one, prompt, limits, WARM, alone=False, confidence=confidence, drafted=seen))
        assert found == pytest.approx(expected, abs=1e-12)
        lengths.add(tuple(sorted(set(seen))))
    assert len(lengths) == (2 if parts.get("confidence") else 1), "confidence changes how much is drafted"


def test_sampled_tokens_pass_a_chi_square_test() -> None:
    """2,000 seeds: counts of the emitted token against p. 13.8 is χ² with 2 degrees of freedom at 0.1 %."""
    counts = [0, 0, 0]
    for seed in range(2000):
        dice = SeededDice(seed)
        proposal = WARM.propose(Q.log()[None], dice)
        accepted, token = WARM.verify(torch.stack([P.log(), P.log()]), proposal, dice)
        counts[proposal.tokens[0] if accepted else token] += 1
    assert all(counts)
    assert sum((n - 2000 * p) ** 2 / (2000 * p) for n, p in zip(counts, P.tolist(), strict=True)) < 13.8


def test_plain_draws_pass_a_chi_square_test() -> None:
    draws = WARM.choose(P.log().expand(2000, 3), SeededDice(0))
    counts = torch.bincount(draws, minlength=3).tolist()
    assert sum((n - 2000 * p) ** 2 / (2000 * p) for n, p in zip(counts, P.tolist(), strict=True)) < 13.8


def test_same_seed_same_text_other_seed_other_text() -> None:
    one = toy()
    asked = [torch.tensor([5, 6, 7]), torch.tensor([9, 4])]

    def run(seed: int) -> list[tuple[int, ...]]:
        dice = seeded(seed, 2, one.target.device)
        return [d.ids for d in speculate(one.target, one.drafter, one.ends, asked, DecodeLimits(12), WARM, dice)]

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choose_keeps_the_shape(temperature: float) -> None:
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    ids = Sampling(temperature).choose(logits, SeededDice(0))
    assert ids.shape == (1, 4)
    assert ids.dtype == torch.int64
    if temperature == 0.0:
        assert torch.equal(ids, logits.argmax(-1))


def test_top_k_and_top_p_cut_the_law() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert Sampling(1.0, top_k=2).law(logits).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert Sampling(1.0, top_p=0.65).law(logits).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert Sampling(1.0, top_p=0.75).law(logits).tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert Sampling(1.0, top_p=1e-9).law(logits).tolist() == [1, 0, 0, 0], "the most likely token always stays"
    assert Sampling(1.0, top_k=9).law(logits).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert Sampling(0.5, top_k=2, top_p=0.6).law(logits).tolist() == pytest.approx([1, 0, 0, 0])


def test_residual_of_equal_laws_is_the_law_itself() -> None:
    assert residual(P, P).tolist() == P.tolist()
    assert residual(P, Q).tolist() == pytest.approx([1, 0, 0])


def test_greedy_accepts_the_longest_right_prefix() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([4, 2, 3, 1]), 5).double()
    dice = SeededDice(0)
    verify = Sampling().verify
    assert verify(logits, Proposal((4, 2, 3), None), dice) == (3, 1)
    assert verify(logits, Proposal((4, 0, 3), None), dice) == (1, 2)
    assert verify(logits[:1], Proposal((), None), dice) == (0, 4)

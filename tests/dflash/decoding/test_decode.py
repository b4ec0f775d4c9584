"""Speculative decoding gives the target's own text, however many drafts are accepted; ids are practice cases."""

from typing import Any

import pytest
import torch
from decoding_toys import STOP, Toy, greedy, llama, prompts, taught, toy
from transformers import MistralConfig, MistralForCausalLM

import dflash.decoding.decode
from dflash.decoding.decode import (
    Decoded,
    DecodeLimits,
    Emission,
    draft_logits,
    plain,
    seeded,
    speculate,
    stream,
    tied,
)
from dflash.decoding.rollback import RowCache
from dflash.decoding.sampling import Proposal, Sampling, SeededDice
from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.evaluation.comparison import Comparison
from dflash.target.frozen import Target

GREEDY = Sampling()
SOME = (6, 2, 9, 1, 13)


def together(
    one: Toy, limits: DecodeLimits, *lengths: int, seed: int = 0, sampling: Sampling = GREEDY
) -> list[Decoded]:
    asked = prompts(*lengths, seed=seed)
    return speculate(
        one.target, one.drafter, one.ends, asked, limits, sampling, seeded(7, len(asked), one.target.device)
    )


def alone(one: Toy, limits: DecodeLimits, *lengths: int, seed: int = 0, sampling: Sampling = GREEDY) -> list[Decoded]:
    decoded = []
    for prompt, dice in zip(prompts(*lengths, seed=seed), seeded(7, len(lengths), one.target.device), strict=True):
        decoded += speculate(one.target, one.drafter, one.ends, [prompt], limits, sampling, [dice])
    return decoded


def answers(decoded: list[Decoded]) -> list[Any]:
    return [(one.ids, one.emitted, one.accepted) for one in decoded]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[RowCache]:
    """The caches that decoding makes while a test runs."""
    made: list[RowCache] = []

    class Kept(RowCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(dflash.decoding.decode, "RowCache", Kept)
    return made


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_greedy_text_is_the_targets_own_in_float64(block_size: int) -> None:
    one = taught(block_size)
    limits = DecodeLimits(25)
    expected = [tuple(greedy(one.target, prompt, 25)[len(prompt) :].tolist()) for prompt in prompts(*SOME)]
    assert [plain(one.target, p, limits, GREEDY, SeededDice(0)).ids for p in prompts(*SOME)] == expected
    assert [decoded.ids for decoded in alone(one, limits, *SOME)] == expected
    assert [decoded.ids for decoded in together(one, limits, *SOME)] == expected
    accepted = {count for decoded in alone(one, limits, *SOME) for count in decoded.accepted}
    assert min(accepted) == 0, "the drafter must be wrong at times"
    assert max(accepted) >= min(3, block_size - 1), "and right at times"


@pytest.mark.parametrize("seed", range(4))
def test_float32_texts_part_only_at_near_ties(seed: int) -> None:
    one = toy(seed, dtype=torch.float32)
    limits = DecodeLimits(30, frozenset({STOP}))
    for prompt, helped in zip(prompts(*SOME), together(one, limits, *SOME), strict=True):
        compared = Comparison((), "", plain(one.target, prompt, limits, GREEDY, SeededDice(0)), helped)
        assert compared.identical or compared.near_tie


def test_a_difference_without_a_near_tie_is_none() -> None:
    other = Decoded((5, 8, 7), (2,), (1,), 1.0)
    for tie, is_near in (({6}, False), ({6, 9}, False), ({6, 8}, True)):
        first = Decoded((5, 6, 7), (1, 1), (0, 0), 1.0, ties=(frozenset({5}), frozenset(tie), frozenset({7, 9})))
        assert Comparison((), "", first, other).near_tie == is_near


@pytest.mark.parametrize(
    ("dtype", "logits", "expected"),
    [
        (torch.float32, [20.0, 20.0 - 9e-4, 20.0 - 2e-3], {0, 1}),
        (torch.bfloat16, [20.0, 19.875, 19.5, 19.0], {0, 1, 2}),  # 0.125 apart are neighbours there
        (torch.bfloat16, [0.5, 0.498, 0.45], {0, 1}),
    ],
)
def test_a_tie_is_what_rounding_decides_in_the_dtype_of_the_logits(
    dtype: torch.dtype, logits: list[float], expected: set[int]
) -> None:
    assert tied(torch.tensor(logits, dtype=dtype), torch.arange(len(logits))) == expected


def test_bfloat16_texts_part_at_ties_only() -> None:
    """24 prompts of toys; each target pass of several tokens rounds otherwise than passes of one."""
    parted = 0
    for seed in range(4):
        one = toy(seed, dtype=torch.bfloat16)
        limits = DecodeLimits(30, frozenset({STOP}))
        for prompt, helped in zip(prompts(*SOME), together(one, limits, *SOME), strict=True):
            compared = Comparison((), "", plain(one.target, prompt, limits, GREEDY, SeededDice(0)), helped)
            assert compared.identical or compared.near_tie
            parted += not compared.identical
    assert parted, "or the test shows nothing"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.8, 0.9, 5)])
def test_no_id_is_drafted_or_emitted_that_the_tokenizer_lacks(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has 24 rows, the tokenizer 21 ids, one of them not in a row with the others; the rest would win."""
    one = toy()
    with torch.no_grad():
        head = one.target.model.lm_head.weight
        head[20], head[22], head[23] = 9 * head[8], 9 * head[9], -9 * head[9]
    known = {*range(20), 21}
    padded = Target(one.target.model, one.target.taps, known=known)
    one = Toy(padded, one.drafter, padded.ends(torch.device("cpu")))
    drafted: set[int] = set()
    propose = Sampling.propose

    def noted(self: Sampling, logits: torch.Tensor, dice: Any) -> Proposal:
        proposal = propose(self, logits, dice)
        drafted.update(proposal.tokens)
        return proposal

    monkeypatch.setattr(Sampling, "propose", noted)
    limits = DecodeLimits(25)
    helped = together(one, limits, *SOME, sampling=sampling)
    own = [plain(padded, prompt, limits, sampling, SeededDice(0)) for prompt in prompts(*SOME)]
    assert drafted <= known
    assert {token for decoded in [*helped, *own] for token in decoded.ids} <= known
    assert sampling != GREEDY or [decoded.ids for decoded in helped] == [decoded.ids for decoded in own]


def test_rows_of_a_batch_are_as_if_alone() -> None:
    one = taught()
    limits = DecodeLimits(30)
    assert len({sum(decoded.accepted) for decoded in alone(one, limits, *SOME)}) > 2, "acceptance must be ragged"
    assert answers(together(one, limits, *SOME)) == answers(alone(one, limits, *SOME))


def test_rows_of_a_batch_are_as_if_alone_when_sampled() -> None:
    one, limits, warm = taught(), DecodeLimits(20, frozenset({9})), Sampling(0.8, top_p=0.9)
    assert answers(together(one, limits, *SOME, sampling=warm)) == answers(alone(one, limits, *SOME, sampling=warm))


def test_stream_gives_runs_as_they_come() -> None:
    one = taught()
    asked = prompts(*SOME)
    given = list(
        stream(one.target, one.drafter, one.ends, asked, DecodeLimits(12), GREEDY, seeded(7, 5, one.target.device))
    )
    assert given[0] == [Emission(row, given[0][row].ids, 0) for row in range(5)]
    assert all(len(emission.ids) == 1 for emission in given[0])
    joined = [tuple(t for emissions in given for e in emissions if e.row == row for t in e.ids) for row in range(5)]
    assert joined == [decoded.ids for decoded in together(one, DecodeLimits(12), *SOME)]
    first = next(stream(one.target, one.drafter, one.ends, asked, DecodeLimits(12), GREEDY, seeded(7, 5, "cpu")))
    assert first == given[0], "the first tokens are there before any draft is made"


def test_text_counters_and_cache_end_at_a_stop_token_inside_a_block(caches: list[RowCache]) -> None:
    one = taught()
    learned = (6, 6)  # the prompts whose texts the drafter has learned
    free = alone(one, DecodeLimits(30), *learned, seed=5)
    tried = 0
    for row, (prompt, decoded) in enumerate(zip(prompts(*learned, seed=5), free, strict=True)):
        start = 1
        for emitted, accepted in zip(decoded.emitted, decoded.accepted, strict=True):
            inside = decoded.ids[start : start + accepted - 1]
            for at, token in enumerate(inside):
                if token in decoded.ids[: start + at]:
                    continue
                tried += 1
                caches.clear()
                stopped = alone(one, DecodeLimits(30, frozenset({token})), *learned, seed=5)[row]
                assert stopped.ids == decoded.ids[: start + at + 1]
                assert stopped.ids[-1] == token
                assert sum(stopped.emitted) == len(stopped.ids) - 1
                assert stopped.accepted[-1] == stopped.emitted[-1] == at + 1
                assert caches[row].lengths.tolist() == [len(prompt) + len(stopped.ids) - 1]
            start += emitted
    assert tried, "some draft inside an accepted run must be new, so that it can be made the stop token"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
def test_exactly_as_many_tokens_as_allowed(limit: int, caches: list[RowCache]) -> None:
    one = taught()
    expected = [tuple(greedy(one.target, prompt, limit)[len(prompt) :].tolist()) for prompt in prompts(*SOME)]
    assert [decoded.ids for decoded in alone(one, DecodeLimits(limit), *SOME)] == expected
    assert [cache.lengths.item() for cache in caches] == [length + limit - 1 for length in SOME]
    assert [decoded.ids for decoded in together(one, DecodeLimits(limit), *SOME)] == expected


@pytest.mark.parametrize("left", [1, 2, 3])
def test_no_position_past_the_targets_last(left: int) -> None:
    one = toy(1, model=llama(max_position_embeddings=10 + left))
    seen: list[int] = []
    rotary = one.target.model.get_decoder().rotary_emb
    rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int(kwargs.get("position_ids", args[-1]).max())), with_kwargs=True
    )
    decoded = together(one, DecodeLimits(50), 10, 4)
    assert [len(row.ids) for row in decoded] == [left, 6 + left]
    assert max(seen) < 10 + left
    with pytest.raises(ConfigMismatch, match=rf"prompt has {10 + left} tokens, the target {10 + left} positions"):
        together(one, DecodeLimits(50), 10 + left)


def test_an_empty_prompt_is_refused() -> None:
    one = toy()
    with pytest.raises(ConfigMismatch, match="prompt has 0 tokens"):
        plain(one.target, torch.zeros(0, dtype=torch.long), DecodeLimits(3), GREEDY, SeededDice(0))


def test_rejected_drafts_leave_the_cache() -> None:
    """Prompt 4, block 4, 1 draft accepted: 4 + 1 + 1 cached positions, and what follows is as without speculation."""
    one = toy()
    (prompt,) = prompts(4)
    cache = RowCache(one.target, [prompt])
    logits, _ = cache.prefill()
    first = int(logits[0].argmax())
    right = greedy(one.target, prompt, 3)[5:].tolist()
    block = torch.tensor([[first, right[0], (right[1] + 1) % 20, 7]])
    cache.extend(block)
    cache.keep([2], 4)
    assert cache.lengths.tolist() == [6]
    assert {layer.keys.shape[2] for layer in cache._cache.layers} == {6}
    after, _ = cache.extend(torch.tensor([[right[1]]]))
    text = torch.cat([prompt, torch.tensor([first, *right[:2]])])
    with torch.no_grad():
        expected = one.target.model(text[None]).logits[0, -1]
    torch.testing.assert_close(after[0, 0], expected, rtol=0, atol=1e-12)


def test_rows_that_keep_different_numbers() -> None:
    """After any ragged history, the logits of every row are those of its own text alone."""
    one = toy()
    texts = prompts(3, 7, 1)
    generator = torch.Generator().manual_seed(1)
    cache = RowCache(one.target, texts)
    cache.prefill()
    for _ in range(6):
        block = torch.randint(4, 20, (len(texts), 5), generator=generator)
        logits, features = cache.extend(block)
        for row, text in enumerate(texts):
            whole = torch.cat([text, block[row]])
            with torch.no_grad():
                expected = one.target.model(whole[None]).logits[0, len(text) :]
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-12)
            assert torch.equal(features[row], one.target.features(whole[None])[0, len(text) :])
        counts = torch.randint(1, 6, (len(texts),), generator=generator).tolist()
        texts = [torch.cat([text, block[row, : counts[row]]]) for row, text in enumerate(texts)]
        cache.keep(counts, 5)
        assert cache.lengths.tolist() == [len(text) for text in texts]
        if len(texts) == 3 and len(texts[0]) > 9:
            cache.select([0, 2])
            texts = [texts[0], texts[2]]
    assert len(texts) == 2


def test_a_target_whose_cache_cannot_be_cropped_is_refused() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, max_position_embeddings=64,
    )  # fmt: skip
    one = toy(model=Qwen3NextForCausalLM(config), init="random", dtype=torch.float32)
    (prompt,) = prompts(5)
    assert len(plain(one.target, prompt, DecodeLimits(3), GREEDY, SeededDice(0)).ids) == 3
    with pytest.raises(TargetMismatch, match=r"Qwen3NextForCausalLM keeps states .*LinearAttention.*target alone"):
        alone(one, DecodeLimits(3), 5)


@pytest.mark.parametrize("window", [4, 7])
def test_window_layers_keep_what_a_row_still_needs(window: int) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=window, initializer_range=0.15,
    )  # fmt: skip
    one = toy(model=MistralForCausalLM(config), block_size=5)
    expected = [tuple(greedy(one.target, prompt, 25)[len(prompt) :].tolist()) for prompt in prompts(*SOME)]
    assert [decoded.ids for decoded in alone(one, DecodeLimits(25), *SOME)] == expected
    assert [decoded.ids for decoded in together(one, DecodeLimits(25), *SOME)] == expected
    assert len({decoded.accepted for decoded in together(one, DecodeLimits(25), *SOME)}) > 1


def test_the_next_draft_is_one_made_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's context holds the target's features of accepted tokens only, never of its own guesses."""
    one = taught()
    (prompt,) = prompts(6)
    made: list[tuple[int, torch.Tensor]] = []

    def recorded(drafter: Any, ends: Any, context: Any, tokens: list[int], anchors: list[int]) -> torch.Tensor:
        logits = draft_logits(drafter, ends, context, tokens, anchors)
        made.append((anchors[0], logits[0]))
        return logits

    monkeypatch.setattr(dflash.decoding.decode, "draft_logits", recorded)
    (decoded,) = alone(one, DecodeLimits(30), 6)
    assert any(0 < count < 3 for count in decoded.accepted)
    text = torch.cat([prompt, torch.tensor(decoded.ids)])
    for anchor, logits in made:
        context = one.drafter.context(one.target.features(text[None, :anchor]))
        with torch.no_grad():
            expected = draft_logits(one.drafter, one.ends, context, [int(text[anchor])], [anchor])[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


def test_a_common_prefix_changes_nothing() -> None:
    one = taught()
    (first,) = prompts(9)
    second = torch.cat([first[:6], torch.tensor([8, 5, 11])])
    cold = speculate(one.target, one.drafter, one.ends, [second], DecodeLimits(20), GREEDY, [SeededDice(0)])
    for asked, at in (([first, second], 1), ([second, first], 0), ([second, second], 1)):
        both = speculate(one.target, one.drafter, one.ends, asked, DecodeLimits(20), GREEDY, seeded(0, 2, "cpu"))
        assert answers(both)[at] == answers(cold)[0]
    again = speculate(one.target, one.drafter, one.ends, [second], DecodeLimits(20), GREEDY, [SeededDice(0)])
    assert answers(again) == answers(cold)


def test_slot_k_of_a_block_is_the_draft_of_token_anchor_plus_k() -> None:
    """The three drafts of a block of 4 are the tokens behind its anchor: slot 0 shows the anchor's own."""
    one = taught()
    right = {-1: 0, 0: 0, 1: 0}
    for prompt in prompts(6, 6, seed=5):
        text = greedy(one.target, prompt, 40)
        context = one.drafter.context(one.target.features(text[None]))
        for anchor in range(6, 41):
            with torch.no_grad():
                drafts = draft_logits(one.drafter, one.ends, context, [int(text[anchor])], [anchor])[0].argmax(-1)
            assert drafts.shape == (3,)
            for shift in right:
                expected = text[anchor + 1 + shift : anchor + 4 + shift]
                right[shift] += int((drafts == expected)[expected != expected.roll(1)].sum())
    assert right[0] > 3 * max(right[-1], right[1]), "the drafter has learned these very texts"

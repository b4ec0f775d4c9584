"""What a server answers over OpenAI's protocol: texts, tokens, and by round how many drafts were accepted.

llama.cpp says in each streamed chunk how many tokens, drafts and accepted drafts there have been so far. The chunks of
one target pass have one time, so a pass is what lies between two times.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAI

from dflash.decoding.tau import RowWalk

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Spelled:
    """A greedy answer token by token: ids, bytes, and how far the best logarithm of probability is above the second."""

    ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A greedy answer as it comes: its text, its passes, its time without that of the prompt."""

    text: str
    finish: str
    tokens: int
    seconds: float
    walk: RowWalk


class Client:
    """Asks one server, greedily, with prompts as ids."""

    def __init__(self, url: str, model: str = "target") -> None:
        self._options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        self._options["timeout"] = TIMEOUT_S
        self._client, self._model = OpenAI(**self._options), model

    def spell(self, prompt: Sequence[int], max_tokens: int) -> Spelled:
        """An answer with its ids; only a server without a drafter gives the probabilities of every token."""
        more = {"logprobs": 2, "extra_body": {"cache_prompt": False}}
        answer = self._client.completions.create(**self._body(prompt, max_tokens), **more)
        entries = answer.choices[0].logprobs.content
        return Spelled(
            tuple(entry["id"] for entry in entries),
            tuple(bytes(entry["bytes"]) for entry in entries),
            tuple(_gap(entry["top_logprobs"]) for entry in entries),
        )

    def stream(
        self, prompt: Sequence[int], max_tokens: int, stop: str | None = None, *, is_endless: bool = False
    ) -> Streamed:
        """An answer as it comes, up to a text that it may not hold; an endless one has no stop token."""
        extra = {"cache_prompt": False, "timings_per_token": True, "ignore_eos": is_endless}
        body = self._body(prompt, max_tokens) | ({} if stop is None else {"stop": [stop]})
        text, finish, times = "", "", []
        for chunk in self._client.completions.create(**body, stream=True, extra_body=extra):
            for choice in chunk.choices:
                text, finish = text + choice.text, choice.finish_reason or finish
            times.append(chunk.timings)
        last = times[-1]
        return Streamed(text, finish, last["predicted_n"], last["predicted_ms"] / 1e3, walk_of(times))

    def at_once(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
        """The texts of prompts that are asked together."""

        async def ask() -> list[str]:
            async with AsyncOpenAI(**self._options) as client:
                extra = {"cache_prompt": False}
                bodies = [self._body(prompt, max_tokens) for prompt in prompts]
                answers = await asyncio.gather(
                    *(client.completions.create(**body, extra_body=extra) for body in bodies)
                )
            return [answer.choices[0].text for answer in answers]

        return asyncio.run(ask())

    def close(self) -> None:
        """Let the connections go: a server waits for them."""
        self._client.close()

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}


def _gap(top: list[dict[str, Any]]) -> float:
    return float(top[0]["logprob"] - top[1]["logprob"]) if len(top) > 1 else float("inf")


def walk_of(times: Iterable[dict[str, Any]]) -> RowWalk:
    """The passes behind the prompt's own, from the timings of streamed chunks.

    A chunk may be missing where its tokens are no whole letter yet: a stretch that emitted more than its accepted
    drafts and one token was several passes.
    """
    passes: list[int] = []
    stretches: dict[float, tuple[int, int]] = {}
    for time in times:
        stretches[time["predicted_ms"]] = (time["predicted_n"], time.get("draft_n_accepted", 0))
    ends = list(stretches.values())
    for (tokens_before, accepted_before), (tokens, accepted) in itertools.pairwise(ends):
        emitted = tokens - tokens_before
        drafts = min(accepted - accepted_before, emitted)
        if emitted:
            passes += [drafts] + [0] * (emitted - drafts - 1)
    return RowWalk(ends[-1][0] - 1, tuple(passes))

"""Engine `transformers`: one copy of the target on a device, a batch of prompts in, their answers out.

Prompts are padded on the left. Every row draws from chance of its own, keyed by (seed, row, answer, position), by the
Gumbel-max rule: argmax(log p + g) has law p. So an answer does not depend on the rows beside it, nor on a resume.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
import xxhash
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers import GenerationConfig as HubGenerationConfig

from dflash.answers.dialogue import Dialogue, Reply, Request
from dflash.answers.parameters import GenerationConfig
from dflash.config import TargetConfig
from dflash.decoding.sampling import Sampling
from dflash.target.frozen import unknown_ids
from dflash.target.placement import Replica, replicas, visible
from dflash.target.sharding import device_map

WINDOW = 2048  # rows that are sorted by length before they are cut into batches


def devices(target: TargetConfig) -> list[Replica]:
    """The named devices of each replica, or all GPUs, or the CPU. Raises ConfigMismatch for one that is not there."""
    if target.devices == "auto":
        return [(device,) for device in visible()]
    return replicas(target.devices)


class Transformers:
    """A worker: answers a batch on the devices of one replica.

    `stopping` ends a batch early, whose answers are then worth nothing.
    """

    def __init__(
        self,
        target: TargetConfig,
        generation: GenerationConfig,
        stop_ids: Sequence[int],
        known: Collection[int],
        replica: Replica,
        longest: int,
        stopping: threading.Event,
    ) -> None:
        self._longest = longest
        self._device, self._generation, self._stop_ids = replica[0], generation, list(stop_ids)
        self._stopping = _Stopping(stopping)
        model = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision,
            dtype=getattr(torch, target.dtype),
            trust_remote_code=target.trust_remote_code,
            attn_implementation="sdpa",
            device_map=device_map(target, replica) if len(replica) > 1 else None,
        )
        self._model = (model if len(replica) > 1 else model.to(replica[0])).eval()
        # A model may come with sampling settings of its own, which would fill in whatever ours leave open.
        self._model.generation_config = HubGenerationConfig()
        unknown = unknown_ids(self._model, known)
        self._unknown = None if unknown is None else torch.nonzero(unknown).flatten().tolist()

    def __call__(self, requests: list[Request]) -> list[Reply]:
        """One reply a request, in their order."""
        lengths = [len(request.ids) for request in requests]
        batches = list(cut(lengths, self._generation, self._longest))
        replies = [reply for batch in batches for reply in self._batch([requests[i] for i in batch])]
        order = [index for batch in batches for index in batch]
        return [reply for _, reply in sorted(zip(order, replies, strict=True), key=itemgetter(0))]

    def _batch(self, requests: list[Request]) -> list[Reply]:
        width = max(len(request.ids) for request in requests)
        ids = torch.zeros((len(requests), width), dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            seen[row, width - len(request.ids) :] = 1
        limit = _room(width, self._generation, self._longest)
        settings = HubGenerationConfig(
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=self._stop_ids,
            pad_token_id=self._stop_ids[0],
            suppress_tokens=self._unknown,
        )
        out = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=seen.to(self._device),
            generation_config=settings,
            logits_processor=self._chance(requests),
            stopping_criteria=[self._stopping],
        )
        return [self._reply(row) for row in out[:, width:].tolist()]

    def _chance(self, requests: list[Request]) -> LogitsProcessorList:
        given = self._generation
        if given.temperature == 0.0:
            return LogitsProcessorList()
        sampling = Sampling(given.temperature, given.top_p, given.top_k)
        return LogitsProcessorList([_Gumbel(sampling, given.seed, requests, self._device)])

    def _reply(self, ids: list[int]) -> Reply:
        stop = next((i for i, identity in enumerate(ids) if identity in self._stop_ids), None)
        return Reply(ids, "length", "generated") if stop is None else Reply(ids[: stop + 1], "stop", "generated")


class _Stopping(StoppingCriteria):  # type: ignore[misc]
    """All rows are done once the event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Any, **kwargs: Any) -> Bool[Tensor, " B"]:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class _Gumbel(LogitsProcessor):  # type: ignore[misc]
    """Turns the greedy choice into a draw from the law."""

    def __init__(self, sampling: Sampling, seed: int, requests: list[Request], device: torch.device) -> None:
        self._sampling = sampling
        keys = [
            xxhash.xxh3_64_intdigest(f"{seed} {request.row} {request.answer}".encode()) >> 1 for request in requests
        ]
        self._dice = [torch.Generator(device).manual_seed(key) for key in keys]

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        law = self._sampling.law(scores)
        noise = torch.empty_like(law)
        for row, dice in zip(noise, self._dice, strict=True):
            row.exponential_(generator=dice)
        return law.log() - noise.log()  # −log of an exponential is Gumbel


def cut(lengths: Sequence[int], generation: GenerationConfig, longest: int) -> Iterator[list[int]]:
    """Batches of prompts by their numbers: of about equal length, with equal room for an answer, not over the limit."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        room = _room(length, generation, longest)
        is_full = (len(batch) + 1) * (length + room) > generation.tokens_per_batch
        if batch and (is_full or room != _room(lengths[batch[0]], generation, longest)):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def by_length(dialogues: Iterable[Dialogue], generation: GenerationConfig, longest: int) -> Iterator[list[Dialogue]]:
    """Windows of rows cut into batches by their first prompts."""
    waiting = iter(dialogues)
    while window := list(islice(waiting, WINDOW)):
        lengths = [len(dialogue.request.ids) if dialogue.request else 0 for dialogue in window]
        for batch in cut(lengths, generation, longest):
            yield [window[index] for index in batch]


def _room(length: int, generation: GenerationConfig, longest: int) -> int:
    """Tokens that may follow a prompt."""
    return min(generation.max_new_tokens, longest - length)

"""Held-out prompts through a real server's HTTP interface, without and with the drafter: same texts, same τ as ours?

Our τ is teacher-forced on the server's own texts: same prompts, same lengths, same tokens. On greedy text it is what
our decoder accepts, pass for pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.decoding.tau import RowWalk, acceptance_by_slot, accepted_by_anchor, tau, walk
from dflash.errors import CheckpointCorrupt
from dflash.evaluation.comparison import finite
from dflash.evaluation.evaluate import held_out_prompts
from dflash.evaluation.report import write_report
from dflash.host import cpu_threads
from dflash.run_directory import CONFIG, ProgressFile
from dflash.serving.client import Client, Spelled, Streamed
from dflash.serving.server import program, running, settings_of
from dflash.target.frozen import Target
from dflash.training import checkpoint
from dflash.training.initial_drafter import load_drafter
from dflash.training.open_run import OpenRun, open_run

# Blocks of tokens go through other kernels than single ones: a server's sums differ by less than this, in ln of a
# probability. Where two tokens are nearer than that, either is the target's own.
NEAR_TIE = 1e-2
BEFORE_THE_END = 8  # tokens that the prompt at the context's end leaves free


@dataclass(frozen=True, slots=True)
class Asked:
    """What one server said: each prompt streamed, and the special cases."""

    streamed: list[Streamed]
    together: list[str]
    stopped: Streamed
    at_the_end: Streamed


def serve_check(path: Path, tokens: Path, config_name: str = CONFIG) -> None:
    """Write served.json of a run whose export has the layout gguf.

    Raises ConfigMismatch without such an export, CheckpointCorrupt without a checkpoint, ServerFailed, and what
    `open_run` does.
    """
    opened = open_run(path, tokens, config_name)
    exported = opened.run.read("export.json")
    settings = settings_of(exported)
    config = opened.config.evaluation
    prompts = [ids.tolist() for _, ids in held_out_prompts(opened, opened.store.rows(1))]
    longest = max(map(len, prompts)) + config.max_new_tokens + opened.shape.block_size
    settings = replace(settings, context=min(settings.context, -(-longest // 256) * 256), parallel=2)
    log = path / "logs" / "server.log"
    log.parent.mkdir(exist_ok=True)
    progress = ProgressFile(opened.run, "serve-check", 3 * len(prompts), "answers")
    with running(replace(settings, drafter=None), log) as server:
        client = Client(server.url)
        spelled = []
        for prompt in prompts:
            spelled.append(client.spell(prompt, config.max_new_tokens))
            progress.advance("the server's own tokens")
        stop = _a_stop(spelled[0])
        alone = ask(client, prompts, config.max_new_tokens, stop, settings.context, progress)
        client.close()
    with running(settings, log) as server:
        client = Client(server.url)
        helped = ask(client, prompts, config.max_new_tokens, stop, settings.context, progress)
        client.close()
    ours = our_walks(opened, prompts, spelled)
    value = facts(alone, helped, spelled, ours, opened.shape.block_size)
    told = {"server": program(), "threads": settings.threads, "target": str(settings.target)}
    told["checkpoint"] = exported["checkpoint"]
    opened.run.write("served.json", {**told, "max_new_tokens": config.max_new_tokens, **value})
    if (path / "evaluation.json").is_file():
        write_report(opened.run, opened.run.read("evaluation.json"))


def ask(
    client: Client, prompts: list[list[int]], max_tokens: int, stop: str, context: int, progress: ProgressFile
) -> Asked:
    """Each prompt streamed; two at once; one up to a text; one whose answer has no room."""
    streamed = []
    for prompt in prompts:
        streamed.append(client.stream(prompt, max_tokens))
        progress.advance(f"streamed, {streamed[-1].tokens} tokens")
    together = client.at_once([prompts[0], prompts[-1]], max_tokens)
    full = list(islice(cycle(prompts[0]), context - BEFORE_THE_END))
    return Asked(
        streamed,
        together,
        client.stream(prompts[0], max_tokens, stop),
        client.stream(full, max_tokens, is_endless=True),
    )


def _a_stop(spelled: Spelled) -> str:
    """A text that the first answer comes to about half way."""
    text = b"".join(spelled.pieces).decode(errors="ignore")
    middle = len(text) // 2
    return text[middle : middle + 4] or text


def our_walks(opened: OpenRun, prompts: list[list[int]], spelled: Sequence[Spelled]) -> list[RowWalk]:
    """What our drafter would have had accepted on the server's texts."""
    found = checkpoint.best(opened.run.checkpoints)
    if found is None:
        raise CheckpointCorrupt(f"{opened.run.checkpoints} holds no checkpoint. Train the run first.")
    torch.set_num_threads(cpu_threads())
    cpu = torch.device("cpu")
    target = Target.load(opened.config.target, opened.shape.taps, cpu)
    ends, drafter = target.ends(cpu), load_drafter(opened.shape, found).eval()
    walks = []
    for prompt, answer in zip(prompts, spelled, strict=True):
        ids = np.array([*prompt, *answer.ids], dtype=np.int64)
        mask = np.repeat([0, 1], [len(prompt), len(answer.ids)]).astype(np.uint8)
        features = target.features(torch.from_numpy(ids)[None])
        (accepted,) = accepted_by_anchor(drafter, ends, [(ids, mask)], features)
        walks.append(walk(mask, accepted))
    return walks


def facts(
    alone: Asked, helped: Asked, spelled: Sequence[Spelled], ours: list[RowWalk], block_size: int
) -> dict[str, Any]:
    """What served.json says."""
    parted = [parts_at(one, answer.text) for one, answer in zip(spelled, helped.streamed, strict=True)]
    near_ties = sum(at is not None and one.gaps[at] < NEAR_TIE for one, at in zip(spelled, parted, strict=True))
    identical = parted.count(None)
    walks = [one.walk for one in helped.streamed]
    there, here = finite(tau(walks).value), finite(tau(ours).value)
    first, last = alone.streamed[0].text, alone.streamed[-1].text
    plain, speculative = _tokens_per_s(alone.streamed), _tokens_per_s(helped.streamed)
    return {
        "prompts": len(spelled),
        "identical": identical,
        "near_ties": near_ties,
        "lossless": identical + near_ties == len(spelled),
        "tau": there,
        "tau_ours": here,
        "tau_difference": None if there is None or here is None else abs(there - here),
        "rounds": sum(len(one.accepted) for one in walks),
        "rounds_ours": sum(len(one.accepted) for one in ours),
        "accepted_by_slot": acceptance_by_slot(walks, block_size),
        "accepted_by_slot_ours": acceptance_by_slot(ours, block_size),
        "plain_tokens_per_s": plain,
        "speculative_tokens_per_s": speculative,
        "speedup": speculative / plain,
        "ended_by_stop_token": sum(one.finish == "stop" for one in helped.streamed),
        "cases": {
            "two prompts at once": helped.together == alone.together == [first, last],
            "a stop text": helped.stopped.text == alone.stopped.text and first.startswith(helped.stopped.text),
            "a prompt at the context's end": helped.at_the_end.text == alone.at_the_end.text
            and helped.at_the_end.finish == alone.at_the_end.finish == "length",
        },
        "convention": "greedy; held-out prompts as ids over HTTP, one at a time, streamed; τ as in decoding: the "
        "prompt's own pass is not a round; ours is teacher-forced on the server's own texts; seconds are the server's, "
        "without the prompt's pass",
    }


def parts_at(spelled: Spelled, text: str) -> int | None:
    """The token at which a text leaves an answer; None where it is the answer."""
    wanted, so_far = text.encode(), b""
    for index, piece in enumerate(spelled.pieces):
        so_far += piece
        if not wanted.startswith(so_far):
            return None if so_far.decode(errors="replace") == text else index
    return None if so_far == wanted else len(spelled.pieces) - 1


def _tokens_per_s(streamed: Sequence[Streamed]) -> float:
    return sum(one.tokens - 1 for one in streamed) / sum(one.seconds for one in streamed)

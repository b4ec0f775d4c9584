"""A target that talks: a byte tokenizer with turns, and random weights that say a few printable letters and end."""

import json
from pathlib import Path
from typing import Any

import torch
import toy

LETTERS = range(33, 127)


def make_talker(directory: Path, template: str = toy.PLAIN, merged: bytes = b"", padded: int = 0) -> Path:
    """A Llama whose every answer is of a few letters.

    Each of the `merged` bytes has a token with each letter behind it, which the target never says: its answers,
    tokenised from their text, are other ids. The head has `padded` more rows than there are ids, with large logits.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    merges = tuple((bytes([first]), bytes([second])) for first in merged for second in LETTERS)
    toy.save_tokenizer(directory, template, merges=merges)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263 + len(merges) + padded,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=toy.E,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        head = torch.zeros_like(model.lm_head.weight)
        head[list(LETTERS)] = torch.randn(len(LETTERS), 32)
        head[toy.E] = 3 * torch.randn(32)
        head[len(head) - padded :] = 9 * torch.randn(padded, 32)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(directory)
    return directory


def make_prompts(file: Path, count: int) -> Path:
    lines = [
        {"id": f"p{i}", "domain": "ab"[i % 2], "prompt": "tell me about " + "x" * (i * 7 % 23) + str(i)}
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def make_answers(
    path: Path, target: Path, source: Path | str, of_rows: dict[str, Any] | None = None, **given: Any
) -> Path:
    """A directory of answers with its config.json; keywords are fields of `generation`."""
    path.mkdir(parents=True, exist_ok=True)
    devices = given.pop("devices", ["cpu"])
    config = {
        "name": path.name,
        "home": str(path.parent),
        "rows": {"source": str(source)} | (of_rows or {}),
        "target": {"model": str(target), "dtype": "float32", "devices": devices},
        "generation": {"max_new_tokens": 12, "tokens_per_batch": 200} | given,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "answers.jsonl").read_text().splitlines()]


def greedy(target: Path, prompt: list[int], limit: int) -> list[int]:
    """One row, one token at a time, without any batch, cache or padding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = list(prompt)
    while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] not in (toy.E, toy.EOS)):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]

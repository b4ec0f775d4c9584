"""Parameters, rows and a target of a training that takes a few seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 61
EPOCHS = 4
TRAINING: dict[str, Any] = {
    "epochs": EPOCHS,
    "tokens_per_step": 64,
    "anchors": 8,
    "lr": 0.005,
    "checkpoint_every_steps": 20,
    "log_every_steps": 20,
}


def tiny_tree(directory: Path) -> dict[str, Any]:
    """Parameters of a training that takes about ten seconds on a tiny random target."""
    return {
        "name": "whole",
        "rows": {"source": str(make_rows(directory / "rows.jsonl")), "held_out": 0.1},
        "target": {"model": str(make_target(directory / "target")), "dtype": "float32"},
        "drafter": {"layers": 1, "block_size": 4, "taps": [1, 3], "mask_token_id": VOCABULARY - 1},
        "training": TRAINING,
        "evaluation": {"prompts": 2, "max_new_tokens": 8},
    }


def make_rows(path: Path) -> Path:
    """Counting sequences: a prompt of 4 tokens, then an answer that a drafter can learn."""
    with path.open("w") as stream:
        for row in range(300):
            length = 12 + row % 16
            ids = [2 + (7 * row + k) % (VOCABULARY - 4) for k in range(length)]
            stream.write(json.dumps({"input_ids": ids, "loss_mask": [int(k >= 4) for k in range(length)]}) + "\n")
    return path


def make_target(directory: Path) -> Path:
    """A random Llama of a few thousand weights; made in another process, so that this one needs no torch."""
    code = f"""
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
config = LlamaConfig(vocab_size={VOCABULARY}, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=None,
    eos_token_id=1, pad_token_id=None, tie_word_embeddings=True)
LlamaForCausalLM(config).save_pretrained({str(directory)!r})
words = {{f"w{{i}}": i for i in range({VOCABULARY})}}
tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained({str(directory)!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return directory

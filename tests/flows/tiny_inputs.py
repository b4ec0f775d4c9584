"""As much of rows and target as preparing needs; no weights, no torch."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY = 263


def write_rows(path: Path) -> Path:
    """A file of forty tokenised rows."""
    lines = [{"input_ids": [i % 250, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 1, 1]} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_target(directory: Path) -> Path:
    """A target's sizes and a word-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return directory

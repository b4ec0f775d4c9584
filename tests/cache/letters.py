"""Conversations for a stand-in of the tokenizer that gives one id a character."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from cache.config import Columns
from cache.errors import BadRow
from cache.ragged import Ragged, Tokenised, offsets_of
from cache.source.place import Place


class OneIdACharacter:
    """A question gives zeros in the mask, each answer to it ones and a row of its own; `bad` is refused by a rule."""

    stop_ids = (0,)
    turn_tokens: ClassVar[dict[str, int]] = {}

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[list[str]] = []  # the rows of each call, by name
        self.noted: Counter[str] = Counter()

    def begin(self) -> None: ...

    def tokenise(self, batch: pa.RecordBatch | pa.Table, columns: Columns, place: Place) -> Tokenised:
        self.calls.append([place(row) for row in range(batch.num_rows)])
        self.noted["shortened"] += 1
        rows: list[tuple[int, str, str]] = []
        bad = 0
        for index, value in enumerate(batch.column(columns.messages).to_pylist()):
            messages = json.loads(value) if isinstance(value, str) else value
            if messages[0]["content"] == "bad":
                bad += 1
                continue
            if messages[0]["content"] == "worse":
                raise BadRow(place(index))
            rows += [(index, messages[0]["content"], answer["content"]) for answer in messages[1:]]
        values = np.array([ord(letter) for _, question, answer in rows for letter in question + answer], dtype=np.int64)
        mask = np.array([bit for _, q, a in rows for bit in [0] * len(q) + [1] * len(a)], dtype=np.uint8)
        offsets = offsets_of(np.array([len(q) + len(a) for _, q, a in rows], dtype=np.int64))
        return Tokenised(
            tokens=Ragged(values, mask, offsets),
            row=np.array([index for index, _, _ in rows], dtype=np.int64),
            split_text=[question for _, question, _ in rows],
            dropped={"refused": bad} if bad else {},
        )


def conversation(question: str, *answers: str, domain: str = "a") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": answer} for answer in answers]
    return {"messages": messages, "domain": domain}


def put(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]

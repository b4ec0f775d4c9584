"""Conversations → token ids and loss mask: rendered once, tokenised once, the mask proved and compared with serving.

The rules (roles, drops, what is supervised) are written in docs/chat.md.
"""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt8
from numpy import ndarray

from cache.answers import SENTINEL, AnswerFinder, Document
from cache.config import Columns
from cache.conversation import Counts, read_conversations
from cache.errors import BadRow
from cache.message import Refused
from cache.ragged import Ragged, Tokenised, offsets_of
from cache.render import BadTemplate, Template
from cache.spelling import Encoded, Speller, byte_places

COMPARE_EVERY = 128  # rows: one of so many is compared with the ids that serving sees


class ChatTokenizer:
    """The target's tokenizer and chat template. `noted` counts what was changed without dropping a row."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        template: str | None,
        template_arguments: dict[str, Any],
        supervise: Literal["all", "last"],
    ) -> None:
        # Imported here: it pulls torch in, and everything but conversations does without.
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._supervise = supervise
        self.noted: Counter[str] = Counter()
        source = Path(template).read_text(encoding="utf-8") if template else self._tokenizer.get_chat_template()
        name = template or f"the chat template of {tokenizer}"
        self._template = Template(source, {**self._tokenizer.special_tokens_map, **template_arguments}, name)
        self._speller = Speller(self._tokenizer.backend_tokenizer)
        self.vocabulary = len(self._tokenizer)
        self.stop_ids, endings = self._probe(tokenizer)
        self._finder = AnswerFinder(
            self._template, tuple(self._tokenizer.convert_ids_to_tokens(self.stop_ids)), endings, self.noted
        )
        self._is_stop = np.zeros(self.vocabulary, dtype=bool)
        self._is_stop[list(self.stop_ids)] = True

    def _probe(self, tokenizer: Path) -> tuple[tuple[int, ...], set[str]]:
        text = self._template.render(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}], None
        )
        after = text.partition(SENTINEL)[2]
        ids = self._tokenizer(after, add_special_tokens=False)["input_ids"]
        stop = next((i for i in ids if i in self._tokenizer.added_tokens_decoder), None)
        stop_ids = {self._tokenizer.eos_token_id, stop} - {None}
        if stop is None:
            raise BadTemplate("no end of turn")
        token = self._tokenizer.convert_ids_to_tokens(stop)
        return tuple(sorted(stop_ids)), {after[: after.index(token) + len(token)]}

    def tokenise(self, batch: pa.RecordBatch | pa.Table, columns: Columns, first_row: int, source: str) -> Tokenised:
        """One batch of conversations as rows; several rows may come from one conversation."""
        counts = Counts(Counter(), self.noted)
        conversations = read_conversations(batch, columns, self._supervise, counts, first_row=first_row, source=source)
        documents: list[Document] = []
        split_text: list[str] = []
        for conversation in conversations:
            try:
                found = list(self._finder.documents(conversation))
            except Refused as refused:
                counts.dropped[str(refused)] += 1
                continue
            documents += found
            split_text += [conversation.split_text] * len(found)
        encoded = self._speller.encode([document.text for document in documents])
        self._compare(documents, encoded)
        mask, keep = self._mask(documents, encoded)
        lengths = np.add.reduceat(keep, encoded.offsets[:-1], dtype=np.int64) if documents else np.zeros(0, np.int64)
        return Tokenised(
            Ragged(encoded.ids[keep], mask[keep], offsets_of(lengths)),
            np.fromiter((document.index for document in documents), np.int64, len(documents)),
            split_text,
            dict(counts.dropped),
            sum(len(document.spans) for document in documents),
        )

    def _mask(self, documents: list[Document], encoded: Encoded) -> tuple[UInt8[ndarray, "T"], Bool[ndarray, "T"]]:
        num_spans = [len(document.spans) for document in documents]
        row = np.repeat(np.arange(len(documents)), num_spans)
        places = np.array([span for document in documents for span in _byte_spans(document)], np.int64).reshape(-1, 2)
        places += encoded.text_start[row][:, None]
        first = np.searchsorted(encoded.start, places[:, 0], side="left")
        last = np.searchsorted(encoded.end, places[:, 1], side="right")  # one past the answer's own last token
        stops = np.append(np.flatnonzero(self._is_stop[encoded.ids]), encoded.ids.size)
        stop = stops[np.searchsorted(stops, first)]
        if (stop >= encoded.offsets[row + 1]).any():
            raise BadTemplate(f"{self._template.name}: no end of turn after an answer")
        open_ = np.zeros(row.size, dtype=bool)
        unfinished = np.flatnonzero([not d.finished for d in documents])
        open_[np.cumsum(num_spans)[unfinished] - 1] = True
        end = np.where(open_, last, stop + 1)
        edges = np.zeros(encoded.ids.size + 1, dtype=np.int8)
        edges[first] += 1
        edges[end] -= 1
        mask = np.cumsum(edges[:-1], dtype=np.int8).view(np.uint8)
        cut = np.zeros(encoded.ids.size + 1, dtype=np.int8)
        cut[end[open_]] += 1
        cut[encoded.offsets[row[open_] + 1]] -= 1
        return mask, np.cumsum(cut[:-1]) == 0

    def _compare(self, documents: list[Document], encoded: Encoded) -> None:
        for i in range(0, len(documents), COMPARE_EVERY):
            document = documents[i]
            ids = self._tokenizer.apply_chat_template(
                document.messages,
                tools=document.tools,
                chat_template=self._template.source,
                tokenize=True,
                return_dict=False,
                **self._template.arguments,
            )
            ours = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
            if ids != ours:
                raise BadTemplate("differs")


def _byte_spans(document: Document) -> list[tuple[int, int]]:
    if document.text.isascii():
        return document.spans
    places = byte_places(document.text)
    return [(int(places[start]), int(places[end])) for start, end in document.spans]

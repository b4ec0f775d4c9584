"""Conversations → token ids and loss mask: rendered once, tokenised once, the mask proved and the ids compared.

The written rules (roles, drops, what is supervised) are in docs/chat.md.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from cache.chat.control_text import ControlText
from cache.chat.conversation import Conversation, ReadCounts, read_conversations
from cache.chat.find_answers import AnswerFinder, Document
from cache.chat.message import Refused
from cache.chat.supervise import AnswerSpans, supervise
from cache.chat.template import BadTemplate
from cache.chat.template_probe import probe, prove
from cache.chat.templates import load_templates
from cache.chat.token_places import Encoded, Speller, byte_places
from cache.config import Columns
from cache.errors import BadSource, CacheMismatch
from cache.ragged import Ragged, Tokenised, offsets_of
from cache.source.place import Place

COMPARE_EVERY = 128  # rows: one of so many is compared with the ids that serving sees


class ChatTokenizer:
    """The target's tokenizer and chat template.

    `noted` counts, over all batches, what was changed without dropping a conversation.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        template: str | None,
        template_arguments: dict[str, Any],
        supervise: Literal["all", "last"],
        trust_remote_code: bool = False,
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
        self._supervise = supervise
        self.noted: Counter[str] = Counter()
        self._templates = load_templates(self._tokenizer, tokenizer, template, template_arguments)
        self._speller = Speller(self._tokenizer.backend_tokenizer)
        self.vocabulary = self._speller.vocabulary
        found = probe(self._templates, self._tokenizer, tokenizer)
        self.stop_ids = found.stop_ids
        self.turn_tokens = found.turn_tokens
        self._stop_texts = found.stop_texts
        self._is_stop = np.zeros(self.vocabulary, dtype=bool)
        self._is_stop[list(found.stop_ids)] = True
        self._control = ControlText(set(found.control_texts))
        prove(self._templates, found.stop_texts)
        self.begin()

    def begin(self) -> None:
        """Forget what was learnt from the batches so far, so that those of a slice alone decide what it becomes."""
        templates = {id(one): one for one in (self._templates.plain, self._templates.with_tools)}
        finders = {name: AnswerFinder(one, self._stop_texts, self.noted) for name, one in templates.items()}
        self._finder, self._finder_with_tools = (
            finders[id(one)] for one in (self._templates.plain, self._templates.with_tools)
        )
        self._num_documents = 0

    def tokenise(self, batch: pa.RecordBatch | pa.Table, columns: Columns, place: Place) -> Tokenised:
        """One batch of conversations as rows; one conversation may give several. `place` names a row in errors."""
        counts = ReadCounts(Counter(), self.noted, Counter())
        documents: list[Document] = []
        split_text: list[str] = []
        for conversation in read_conversations(batch, columns, self._supervise, counts, place):
            try:
                finder = self._finder_with_tools if conversation.tools else self._finder
                found = list(finder.documents(self._without_control(conversation)))
            except Refused as refused:
                counts.dropped[str(refused)] += 1
                counts.count(conversation.messages, "dropped")
                continue
            if conversation.tools and finder.leaves_out_tools(conversation):
                self.noted["tools that the template leaves out"] += 1
            counts.messages["assistant", "supervised"] += len(conversation.answers)
            documents += found
            split_text += [conversation.split_text] * len(found)
        if not documents:
            return Tokenised(_no_rows(), np.zeros(0, np.int64), [], dict(counts.dropped), counts.by_role())
        encoded = self._speller.encode([document.pieces for document in documents])
        self._compare(documents, encoded, place)
        return Tokenised(
            self._supervised(documents, encoded, place),
            np.fromiter((document.index for document in documents), np.int64, len(documents)),
            split_text,
            dict(counts.dropped),
            counts.by_role(),
        )

    def _without_control(self, conversation: Conversation) -> Conversation:
        """The conversation, with any text that reads like a control token broken."""
        if not self._control.is_in(conversation.messages) and not self._control.is_in(conversation.tools):
            return conversation
        self.noted["text of a control token, tokenised apart"] += 1
        return replace(
            conversation,
            messages=self._control.broken(conversation.messages),
            tools=self._control.broken(conversation.tools),
            is_broken=True,
        )

    def _supervised(self, documents: list[Document], encoded: Encoded, place: Place) -> Ragged:
        spans = [_byte_spans(document) for document in documents]
        counts = np.fromiter(map(len, spans), np.int64, len(spans))
        row = np.repeat(np.arange(counts.size), counts)
        bounds = np.array([span for of_row in spans for span in of_row], np.int64).reshape(-1, 2)
        bounds += encoded.text_start[row][:, None]
        is_finished = np.fromiter((document.finished for document in documents), bool, len(documents))
        is_last = np.append(row[1:] != row[:-1], True)[: row.size]
        found = supervise(
            encoded, AnswerSpans(row, bounds[:, 0], bounds[:, 1], is_last & ~is_finished[row]), self._is_stop
        )
        if found.without_end.size:
            document = documents[row[found.without_end[0]]]
            name = self._templates.of(document.tools).name
            raise BadTemplate(
                f"{place(document.index)}: {name} writes no end of turn after an answer, in"
                f" {document.text[-200:]!r}; expected one of {', '.join(self._stop_texts)}. Correct it, or name another"
                " in rows.template."
            )
        whole = np.flatnonzero(
            np.add.reduceat(found.mask, encoded.offsets[:-1], dtype=np.int64) == np.diff(encoded.offsets)
        )
        if whole.size:
            document = documents[whole[0]]
            name = self._templates.of(document.tools).name
            raise BadTemplate(
                f"{place(document.index)}: {name} marks every token as an answer, in"
                f" {document.text[:200]!r}; expected a question before it. Correct it, or name another in"
                " rows.template."
            )
        if found.keep.all():
            return Ragged(encoded.ids, found.mask, encoded.offsets)
        lengths = np.add.reduceat(found.keep, encoded.offsets[:-1], dtype=np.int64)
        return Ragged(encoded.ids[found.keep], found.mask[found.keep], offsets_of(lengths))

    def _compare(self, documents: list[Document], encoded: Encoded, place: Place) -> None:
        """Refuse ids that are not those that serving sees, on a sample; a text that had to be broken is never equal."""
        first = -self._num_documents % COMPARE_EVERY
        self._num_documents += len(documents)
        for i in range(first, len(documents), COMPARE_EVERY):
            document = documents[i]
            if len(document.pieces) > 1:
                continue
            ours = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
            template = self._templates.of(document.tools)
            served = self._tokenizer.apply_chat_template(
                document.messages,
                chat_template=template.for_serving,
                tokenize=True,
                return_dict=False,
                **{**template.arguments, **({"tools": document.tools} if document.tools else {})},
            )
            if ours != served:
                at = next(
                    (k for k, (a, b) in enumerate(zip(ours, served, strict=False)) if a != b),
                    min(len(ours), len(served)),
                )
                raise CacheMismatch(
                    f"{place(document.index)}: token {at} is {ours[at : at + 8]}, but apply_chat_template gives"
                    f" {served[at : at + 8]} there. The drafter would learn other ids than serving sees. Report it as"
                    f" a fault of dflash-train, with the row and {template.name}."
                )


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer as transformers builds it. Never asks anything; raises BadSource where it cannot be used."""
    # Imported here because it pulls torch in, and only conversations need it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind: the files, a class of another version, or the model's own code
        if "trust_remote_code" in str(error):
            raise BadSource(
                f"the tokenizer in {directory} comes with code of its own, which is not run unasked. Read it, then set"
                " target.trust_remote_code=true."
            ) from None
        raise BadSource(
            f"the tokenizer in {directory} cannot be loaded by transformers ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Download its files again, or name another target.model."
        ) from error
    if not tokenizer.is_fast:
        raise BadSource(
            f"the tokenizer in {directory} has no tokenizer.json, expected one: it tells which text a token covers."
            " Save it again with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    return tokenizer


def _byte_spans(document: Document) -> list[tuple[int, int]]:
    text = document.text
    if text.isascii():
        return document.spans
    places = byte_places(text)
    return [(int(places[start]), int(places[end])) for start, end in document.spans]


def _no_rows() -> Ragged:
    return Ragged(np.zeros(0, np.uint32), np.zeros(0, np.uint8), np.zeros(1, np.int64))

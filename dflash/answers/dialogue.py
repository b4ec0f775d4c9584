"""One row on its way: turn by turn, the ids of what is asked, the ids that were answered, and the lines they become.

The next prompt is the ids so far and the ids of the template's further text, wherever the text of the longer
conversation begins with the text so far. Where it does not (a template that rewrites earlier answers, an answer that
ended in another way than the template writes), the conversation goes on in a row of its own, supervised on its last
answer alone. A conversation ends with its first answer that a limit cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache.chat.control_text import BREAK, ControlText
from cache.chat.find_answers import ANSWER
from cache.chat.message import Message, Refused
from cache.chat.template_probe import probe
from cache.chat.templates import load_templates
from cache.chat.tokenizer import load_tokenizer
from cache.config import RowsConfig
from dflash.answers.questions import Question

Finish = Literal["stop", "length"]
Origin = Literal["generated", "server", "tokenised"]  # of ids: this process, the server, or the text that it gave

_BESIDE = 8  # ids before an answer that are decoded with it: some tokenizers drop a blank at the start of a text


@dataclass(frozen=True, slots=True)
class Request:
    """One answer is due."""

    row: int
    answer: int  # number of it in its conversation
    messages: list[Message]
    tools: list[Message] | None
    ids: list[int]  # the prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What was answered, end of turn included where there is one. `prompt` is what a server saw where it says so."""

    ids: list[int]
    finish: Finish
    origin: Origin
    prompt: list[int] | None = None


class Prompter:
    """The target's tokenizer and chat template, used as `cache.chat.tokenizer` uses them for rows."""

    def __init__(self, tokenizer: Path, rows: RowsConfig, *, trust_remote_code: bool = False) -> None:
        self._tokenizer: Any = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
        self.templates = load_templates(self._tokenizer, tokenizer, rows.template, rows.template_arguments)
        self.known = frozenset(self._tokenizer.get_vocab().values())  # ids; the target's head may have more rows
        found = probe(self.templates, self._tokenizer, tokenizer)
        self.stop_ids = found.stop_ids
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        after = self._ids(self.templates.plain.render(said, None).partition(ANSWER)[2])
        self.end_of_turn = next(identity for identity in after if identity in found.stop_ids)
        self._control = ControlText(set(found.control_texts))

    def text(self, messages: list[Message], tools: list[Message] | None) -> str:
        """The prompt's text; `BREAK` stands where typed text that reads like a control token is cut."""
        template = self.templates.of(tools)
        return template.render(self._control.broken(messages), self._control.broken(tools), prompt=True)

    def ids(self, text: str) -> list[int]:
        return [identity for piece in text.split(BREAK) if piece for identity in self._ids(piece)]

    def decoded(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of ids as it stands behind others."""
        beside = list(before[-_BESIDE:])
        left, both = self._decode(beside), self._decode([*beside, *ids])
        return both.removeprefix(left) if both.startswith(left) else self._decode(ids)

    def answer_ids(self, text: str) -> list[int]:
        """The ids of an answer of which only the text is known: no text of it is a control token."""
        return self.ids(self._control.broken(text))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass(slots=True)
class _Part:
    """A row to be: ids and mask up to the last answer so far."""

    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    finish: list[Finish] = field(default_factory=list)
    origin: list[Origin] = field(default_factory=list)


class Dialogue:
    """A question and its answers so far. `request` is None once nothing more is to be asked."""

    def __init__(self, question: Question, prompter: Prompter, longest: int) -> None:
        self.question = question
        self._prompter = prompter
        self._longest = longest  # positions of the target: a prompt needs one less
        self._messages: list[Message] = []
        self._parts: list[_Part] = []
        self._text = ""  # of the prompt that was asked last
        self._text_so_far: str | None = None  # with its answer
        self._num_answers = 0
        self.refused = question.refused
        self.request: Request | None = None
        self._ask()

    def take(self, reply: Reply) -> None:
        """Note the answer that was due, and go on to the next."""
        request = self.request
        assert request is not None, "no answer is due"
        prompt = request.ids if reply.prompt is None else reply.prompt
        part = self._parts[-1] if self._parts else None
        if part is None or prompt[: len(part.ids)] != part.ids:
            part = _Part(self._messages)
            self._parts.append(part)
        asked = len(prompt) - len(part.ids)
        part.ids = [*prompt, *reply.ids]
        part.mask += [0] * asked + [1] * len(reply.ids)
        part.finish.append(reply.finish)
        part.origin.append(reply.origin)
        is_ended = reply.finish == "stop" and reply.ids[-1] in self._prompter.stop_ids
        answer = self._prompter.decoded(reply.ids[:-1] if is_ended else reply.ids, prompt)
        self._text_so_far = self._text + self._prompter.decoded(reply.ids, prompt)
        self._messages = [*self._messages, {"role": "assistant", "content": answer}]
        part.messages = self._messages
        self._num_answers += 1
        if reply.finish == "length":
            self.request = None
        else:
            self._ask()

    def refuse(self, reason: str) -> None:
        """Nothing more is asked; answers that are there stay."""
        self.refused, self.request = reason, None

    def lines(self) -> list[dict[str, Any]]:
        """The rows of this conversation: one, or more where it was not one text."""
        question = self.question
        beside = {"id": question.identity, "domain": question.domain, "tools": question.tools}
        return [
            {
                "row": question.row,
                **{name: value for name, value in beside.items() if value is not None},
                "messages": part.messages,
                "finished": part.finish[-1] == "stop",
                "finish_reasons": part.finish,
                "ids_from": part.origin[0] if len(set(part.origin)) == 1 else "tokenised",
                "question": question.key,
                "input_ids": part.ids,
                "loss_mask": part.mask,
            }
            for part in self._parts
        ]

    def _ask(self) -> None:
        if self._num_answers == len(self.question.stretches):
            self.request = None
            return
        self._messages = [*self._messages, *self.question.stretches[self._num_answers]]
        tools = self.question.tools
        try:
            self._text = self._prompter.text(self._messages, tools)
        except Refused as refused:
            self.refuse(str(refused))
            return
        if self._text_so_far is not None and self._text.startswith(self._text_so_far):
            ids = self._parts[-1].ids + self._prompter.ids(self._text[len(self._text_so_far) :])
        else:
            ids = self._prompter.ids(self._text)
        if len(ids) >= self._longest:
            self.refuse("prompt_too_long")
            return
        self.request = Request(self.question.row, self._num_answers, self._messages, tools, ids)

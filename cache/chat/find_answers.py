"""Where the answers stand in the rendered text of a conversation, proved by rendering.

Either the template marks them (`{% generation %}`), or the messages before an answer are rendered with the generation
prompt, and the messages up to it without: both must be how the full text begins. What follows the prompt, to the first
end of turn, is what the target writes. A template that writes an earlier answer in another way than it wrote it as the
last one fails that; then each answer gets a row of its own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cache.chat.control_text import BREAK
from cache.chat.conversation import Conversation
from cache.chat.message import Message, Refused
from cache.chat.role_order import Order, Shape, order_of, placeholders, shape_of
from cache.chat.template import BadTemplate, Span, Template

ANSWER = "\ufdd3"  # stands for an answer where we ask what the template writes around any
PROVE_EVERY = 128  # conversations: one of so many of a known shape is proved on its own
MAX_ORDERS = 4096
MAX_AROUND = 16


@dataclass(frozen=True, slots=True)
class Document:
    """The text of one row, and the characters of its supervised answers without their end of turn."""

    index: int  # of the conversation in the batch
    messages: list[Message]
    tools: list[Message] | None
    pieces: list[str]  # of the text: tokenised apart, so that a control token's text gives no control id
    spans: list[Span]
    finished: bool

    @property
    def text(self) -> str:
        return self.pieces[0] if len(self.pieces) == 1 else "".join(self.pieces)


class AnswerFinder:
    """`noted` counts what was found but dropped no row. It learns from each conversation how to read the next ones."""

    def __init__(self, template: Template, stop_texts: tuple[str, ...], noted: Counter[str]) -> None:
        self._template = template
        self._stop_texts = stop_texts
        self._noted = noted
        self._around: dict[tuple[str, str], None] = {}  # what the template was seen to write around an answer, in order
        self._seen: set[Order] = set()
        self._shapes: dict[Order, Shape | None] = {}
        self._rewritten: set[Order] = set()  # orders of which each answer gets a row of its own
        self._num_by_shape = 0
        self._supplies: dict[bool, str] = {}  # by whether a row has tools

    def documents(self, conversation: Conversation) -> Iterator[Document]:
        """One document of the whole conversation, or one for each answer if the template rewrites earlier ones."""
        messages, tools = conversation.messages, conversation.tools
        if self._template.marks_answers:
            text, marked = self._template.render_marked(messages, tools)
            supplied = self._supplied(tools)
            marked = [(start + len(supplied) * text.startswith(supplied, start, end), end) for start, end in marked]
            chosen = _chosen(conversation, text, marked)
            self._note_unwritten(conversation, text)
            self._note_unmarked(conversation, text, chosen)
            yield _document(conversation, text, chosen)
            return
        order = order_of(messages, conversation.answers) if tools is None else None
        if order in self._rewritten:
            yield from self._one_an_answer(conversation)
            return
        text = self._template.render(messages, tools)
        shape = self._shape(order) if order else None
        spans = shape.spans(messages, text) if shape else None
        if spans is not None:
            self._num_by_shape += 1
            if self._num_by_shape % PROVE_EVERY == 0 and self._proved(conversation, text) != spans:
                raise BadTemplate(
                    f"{self._template.name} writes another generation prompt for what is said in {text[-200:]!r} than"
                    " for other words. Mark its answers with {% generation %}, or name another in rows.template."
                )
        else:
            self._note_unwritten(conversation, text)
            spans = self._proved(conversation, text)
        if spans is not None:
            yield _document(conversation, text, spans)
        elif len(conversation.answers) == 1:
            raise Refused("answer_not_after_prompt")
        else:
            yield from self._one_an_answer(conversation)

    def leaves_out_tools(self, conversation: Conversation) -> bool:
        """Whether the template writes nothing of a row's tools."""
        try:
            return self._template.render(conversation.messages, None) == self._template.render(
                conversation.messages, conversation.tools
            )
        except Refused:  # it wants them
            return False

    def _supplied(self, tools: list[Message] | None) -> str:
        """What marks enclose though the generation prompt writes it, such as an empty think block: asked once."""
        if (tools is not None) not in self._supplies:
            asked: list[Message] = [{"role": "user", "content": ANSWER}]
            prompt = self._template.render(asked, tools, prompt=True)
            text, marked = self._template.render_marked([*asked, {"role": "assistant", "content": ANSWER}], tools)
            start = marked[-1][0] if marked else len(prompt)
            self._supplies[tools is not None] = prompt[start:] if text.startswith(prompt) else ""
        return self._supplies[tools is not None]

    def _note_unwritten(self, conversation: Conversation, text: str) -> None:
        """Count what is asked and is not in the text: some templates write system text in the first place only."""
        for message in conversation.messages:
            role, said = message["role"], message.get("content", "").strip()
            if role in ("system", "user") and said not in text and _squashed(said) not in _squashed(text):
                self._noted[f"{role} text that the template leaves out"] += 1

    def _note_unmarked(self, conversation: Conversation, text: str, spans: list[Span]) -> None:
        """Marked text is taken as it is, but what it lacks of its message is counted."""
        if len(spans) != len(conversation.answers):
            return
        for answer, (start, end) in zip(conversation.answers, spans, strict=True):
            message, written = conversation.messages[answer], text[start:end]
            if any(call["function"]["name"] not in written for call in message.get("tool_calls", ())):
                self._noted["tool call that the template leaves out"] += 1
            reasoning = _squashed(message.get("reasoning_content", ""))
            if reasoning and reasoning not in _squashed(written):
                self._noted["reasoning that the template leaves out"] += 1

    def _one_an_answer(self, conversation: Conversation) -> Iterator[Document]:
        self._noted["rewritten by the template, so one row an answer"] += 1
        for answer in conversation.answers:
            is_last = answer + 1 == len(conversation.messages)
            turns = conversation.messages[: answer + 1]
            finished = conversation.finished or not is_last
            yield from self.documents(replace(conversation, messages=turns, answers=(answer,), finished=finished))

    def _proved(self, conversation: Conversation, text: str) -> list[Span] | None:
        """The spans of all answers in this text of all messages; None where one has no proof."""
        spans = []
        for answer in conversation.answers:
            span = self._span(conversation.messages, conversation.tools, text, answer)
            if span is None:
                return None
            spans.append(span)
        return spans

    def _shape(self, order: Order) -> Shape | None:
        """The shape of an order of roles, from the second conversation of that order on."""
        if order not in self._shapes:
            if order not in self._seen:
                if len(self._seen) < MAX_ORDERS:
                    self._seen.add(order)
                return None
            placed = Conversation(0, placeholders(order), order[1], None, True, "")
            text = self._template.render(placed.messages, None)
            spans = self._proved(placed, text)
            self._shapes[order] = None if spans is None else shape_of(order, text, spans)
            if spans is None and len(order[1]) > 1:
                self._rewritten.add(order)
        return self._shapes[order]

    def _span(self, messages: list[Message], tools: list[Message] | None, text: str, answer: int) -> Span | None:
        """The characters of one answer; None where the text of all messages does not begin as those up to it do."""
        prompt = self._template.render(messages[:answer], tools, prompt=True)
        if not text.startswith(prompt):
            return None
        is_last = answer + 1 == len(messages)
        closed = text if is_last else self._template.render(messages[: answer + 1], tools)
        start = len(prompt)
        stops = [(at, stop) for stop in self._stop_texts if (at := closed.find(stop, start)) >= 0]
        if not stops:
            return None
        end, stop = min(stops)
        if not is_last and not text.startswith(closed[: end + len(stop)]):
            return None
        message, body = messages[answer], text[start:end]
        content = message.get("content", "")
        is_plain = message.keys() == {"role", "content"}
        if is_plain and body == content:
            return start, end
        for before, after in self._around:
            if is_plain and body == before + content:  # what was trimmed off is written again: the answer's own
                return _trimmed(start, end, before, "")
            if is_plain and body == before + content + after:
                return _trimmed(start, end, before, after)
        before, after = self._written_around(messages[:answer], tools, prompt, stop)
        is_all = is_plain and body == before + content
        span = _trimmed(
            start,
            end,
            before if body.startswith(before) else "",
            after if body.endswith(after) and not is_all else "",
        )
        return span if self._holds(message, text[span[0] : span[1]], prompt) else None

    def _written_around(
        self, messages: list[Message], tools: list[Message] | None, prompt: str, stop: str
    ) -> tuple[str, str]:
        """What the template writes between the generation prompt and an answer, and between it and its end of turn."""
        text = self._template.render([*messages, {"role": "assistant", "content": ANSWER}], tools)
        before, found, after = text.partition(ANSWER)
        if not found or not before.startswith(prompt):
            return "", ""
        around = before[len(prompt) :], after[: max(0, after.find(stop))]
        if len(self._around) < MAX_AROUND:
            self._around[around] = None
        return around

    def _holds(self, message: Message, body: str, prompt: str) -> bool:
        """Whether this text is the message, all of it and in order: the same but for blanks and the marks of parts."""
        written = _squashed(body)
        content = _squashed(message.get("content", ""))
        reasoning = _squashed(message.get("reasoning_content", ""))
        calls = [_squashed(call["function"]["name"]) for call in message.get("tool_calls", ())]
        if not calls and written == content:
            if reasoning:
                self._noted["reasoning that the template leaves out"] += 1
            return True
        if not calls and not reasoning:
            # Its beginning may be what the generation prompt writes, such as an empty think block.
            return (
                bool(written) and content.endswith(written) and (_squashed(prompt).endswith(content[: -len(written)]))
            )
        at = 0
        for part in (reasoning, content, *calls):
            at = written.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True


def _document(conversation: Conversation, text: str, spans: list[Span]) -> Document:
    pieces = [text]
    if conversation.is_broken:
        spans = [(start - text.count(BREAK, 0, start), end - text.count(BREAK, 0, end)) for start, end in spans]
        pieces = [piece for piece in text.split(BREAK) if piece]
    return Document(conversation.index, conversation.messages, conversation.tools, pieces, spans, conversation.finished)


def _chosen(conversation: Conversation, text: str, marked: list[Span]) -> list[Span]:
    """The marked spans of the answers that are supervised; an unfinished answer's ends with its own text."""
    assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if len(marked) == len(assistant):
        marked = [span for i, span in zip(assistant, marked, strict=True) if i in conversation.answers]
    elif not marked or conversation.answers != tuple(assistant):
        raise Refused("template_marks_other_answers")
    if not conversation.finished:
        start, end = marked[-1]
        content = conversation.messages[-1].get("content", "")
        for written in (content, content.strip()):
            if written and (at := text.find(written, start, end)) >= 0:
                marked[-1] = (start, at + len(written))
                break
        else:
            raise Refused("answer_not_as_written")
    return marked


def _trimmed(start: int, end: int, before: str, after: str) -> Span:
    """Without what the template supplies before an answer: a header, an empty think block. Blanks alone, and what
    follows the answer up to its end of turn, the target has to write itself."""
    return start + len(before) if before.strip() else start, end - len(after)


def _squashed(text: str) -> str:
    return "".join(text.split())

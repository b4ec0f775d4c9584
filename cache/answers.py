"""Where the answers stand in the rendered text of a conversation, proved by rendering.

Either the template marks them (`{% generation %}`), or the messages before an answer are rendered with the generation
prompt, and the messages up to it without: both must be how the full text begins. What follows the prompt, to the first
end of turn, is what the target writes. A template that writes an earlier answer in another way than it wrote it as the
last one fails that; then each answer gets a row of its own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cache.control import BREAK
from cache.conversation import Conversation
from cache.message import Message, Refused
from cache.render import Span, Template

ANSWER = "\ufdd3"  # stands for an answer where we ask what the template writes around any


@dataclass(frozen=True, slots=True)
class Document:
    """One row to be: its text, and the characters of its supervised answers without their end of turn."""

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
    """`noted` counts what was found but dropped no row."""

    def __init__(self, template: Template, stop_texts: tuple[str, ...], noted: Counter[str]) -> None:
        self._template = template
        self._stop_texts = stop_texts
        self._noted = noted
        self._around: set[tuple[str, str]] = set()  # what the template was seen to write around an answer

    def documents(self, conversation: Conversation) -> Iterator[Document]:
        """One document of the whole conversation, or one for each answer if the template rewrites earlier ones."""
        messages, tools = conversation.messages, conversation.tools
        if self._template.marks_answers:
            text, marked = self._template.render_marked(messages, tools)
            yield _document(conversation, messages, text, _chosen(conversation, text, marked))
            return
        text = self._template.render(messages, tools)
        spans = [self._span(messages, tools, text, answer) for answer in conversation.answers]
        found = [span for span in spans if span is not None]
        if len(found) == len(spans):
            yield _document(conversation, messages, text, found)
            return
        self._noted["rewritten by the template, so one row an answer"] += 1
        for answer in conversation.answers:
            turns = messages[: answer + 1]
            own = text if answer + 1 == len(messages) else self._template.render(turns, tools)
            span = self._span(turns, tools, own, answer)
            if span is None:
                raise Refused("answer_not_after_prompt")
            yield _document(conversation, turns, own, [span])

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
            if is_plain and body == before + content + after:
                return _trimmed(start, end, before, after)
        before, after = self._written_around(messages[:answer], tools, prompt, stop)
        span = _trimmed(
            start,
            end,
            before if body.startswith(before) and "reasoning_content" not in message else "",
            after if body.endswith(after) else "",
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
        self._around.add(around)
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


def _document(conversation: Conversation, messages: list[Message], text: str, spans: list[Span]) -> Document:
    finished = conversation.finished or len(messages) < len(conversation.messages)
    pieces = [text]
    if BREAK in text:
        spans = [(start - text.count(BREAK, 0, start), end - text.count(BREAK, 0, end)) for start, end in spans]
        pieces = [piece for piece in text.split(BREAK) if piece]
    return Document(conversation.index, messages, conversation.tools, pieces, spans, finished)


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

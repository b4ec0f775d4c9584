"""Where the answers stand in the rendered text of a conversation, proved by rendering.

Either the template marks them (`{% generation %}`), or every prefix of the messages is rendered with the generation
prompt and must be how the full text begins: what follows the prompt is what the target writes. A template that writes
earlier turns in another way than it wrote them as answers fails that; then each answer gets a row of its own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cache.conversation import Conversation
from cache.message import Message, Refused
from cache.render import Span, Template

SENTINEL = "\ufdd3"  # stands for an answer where we ask what the template writes around it


@dataclass(frozen=True, slots=True)
class Document:
    """One row to be: its text and the characters of its supervised answers, without their end of turn."""

    index: int  # of the conversation in the batch
    messages: list[Message]
    tools: list[Message] | None
    text: str
    spans: list[Span]
    finished: bool


class AnswerFinder:
    """`endings`: what may stand between an answer and the text after its end of turn, learned from a probe."""

    def __init__(self, template: Template, stop_texts: tuple[str, ...], endings: set[str], noted: Counter[str]) -> None:
        self._template = template
        self._stop_texts = stop_texts
        self._endings = endings
        self._noted = noted

    def documents(self, conversation: Conversation) -> Iterator[Document]:
        """One document of the whole conversation, or one for each answer if the template rewrites earlier turns."""
        messages, tools = conversation.messages, conversation.tools
        if self._template.marks_answers:
            text, marked = self._template.render_marked(messages, tools)
            yield self._document(conversation, messages, text, self._chosen(conversation, text, marked))
            return
        text = self._template.render(messages, tools)
        spans = [self._span(messages, tools, text, answer) for answer in conversation.answers]
        found = [span for span in spans if span is not None]
        if len(found) == len(spans):
            yield self._document(conversation, messages, text, found)
            return
        for answer in conversation.answers:
            turns = messages[: answer + 1]
            own = text if answer + 1 == len(messages) else self._template.render(turns, tools)
            span = self._span(turns, tools, own, answer)
            if span is None:
                raise Refused("an answer that the chat template does not write as it is after its generation prompt")
            yield self._document(conversation, turns, own, [span])

    def _document(self, conversation: Conversation, messages: list[Message], text: str, spans: list[Span]) -> Document:
        finished = conversation.finished or len(messages) < len(conversation.messages)
        return Document(conversation.index, messages, conversation.tools, text, spans, finished)

    def _chosen(self, conversation: Conversation, text: str, marked: list[Span]) -> list[Span]:
        """The marked spans of the answers that are supervised; an unfinished one without what follows its text."""
        assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(marked) == len(assistant):
            marked = [span for i, span in zip(assistant, marked, strict=True) if i in conversation.answers]
        elif conversation.answers != tuple(assistant):
            raise Refused("a template that marks another number of answers than there are")
        if not conversation.finished and marked:
            start, end = marked[-1]
            content = conversation.messages[-1].get("content", "")
            place = text.find(content, start, end)
            if place < 0:
                raise Refused("an answer that the chat template does not write as it is")
            marked[-1] = (start, place + len(content))
        return [span for span in marked if span[0] < span[1]]

    def _span(self, messages: list[Message], tools: list[Message] | None, text: str, answer: int) -> Span | None:
        """The characters of one answer in the text of all messages; None where a prefix is not how the text begins."""
        prompt = self._template.render(messages[:answer], tools, prompt=True)
        if not text.startswith(prompt):
            return None
        message = messages[answer]
        start, end = len(prompt), len(prompt) + len(message.get("content", ""))
        if not (
            "content" in message
            and "tool_calls" not in message
            and text.startswith(message["content"], start)
            and (ending := next((e for e in self._endings if text.startswith(e, end)), None))
        ):
            found = self._between(messages, tools, text, answer, start)
            if found is None:
                return None
            start, end, ending = found
        if answer + 1 < len(messages):
            # The text of the messages up to this answer must be how the full text begins, its end of turn included.
            closed = self._template.render(messages[: answer + 1], tools)
            if not closed.startswith(text[: end + len(ending)]):
                return None
        return start, end

    def _between(
        self, messages: list[Message], tools: list[Message] | None, text: str, answer: int, start: int
    ) -> tuple[int, int, str] | None:
        """Start and end of an answer and its end of turn, by what the template writes around another answer."""
        message = messages[answer]
        other: list[Message] = [*messages[:answer], {"role": "assistant", "content": SENTINEL}, *messages[answer + 1 :]]
        before, found, after = self._template.render(other, tools).partition(SENTINEL)
        if not found or not before.startswith(text[:start]) or not text.endswith(after):
            return None
        end = len(text) - len(after)
        supplied = before[start:]
        # Blanks after the generation prompt are the target's to write; a header or an empty think block is supplied.
        if supplied.strip() and text.startswith(supplied, start):
            start += len(supplied)
        if end < start or not self._holds(message, text[start:end]):
            return None
        stops = [(at, stop) for stop in self._stop_texts if (at := after.find(stop)) >= 0]
        if not stops:
            return None
        at, stop = min(stops)
        return start, end, after[: at + len(stop)]

    def _holds(self, message: Message, body: str) -> bool:
        """Whether this text is the message: the same but for blanks, and where there is more than content, all of it."""
        written = _squashed(body)
        content = _squashed(message.get("content", ""))
        reasoning = _squashed(message.get("reasoning_content", ""))
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not calls and written == content:
            if reasoning:
                self._noted["reasoning that the chat template leaves out"] += 1
            return True
        if not calls and not reasoning:
            return False
        at = 0
        for part in (reasoning, content, *map(_squashed, calls)):
            at = written.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True


def _squashed(text: str) -> str:
    return "".join(text.split())

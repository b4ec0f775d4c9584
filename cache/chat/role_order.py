"""What a template writes around messages, by their roles alone: proved once, then a comparison of text a row.

Rendering every prefix of every conversation would cost more than tokenising. So the proof is done once for each order
of roles, with placeholders for what is said; a conversation whose own full text is that one with its own words in the
places is written the same way, and its answers stand where those words stand.
"""

from dataclasses import dataclass

from cache.chat.message import Message
from cache.chat.template import Span

Order = tuple[tuple[str, ...], tuple[int, ...]]  # roles, and positions of the supervised answers


@dataclass(frozen=True, slots=True)
class Shape:
    """The text of one order of roles: `around[0]`, first content, `around[1]`, second content, …"""

    around: tuple[str, ...]
    answers: tuple[tuple[int, int], ...]  # position of each answer, and how far its span begins before its content

    def spans(self, messages: list[Message], text: str) -> list[Span] | None:
        """The answers in the full text of these messages; None where it is not this shape."""
        parts = [self.around[0]]
        for message, after in zip(messages, self.around[1:], strict=True):
            parts += (message["content"], after)
        if "".join(parts) != text:
            return None
        spans = []
        at = done = 0
        for answer, lead in self.answers:
            at += sum(map(len, parts[done : 2 * answer + 1]))
            done = 2 * answer + 1
            spans.append((at - lead, at + len(parts[done])))
        return spans


def order_of(messages: list[Message], answers: tuple[int, ...]) -> Order | None:
    """The order of roles, where there is nothing but roles and text."""
    if any(len(message) != 2 or "content" not in message for message in messages):
        return None
    return tuple([message["role"] for message in messages]), answers


def placeholders(order: Order) -> list[Message]:
    return [{"role": role, "content": f"\ufdd4{i}\ufdd4"} for i, role in enumerate(order[0])]


def shape_of(order: Order, text: str, spans: list[Span]) -> Shape | None:
    """The shape that the rendered placeholders show; None where one is missing, repeated or moved."""
    around, rest, at = [], text, 0
    starts = []
    for message in placeholders(order):
        before, found, rest = rest.partition(message["content"])
        if not found or message["content"] in rest:
            return None
        around.append(before)
        starts.append(at + len(before))
        at = starts[-1] + len(message["content"])
    return Shape(
        (*around, rest),
        tuple((answer, starts[answer] - start) for answer, (start, _) in zip(order[1], spans, strict=True)),
    )

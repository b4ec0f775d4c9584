"""Text that reads like a control token: found in messages and broken, so that typing it never gives its id.

A control token is one that no text may produce: a special token, an end of turn, or a token by which the template opens
a turn. Others that a tokenizer has added (`<think>`, `<tool_call>`) are words of the target's own and stay whole.
"""

import re
from typing import Any

from cache.chat.message import Refused

BREAK = "\ufdd2"  # Unicode keeps it for a program's own use: here a text is cut before it is tokenised


class ControlText:
    """The texts of the control tokens."""

    def __init__(self, tokens: set[str]) -> None:
        # What all of them begin with, written first, lets the search skip through text without trying each.
        shared = _shared_beginning(min(tokens, default=""), max(tokens, default=""))
        rest = sorted((re.escape(token[len(shared) :]) for token in tokens), key=len, reverse=True)
        self._pattern = re.compile(f"{re.escape(shared)}(?:{'|'.join(rest)})" if tokens else "(?!)")

    def is_in(self, value: Any) -> bool:
        """Whether any text in these messages (or tools) holds one."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, dict):
            return any(map(self.is_in, value.values()))
        return isinstance(value, list) and any(map(self.is_in, value))

    def broken(self, value: Any) -> Any:
        """The same messages (or tools) with each such text broken between its first two characters."""
        if isinstance(value, str):
            if BREAK in value:
                raise Refused("noncharacter_beside_control_token")
            while (text := self._pattern.sub(_broken, value)) != value:  # one may hold another
                value = text
            return value
        if isinstance(value, dict):
            return {key: self.broken(item) for key, item in value.items()}
        return [self.broken(item) for item in value] if isinstance(value, list) else value


def _shared_beginning(first: str, last: str) -> str:
    """What all texts that sort between these two begin with."""
    differ = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:differ]


def _broken(match: re.Match[str]) -> str:
    text = match.group()
    if len(text) == 1:
        raise Refused("control_token_of_one_character")
    return text[0] + BREAK + text[1:]

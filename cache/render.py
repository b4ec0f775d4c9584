"""A chat template, compiled once: messages → text, and the spans that its `{% generation %}` blocks mark.

The environment is the one in which serving renders (sandboxed, blocks trimmed, loop controls, a plain `tojson`), so that
the text is the text that serving sees; `cache.chat` compares the two on a sample.
"""

import json
import re
from datetime import date
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cache.errors import CacheError
from cache.message import Message, Refused

# Unicode keeps these two for a program's own use, so no text may hold them; they survive any filter of a template.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"[{OPEN}{CLOSE}]")

Span = tuple[int, int]


class BadTemplate(CacheError):
    """The chat template cannot be used: it is no template, or its text does not hold what the messages say."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: puts marks around the block where `mark_generation` is set."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own protocol

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class Template:
    """A compiled template with the arguments that are the same for all rows."""

    def __init__(self, source: str, arguments: dict[str, Any], name: str) -> None:
        self.source = source
        self.name = name
        self.arguments = {key: value for key, value in arguments.items() if key != "strftime_now"}
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self.dates: dict[str, str] = {}  # format → text, of the day that the template asked for
        self._day = arguments.get("strftime_now")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadTemplate(
                f"{name}: not a Jinja template, line {error.lineno}: {error.message}. Correct it, or name another in"
                " rows.template."
            ) from None

    def render(self, messages: list[Message], tools: list[Message] | None, *, prompt: bool = False) -> str:
        """The text of these messages, with the generation prompt after it if `prompt`."""
        text = self._rendered(messages, tools, prompt)
        return _MARK.sub("", text) if self.marks_answers else text

    def render_marked(self, messages: list[Message], tools: list[Message] | None) -> tuple[str, list[Span]]:
        """The text of these messages and the spans of its `{% generation %}` blocks."""
        pieces = _MARK.split(marked := self._rendered(messages, tools, False))
        marks = _MARK.findall(marked)
        if marks != [OPEN, CLOSE] * (len(marks) // 2):
            raise Refused(f"text with U+{ord(OPEN):X} or U+{ord(CLOSE):X}, which are no characters")
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        return "".join(pieces), [(ends[i], ends[i + 1]) for i in range(1, len(pieces), 2)]

    def _rendered(self, messages: list[Message], tools: list[Message] | None, prompt: bool) -> str:
        try:
            return self._template.render(
                {
                    **self.arguments,
                    "messages": messages,
                    "tools": tools or self.arguments.get("tools"),
                    "documents": self.arguments.get("documents"),
                    "add_generation_prompt": prompt,
                }
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Refused(f"the chat template refuses it: {str(error)[:120]}") from None

    def _strftime_now(self, form: str) -> str:
        """The day as the template wants it written: a fixed one, since the same rows must give the same ids tomorrow."""
        if self._day is None:
            raise BadTemplate(
                f"{self.name} writes the day of today into every row, so that the same rows would give other ids"
                ' tomorrow. Fix the day: rows.template_arguments={"strftime_now": "2025-01-31"}, or the argument by'
                " which the template takes a date, such as date_string."
            )
        return self.dates.setdefault(form, date.fromisoformat(self._day).strftime(form))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

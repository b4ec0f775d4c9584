"""A chat template, compiled once: messages → text, and the spans that its `{% generation %}` blocks mark.

The environment is the one in which serving renders (sandboxed, blocks trimmed, loop controls, a plain `tojson`), so
that the text is the text that serving sees; `cache.chat.tokenizer` compares the two on a sample.
"""

import json
import re
import secrets
from datetime import date
from itertools import accumulate
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cache.chat.message import Message, Refused
from cache.errors import CacheError

# Marks around an answer; nobody can type them, since they are others in every process.
_SECRET = f"\ufdd0{secrets.token_hex(8)}"
_OPEN, _CLOSE = f"{_SECRET}[", f"{_SECRET}]"
_MARK = re.compile(rf"{_SECRET}([\[\]])")

Span = tuple[int, int]


class BadTemplate(CacheError):
    """The chat template cannot be used: it is no template, or its text does not hold what the messages say."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: puts marks around the block."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own protocol

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without its search for what templates read most: a key of a message, a fact about the loop.

    The sandbox asks a dict for an attribute first, which raises for every key, and inspects each value it hands out.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(("first", "last", "index", "index0"))


class Template:
    """A compiled template with the arguments that are the same for all rows."""

    def __init__(self, source: str, arguments: dict[str, Any], name: str, *, is_served: bool = False) -> None:
        self.source = source
        self.name = name
        self._is_served = is_served  # whether the tokenizer itself would choose this one
        self.arguments = {key: value for key, value in arguments.items() if key != "strftime_now"}
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._written: dict[str, str] = {}  # form → the day in it, as the template asked for
        self._day = arguments.get("strftime_now")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        names = {"raise_exception": _raise, "strftime_now": self._strftime_now, "tools": None, "documents": None}
        self._names: dict[str, Any] = {**environment.globals, **names, **self.arguments}
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
        parts = _MARK.split(self._rendered(messages, tools, False))
        pieces, sides = parts[::2], parts[1::2]
        if sides != ["[", "]"] * (len(sides) // 2):
            raise BadTemplate(f"{self.name}: generation blocks inside each other. Take one of them out.")
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), list(zip(ends[:-1:2], ends[1::2], strict=True))

    @property
    def for_serving(self) -> str | None:
        """The template for `apply_chat_template`, whose own day would be today's; None: it chooses its own."""
        if not self._written:
            return None if self._is_served else self.source
        days = json.dumps(self._written)
        return f"{{%- macro strftime_now(form) -%}}{{{{ {days}[form] }}}}{{%- endmacro -%}}{self.source}"

    def _rendered(self, messages: list[Message], tools: list[Message] | None, prompt: bool) -> str:
        # `shared`: the names are the whole context. Template.render would merge the globals into it for every text.
        names = {**self._names, "messages": messages, "add_generation_prompt": prompt}
        if tools:
            names["tools"] = tools
        try:
            return "".join(self._template.root_render_func(self._template.new_context(names, shared=True)))
        except BadTemplate:
            raise
        except Exception as error:  # whatever the template does with this conversation, the others go on
            raise Refused(f"template_refuses: {str(error)[:80] or type(error).__name__}") from None

    def _strftime_now(self, form: str) -> str:
        """The day in the form that the template asks for: a fixed one, since the same rows must give the same ids."""
        if self._day is None:
            raise BadTemplate(
                f"{self.name} writes the day of today into every row, so that the same rows would give other ids"
                ' tomorrow. Fix the day: rows.template_arguments={"strftime_now": "2025-01-31"}, or the argument by'
                " which the template takes a date, such as date_string."
            )
        return self._written.setdefault(form, date.fromisoformat(self._day).strftime(form))


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

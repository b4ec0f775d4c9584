"""What a tokenizer and a chat template make of a plain conversation: their stop ids and control tokens, or a refusal.

Asked once, before any row: a template that changes what people say, or that never ends a turn, is refused by name.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.chat.conversation import Conversation
from cache.chat.find_answers import ANSWER, AnswerFinder
from cache.chat.message import Message, Refused
from cache.chat.template import BadTemplate, Template
from cache.chat.templates import Templates

# Upper case, an ampersand and a quote: what a template that rewrites text would not leave alone.
QUESTION = "Is \"A\" < 'b' & é?"

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}


@dataclass(frozen=True, slots=True)
class Probe:
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    control_texts: frozenset[str]
    turn_tokens: dict[str, int]  # control tokens around any answer: text → id


def probe(templates: Templates, tokenizer: Any, directory: Path) -> Probe:
    """`tokenizer` is the one of transformers; `directory` may hold a generation_config.json with more stop ids."""
    found = [_probe(template, tools, tokenizer, directory) for template, tools in _each(templates)]
    stops = {identity: text for one in found for identity, text in zip(one.stop_ids, one.stop_texts, strict=True)}
    return Probe(
        tuple(sorted(stops)),
        tuple(stops[identity] for identity in sorted(stops)),
        frozenset().union(*(one.control_texts for one in found)),
        found[0].turn_tokens,  # rows with tools may be none, so their tokens are expected of none
    )


def _each(templates: Templates) -> list[tuple[Template, list[Message] | None]]:
    """The templates, with the tools that each is asked with."""
    plain, with_tools = templates.plain, templates.with_tools
    return [(plain, None), *([] if with_tools is plain else [(with_tools, [TOOL])])]


def _probe(template: Template, tools: list[Message] | None, tokenizer: Any, directory: Path) -> Probe:
    asked: list[Message] = [{"role": "user", "content": QUESTION}]
    text = _rendered(template, [*asked, {"role": "assistant", "content": ANSWER}], tools)
    for said in (QUESTION, ANSWER):
        if said not in text:
            raise BadTemplate(
                f"{template.name} changes what people say: for {said!r} it wrote {text!r}. No loss mask can be made for"
                " text that is not there. Correct it, or name another in rows.template."
            )
    added = {identity: str(token) for identity, token in tokenizer.added_tokens_decoder.items()}
    after = next((identity for identity in _ids(tokenizer, text.partition(ANSWER)[2]) if identity in added), None)
    if after is None:
        raise BadTemplate(
            f"{template.name} writes no end of turn after an answer, only {text.partition(ANSWER)[2]!r}; expected one"
            " of the tokenizer's own tokens, such as its end of sequence. A drafter could not learn where answers end."
            " Correct it, or name another in rows.template."
        )
    stop_ids = {after, tokenizer.eos_token_id, *_generation_stops(directory)} - {None}
    stop_ids = {identity for identity in stop_ids if tokenizer.convert_ids_to_tokens(identity) is not None}
    special = {identity for identity, token in tokenizer.added_tokens_decoder.items() if token.special}
    before, _, rest = _rendered(template, asked, tools, prompt=True).partition(QUESTION)
    opening = {_opener(ids, added, special) for ids in (_ids(tokenizer, before)[::-1], _ids(tokenizer, rest))}
    around = {after} | {identity for identity in _ids(tokenizer, rest) if identity in special}
    control = {added[identity] for identity in stop_ids | special | opening if identity in added}
    return Probe(
        tuple(sorted(stop_ids)),
        tuple(tokenizer.convert_ids_to_tokens(sorted(stop_ids))),
        frozenset(text for text in control if not text.isspace()),
        {added[identity]: identity for identity in sorted(around)},
    )


def prove(templates: Templates, stop_texts: tuple[str, ...]) -> None:
    """Refuse a template with which no answer could ever be found."""
    for template, tools in _each(templates):
        _prove(template, tools, AnswerFinder(template, stop_texts, Counter()))


def _prove(template: Template, tools: list[Message] | None, finder: AnswerFinder) -> None:
    asked: list[Message] = [{"role": "user", "content": QUESTION}]
    talk = Conversation(0, [*asked, {"role": "assistant", "content": "An answer."}], (1,), tools, True, "")
    try:
        list(finder.documents(talk))
    except Refused as refused:
        raise BadTemplate(
            f"{template.name}: {refused}. It asks with {_rendered(template, asked, tools, prompt=True)!r}, and writes"
            f" question and answer as {_rendered(template, talk.messages, tools)!r}; expected the first to be how the"
            " second begins, as serving goes on from there. Mark its answers with {% generation %}, or name another in"
            " rows.template."
        ) from None


def _rendered(template: Template, messages: list[Message], tools: list[Message] | None, *, prompt: bool = False) -> str:
    try:
        return template.render(messages, tools, prompt=prompt)
    except Refused as refused:
        raise BadTemplate(
            f"{template.name} refuses one question and its answer: {refused}. Correct it, give it the arguments that it"
            " needs in rows.template_arguments, or name another in rows.template."
        ) from None


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _opener(ids: list[int], added: dict[int, str], special: set[int]) -> int | None:
    """The added token, not a special one, that stands right beside what people say, or beside special tokens there.

    Some tokenizers do not call their turn openers special. What comes after text or after such an opener (the think
    block of a generation prompt) is no opener.
    """
    first = next((identity for identity in ids if identity not in special), None)
    return first if first in added else None


def _generation_stops(directory: Path) -> set[int]:
    """Stop ids that the target's maker names beside its weights."""
    file = directory / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return set(named) if isinstance(named, list) else set() if named is None else {named}

"""One message in any of the usual shapes → the message a chat template expects.

Role aliases, content in parts, reasoning under its three names, tool calls with missing pieces or arguments as text.
What has no rule is a `SchemaError` (the file is not what we think it is: stop) or `Refused` (this row alone: count it).
"""

from collections import Counter
from typing import Any

from cache.source.json_text import decoded, is_missing
from cache.source.message_keys import ROLE_AND_TEXT, ROLES, unread_keys

Message = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")
FLAGS = ("weight", "train", "trainable", "loss_mask")  # by which a message says whether its answer is learned
READ = (
    *(key for keys in ROLE_AND_TEXT for key in keys), *REASONING, *FLAGS,
    "tool_calls", "function_call", "name", "tool_call_id",
)  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
TOLD_CHARACTERS = 40  # of a name of the source's own in a reason


class SchemaError(ValueError):
    """A key set or a type that no rule covers; the caller adds file and row and stops."""


class Refused(ValueError):
    """This conversation cannot be used, by a written rule; the caller counts it under this reason."""


def standard_message(raw: Any, num_calls: int, noted: Counter[str]) -> Message:
    """The message with `role`, `content` and what else templates read; `num_calls` tool calls came before it."""
    if not isinstance(raw, dict):
        raise SchemaError(f"a message is {_shown(raw)}, expected an object with role and content")
    if raw.keys() == {"role", "content"}:
        given = raw["role"]
        if isinstance(raw["content"], str) and isinstance(given, str) and ROLES.get(given) == given:
            return raw
    role_key, content_key = _shape(raw)
    given = raw[role_key]
    if not isinstance(given, str):
        raise SchemaError(f"{role_key} is {_shown(given)}, expected text")
    role = ROLES.get(given.strip().lower())
    if role is None:
        raise Refused(f"unknown_role: {given[:TOLD_CHARACTERS]}")
    for key in unread_keys(raw, READ):
        if raw[key] not in (None, "", [], {}) and not is_missing(raw[key]):
            noted[f"key of a message that is not read: {key[:TOLD_CHARACTERS]}"] += 1
    message: Message = {"role": role, "content": _text(raw.get(content_key), content_key)}
    calls = None if is_missing(raw.get("tool_calls")) else raw.get("tool_calls")
    older = None if is_missing(raw.get("function_call")) else raw.get("function_call")
    if given == "function_call":
        calls, message["content"] = [_parsed(message["content"])], ""
    elif older and not calls:
        calls = [_parsed(older) if isinstance(older, str) else older]
    if calls:
        if role != "assistant":
            raise Refused(f"tool_calls_of_another_role: {role}")
        message["tool_calls"] = _tool_calls(calls, num_calls)
        if not message["content"]:
            del message["content"]  # templates test whether there is any
    reasoning = next((raw[key] for key in REASONING if raw.get(key) and not is_missing(raw[key])), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise SchemaError(f"the reasoning of a message is {_shown(reasoning)}, expected text")
        message |= {"thinking": reasoning, "reasoning_content": reasoning}  # both names are read by templates
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def is_learned(raw: Message, role: str, noted: Counter[str]) -> bool:
    """What the flags of a message say: 0 or false means context, anything more means learned."""
    learned = True
    for key in FLAGS:
        value = raw.get(key)
        if is_missing(value):
            continue
        value = (
            {"true": True, "false": False, "0": 0, "1": 1}.get(value.lower(), value)
            if isinstance(value, str)
            else value
        )
        if not isinstance(value, int | float) or value < 0:
            raise SchemaError(f"{key} of a message is {_shown(value)}, expected 0 (not learned) or 1")
        if not value:
            learned = False
        elif role != "assistant" and key != "weight":  # whose default is 1 everywhere
            noted[f"{key} of a message that is no answer, not supervised"] += 1
        elif value != 1:
            noted[f"{key} of an answer other than 0 and 1, taken as 1"] += 1
    return learned


def _shape(raw: Message) -> tuple[str, str]:
    for role_key, content_key in ROLE_AND_TEXT:
        if role_key in raw and (content_key in raw or raw.get("tool_calls") or raw.get("function_call")):
            return role_key, content_key
    raise SchemaError(
        f"a message has the keys {', '.join(sorted(map(str, raw))) or 'none'}; expected role and content, or from and"
        " value"
    )


def _text(content: Any, key: str) -> str:
    """Content as text: null is none, parts of text are joined, any other part refuses the row."""
    if is_missing(content):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise SchemaError(f"{key} is {_shown(content)}, expected text or a list of parts")
    texts = []
    for part in content:
        kind = (part.get("type") or "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) and kind in TEXT_PARTS else part
        if not isinstance(text, str):
            raise Refused(f"part_not_text: {str(kind)[:TOLD_CHARACTERS]}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, num_calls: int) -> list[Message]:
    if not isinstance(calls, list):
        raise SchemaError(f"tool_calls is {_shown(calls)}, expected a list")
    return [_tool_call(call, num_calls + i) for i, call in enumerate(calls)]


def _tool_call(call: Any, number: int) -> Message:
    """`{id, type, function: {name, arguments}}`: a missing id or type is filled, arguments become an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SchemaError(f"a tool call is {_shown(call)}, expected an object with the name of a function")
    identity = call.get("id")
    if not is_missing(identity) and not isinstance(identity, str):
        raise SchemaError(f"the id of a tool call is {_shown(identity)}, expected text or none")
    kind = call.get("type") or "function"
    if kind != "function":
        raise SchemaError(f"the type of a tool call is {_shown(kind)}, expected function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Text is parsed, so that a template's own JSON filter does not quote it a second time.
        arguments = _parsed(arguments)
    if is_missing(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        raise Refused("tool_arguments_not_json")
    return {
        "id": (not is_missing(identity) and identity) or invented_id(number),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def invented_id(number: int) -> str:
    """Nine letters and digits: what the strictest templates demand of a call's id."""
    return f"call{number % 100_000:05d}"


def _parsed(text: str) -> Any:
    try:
        return decoded(text)
    except ValueError:
        raise Refused("tool_arguments_not_json") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text

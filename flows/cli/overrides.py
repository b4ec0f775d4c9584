"""`--set` overrides of a flow's parameters, and the check of the whole; each error is named by its field."""

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from flows.cli.fields import absolute, all_fields, options
from flows.cli.presets import Tree, read_yaml
from flows.errors import BadParameter


def with_overrides(tree: Tree, overrides: Sequence[str], base: Path | None = None) -> Tree:
    """A copy of the tree with each `field.path=value` set, read as the field's type asks; others as YAML.

    Relative paths among them are taken from `base`, where there is one.
    """
    known = all_fields() if overrides else {}
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        keys = path.split(".")
        if not equals or not all(keys):
            raise BadParameter(f"--set {override}: expected field=value, such as --set training.epochs=2.")
        try:
            value = typed(text, known[path].schema) if path in known else read_yaml(text)
        except yaml.YAMLError as error:
            raise BadParameter(f"{path}: {text!r} is not YAML ({' '.join(str(error).split())}).") from None
        if base is not None:
            placed: Any = absolute(_with_value({}, keys, value, path), base)
            for key in keys:
                placed = placed[key]
            value = placed
        tree = _with_value(tree, keys, value, path)
    return tree


def typed(text: str, schema: Tree) -> Any:
    """What was typed for a field: text as it stands, one value of a list as a list of one, all else as YAML."""
    kinds = {str(one.get("type")): one for one in options(schema)}
    if "null" in kinds and text in ("~", "null"):
        return None
    array = kinds.get("array")
    if array is None:
        return text if kinds.keys() <= {"string", "null"} else read_yaml(text)
    is_of_text = array.get("items", {}).get("type") == "string"
    if text.startswith("["):
        try:
            return yaml.load(text, Loader=yaml.BaseLoader) if is_of_text else read_yaml(text)
        except yaml.YAMLError:
            if "string" not in kinds:
                raise
    is_a_whole = "string" in kinds and ("const" not in kinds["string"] or text == kinds["string"]["const"])
    if is_a_whole or "items" not in array:
        return text if is_a_whole else read_yaml(text)
    value = text if is_of_text else read_yaml(text)
    return value if "integer" in kinds and isinstance(value, int) else [value]


def _with_value(tree: Tree, keys: list[str], value: object, path: str) -> Tree:
    key, rest = keys[0], keys[1:]
    if not rest:
        return {**tree, key: value}
    below = tree.get(key)
    if below is not None and not isinstance(below, dict):
        raise BadParameter(f"{path}: {key} is {below!r} and has no fields.")
    return {**tree, key: _with_value(below or {}, rest, value, path)}


def check_parameters(function: Callable[..., Any], tree: Tree) -> dict[str, Any]:
    """The tree as the arguments of a flow's function; raises `BadParameter` naming every wrong field."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
    }
    model = create_model(function.__name__, __config__=ConfigDict(extra="forbid", frozen=True), **fields)
    try:
        checked = model.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(details, tree, model) for details in error.errors(include_url=False)]
        raise BadParameter("\n".join(dict.fromkeys(lines))) from None
    return {name: getattr(checked, name) for name in fields}


def _explain(details: Any, tree: Tree, model: type[BaseModel]) -> str:
    path = _field_path(details["loc"], tree)
    if details["type"] == "extra_forbidden":
        *parents, last = path.split(".")
        known = _fields_below(model, parents)
        close = difflib.get_close_matches(last, known, n=1)
        close = [".".join([*parents, close[0]])] if close else _meant(model, last)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known here: {', '.join(known)}."
        return f"{path}: there is no such field; {hint}"
    if details["type"] == "missing":
        return f"{path}: this field is needed and has no default; set it in prefect.yaml or with --set {path}=…"
    return f"{path}: {details['msg']}; got {details['input']!r}."


def _field_path(location: tuple[int | str, ...], tree: Tree) -> str:
    """A pydantic location without the names of union members, which are no fields of the tree."""
    path: list[str] = []
    node: object = tree
    for part in location:
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        elif isinstance(node, list):
            continue
        else:
            break
        path.append(str(part))
    return ".".join(path)


def _meant(model: type[BaseModel], name: str) -> list[str]:
    """Where in the tree a field of this name is, or of one like it, or one that is described by it."""
    described = dict(_described(model))
    last = {path: path.rpartition(".")[2] for path in described}
    close = difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.75)
    words = name.replace("_", " ")
    return (
        [path for path in last if last[path] == name]
        or [path for path in last if last[path] in close]
        or [path for path, text in described.items() if len(words) > 3 and words in text]
    )


def _described(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, str]]:
    """Every field's path and description."""
    for name, field in model.model_fields.items():
        yield f"{before}{name}", field.description or ""
        below = _model_of(field.annotation)
        if below is not None:
            yield from _described(below, f"{before}{name}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, also where it may be None."""
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in kinds if issubclass(one, BaseModel)), None)


def _fields_below(model: type[BaseModel], parents: list[str]) -> list[str]:
    for name in parents:
        field = model.model_fields.get(name)
        below = None if field is None else _model_of(field.annotation)
        if below is None:
            return []
        model = below
    return list(model.model_fields)

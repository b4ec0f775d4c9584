"""`--set` overrides of a deployment's parameters, and the check of the whole; each error is named by its field."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from flows.cli.presets import Tree, read_yaml
from flows.errors import BadParameter


def with_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """A copy of the tree with each `field.path=value` set; the value is read as YAML."""
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise BadParameter(f"--set {override}: expected field=value, such as --set training.epochs=2.")
        try:
            value = text if _is_plain(text) else read_yaml(text)
        except yaml.YAMLError as error:
            if not (text.startswith("[") and "]" in text[:-1]):
                raise BadParameter(f"{path}: {text!r} is not YAML ({' '.join(str(error).split())}).") from None
            value = text  # a path, such as "[v2] chat/*.jsonl"
        tree = _with_value(tree, keys, value, path)
    return tree


def _is_plain(text: str) -> bool:
    """Globs and names of files that YAML would read as something else, or cut at a #."""
    return text.startswith(("*", "&", "%", "@", "`", "!", "|", ">", "#")) or " #" in text


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
        close = [".".join([*parents, close[0]])] if close else _paths_to(model, last)
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


def _paths_to(model: type[BaseModel], name: str, before: tuple[str, ...] = ()) -> list[str]:
    """Where in the tree a field of this name is."""
    found = []
    for field, information in model.model_fields.items():
        path = (*before, field)
        if field == name:
            found.append(".".join(path))
        elif isinstance(information.annotation, type) and issubclass(information.annotation, BaseModel):
            found += _paths_to(information.annotation, name, path)
    return found


def _fields_below(model: type[BaseModel], parents: list[str]) -> list[str]:
    for name in parents:
        field = model.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)

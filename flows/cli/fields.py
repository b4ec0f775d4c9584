"""All fields of the parameters by their paths: what help, files of one's own, editors and `--set` know of them.

They come from pydantic's JSON schema of the models, so a field is described in one place.
"""

import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from dflash.answers.parameters import GenerationConfig
from flows.cli.presets import Tree, load_flow
from flows.runs.parameters import Dask, Override, Parameters

FLOWS = {
    "prepare": "flows.prepare.prepare",
    "train": "flows.train.train",
    "evaluate": "flows.evaluate.evaluate",
    "export": "flows.export.export",
    "serve-check": "flows.serve_check.serve_check",
    "full": "flows.full.full",
    "regenerate": "flows.regenerate.regenerate",
}

PATHS = ("home", "rows.source", "rows.template", "target.model", "export.path", "generation.only_missing")

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "fields"}


class Everything(Parameters):
    """The parameters of all flows; each takes its own part of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Parameters of dflash-train")

    generation: GenerationConfig = GenerationConfig()
    dask: Dask = None
    override: Override = False


@dataclass(frozen=True, slots=True)
class Field:
    """One field that holds a value."""

    path: str
    schema: Tree  # without references
    has_default: bool

    @property
    def default(self) -> Any:
        return self.schema.get("default")

    @property
    def description(self) -> str:
        return str(self.schema.get("description", ""))

    @property
    def type_text(self) -> str:
        return _type_text(self.schema)


def json_schema() -> Tree:
    """For editors. A file may leave out what a flow that it is used for does not need."""
    schema = Everything.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "required": []}


def all_fields() -> dict[str, Field]:
    """Every field of the whole tree by its path, in the order of the models."""
    schema = Everything.model_json_schema()
    return {field.path: field for field in _walk(schema, schema["$defs"], "")}


def _walk(schema: Tree, definitions: Tree, before: str) -> Iterator[Field]:
    for name, inner in schema["properties"].items():
        whole = _resolved(inner, definitions)
        if "properties" in whole:
            yield from _walk(whole, definitions, f"{before}{name}.")
        else:
            yield Field(f"{before}{name}", whole, "default" in whole)


def _resolved(schema: Tree, definitions: Tree) -> Tree:
    if "$ref" in schema:
        return {**definitions[schema["$ref"].rpartition("/")[2]], **{k: v for k, v in schema.items() if k != "$ref"}}
    return schema


def options(schema: Tree) -> list[Tree]:
    """The types that a field may have."""
    return schema.get("anyOf") or [schema]


def _type_text(schema: Tree) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_type_text, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or {}
        inner = schema.get("prefixItems")
        return f"list of {len(inner)} numbers" if inner else f"list of {_type_text(items)}"
    bounds = " ".join(f"{sign} {schema[name]:,}" for name, sign in _BOUNDS.items() if name in schema)
    return " ".join(filter(None, [str(_TYPES.get(str(kind), kind or "any")), bounds]))


def fields_help(entrypoint: str, preset: Tree) -> str:
    """The fields that a flow takes: path, type, default or the preset's value, description."""
    taken = inspect.signature(load_flow(entrypoint).fn).parameters
    lines = ["fields, set by --set FIELD=VALUE or in a file:"]
    for field in all_fields().values():
        if field.path.partition(".")[0] not in taken:
            continue
        value: Any = preset
        for name in field.path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        said = [field.type_text]
        said += [f"default {json.dumps(field.default, ensure_ascii=False)}"] if field.has_default else []
        said += (
            [f"here {json.dumps(value, ensure_ascii=False)}"] if value is not None and value != field.default else []
        )
        lines.append(f"  {field.path:<30} {', '.join(said)}")
        lines += textwrap.wrap(field.description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def absolute(tree: Tree, base: Path) -> Tree:
    """The tree with its relative paths taken from `base`: the directory of who typed them, or of their file."""
    for path in PATHS:
        *parents, last = path.split(".")
        node: Any = tree
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            value = node[last]
            placed = (
                [_placed(path, one, base) for one in value] if isinstance(value, list) else _placed(path, value, base)
            )
            tree = _replaced(tree, [*parents, last], placed)
    return tree


def _replaced(tree: Tree, keys: list[str], value: Any) -> Tree:
    return {**tree, keys[0]: _replaced(tree[keys[0]], keys[1:], value) if keys[1:] else value}


def _placed(path: str, value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value or "://" in value or value.startswith(("/", "~", "$")):
        return value
    is_name = path == "target.model" and not (
        value.startswith(".") or value.endswith(".gguf") or (base / value).exists()
    )
    return value if is_name else str(base / value)

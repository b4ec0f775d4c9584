"""Reads prefect.yaml: the deployments and their parameters, which are the presets."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.errors import BadParameter

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One entry of prefect.yaml."""

    name: str
    description: str
    entrypoint: str  # a module path such as flows.train.train
    parameters: Tree


def load_flow(entrypoint: str) -> Any:
    """The flow at a module path such as flows.train.train. Imports Prefect."""
    module, _, attribute = entrypoint.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise BadParameter(
            f"the entrypoint {entrypoint!r} leads nowhere ({error}). In prefect.yaml, name a flow by its module, such "
            "as flows.train.train."
        ) from None


def read_deployments(root: Path) -> dict[str, Deployment]:
    """All deployments of the prefect.yaml in `root`, by name."""
    path = root / "prefect.yaml"
    if not path.is_file():
        raise BadParameter(f"There is no prefect.yaml in {root}. Run from a checkout of the project.")
    try:
        content = read_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise BadParameter(f"{path}: {' '.join(str(error).split())}. Correct the YAML at that place.") from None
    entries = content.get("deployments") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise BadParameter(f"{path}: no list of deployments in it. See the project's own prefect.yaml.")
    deployments = {}
    for number, entry in enumerate(entries, start=1):
        lacking = [key for key in ("name", "entrypoint") if not isinstance(entry, dict) or not entry.get(key)]
        if lacking:
            raise BadParameter(f"{path}: deployment {number} has no {' and no '.join(lacking)}. Add it.")
        deployments[entry["name"]] = Deployment(
            name=entry["name"],
            description=" ".join(entry.get("description", "").split()),
            entrypoint=entry["entrypoint"],
            parameters=entry.get("parameters") or {},
        )
    return deployments


def read_yaml(text: str) -> Any:
    """YAML as people mean it: 6e-4 is a number, and a date is the text that was typed."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """The safe loader, with resolvers of its own."""


_DATE = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag != _DATE]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)

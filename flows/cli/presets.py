"""Reads prefect.yaml: the deployments and their parameters, which are the presets."""

import importlib
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

    def load(self) -> Any:
        """The flow that the entrypoint names. Imports Prefect."""
        module, _, attribute = self.entrypoint.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def read_deployments(root: Path) -> dict[str, Deployment]:
    """All deployments of the prefect.yaml in `root`, by name."""
    path = root / "prefect.yaml"
    if not path.is_file():
        raise BadParameter(f"There is no prefect.yaml in {root}. Run from a checkout of the project.")
    entries = yaml.safe_load(path.read_text())["deployments"]
    deployments = [
        Deployment(
            name=entry["name"],
            description=" ".join(entry.get("description", "").split()),
            entrypoint=entry["entrypoint"],
            parameters=entry.get("parameters") or {},
        )
        for entry in entries
    ]
    return {deployment.name: deployment for deployment in deployments}

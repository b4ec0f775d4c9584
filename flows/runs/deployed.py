"""What a flow run was not given comes from its deployment, field by field.

Prefect puts a flow run's parameters over its deployment's by their top names only: `--params '{"training": {"epochs":
8}}'` would leave all other fields of `training` to our defaults, without a word.
"""

import logging
from typing import Any

from prefect.client.orchestration import get_client
from prefect.runtime import deployment
from pydantic import BaseModel

from flows.runs.directory import Tree

logger = logging.getLogger("flows.runs.deployed")


def from_deployment(**given: Any) -> Tree:
    """The arguments of a flow, where fields of its models that this run was not given are the deployment's."""
    taken: list[str] = []
    arguments = completed(given, taken)
    if taken:
        logger.info("not given to this run, and so as its deployment has them: %s", ", ".join(taken))
    return arguments


def completed(given: Tree, taken: list[str]) -> Tree:
    """The same, and silent; `taken` gets the paths of the fields. There may be no deployment."""
    if deployment.id is None:
        return given
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment.id).parameters
    return {name: _completed(value, deployed.get(name), name, taken) for name, value in given.items()}


def _completed(value: Any, deployed: object, path: str, taken: list[str]) -> Any:
    """A model with the deployment's value in each field that was left out; anything else as it was given."""
    if not isinstance(value, BaseModel) or not isinstance(deployed, dict):
        return value
    fields = {name: getattr(value, name) for name in value.model_fields_set}
    left_out = {name: deployed[name] for name in deployed if name not in fields}
    taken += [f"{path}.{name}" for name in left_out]
    below = {name: _completed(one, deployed.get(name), f"{path}.{name}", taken) for name, one in fields.items()}
    return type(value).model_validate(left_out | below)

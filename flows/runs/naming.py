"""Names of flow runs that say what they are, such as `train qwen3-8b epoch 3/6`."""

from typing import Any

from prefect.runtime import flow_run

from dflash.config import TrainingConfig
from flows.runs.deployed import completed
from flows.runs.directory import epochs_done
from flows.runs.parameters import run_directory


def train_run_name() -> str:
    name, epoch, epochs = _position(flow_run.parameters)
    return f"train {name} epoch {min(epoch + 1, epochs)}/{epochs}"


def full_run_name() -> str:
    name, _, epochs = _position(flow_run.parameters)
    return f"full {name} {epochs} epochs"


def _position(parameters: dict[str, Any]) -> tuple[str, int, int]:
    name = str(parameters["name"])
    given = TrainingConfig.model_validate(parameters["training"])
    training = completed({"training": given}, [])["training"]
    return name, epochs_done(run_directory(name, parameters.get("home"))), training.epochs

"""What a run was started as, so that `dflash-train resume NAME` needs nothing typed again: RUN/flow.json."""

from pathlib import Path
from typing import Any

from cache.json_file import read_json, write_json
from flows.errors import BadParameter
from flows.runs.parameters import Parameters

FLOW = "flow.json"


def note_flow(parameters: Parameters, flow: str, dask: str | None) -> None:
    """The flow by its module path, and where it tokenises; its parameters are in config.json once they are accepted."""
    write_json(parameters.run_directory / FLOW, {"flow": flow, "dask": dask})


def started_as(run: Path) -> tuple[str, dict[str, Any]]:
    """Module path of the flow that goes on with a run, and the tree of its parameters."""
    config, note = read_json(run / "config.json"), read_json(run / FLOW)
    if config is None or note is None:
        raise BadParameter(
            f"{run.name}: its training has not begun, so {run} does not hold its parameters yet. "
            "Type the command that started it again."
        )
    return note["flow"], config | {"dask": note["dask"]}

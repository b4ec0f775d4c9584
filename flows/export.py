"""Checkpoint → the layouts that servers load."""

import logging
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.json_file import read_json
from dflash.config import ExportConfig
from flows.runs.deployed import from_deployment
from flows.runs.directory import Tree, in_use, proposed_config, read_parameters, stage_alone
from flows.runs.ledger import is_finished, mark_finished
from flows.runs.parameters import Home, Name, Parameters, run_directory
from flows.runs.repeats import export_fingerprint
from flows.stage.watch import watch_stage

logger = logging.getLogger("flows.export")


@flow(name="export", flow_run_name="export {name}")
def export(name: Name, export: ExportConfig | None = None, home: Home = None) -> "State[Tree]":
    """Writes the newest checkpoint of a run in the layouts that servers load.

    Args:
        name: name of the run; its directory is home/runs/name
        export: layouts and place; what is not given is as the run's own parameters say
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
    """
    parameters = read_parameters(run_directory(name, home))
    if export is not None:
        asked = from_deployment(export=export)["export"].model_dump(exclude_unset=True)
        given = parameters.export.model_copy(update=asked)
        parameters = parameters.model_copy(update={"export": given}).resolved()
    with in_use(parameters.run_directory):
        exported = export_run(parameters)
    return Completed(message=outcome(exported), data=exported)


def export_run(parameters: Parameters) -> Tree:
    """Exports unless just this has been exported and is still there. Returns export.json."""
    run = parameters.run_directory
    fingerprint = export_fingerprint(parameters)
    result = read_json(run / "export.json")
    if result is not None and _is_still_there(result) and is_finished(run, "export", fingerprint):
        logger.info("export: not repeated for this checkpoint, %s", outcome(result))
        return result
    result = export_drafter(parameters)
    mark_finished(run, "export", fingerprint)
    logger.info("export: %s", outcome(result))
    return result


def _is_still_there(result: Tree) -> bool:
    """Whether every layout is where it was written, and nobody has put another in its place."""
    layouts = result["layouts"].values()
    return all(read_json(Path(one["path"]) / "origin.json") == one["origin"] for one in layouts)


@task(name="export", task_run_name="export {parameters.name}", cache_policy=NO_CACHE)
def export_drafter(parameters: Parameters) -> Tree:
    run = parameters.run_directory
    with stage_alone(run, "export"), proposed_config(run, parameters, "export") as config:
        watch_stage("export", ["export", str(run), "--config", config], run)
    result = read_json(run / "export.json")
    assert result is not None, "an export that succeeded leaves export.json"
    return result


def outcome(result: Tree) -> str:
    return f"{result['layout']} layout in {result['path']}"

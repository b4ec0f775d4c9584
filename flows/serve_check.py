"""Export → the same texts and the same τ from a server that people use."""

import logging
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.json_file import read_json
from dflash.serving.server import is_installed
from flows.errors import BadParameter
from flows.prepare import prepare_run
from flows.runs.directory import Tree, in_use, proposed_config, read_parameters, stage_alone
from flows.runs.ledger import is_finished, mark_finished
from flows.runs.parameters import Home, Name, Parameters, run_directory
from flows.runs.repeats import serve_fingerprint
from flows.show.artifacts import reporting
from flows.show.tables import served_line, served_table
from flows.stage.watch import watch_stage

logger = logging.getLogger("flows.serve_check")

EXTRA = "pip install 'dflash-train[serve]' brings the server"


@flow(name="serve-check", flow_run_name="serve-check {name}")
def serve_check(name: Name, home: Home = None) -> "State[Tree]":
    """Decodes held-out prompts through llama.cpp's server, without and with the exported drafter of a run.

    Args:
        name: name of the run; its directory is home/runs/name
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
    """
    if not is_installed():
        raise BadParameter(f"serve-check: xllamacpp and openai are not installed; {EXTRA}.")
    parameters = read_parameters(run_directory(name, home))
    with in_use(parameters.run_directory):
        served = check_served(*prepare_run(parameters))
    return Completed(message=served_line(served), data=served)


def serve_check_run(parameters: Parameters, tokens: Path) -> Tree | None:
    """Checks where the server is installed and the export has a file for it. Returns served.json."""
    if "gguf" not in parameters.export.layouts:
        return None
    if not is_installed():
        logger.info("serve-check: left out; %s", EXTRA)
        return None
    return check_served(parameters, tokens)


def check_served(parameters: Parameters, tokens: Path) -> Tree:
    """Checks unless just this export has been checked. Returns served.json."""
    run = parameters.run_directory
    fingerprint = serve_fingerprint(parameters, tokens)
    result = read_json(run / "served.json")
    if result is not None and is_finished(run, "serve-check", fingerprint):
        logger.info("serve-check: not repeated for this export, %s", served_line(result))
        return result
    result = ask_server(parameters, tokens)
    mark_finished(run, "serve-check", fingerprint)
    logger.info("serve-check: %s", served_line(result))
    return result


@task(name="serve-check", task_run_name="serve-check {parameters.name}", cache_policy=NO_CACHE)
def ask_server(parameters: Parameters, tokens: Path) -> Tree:
    run = parameters.run_directory
    with stage_alone(run, "serve-check"), proposed_config(run, parameters, "serve-check") as config:
        watch_stage("serve-check", ["serve-check", str(run), "--tokens", str(tokens), "--config", config], run)
    result = read_json(run / "served.json")
    assert result is not None, "a check that succeeded leaves served.json"
    with reporting(parameters.name, "serve-check") as reporter:
        reporter.table("served", lambda: served_table(result), f"the drafter in {result['server']}")
    return result

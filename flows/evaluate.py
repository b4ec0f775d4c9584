"""Checkpoint → τ, speed and losslessness."""

import logging
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.json_file import read_json
from dflash.config import EvaluationConfig
from flows.prepare import prepare_run
from flows.runs.deployed import from_deployment
from flows.runs.directory import Tree, in_use, proposed_config, read_parameters, stage_alone
from flows.runs.ledger import is_finished, mark_finished
from flows.runs.parameters import Home, Name, Parameters, run_directory
from flows.runs.repeats import evaluate_fingerprint
from flows.show.artifacts import reporting
from flows.show.tables import tau_change, tau_table
from flows.stage.watch import watch_stage

logger = logging.getLogger("flows.evaluate")


@flow(name="evaluate", flow_run_name="evaluate {name}")
def evaluate(name: Name, evaluation: EvaluationConfig | None = None, home: Home = None) -> "State[Tree]":
    """Measures the newest checkpoint of a run on held-out rows.

    Args:
        name: name of the run; its directory is home/runs/name
        evaluation: how it is evaluated; what is not given is as the run's own parameters say
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
    """
    parameters = read_parameters(run_directory(name, home))
    if evaluation is not None:
        given = from_deployment(evaluation=evaluation)["evaluation"].model_dump(exclude_unset=True)
        parameters = parameters.model_copy(update={"evaluation": parameters.evaluation.model_copy(update=given)})
    with in_use(parameters.run_directory):
        evaluation_ = evaluate_run(*prepare_run(parameters))
    return Completed(message=outcome(evaluation_), data=evaluation_)


def evaluate_run(parameters: Parameters, tokens: Path) -> Tree:
    """Evaluates unless just this has been evaluated. Returns evaluation.json."""
    run = parameters.run_directory
    fingerprint = evaluate_fingerprint(parameters, tokens)
    result = read_json(run / "evaluation.json")
    if result is not None and (run / "report.html").exists() and is_finished(run, "evaluate", fingerprint):
        logger.info("evaluate: not repeated for this checkpoint, %s", outcome(result))
        return result
    result = evaluate_drafter(parameters, tokens)
    mark_finished(run, "evaluate", fingerprint)
    logger.info("evaluate: %s", outcome(result))
    return result


@task(name="evaluate", task_run_name="evaluate {parameters.name}", cache_policy=NO_CACHE)
def evaluate_drafter(parameters: Parameters, tokens: Path) -> Tree:
    run = parameters.run_directory
    with stage_alone(run, "evaluate"), proposed_config(run, parameters, "evaluate") as config:
        processes = (read_json(run / "plan.json") or {}).get("evaluation_processes", 1)
        watch_stage("evaluate", ["evaluate", str(run), "--tokens", str(tokens), "--config", config], run, processes)
    result = read_json(run / "evaluation.json")
    assert result is not None, "an evaluation that succeeded leaves evaluation.json"
    with reporting(parameters.name, "evaluate") as reporter:
        reporter.table("tau", lambda: tau_table(result), "τ on held-out rows, by domain and slot")
    return result


def outcome(result: Tree) -> str:
    """`τ 1.312, lossless`, or `τ 1.008 → 1.312, lossless`: the state's message."""
    before, after = (value and value["value"] for value in (result["tau"][when] for when in ("before", "after")))
    lossless = {True: ", lossless", False: ", NOT lossless", None: ""}[result["decode"]["lossless"]]
    return f"{tau_change(before, after)}{lossless}"

"""Token cache → checkpoints: a check that the run fits, then training in a process of its own, retried from there."""

import logging
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.config import RowsConfig
from cache.json_file import read_json
from dflash.config import DrafterConfig, EvaluationConfig, ExportConfig, TargetConfig, TrainingConfig
from flows.errors import CannotFit
from flows.prepare import prepare_run
from flows.runs.deployed import from_deployment
from flows.runs.directory import (
    Tree,
    accept_config,
    checkpoint_position,
    epochs_done,
    in_use,
    proposed_config,
    stage_alone,
)
from flows.runs.ledger import is_finished, mark_finished
from flows.runs.naming import train_run_name
from flows.runs.parameters import Dask, Home, Name, Override, Parameters
from flows.runs.repeats import train_fingerprint
from flows.runs.start import note_flow
from flows.stage.attempts import keep_trying
from flows.stage.limits import Limits, fix_limits
from flows.stage.watch import watch_stage

logger = logging.getLogger("flows.train")


@flow(name="train", flow_run_name=train_run_name)
def train(
    name: Name,
    rows: RowsConfig,
    target: TargetConfig,
    drafter: DrafterConfig = DrafterConfig(),
    training: TrainingConfig = TrainingConfig(),
    evaluation: EvaluationConfig = EvaluationConfig(),
    export: ExportConfig = ExportConfig(),
    home: Home = None,
    dask: Dask = None,
    override: Override = False,
) -> "State[Tree]":
    """Trains a drafter from the newest checkpoint of its run directory on, until the plan or this run's share is done.

    Args:
        name: name of the run; its directory is home/runs/name
        rows: where the rows come from and what becomes of them
        target: the frozen model to be sped up
        drafter: the model being trained
        training: how it is trained
        evaluation: how it will be evaluated
        export: how it will be exported
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
        dask: where conversations are tokenised; null means in this process
        override: go on under changed settings that change the curve; the run's history keeps them
    """
    given = Parameters(
        **from_deployment(
            name=name,
            rows=rows,
            target=target,
            drafter=drafter,
            training=training,
            evaluation=evaluation,
            export=export,
            home=home,
        )
    )
    with in_use(given.run_directory):
        note_flow(given, "flows.train.train", dask)
        trained = train_run(*prepare_run(given, dask), override)
    return Completed(message=outcome(trained), data=trained)


def train_run(parameters: Parameters, tokens: Path, override: bool = False) -> Tree:
    """Trains what is left of the run, at most up to the limits of this flow run. Returns train.json."""
    run = parameters.run_directory
    fingerprint = train_fingerprint(parameters, tokens)
    trained = read_json(run / "train.json")
    if trained is not None and trained["finished"] and is_finished(run, "train", fingerprint):
        accept_config(run, parameters)
        logger.info("train: not repeated, %s", outcome(trained))
        return trained
    limits = fix_limits(parameters)
    why_reached = limits.why_reached(run, parameters.training.epochs)
    if why_reached is not None:
        logger.info("train: nothing is trained in this run: %s", why_reached)
        so_far = {"epochs_done": epochs_done(run), "epochs": parameters.training.epochs}
        return (trained or {"finished": False}) | so_far | {"note": f"nothing was trained: {why_reached}"}
    trained = keep_trying(
        "train", run, lambda: checkpoint_position(run), lambda: train_drafter(parameters, tokens, limits, override)
    )
    if trained["finished"]:
        mark_finished(run, "train", fingerprint)
    logger.info("train: %s", outcome(trained))
    return trained


# Called directly, never submitted: signals reach the main thread only. It is tried again by `keep_trying`, and not by
# Prefect: a flow retried in its own process keeps what the failed attempt held, and a task has so many retries in all.
@task(name="train", task_run_name="train {parameters.name}", cache_policy=NO_CACHE)
def train_drafter(parameters: Parameters, tokens: Path, limits: Limits, override: bool = False) -> Tree:
    run = parameters.run_directory
    with stage_alone(run, "train"), proposed_config(run, parameters, "train") as config:
        plan = check_run(run, tokens, config)
        arguments = ["train", str(run), "--tokens", str(tokens), "--config", config, *limits.arguments()]
        arguments += ["--override"] if override else []
        watch_stage("train", arguments, run, plan["processes"], parameters.training.grace_s)
    trained = read_json(run / "train.json")
    assert trained is not None, "a training that succeeded leaves train.json"
    return trained


def check_run(run: Path, tokens: Path, config: str) -> Tree:
    """Refuses what cannot fit, from a measured step, before hours are spent on it. Returns plan.json."""
    watch_stage("check", ["check", str(run), "--tokens", str(tokens), "--config", config], run)
    plan = read_json(run / "plan.json")
    assert plan is not None, "a check that succeeded leaves plan.json"
    if not plan["fits"]:
        raise CannotFit("This run cannot fit here. " + " ".join(plan["refusals"]))
    return plan


def outcome(trained: Tree) -> str:
    """`2/2 epochs, 480 steps, loss 3.810, nothing left`: the state's message."""
    loss = f", {trained['steps']:,} steps, loss {trained['loss']:.3f}" if trained.get("loss") is not None else ""
    left = ", nothing left" if trained["finished"] else ""
    note = f"; {trained['note']}" if "note" in trained else ""
    return f"{trained['epochs_done']}/{trained['epochs']} epochs{loss}{left}{note}"

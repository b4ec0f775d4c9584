"""Prompts → the target's own answers, ids included: rows on which drafting is measured as it will be served."""

import logging
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.config import RowsConfig
from cache.json_file import read_json
from dflash.answers.parameters import AnswersConfig, GenerationConfig
from dflash.config import TargetConfig
from flows.prepare import fetch_rows, local_target
from flows.runs.deployed import from_deployment
from flows.runs.directory import Tree, proposed_config, stage_alone
from flows.runs.parameters import Home, Name, resolve_home, resolve_path, resolve_rows, resolve_target
from flows.stage.attempts import Position, keep_trying
from flows.stage.watch import watch_stage

logger = logging.getLogger("flows.regenerate")


@flow(name="regenerate", flow_run_name="regenerate {name}")
def regenerate(
    name: Name,
    rows: RowsConfig,
    target: TargetConfig,
    generation: GenerationConfig = GenerationConfig(),
    home: Home = None,
) -> "State[Tree]":
    """Answers the rows' prompts with the target; what is answered already is not asked again.

    Args:
        name: name of the answers; their directory is home/answers/name
        rows: where the prompts come from; of conversations the system and user turns are kept
        target: the frozen model that answers
        generation: how it answers, and on what
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
    """
    given = from_deployment(rows=rows, target=target, generation=generation)
    generation = given["generation"]
    root = resolve_home(home)
    if generation.only_missing is not None:
        earlier = str(resolve_path(generation.only_missing, root))
        generation = generation.model_copy(update={"only_missing": earlier})
    config = AnswersConfig(
        rows=fetch_rows(resolve_rows(given["rows"], root), root),
        target=local_target(resolve_target(given["target"], root), root),
        generation=generation,
    )
    directory = root / "answers" / name
    answered = keep_trying("generate", directory, lambda: answered_bytes(directory), lambda: answer(directory, config))
    logger.info("regenerate: %s", outcome(answered))
    return Completed(message=outcome(answered), data=answered)


# Called directly, never submitted: signals reach the main thread only.
@task(name="regenerate", task_run_name="regenerate {directory.name}", cache_policy=NO_CACHE)
def answer(directory: Path, config: AnswersConfig) -> Tree:
    with stage_alone(directory, "generate"), proposed_config(directory, config, "generate") as name:
        watch_stage("generate", ["generate", str(directory), "--config", name], directory)
    result = read_json(directory / "answers.json")
    assert result is not None, "a generation that succeeded leaves answers.json"
    return result


def answered_bytes(directory: Path) -> Position:
    """Answers are added to the shards as rows finish."""
    return (sum(shard.stat().st_size for shard in directory.glob("shard-*.jsonl")),)


def outcome(result: Tree) -> str:
    lost = sum(result["refused"].values())
    return (
        f"{result['answers']:,} answers to {result['rows']:,} rows, {result['tokens']:,} tokens, {result['cut']:,} cut"
        f" by the limit, {lost:,} rows refused, in {result['path']}"
    )

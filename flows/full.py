"""All of it: rows → token cache → checkpoints → report → drafter to serve, tried in a server."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from cache.config import RowsConfig
from dflash.config import DrafterConfig, EvaluationConfig, ExportConfig, TargetConfig, TrainingConfig
from flows.evaluate import evaluate_run
from flows.export import export_run
from flows.prepare import prepare_run
from flows.runs.deployed import from_deployment
from flows.runs.directory import Tree, in_use
from flows.runs.naming import full_run_name
from flows.runs.parameters import Dask, Home, Name, Override, Parameters
from flows.runs.start import note_flow
from flows.serve_check import serve_check_run
from flows.show.summary import outcome, summarise
from flows.train import train_run


@flow(name="full", flow_run_name=full_run_name)
def full(
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
    """Prepares, trains, evaluates, exports and tries the drafter in a server; what is done already is not repeated.

    Args:
        name: name of the run; its directory is home/runs/name
        rows: where the rows come from and what becomes of them
        target: the frozen model to be sped up
        drafter: the model being trained
        training: how it is trained
        evaluation: how it is evaluated
        export: how it is exported
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
        note_flow(given, "flows.full.full", dask)
        parameters, tokens = prepare_run(given, dask)
        train_run(parameters, tokens, override)
        evaluate_run(parameters, tokens)
        export_run(parameters)
        served = serve_check_run(parameters, tokens)
        summary = summarise(parameters, tokens, served)
    return Completed(message=outcome(summary), data=summary)

"""Rows → token cache: the target's files first, then one build per content key, ever."""

import hashlib
import logging
import os
from pathlib import Path

from prefect import flow, task
from prefect.context import FlowRunContext

from cache.build import BuildProgress, build, refuse_drops
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.elsewhere.download import FetchProgress
from cache.elsewhere.places import address_of, check_address, fetched
from cache.errors import BadSource
from cache.json_file import read_json
from cache.key.content import content_key
from cache.locks import held, lock_of
from cache.source.find import find_files
from dflash.config import TargetConfig
from dflash.target.tokenizer import commit_of, tokenizer_directory
from flows.errors import BadParameter
from flows.runs.deployed import from_deployment
from flows.runs.ledger import measured, note_tokens
from flows.runs.parameters import Dask, Home, Parameters, resolve_home, resolve_rows, resolve_target
from flows.runs.repeats import tokens_key, why_not_open
from flows.show.artifacts import reporting
from flows.show.progress import StageProgress, progress_line
from flows.show.tables import sample_rows, tokens_table
from flows.slices.fan_out import check_dask, tokenise_missing
from flows.stage.process import run_stage

logger = logging.getLogger("flows.prepare")


@flow(name="prepare", flow_run_name="prepare rows")
def prepare(rows: RowsConfig, target: TargetConfig, home: Home = None, dask: Dask = None) -> str:
    """Makes the token cache of the rows for a target, unless it is there.

    Args:
        rows: where the rows come from and what becomes of them
        target: the frozen model whose tokenizer is used
        home: directory of all data; null means $DFLASH_HOME, or var/ in the repository
        dask: where conversations are tokenised; null means in this process
    """
    given = from_deployment(rows=rows, target=target)
    root = resolve_home(home)
    local = local_target(resolve_target(given["target"], root), root)
    return str(prepare_tokens(resolve_rows(given["rows"], root), local, root, dask=dask))


def prepare_run(parameters: Parameters, dask: str | None = None) -> tuple[Parameters, Path]:
    """The parameters with paths and target resolved, and the token cache of their rows."""
    parameters = parameters.resolved()
    home = resolve_home(parameters.home)
    run = parameters.run_directory
    target = pinned(local_target(parameters.target, home, run), run)
    tokens = prepare_tokens(parameters.rows, target, home, run, dask=dask)
    note_tokens(run, tokens.name)
    return parameters.model_copy(update={"target": target}), tokens


def pinned(target: TargetConfig, run: Path) -> TargetConfig:
    """A hub model without a revision, fixed to the commit that the run began with: what is new there changes no run."""
    if target.revision is not None or Path(target.model).is_dir():
        return target
    before = (read_json(run / "config.json") or {}).get("target", {})
    kept = before.get("revision") if before.get("model") == target.model else None
    return target.model_copy(update={"revision": kept or commit_of(target)})


def prepare_tokens(
    rows: RowsConfig, target: TargetConfig, home: Path, run: Path | None = None, *, dask: str | None = None
) -> Path:
    """The directory of the token cache. Prefect's record is an index: it counts while the directory opens."""
    check_dask(dask)
    rows = fetch_rows(rows, home)
    tokenizer = tokenizer_directory(target)
    may_run = target.trust_remote_code
    key = content_key(rows, tokenizer, home=home, trust_remote_code=may_run)
    directory = home / "tokens" / key.hex
    why_not = why_not_open(directory)
    if why_not is not None and directory.exists():
        logger.warning("The token cache %s does not open and is built again. %s", directory, why_not)
    recorded = build_tokens.with_options(result_storage=home / "tokens" / ".records", refresh_cache=why_not is not None)
    has_server = FlowRunContext.get() is not None  # a dry run has none: then `build` tokenises, too
    with measured(None if why_not is None else run, "prepare"):
        if why_not is not None and has_server:
            tokenise_missing(rows, tokenizer, key, home, dask, trust_remote_code=may_run)
        build_once = recorded if has_server else build_tokens.fn
        built = build_once(rows, home, tokenizer, key.hex, may_run)
        if built != key.hex:  # what was found first and what was read are not the same
            raise BadSource(f"{rows.source}: changed while it was read. Run again once nothing writes to it.")
    refuse_drops(TokenCache.open(directory).manifest, rows)  # the limit may be lower than when it was built
    logger.info("prepare: the token cache %s %s", directory, "was there" if why_not is None else "is new")
    return directory


@task(
    name="prepare",
    task_run_name="prepare {key}",
    cache_key_fn=tokens_key,
    persist_result=True,
    result_serializer="json",
)
def build_tokens(rows: RowsConfig, home: Path, tokenizer: Path, key: str, trust_remote_code: bool = False) -> str:
    """The name of the token cache below home/tokens, not its path: a home may move."""
    with reporting(key[:8], "prepare") as reporter, progress_line("prepare") as line:

        def on_progress(progress: BuildProgress) -> None:
            state = _stage_progress(progress)
            line.show(state)
            reporter.show(state)

        directory = build(
            rows,
            home=home,
            tokenizer=tokenizer,
            vocabulary=None,
            progress=on_progress,
            trust_remote_code=trust_remote_code,
        )
        tokens = TokenCache.open(directory)
        reporter.table("token-cache", lambda: tokens_table(tokens.manifest), f"token cache {directory.name}")
        reporter.markdown(
            "sample-rows", lambda: sample_rows(tokens, tokenizer), "three rows; the supervised tokens are bold"
        )
    return directory.name


def _stage_progress(progress: BuildProgress) -> StageProgress:
    rate = progress.rows / progress.seconds if progress.seconds > 0 else 0.0
    left = progress.seconds * (1 / progress.share - 1) if progress.share > 0 else None
    return StageProgress(
        stage="prepare",
        done=progress.rows,
        total=progress.total_rows,
        unit="rows",
        rate=rate,
        seconds=progress.seconds,
        eta_s=left,
        message=f"{progress.bytes / 1e6:,.0f} MB written",
        share=progress.share,
    )


def fetch_rows(rows: RowsConfig, home: Path) -> RowsConfig:
    """The rows with their source on this machine."""
    given = [rows.source] if isinstance(rows.source, str) else rows.source
    if not any(map(address_of, given)):
        return rows
    with progress_line("fetch") as line:

        def show(progress: FetchProgress) -> None:
            rate = progress.done / max(progress.seconds, 1e-9)
            line.show(
                StageProgress(
                    stage="fetch",
                    done=progress.done / 1e6,
                    total=progress.total / 1e6,
                    unit="MB",
                    rate=rate / 1e6,
                    seconds=progress.seconds,
                    eta_s=(progress.total - progress.done) / rate if rate else None,
                    message=progress.source,
                )
            )

        return fetched(rows, home, show)


def require_inputs(rows: RowsConfig, target: TargetConfig, home: Path) -> None:
    """Raises what is wrong with the places of rows and target, before anything is started."""
    resolved = resolve_target(target, home)
    require_target(resolved)
    if not Path(resolved.model).is_absolute():
        tokenizer_directory(resolved)  # a hub model that is none is found before a server is started
    resolved_rows = resolve_rows(rows, home)
    given = [resolved_rows.source] if isinstance(resolved_rows.source, str) else resolved_rows.source
    for source in given:
        check_address(source)
    here = [source for source in given if address_of(source) is None]
    if here:
        find_files(resolved_rows.model_copy(update={"source": here}))


def require_target(target: TargetConfig) -> None:
    place = Path(target.model)
    if place.suffix == ".gguf" and not place.is_file():
        raise BadParameter(f"target.model: there is no file {place}. `make demo` fetches the one of the demo.")
    if place.suffix != ".gguf" and place.is_absolute() and not place.is_dir():
        raise BadParameter(f"target.model: there is no directory {place}. Name one, a GGUF file, or a hub model.")


def local_target(target: TargetConfig, home: Path, run: Path | None = None) -> TargetConfig:
    """The target with a GGUF file replaced by the directory of its dequantised weights, made once per content."""
    require_target(target)
    file = Path(target.model)
    if file.suffix != ".gguf":
        return target
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    directory = home / "targets" / sha256
    with held(lock_of(directory)):  # two at once would do the work twice
        if (directory / "config.json").is_file():
            os.utime(directory)  # used: `clean` keeps what is young
        else:
            logger.info("target: dequantising %s, once", file.name)
            with measured(run, "target"), progress_line("target") as line:
                reports = home / "targets" / ".stages" / sha256
                run_stage("target", ["dequantise", str(file), str(home), str(reports)], reports, line.show)
    return target.model_copy(update={"model": str(directory)})

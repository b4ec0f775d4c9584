"""Composes the parameter models into the one tree that prefect.yaml, `--set`, the UI form and config.json share.

Nothing here imports Prefect: a wrong field is found before anything slow happens.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field

from cache.config import RowsConfig, names_a_template
from cache.elsewhere.places import address_of
from dflash.config import RunConfig, TargetConfig
from flows.errors import BadParameter

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # never "", ".." or a path: names become directories, also to be deleted
Name = Annotated[str, Field(description="name of the run; its directory is <home>/runs/<name>", pattern=NAME_PATTERN)]
Home = Annotated[
    str | None,
    Field(description="directory of all data; null: $DFLASH_HOME, or var/ in the repository"),
]
Dask = Annotated[
    str | None,
    Field(
        description="where conversations are tokenised. null: in this process, on all cores; local:N: "
        "in N processes of this machine; tcp://host:port: on the workers of that Dask scheduler, with shared storage",
        pattern=r"^(local:[1-9]\d*|(tcp|tls)://.+)$",
    ),
]
Override = Annotated[
    bool,
    Field(description="go on under changed settings that change the curve; the run's history keeps them"),
]


class Parameters(RunConfig):
    """Everything one run is made of; the run directory's config.json holds it, resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    home: Home = None
    rows: RowsConfig

    def resolved(self) -> Self:
        """The same parameters with every path absolute, so that they mean the same from any directory."""
        home = resolve_home(self.home)
        export = self.export
        if export.path is not None:
            export = export.model_copy(update={"path": str(resolve_path(export.path, home))})
        drafter = self.drafter
        if drafter.init not in ("random", "target"):
            drafter = drafter.model_copy(update={"init": str(resolve_path(drafter.init, home))})
        return self.model_copy(
            update={
                "home": str(home),
                "drafter": drafter,
                "rows": resolve_rows(self.rows, home),
                "target": resolve_target(self.target, home),
                "export": export,
            }
        )

    @property
    def run_directory(self) -> Path:
        return run_directory(self.name, self.home)


def repository() -> Path:
    """The directory of prefect.yaml: this package's checkout, else the nearest one above the working directory."""
    beside = Path(__file__).resolve().parents[2]
    for directory in (beside, Path.cwd(), *Path.cwd().parents):
        if (directory / "prefect.yaml").is_file():
            return directory
    return beside


def resolve_home(home: str | None) -> Path:
    """Where all data lives: the parameter, else $DFLASH_HOME, else var/ in the repository."""
    chosen = home or os.environ.get("DFLASH_HOME") or "var"
    return (repository() / Path(chosen).expanduser()).resolve()


def run_directory(name: str, home: str | None) -> Path:
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise BadParameter(
            f"{name!r} is no name of a run. Give one of letters, digits, '.', '_' and '-', a letter or digit first, "
            "as in <home>/runs."
        )
    return resolve_home(home) / "runs" / name


def expand(text: str, home: Path) -> str:
    """`$DFLASH_HOME` written out; it means the home of this run, also where the variable is not set."""
    return text.replace("${DFLASH_HOME}", str(home)).replace("$DFLASH_HOME", str(home))


def resolve_path(text: str, home: Path) -> Path:
    return repository() / Path(expand(text, home)).expanduser()


def resolve_rows(rows: RowsConfig, home: Path) -> RowsConfig:
    def absolute(source: str) -> str:
        path = resolve_path(source, home)
        return str(path) if path.exists() else address_of(source) or str(path)

    source = [absolute(one) for one in rows.source] if isinstance(rows.source, list) else absolute(rows.source)
    template = rows.template
    if template is not None and not names_a_template(template):
        template = str(resolve_path(template, home))
    return rows.model_copy(update={"source": source, "template": template})


def resolve_target(target: TargetConfig, home: Path) -> TargetConfig:
    """A path becomes absolute; what is no path here is a hub name and stays one."""
    path = resolve_path(target.model, home)
    is_path = target.model.startswith(("/", ".", "~", "$")) or path.suffix == ".gguf" or path.exists()
    return target.model_copy(update={"model": str(path)}) if is_path else target

"""Parameters of rows: where they come from and what becomes of them."""

import os
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Columns(BaseModel):
    """Names of the source's columns. `None`: found by the names that are usual in the field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: str | None = Field(None, description="token ids; usual: input_ids, ids, tokens")
    mask: str | None = Field(
        None,
        description="loss mask, or labels with -100; usual: loss_mask, assistant_masks, completion_mask, labels",
    )
    messages: str | None = Field(None, description="conversations; usual: messages, conversations, conversation")
    prompt: str | None = Field(None, description="what is asked; usual: prompt, instruction, question")
    completion: str | None = Field(None, description="what is answered; usual: completion, response, output, answer")
    group: str | None = Field(None, description="domain of a row, as text; usual: domain, group; empty: none is read")


class RowsConfig(BaseModel):
    """Parameters of rows (`rows` in the tree)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | list[str] = Field(
        description="path, list of paths, or glob: a datasets directory, Arrow, Parquet, JSONL or JSON files; or a "
        "data set of the hub (OWNER/NAME, hf://datasets/…), s3://, gs:// or https://, fetched once"
    )
    revision: str | None = Field(None, description="commit, tag or branch of a hub data set; None: its newest")
    split: str | None = Field(None, description="split to read where the source has several, such as train")
    columns: Columns = Field(Columns(), description="names of the source's columns where they are not the usual ones")
    groups: list[str] | None = Field(None, description="keep only rows of these domains; the others are counted")
    supervise_all: bool = Field(
        False, description="pre-tokenised rows without a mask: supervise every token instead of refusing"
    )
    vocabulary: int | None = Field(
        None, description="number of token ids of the target; None: read from the target", ge=1, le=2**31
    )
    template: str | None = Field(
        None,
        description="path of a Jinja chat template, or the name of one of the tokenizer's; None: the tokenizer's own",
    )
    template_arguments: dict[str, Any] = Field(
        {}, description="arguments of the chat template, such as enable_thinking"
    )
    max_tokens: int = Field(3072, description="longest row, in tokens", ge=2)
    overflow: Literal["truncate", "drop", "split"] = Field(
        "truncate", description="what becomes of a longer row: cut from the right, dropped, or cut into windows"
    )
    supervise: Literal["all", "last"] = Field("all", description="which answers of a conversation are supervised")
    max_dropped: float = Field(
        0.1, description="largest share of rows that may be dropped before the build is refused", ge=0, le=1
    )
    held_out: float = Field(0.05, description="share of conversations held out of training", ge=0, lt=1)

    @field_validator("template_arguments")
    @classmethod
    def _dates_are_text(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """YAML makes a date of 2025-01-31. The day for `strftime_now` must be one."""
        days = {name: value.date() if isinstance(value, datetime) else value for name, value in arguments.items()}
        found = {name: value.isoformat() if isinstance(value, date) else value for name, value in days.items()}
        if "strftime_now" in found:
            try:
                date.fromisoformat(found["strftime_now"])
            except (TypeError, ValueError):
                raise ValueError(
                    f"template_arguments.strftime_now is {found['strftime_now']!r}, expected a day such as 2025-01-31"
                ) from None
        return found


def names_a_template(template: str) -> bool:
    """Whether `rows.template` is the name of one of the tokenizer's own, such as tool_use; else it is a path."""
    return "/" not in template and "." not in template


def default_home() -> Path:
    """Where data lives unless told otherwise: `$DFLASH_HOME`, else `var/` in the repository (or working directory)."""
    told = os.environ.get("DFLASH_HOME")
    if told:
        return Path(told).expanduser()
    repository = Path(__file__).resolve().parent.parent
    return (repository if (repository / "pyproject.toml").is_file() else Path.cwd()) / "var"

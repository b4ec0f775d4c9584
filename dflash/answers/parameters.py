"""Parameters of answers that the target itself writes."""

from typing import Literal

from pydantic import Field

from cache.config import RowsConfig
from dflash.config import Fields, TargetConfig


class GenerationConfig(Fields):
    """Parameters of answers from the target (`generation` in the tree)."""

    engine: Literal["transformers", "openai"] = Field(
        "transformers", description="what runs the target: this machine, or servers that speak OpenAI's protocol"
    )
    max_new_tokens: int = Field(1024, description="longest answer, in tokens", ge=1)
    temperature: float = Field(0.0, description="0: greedy", ge=0)
    top_p: float = Field(1.0, description="nucleus of the sampling law", gt=0, le=1)
    top_k: int = Field(0, description="largest number of tokens to sample from; 0: all", ge=0)
    seed: int = Field(0, description="seed of sampling", ge=0, lt=2**31)
    rows: int | None = Field(None, description="answer only the first so many rows of the source; None: all", ge=1)
    only_missing: str | None = Field(
        None, description="path of earlier answers (their directory, or JSONL): answer only the rows that it lacks"
    )
    tokens_per_batch: int = Field(
        65_536, description="transformers: rows of a batch times (longest prompt + max_new_tokens), in tokens", ge=1
    )
    urls: list[str] = Field([], description="openai: servers, such as [http://gpu1:8000/v1]; taken in turn")
    api: Literal["completions", "chat"] = Field(
        "completions",
        description="openai: completions sends our ids (vLLM, SGLang); chat sends messages, for any other server",
    )
    served_model: str | None = Field(None, description="openai: the model's name on the servers; None: target.model")
    concurrency: int = Field(32, description="openai: requests under way at once, over all servers", ge=1, le=4096)
    retries: int = Field(8, description="openai: how often a request that failed is sent again", ge=0)
    timeout_s: float = Field(600.0, description="openai: longest wait for one answer, in seconds", gt=0)


class AnswersConfig(Fields):
    """What `python -m dflash generate` needs to know; config.json in the directory of the answers holds it."""

    rows: RowsConfig
    target: TargetConfig
    generation: GenerationConfig = GenerationConfig()

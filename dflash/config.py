"""Parameters of target, drafter, training, evaluation, export and generation: one tree, the same names everywhere."""

from typing import Annotated, Literal, Self
from zoneinfo import available_timezones

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _known_zone(text: str) -> str:
    zone = text.partition(" ")[2]
    if zone and zone not in available_timezones():
        raise ValueError(f"there is no time zone {zone}; give one such as Europe/Berlin or UTC, or none")
    return text


def _as_typed(value: object) -> object:
    """YAML reads 16:00, but not 06:00, as 16 times 60."""
    return f"{value // 60:02}:{value % 60:02}" if isinstance(value, int) and 0 <= value < 24 * 60 else value


TimeOfDay = Annotated[
    str,
    Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d( [A-Za-z][\w+/-]*)?$"),
    BeforeValidator(_as_typed),
    AfterValidator(_known_zone),
]
GRACE_S = 25.0  # Prefect's worker kills what it cancels after 30
GgufType = Literal["float16", "bfloat16", "float32", "q8_0"]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Fields):
    """Parameters of the target (`target` in the tree)."""

    model: str = Field(
        description="the frozen model: a directory, a hub name, or a GGUF file; $DFLASH_HOME is expanded"
    )
    revision: str | None = Field(None, description="revision of a hub name")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of the target's weights")
    devices: list[str] | Literal["auto"] = Field(
        "auto",
        description="devices of the target's replicas, such as [cuda:0, cuda:1], or [cuda:0+cuda:1] where one needs "
        "several; auto: all but the drafter's, and that one, too, where measured times say so",
    )
    trust_remote_code: bool = Field(False, description="run the model code that comes with a hub model")


class DrafterConfig(Fields):
    """Parameters of the drafter (`drafter` in the tree)."""

    layers: int = Field(5, description="number of drafter layers", ge=1)
    block_size: int = Field(16, description="K: slots of a block, the anchor's own slot included", ge=2)
    taps: int | list[int] = Field(
        5, description="number of taps, spread by the published formula, or the layers themselves"
    )
    mask_token_id: int | None = Field(
        None, description="id of the mask token: an existing row of the target's embedding that no text uses"
    )
    init: str = Field(
        "random",
        description="where the drafter starts from: random, target (its last layers), or a directory with an exported "
        "drafter, ours or a published one in either layout",
        min_length=1,
    )
    kind: Literal["dflash", "dflash2", "dspark"] = Field(
        "dflash",
        description="dflash: slots independent of each other; dflash2: convolutions and a candidate selector; dspark: "
        "a Markov head on the token before",
    )
    rank: int = Field(
        128, description="rank of the tables that look back; 0: none, which leaves dflash2 its convolutions", ge=0
    )
    tables: Literal["frozen", "free"] = Field(
        "frozen",
        description="frozen: tables of low rank are made from the target's embedding and head; free: trained row by "
        "row, as published",
    )
    markov: Literal["vanilla", "gated"] = Field(
        "vanilla", description="dspark: what the token before says alone, or gated by the slot's own state"
    )
    confidence: bool = Field(
        False, description="dspark: a head that guesses whether a slot is accepted; training.loss=dspark trains it"
    )
    vocabulary: int | None = Field(
        None,
        description="ids that may be drafted: so many of those that the training answers hold most often, which makes "
        "steps and drafts cheaper; None: all",
        ge=1,
    )
    sliding_window: int | None = Field(
        None, description="sliding layers see keys fewer than so many positions away; None: no such layers", ge=1
    )
    sliding_layers: list[int] | None = Field(
        None, description="which layers have the window, from 0 on; None: all of them"
    )


class TrainingConfig(Fields):
    """Parameters of training (`training` in the tree)."""

    epochs: int = Field(6, description="passes over the rows", ge=1)
    tokens_per_step: int = Field(
        24_576,
        description="rows of one optimizer step, about, in tokens without padding; the same on any machine",
        ge=1,
    )
    anchors: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] = Field(
        512, description="anchors of a row in one epoch: at most so many, or (0.25, 1.0) a share of its legal positions"
    )
    loss: Literal["ce", "dpace", "kl", "dspark"] = Field(
        "ce",
        description="ce: weights exp(−(k−1)/γ); dpace: weights from the drafter's own confidence; kl: to the target's "
        "distribution, for which the target runs to its end; dspark: 0.1·CE + 0.9·Σ|q − p|, as far, and the "
        "confidence head's",
    )
    selector_weight: float = Field(
        0.1, description="dflash2: what the selector's loss is multiplied by beside the base loss", ge=0
    )
    gamma: float | None = Field(None, description="γ of exp(−(k−1)/γ); None: 7, 5, 4 for K = 16, 10, 8", gt=0)
    lr: float = Field(6e-4, description="peak learning rate", gt=0)
    min_lr: float = Field(0.0, description="learning rate at the end", ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's β₁ and β₂"
    )
    weight_decay: float = Field(0.0, description="AdamW's decoupled decay", ge=0)
    warmup: float = Field(0.04, description="share of the whole plan in which the learning rate rises", ge=0, lt=1)
    clip: float = Field(1.0, description="largest gradient norm", gt=0)
    seed: int = Field(0, description="seed of everything random", ge=0, lt=2**63)
    features: Literal["stream", "reuse"] = Field(
        "stream", description="reuse: keep the first epoch's features on disk, so that later epochs skip the target"
    )
    processes: int | None = Field(
        None,
        description="processes of one machine that a flow starts for this run, by torchrun; they share out its GPUs "
        "and the rows of a step; None: as many as the check finds the fastest",
        ge=1,
    )
    pass_slots: int | None = Field(
        None, description="slots of one forward and backward pass at most, padding included; None: as many as fit", ge=1
    )
    recompute: Literal["none", "mlp", "layers"] = Field(
        "none",
        description="what a backward pass makes again instead of keeping it: nothing, the MLPs or whole layers; more "
        "slots fit a pass, and it takes longer",
    )
    epochs_per_run: int | None = Field(None, description="end this run after so many epochs; the next goes on", ge=1)
    stop_after_s: float | None = Field(None, description="end this run after so many seconds; the next goes on", gt=0)
    until: TimeOfDay | None = Field(
        None,
        description="end this run at this time of day, hh:mm, such as 06:00 Europe/Berlin; without a time zone, the "
        "machine's; the next goes on",
    )
    checkpoint_every_steps: int = Field(500, description="steps between checkpoints", ge=1)
    checkpoint_every_s: float = Field(900.0, description="seconds after which a checkpoint is due anyhow", gt=0)
    evaluate_every_steps: int | None = Field(
        None,
        description="steps between measurements of τ on a few held-out rows, each with a checkpoint; one more at the "
        "end. The best checkpoint is kept, and is the one that is evaluated and exported",
        ge=1,
    )
    log_every_steps: int = Field(10, description="steps between lines of metrics.jsonl", ge=1)
    grace_s: float = Field(
        GRACE_S,
        description="seconds that a training has after a signal to finish its step and write a checkpoint before it is "
        "killed; a run that Prefect's worker cancels has 30 in all",
        gt=0,
    )
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = Field(
        [], description="services that get the curves, too, as their own environment variables say"
    )
    keep: int = Field(3, description="newest checkpoints kept, beside the first and the best", ge=1)


# Training parameters that say how long and how often and where features lie, not what is learned.
NOT_LEARNED = (
    "features",
    "processes",
    "pass_slots",
    "recompute",
    "epochs_per_run",
    "stop_after_s",
    "until",
    "checkpoint_every_steps",
    "checkpoint_every_s",
    "evaluate_every_steps",
    "log_every_steps",
    "grace_s",
    "trackers",
    "keep",
)


class EvaluationConfig(Fields):
    """Parameters of evaluation (`evaluation` in the tree)."""

    rows: int | None = Field(
        None,
        description="held-out rows for teacher-forced τ; None: so many that its standard error is below 0.01, at most "
        "1,000",
        ge=1,
    )
    before: bool = Field(False, description="measure τ before training, too: the first checkpoint on the same rows")
    prompts: int = Field(64, description="held-out prompts that are decoded", ge=1)
    max_new_tokens: int = Field(256, description="longest answer, in tokens", ge=1)
    temperature: float = Field(0.0, description="0: greedy", ge=0)
    top_p: float = Field(1.0, description="nucleus of the sampling law", gt=0, le=1)
    top_k: int = Field(0, description="largest number of tokens to sample from; 0: all", ge=0)
    seed: int = Field(0, description="seed of sampling", ge=0, lt=2**63)
    confidence: float = Field(
        0.0,
        description="a block's drafts end before the first slot to which the drafter's confidence head gives less; 0: "
        "all are checked",
        ge=0,
        lt=1,
    )


class ExportConfig(Fields):
    """Parameters of export (`export` in the tree)."""

    layouts: list[Literal["dflash", "speculators", "gguf"]] = Field(
        ["dflash"],
        description="served layouts to write: as the public checkpoints, for speculators, or a file for llama.cpp",
        min_length=1,
    )
    gguf_type: GgufType | None = Field(
        None, description="type of the matrices in GGUF files; null: bfloat16 as the target, or float16"
    )
    path: str | None = Field(None, description="directory to write to; None: export/ in the run directory")


class RunConfig(Fields):
    """What `python -m dflash` needs to know of a run; config.json in the run directory holds it."""

    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _parts_are_trained(self) -> Self:
        drafter = self.drafter
        if drafter.kind == "dspark" and not drafter.rank:
            raise ValueError("drafter.kind=dspark is its Markov head alone: drafter.rank=0 leaves nothing of it")
        if drafter.confidence and (drafter.kind != "dspark" or self.training.loss != "dspark"):
            raise ValueError("drafter.confidence needs drafter.kind=dspark, and training.loss=dspark, which trains it")
        if drafter.vocabulary is not None and (
            drafter.kind != "dspark" or drafter.tables == "free" or drafter.markov == "gated" or drafter.confidence
        ):
            raise ValueError(
                "drafter.vocabulary is told to servers by the tables of drafter.kind=dspark, frozen, without "
                "drafter.confidence or a gated Markov head; no other drafter can say it. Leave drafter.vocabulary out"
            )
        if self.export.gguf_type == "q8_0" and drafter.vocabulary is not None:
            raise ValueError(
                "export.gguf_type=q8_0 would round the tables that say drafter.vocabulary. Use float16 or float32"
            )
        if "gguf" in self.export.layouts and (
            drafter.sliding_window is not None or drafter.confidence or drafter.markov == "gated"
        ):
            raise ValueError(
                "export.layouts: gguf is not written with drafter.sliding_window, drafter.confidence or a gated Markov "
                "head. Leave gguf out, as with export.layouts=[dflash]"
            )
        return self

"""Everything that fixes a drafter's tensors and what they mean."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

DrafterKind = Literal["dflash", "dflash2", "dspark"]
MarkovForm = Literal["vanilla", "gated"]
Tables = Literal["frozen", "free"]


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Sizes of the layers, what they read, and the parts that look back; widths and heads are the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    taps: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    mask_token_id: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    kind: DrafterKind = "dflash"
    rank: int = 0  # of the tables of selector or Markov head; 0: none of them
    candidates: int = 16  # tokens of a slot among which the selector chooses
    markov: MarkovForm = "vanilla"
    confidence: bool = False
    tables: Tables = "frozen"
    vocabulary: int = 0  # ids that may be drafted; 0: all
    sliding_window: int | None = None  # positions that a sliding layer sees: key visible when |query − key| < it
    sliding_layers: tuple[int, ...] = ()
    sliding_causal: bool = False  # slots of a sliding layer see no later slot of their block

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"taps": list(self.taps), "sliding_layers": list(self.sliding_layers)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DrafterShape":
        """Inverse of `to_json`."""
        return cls(**value | {name: tuple(value[name]) for name in ("taps", "sliding_layers")})

    def published(self) -> "DrafterShape":
        """The shape as checkpoints have it: tables written out, one column more for the ids that are not drafted."""
        if not self.rank:
            return self
        return replace(self, tables="free", rank=self.rank + (1 if self.vocabulary else 0), vocabulary=0)

    @property
    def num_drafted(self) -> int:
        """Rows of the head that logits are made with."""
        return self.vocabulary or self.vocab_size

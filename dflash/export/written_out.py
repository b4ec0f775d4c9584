"""A drafter as its checkpoint has it: tables of the whole vocabulary, and no embedding or head to make them from."""

import torch
from torch import Tensor, nn

from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.model.drafter import Drafter
from dflash.model.drafter_loss import slot_logits
from dflash.model.head import Head
from dflash.model.look_back import Ends
from dflash.model.vocabulary import EXCLUDED

_TOLERANCE = 1e-4  # of the largest logit: the same product in another order, in float32


@torch.no_grad()
def written_out(drafter: Drafter, ends: tuple[nn.Module, Head]) -> Drafter:
    """The same drafter with free tables; itself where it has none to write out.

    Raises ConfigMismatch for a drafter of convolutions alone, CheckpointCorrupt when the tables give other logits.
    """
    part = drafter.look_back
    if drafter.shape.kind == "dflash2" and part is None:
        raise ConfigMismatch("drafter.rank=0: servers expect a selector in a drafter of kind dflash2.")
    if part is None or part.free:
        return drafter
    head = ends[1].to(torch.float32)
    tables = part.written_out(Ends(ends[0], head, drafter.norm.weight))
    result = Drafter(drafter.shape.published())
    own = {f"{part.name}.{name}.weight" for name in ("before", "after")}
    kept = {name: value for name, value in drafter.state_dict().items() if name not in own}
    kept.pop("vocabulary.ids", None)  # the tables say it
    missing, unexpected = result.load_state_dict(kept, strict=False)
    assert len(missing) == len(tables)
    assert not unexpected
    assert result.look_back is not None
    if drafter.vocabulary is not None:
        tables = drafter.vocabulary.tables(*tables)
    for table, value in zip(result.look_back.tables(), tables, strict=True):
        table.copy_(value)
    hidden = torch.randn(64, drafter.shape.hidden_size, generator=torch.Generator().manual_seed(0))
    previous = torch.arange(64) % drafter.shape.vocab_size
    one, other = (slot_logits(d, (ends[0], head), hidden, previous) for d in (drafter, result))
    finite = one.isfinite() & other.isfinite()
    if drafter.vocabulary is not None and not bool((other[:, one[0] == -torch.inf] < EXCLUDED / 2).all()):
        raise CheckpointCorrupt("ids out of drafter.vocabulary would be drafted. Nothing was exported.")
    if not bool((one[finite] - other[finite]).abs().max() <= _TOLERANCE * one[finite].abs().max().clamp(min=1.0)):
        raise CheckpointCorrupt("tables that were written out give other logits than before. Nothing was exported.")
    return result.eval()


def probe(drafter: Drafter) -> dict[str, Tensor]:
    """What a drafter with its tables makes of seeded inputs, the same in every process.

    `hidden` are final states; `bonus` what the tables add to logits, `confidence` the confidence head's.
    """
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 24, len(shape.taps) * shape.hidden_size, generator=generator)
    embedded = torch.randn(1, 3, shape.block_size, shape.hidden_size, generator=generator)
    hidden: Tensor = drafter(features, embedded, torch.tensor([[3, 11, 24]]))
    part = drafter.look_back
    if part is None:
        return {"hidden": hidden}
    previous = torch.randint(shape.vocab_size, hidden.shape[:-1], generator=generator)
    first, second = part.tables()
    read = torch.nn.functional.embedding(previous, first)
    out = {"hidden": hidden, "bonus": part.meet(hidden, read) @ second.T}
    if drafter.confidence_head is not None:
        out["confidence"] = torch.nn.functional.linear(
            torch.cat([hidden, read], dim=-1), drafter.confidence_head.proj.weight, drafter.confidence_head.proj.bias
        )
    return out

"""Which parts a kind of drafter has. A new head is a module beside this one, and a line here."""

from dataclasses import dataclass

from dflash.model.look_back import LookBack
from dflash.model.markov import MarkovHead
from dflash.model.selector import CandidateSelector
from dflash.model.shape import DrafterKind


@dataclass(frozen=True, slots=True)
class Kind:
    """Convolutions around the sublayers, and the head that looks back."""

    convolutions: bool
    look_back: type[LookBack] | None


KINDS: dict[DrafterKind, Kind] = {
    "dflash": Kind(convolutions=False, look_back=None),
    "dflash2": Kind(convolutions=True, look_back=CandidateSelector),
    "dspark": Kind(convolutions=False, look_back=MarkovHead),
}

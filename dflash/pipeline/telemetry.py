"""How a stage spent its time: busy, starved (waiting for input) or blocked (waiting for room, or for its turn)."""

import time
from dataclasses import dataclass

SHARES = ("busy", "starved", "blocked")


@dataclass(slots=True)
class Clock:
    """Seconds of one stage so far; written by one thread at a time, read by any."""

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    items: int = 0
    working_since: float | None = None  # on time.monotonic; None while it waits

    def begin(self) -> None:
        """The stage has its input and works."""
        self.working_since = time.monotonic()

    def rest(self) -> None:
        """The stage waits."""
        self.working_since = None

    def add(self, *, busy: float, starved: float, blocked: float) -> None:
        """One item is done."""
        self.busy += busy
        self.starved += starved
        self.blocked += blocked
        self.items += 1

    def shares(self) -> dict[str, float]:
        """Parts of the stage's time, summing to 1; all 0 before it did anything."""
        total = self.busy + self.starved + self.blocked
        return {name: round(getattr(self, name) / total, 4) if total else 0.0 for name in SHARES}


def merge(clocks: list[Clock]) -> Clock:
    """Several workers of one stage as one."""
    return Clock(*(sum(getattr(clock, name) for clock in clocks) for name in SHARES))


def bottleneck(stages: dict[str, dict[str, float]], *, shared: bool = False, reuse: bool = False) -> str:
    """One sentence: who is the busiest, who waits, what to change.

    `shared`: target and drafter take turns on one device. `reuse`: features are kept after the first epoch.
    """
    if not any(share["busy"] for share in stages.values()):  # true of no stages, too
        return "nothing has run yet"
    busy = {name: share["busy"] for name, share in stages.items()}
    name = max(busy, key=lambda stage: busy[stage])
    share = f"{name} {busy[name]:.0%} busy"
    if name == "read":
        return f"{share}, target {stages['target']['starved']:.0%} starved: put the token cache on a faster disk"
    if shared:
        target, train = f"target {busy['target']:.0%} busy", f"train {busy['train']:.0%} busy"
        if name == "train":
            change = "the drafter sets the pace; fewer anchors are faster"
        elif reuse:
            change = "the target runs in the first epoch only"
        else:
            change = "set training.features=reuse to run the target in the first epoch only"
        return f"{target}, {train} of one device: {change}"
    if name == "target":
        return f"{share}, train {stages['train']['starved']:.0%} starved: add a target device, or more anchors"
    return (
        f"{share}, target {stages['target']['blocked']:.0%} blocked: give the drafter a faster device, or fewer anchors"
    )

"""How a stage spent its time, in shares of wall clock: busy, starved (of input) or blocked (until there is room).

A device works behind the host's back, so busy is what its own clock says. While it is idle, the stage waits for
whatever the host waits for; once the host has launched the work, the device waits for the input alone:

    host     waits for input │ launches │
    device   works on the item before   │ waits for the input's event │ works
                                        └─ starved ───────────────────┘ busy ─▶

What is left of the wall clock is the stage's own Python, and whatever the run does between two steps.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

SHARES = ("busy", "starved", "blocked")


@dataclass(frozen=True, slots=True)
class Wait:
    """What the host waited for, and when, on time.perf_counter."""

    kind: str  # starved or blocked
    start: float
    end: float


@dataclass(slots=True)
class Clock:
    """Seconds of one stage so far; written by one thread at a time, read by any."""

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    wall: float = 0.0  # all three, and what is none of them
    items: int = 0
    working_since: float | None = None  # on time.monotonic; None while it waits

    def begin(self) -> None:
        """The stage has its input and works."""
        self.working_since = time.monotonic()

    def rest(self) -> None:
        """The stage waits."""
        self.working_since = None

    def add(self, spent: "Spent", items: int = 1) -> None:
        """So many items are done."""
        self.busy += spent.busy
        self.starved += spent.starved
        self.blocked += spent.blocked
        self.wall += spent.wall
        self.items += items

    def shares(self) -> dict[str, float]:
        """Parts of wall clock, summing to 1 at most; all 0 before it did anything."""
        return {name: round(getattr(self, name) / self.wall, 4) if self.wall else 0.0 for name in SHARES}


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of some items, from the end of the one before them to the end of the last."""

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    wall: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def spent(
    idle_since: float, launched: float, began: float, ended: float, waits: Sequence[Wait], *, takes_turns: bool = False
) -> Spent:
    """One item that a device worked on from `began` to `ended`, launched by the host after `waits`.

    Where two stages take turns on a device, one that begins late waited for its turn.
    """
    seconds = dict.fromkeys(SHARES[1:], 0.0)
    seconds["blocked" if takes_turns else "starved"] = max(0.0, began - max(idle_since, launched))
    for wait in waits:
        seconds[wait.kind] += max(0.0, min(wait.end, began) - max(wait.start, idle_since))
    return Spent(ended - began, **seconds, wall=ended - idle_since)


def merge(clocks: list[Clock]) -> Clock:
    """Several workers of one stage as one."""
    return Clock(*(sum(getattr(clock, name) for clock in clocks) for name in (*SHARES, "wall")))


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

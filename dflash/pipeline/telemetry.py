"""How a stage spent its time: busy, starved (waiting for input) or blocked (waiting for room)."""

from dataclasses import dataclass

SHARES = ("busy", "starved", "blocked")


@dataclass(slots=True)
class Clock:
    """Seconds of one stage so far; written by its own thread, read by any."""

    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0

    def shares(self) -> dict[str, float]:
        """Parts of the stage's time, summing to 1; all 0 before it did anything."""
        total = self.busy + self.starved + self.blocked
        return {name: round(getattr(self, name) / total, 4) if total else 0.0 for name in SHARES}


def merge(clocks: list[Clock]) -> Clock:
    """Several workers of one stage as one."""
    return Clock(*(sum(getattr(clock, name) for clock in clocks) for name in SHARES))


def bottleneck(stages: dict[str, dict[str, float]]) -> str:
    """One sentence: who is the busiest, who waits for it, and what to change."""
    if not any(share["busy"] for share in stages.values()):  # true of no stages, too
        return "nothing has run yet"
    name = max(stages, key=lambda stage: stages[stage]["busy"])
    share = f"{name} {stages[name]['busy']:.0%} busy"
    if name == "target":
        return f"{share}, train {stages['train']['starved']:.0%} starved: add a target device, or more anchors"
    if name == "train":
        return f"{share}, target {stages['target']['blocked']:.0%} blocked: give the drafter a faster device, or fewer anchors"
    return f"{share}, target {stages['target']['starved']:.0%} starved: put the token cache on a faster disk"

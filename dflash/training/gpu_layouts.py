"""Every way to share out a machine's GPUs between processes, targets and drafters: days, idle shares, the best one.

With t seconds of all the target's work on one GPU and d of the drafter's, p processes of n GPUs each take

    together   every GPU runs target and drafter in turn:          max(d, (t + d) / n) / p
    apart      one GPU runs the drafter, the others the target:    max(d, t / (n − 1)) / p
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """`processes`, each with `targets` and one drafter; a target shares the drafter's GPU where `together`."""

    processes: int
    targets: int
    together: bool
    seconds: float
    target_idle: float  # share of the time in which the target GPUs wait
    drafter_idle: float

    def says(self) -> str:
        """`8 processes: target and drafter on each GPU`."""
        several = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        if self.together:
            return f"{several}, {self.targets} GPU{'s' if self.targets > 1 else ''} each, a target on all of them"
        return f"{several}, {self.targets} target GPU{'s' if self.targets > 1 else ''} and a drafter GPU each"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__} | {"layout": self.says()}


def layouts(gpus: int, target_s: float, drafter_s: float) -> list[Layout]:
    """All layouts of equal processes, the fastest first; among equals that of the fewest processes."""
    found = []
    for processes in range(1, gpus + 1):
        if gpus % processes:
            continue
        each = gpus // processes
        t, d = target_s / processes, drafter_s / processes
        for together in (True, False) if each > 1 else (True,):
            seconds = max(d, (t + d) / each) if together else max(d, t / (each - 1))
            targets = each if together else each - 1
            whole = seconds or 1.0  # of nothing that is left
            if together:  # the drafter's GPU computes d, all of them share t
                target_idle = drafter_idle = 1 - (t + d) / (each * whole)
            else:
                target_idle, drafter_idle = 1 - t / (targets * whole), 1 - d / whole
            found.append(Layout(processes, targets, together, seconds, target_idle, drafter_idle))
    return sorted(found, key=lambda layout: (round(layout.seconds, 6), layout.processes))


def table(found: list[Layout]) -> str:
    """The layouts as lines of text, and what the next best one costs."""
    lines = [f"{'layout':56}{'days':>8}{'target idle':>13}{'drafter idle':>14}"]
    lines += [
        f"{one.says():56}{one.seconds / 86_400:8.2f}{one.target_idle:13.0%}{one.drafter_idle:14.0%}" for one in found
    ]
    best = found[0]
    lines.append(f"best: {best.says()}, training.processes={best.processes}")
    if len(found) > 1:
        more = found[1].seconds - best.seconds
        lines.append(
            f"the next best takes {more / 86_400:.2f} days more ({more / best.seconds:.0%}): {found[1].says()}"
        )
    return "\n".join(lines)

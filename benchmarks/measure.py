"""What the benchmarks share: interleaved timing, and peak memory as the CPU allocator saw it."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each candidate, the median of `rounds` after one that warms up.

    A round runs all of them, one after another, so that a busy machine slows all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory that was allocated at once during `run`, beyond what was there before."""
    run()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak

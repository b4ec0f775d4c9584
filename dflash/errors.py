"""What can go wrong between a token cache and a served drafter. A message says what, got, expected, what to do."""


class DflashError(Exception):
    """Base of all errors of this package."""


class ConfigMismatch(DflashError):
    """A setting that changes the curve differs from the one the run was started with, or settings contradict."""


class TargetMismatch(DflashError):
    """The target is not the one the rows or the drafter were made for."""


class StageFailed(DflashError):
    """A stage of the pipeline failed; the cause is chained."""


class CheckpointCorrupt(DflashError):
    """A checkpoint does not hold what its state says, or none that verifies is left."""


class RunLocked(DflashError):
    """Another process writes to the run directory."""

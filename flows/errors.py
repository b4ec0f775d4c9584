"""What can go wrong between a deployment and its stages. A message says what, got, expected, and what to do."""


class FlowError(Exception):
    """Base of all errors of this package."""


class BadParameter(FlowError):
    """A parameter does not exist or has a value that is not allowed; named as a path such as training.epochs."""


class StageKilled(FlowError):
    """The process of a stage ended without saying why: killed, out of memory, or crashed in native code."""


class StageError(FlowError):
    """The process of a stage failed with an error that is none of ours."""


class StageRefused(FlowError):
    """The process of a stage refused what it was given; trying again would change nothing."""


class StageStopped(FlowError):
    """The process of a stage was asked to stop by someone else and did so cleanly; a later run goes on from there."""


class NoProgress(FlowError):
    """A stage died several times at the same place; trying again is left to a person."""


class CannotFit(FlowError):
    """The check before a training says that the run cannot fit on this machine."""

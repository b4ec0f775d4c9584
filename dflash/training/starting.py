"""What a run begins with: its drafter, new or from a checkpoint."""

from dflash.model.drafter import Drafter, DrafterShape
from dflash.target.frozen import Target
from dflash.training import checkpoint
from dflash.training.checkpoint import Checkpoint, State
from dflash.training.initial_drafter import new_drafter
from dflash.training.open_run import OpenRun


def first_checkpoint(opened: OpenRun, target: Target, threads: int) -> Checkpoint:
    """The checkpoint before the first step: the drafter as it starts, an optimizer that has seen nothing."""
    drafter = new_drafter(opened.shape, opened.config.drafter, target, opened.config.training.seed)
    state = State(epoch=0, step=0, steps_total=0, settings=opened.settings(), threads=threads)
    return checkpoint.save(opened.run.checkpoints, state, dict(drafter.state_dict()), {})


def load_drafter(shape: DrafterShape, start: Checkpoint) -> Drafter:
    """A checkpoint's drafter, float32, on the CPU."""
    drafter = Drafter(shape).float()
    drafter.load_state_dict(start.drafter())
    return drafter

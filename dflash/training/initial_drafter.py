"""Where a drafter starts from: at random, as copies of the target's last layers, or as a drafter that was exported."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash.config import DrafterConfig
from dflash.errors import ConfigMismatch
from dflash.files import checksum
from dflash.model.drafter import Drafter, DrafterShape
from dflash.model.layouts import load_published
from dflash.model.part import CONVOLUTIONS, Part
from dflash.target.frozen import Target, decoder_layers
from dflash.training import checkpoint
from dflash.training.checkpoint import Checkpoint, State
from dflash.training.open_run import OpenRun
from dflash.training.vocabulary_ids import choose_ids

log = logging.getLogger(__name__)

_STD = 0.02  # the initializer range of the Qwen3 family


def first_checkpoint(opened: OpenRun, target: Target, threads: int) -> Checkpoint:
    """The checkpoint before the first step: the drafter as it starts, an optimizer that has seen nothing."""
    drafter = new_drafter(opened.shape, opened.config.drafter, target, opened.config.training.seed)
    if drafter.vocabulary is not None:
        share = choose_ids(drafter.vocabulary, opened.store, opened.shape.vocab_size)
        log.info(
            "the drafter's %d ids are %.1f%% of the training answers' tokens", opened.shape.vocabulary, share * 100
        )
        opened.run.record("vocabulary", ids=opened.shape.vocabulary, share_of_supervised_tokens=share)
    if opened.config.drafter.init not in ("random", "target"):
        start = Path(opened.config.drafter.init) / "model.safetensors"
        opened.run.record("drafter", init=str(start), checksum=checksum(start))
    state = State(epoch=0, step=0, steps_total=0, settings=opened.settings(), threads=threads)
    return checkpoint.save(opened.run.checkpoints, state, dict(drafter.state_dict()), {})


def load_drafter(shape: DrafterShape, start: Checkpoint) -> Drafter:
    """A checkpoint's drafter, float32, on the CPU."""
    drafter = Drafter(shape).float()
    drafter.load_state_dict(start.drafter())
    return drafter


def new_drafter(shape: DrafterShape, config: DrafterConfig, target: Target, seed: int) -> Drafter:
    """A drafter in float32 on the CPU, the same for the same seed.

    Raises ConfigMismatch when init=target and the target's layers do not compute what the drafter's do.
    """
    drafter = Drafter(shape).float()
    if drafter.look_back is not None:
        _refuse_bent_logits(shape, target)
    generator = torch.Generator().manual_seed(seed)
    parts = [module for module in drafter.modules() if isinstance(module, Part)]
    later = {parameter for part in parts for parameter in part.parameters()}
    for name, parameter in drafter.named_parameters():
        if parameter in later:  # drawn last, so that all kinds of one seed agree in what they share
            continue
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=_STD, generator=generator)
    with torch.no_grad():
        for part in parts:
            part.start(generator)
    if config.init == "target":
        _copy_target(drafter, target)
    elif config.init != "random":
        _copy_published(drafter, Path(config.init))
    return drafter


@torch.no_grad()
def _copy_published(drafter: Drafter, directory: Path) -> None:
    """All tensors of an exported drafter; parts that only the new one has stay as they start, at zero.

    Raises ConfigMismatch where the two differ in more, with the field that would make them alike.
    """
    shape, tensors = load_published(directory)
    own = drafter.shape
    wanted = {
        "drafter.layers": (shape.num_layers, own.num_layers),
        "drafter.taps": (list(shape.taps), list(own.taps)),
        "drafter.mask_token_id": (shape.mask_token_id, own.mask_token_id),
        "hidden size of the target": (shape.hidden_size, own.hidden_size),
        "vocabulary of the target": (shape.vocab_size, own.vocab_size),
    }
    for name, (theirs, ours) in wanted.items():
        if theirs != ours:
            raise ConfigMismatch(f"drafter.init={directory} has {name} {theirs}, this run {ours}; expected the same.")
    state = drafter.state_dict()
    if extra := sorted(tensors.keys() - state.keys()):
        raise ConfigMismatch(
            f"drafter.init={directory} is of kind {shape.kind} and has {extra[0]}, which this drafter has not. Set "
            f"drafter.kind={shape.kind} and, for its tables, drafter.tables=free and drafter.rank={shape.rank}."
        )
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ConfigMismatch(
                f"drafter.init={directory}: {name} is {tuple(tensor.shape)}, expected {tuple(state[name].shape)}."
            )
        state[name].copy_(tensor)


def _refuse_bent_logits(shape: DrafterShape, target: Target) -> None:
    """A Markov head adds to logits; behind a softcap it would add something else than its tables say."""
    if shape.kind == "dspark" and target.ends(torch.device("cpu"))[1].softcap is not None:
        raise ConfigMismatch(
            "drafter.kind=dspark adds to the target's logits, and this target bends them (final_logit_softcapping). "
            "Use drafter.kind=dflash2 or dflash."
        )


@torch.no_grad()
def _copy_target(drafter: Drafter, target: Target) -> None:
    """Layers from the target's last ones, `fc` the identity on the last tap, norms alike.

    The last tap is then what the first copied layer read in the target, up to the QK-norm that the target may lack.
    """
    hidden = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    sources = decoder_layers(target.model)[-drafter.shape.num_layers :]
    config = target.model.config.get_text_config(decoder=True)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in ("silu", "swish"):
        raise _unlike(f"the target's layers use {activation}, the drafter's silu")
    for layer, source in zip(drafter.layers, sources, strict=True):
        _copy_layer(layer, source)
    drafter.hidden_norm.weight.copy_(_norm_weight(sources[0].get_submodule("input_layernorm"), hidden))
    drafter.norm.weight.copy_(_norm_weight(target.model.get_decoder().get_submodule("norm"), hidden))


def _copy_layer(layer: nn.Module, source: nn.Module) -> None:
    ours, theirs = dict(layer.named_parameters()), dict(source.named_parameters())
    ours = {name: parameter for name, parameter in ours.items() if not name.startswith(CONVOLUTIONS)}
    # Biases are left behind, the drafter has none. Anything else more in the target is another kind of layer.
    if extra := [name for name in theirs if name not in ours and not name.endswith(".bias")]:
        raise _unlike(f"the target's layers have {extra[0]}, the drafter's do not")
    for name, parameter in ours.items():
        if name not in theirs:
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                continue
            raise _unlike(f"the target's layers have no {name}")
        value: Tensor = theirs[name]
        if value.shape != parameter.shape:
            raise _unlike(f"the target's {name} has shape {tuple(value.shape)}, the drafter's {tuple(parameter.shape)}")
        if name.endswith("norm.weight"):
            value = _norm_weight(source.get_submodule(name.removesuffix(".weight")), value.shape[0])
        parameter.copy_(value)


def _norm_weight(norm: nn.Module, width: int) -> Tensor:
    """The weight as a plain RMSNorm has it, read from what the norm does: some multiply by 1 + weight."""
    parameter = norm.get_parameter("weight")
    # Inputs so large that no eps is seen; the first one's RMS is 1, so what comes out is the factor of each channel.
    constant = torch.full((width,), 1e3, dtype=parameter.dtype, device=parameter.device)
    slanted = constant * torch.linspace(-1, 2, width, dtype=parameter.dtype, device=parameter.device)
    weight: Tensor = norm(constant).float()
    expected = slanted.float() / slanted.float().square().mean().sqrt() * weight
    if not torch.allclose(norm(slanted).float(), expected, rtol=0.02, atol=0.02):  # bfloat16 rounds to 2⁻⁸
        raise _unlike("the target's norms are no RMSNorms, the drafter's are")
    return weight


def _unlike(why: str) -> ConfigMismatch:
    return ConfigMismatch(f"drafter.init=target: {why}. Use drafter.init=random for this target.")

"""The frozen target: token ids → features, with the target's own embedding and head for the drafter.

Tap i reads `hidden_states[i + 1]`, the output of decoder layer i (entry 0 is the embedding). A forward pass ends inside
the last tap: later layers and the head are never run, unless the loss needs the final state.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from dflash.config import DrafterConfig, TargetConfig
from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.model.drafter import DrafterShape
from dflash.model.head import Head
from dflash.target.drafter_parts import drafter_parts
from dflash.target.mask_token import check_mask_token
from dflash.target.sharding import device_map


def spread_taps(num_layers: int, taps: int) -> tuple[int, ...]:
    """round(1 + i·(L−4)/(n−1)) for i = 0..n−1, L//2 when n = 1 (arXiv 2602.06036 and its public code)."""
    if taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))


def resolve_taps(taps: int | list[int], num_layers: int) -> tuple[int, ...]:
    """The layers to tap, ascending, distinct, within 0..L−2.

    Raises ConfigMismatch otherwise: the last layer's output goes through the final norm in `hidden_states`, so trainers
    and servers mean different things by it, as they do by negative numbers.
    """
    layers = spread_taps(num_layers, taps) if isinstance(taps, int) else tuple(taps)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers - 2:
        raise ConfigMismatch(
            f"drafter.taps={taps} gives layers {list(layers)} of a target with {num_layers} layers; expected distinct, "
            f"ascending layers within 0..{num_layers - 2}. Ask for fewer taps or name other layers."
        )
    return layers


def text_config(model: TargetConfig) -> PreTrainedConfig:
    """The target's configuration, without its weights.

    Raises TargetMismatch when there is none.
    """
    try:
        config = AutoConfig.from_pretrained(
            model.model, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise TargetMismatch(
            f"target.model={model.model} cannot be read: {error}. Name a directory with config.json, or a hub name."
        ) from error
    return config.get_text_config(decoder=True)


def stop_tokens(model: TargetConfig) -> frozenset[int]:
    """The ids that end an answer by the target's generation config: end of text and end of turn."""
    try:
        stop = GenerationConfig.from_pretrained(model.model, revision=model.revision).eos_token_id
    except OSError:
        return frozenset()  # a target without one ends by its config's eos alone
    return frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])


def drafter_shape(drafter: DrafterConfig, config: PreTrainedConfig, stop_ids: Collection[int] = ()) -> DrafterShape:
    """The drafter's shape for a target: its widths, heads and positions are the target's own.

    Raises ConfigMismatch when taps or mask token do not fit the target.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    rope.setdefault("rope_type", "default")
    rope.pop("partial_rotary_factor", None)  # the drafter turns its whole head
    if drafter.vocabulary is not None and drafter.vocabulary > config.vocab_size:
        raise ConfigMismatch(
            f"drafter.vocabulary={drafter.vocabulary} is more than the target's {config.vocab_size} ids. Lower it, or "
            "leave it out for all of them."
        )
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        num_layers=drafter.layers,
        block_size=drafter.block_size,
        taps=resolve_taps(drafter.taps, config.num_hidden_layers),
        num_target_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        mask_token_id=check_mask_token(drafter.mask_token_id, config, config.vocab_size, stop_ids),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        kind=drafter.kind,
        **drafter_parts(drafter, config.hidden_size),
    )


class _LastTap(Exception):
    """Ends a forward pass inside the last tap. Not an error."""


@dataclass(slots=True)
class _Taps:
    """What the hooks of one forward pass saw."""

    outputs: dict[int, Tensor]
    stop: bool


class Target:
    """The frozen model with its taps; with `final`, features end with the final hidden state, which the head reads.

    `known` are the tokenizer's ids, where the target decodes: a head may have more rows (Qwen3's 151,936 for 151,669
    ids), and what they give is never emitted, nor drafted.
    """

    def __init__(
        self, model: PreTrainedModel, taps: tuple[int, ...], final: bool = False, known: Collection[int] | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.taps = taps
        self.final = final
        self._unknown = None if known is None else unknown_ids(model, known)
        self._seen = _Taps({}, stop=False)
        # The library's name since 5.24; code that comes with a hub model may have the older one.
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        layers = decoder_layers(model)
        for tap in taps:
            layers[tap].register_forward_hook(self._hook(tap))
        used = [next(layer.parameters()).device for layer in layers[: None if final else taps[-1] + 1]]
        # The first takes the ids, the last gives the features; a target on one device has one.
        self.devices: tuple[torch.device, ...] = tuple(
            dict.fromkeys([model.get_input_embeddings().weight.device, *used])
        )

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        taps: tuple[int, ...],
        devices: str | torch.device | Sequence[torch.device],
        final: bool = False,
        known: Collection[int] | None = None,
    ) -> "Target":
        """Read the target's weights onto a device, or onto several that hold it together.

        Raises TargetMismatch when a weight is missing: the library would go on with a random one.
        """
        devices = [torch.device(devices)] if isinstance(devices, str | torch.device) else devices
        model, info = AutoModelForCausalLM.from_pretrained(
            config.model,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            device_map=device_map(config, devices) if len(devices) > 1 else None,
        )
        if lacking := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
            raise TargetMismatch(
                f"target.model={config.model} lacks {len(lacking)} of the weights that its config asks for, "
                f"{', '.join(lacking[:3])} among them; expected all. The files are not whole or not of this model."
            )
        return cls(model if len(devices) > 1 else model.to(devices[0]), taps, final, known)

    @property
    def device(self) -> torch.device:
        """Where the target takes its ids."""
        return self.devices[0]

    def features(self, ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S N*H"]:
        """The tapped hidden states of right-padded rows, concatenated in tap order, rounded to bfloat16.

        No attention mask is needed: the target is causal and padding comes last, so no real position sees it.
        """
        self._seen = _Taps({}, stop=not self.final)
        states = []
        with torch.no_grad(), suppress(_LastTap):
            states.append(self.model.get_decoder()(input_ids=ids.long(), use_cache=False).last_hidden_state)
        return torch.cat([self._collect(), *(state.to(self.devices[-1], torch.bfloat16) for state in states)], dim=-1)

    def forward(
        self, ids: Int[Tensor, "B S"], cache: Any, **inputs: Any
    ) -> tuple[Float[Tensor, "B S V"], Float[Tensor, "B S N*H"]]:
        """A whole pass over new tokens behind `cache`: the model's own logits, and features of the new positions.

        Ids that the tokenizer lacks have logit −inf where it is known.

        `inputs` are the model's own: mask and positions where rows of a batch are of unequal length.
        """
        self._seen = _Taps({}, stop=False)
        with torch.no_grad():
            logits = self.model(input_ids=ids.long(), use_cache=True, **{self._cache_name: cache}, **inputs).logits
        if self._unknown is not None:
            logits = logits.masked_fill(self._unknown.to(logits.device), -torch.inf)
        return logits, self._collect()

    def ends(self, device: torch.device) -> tuple[nn.Module, Head]:
        """The target's own input embedding and LM head (soft-capping and scaling included), on a device.

        Raises TargetMismatch when that head does not give the model's logits.
        """
        config = self.model.config.get_text_config(decoder=True)
        embedding = _moved(self.model.get_input_embeddings(), device)
        linear = _moved(self.model.get_output_embeddings(), device)
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:
            scale = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None) is not None:
            scale = 1.0 / float(config.logits_scaling)
        softcap = getattr(config, "final_logit_softcapping", None)
        head = Head(linear.weight, getattr(linear, "bias", None), softcap, scale)
        self._check_head(head, device)
        return embedding, head if self._unknown is None else replace(head, unknown=self._unknown.to(device))

    def _check_head(self, head: Head, device: torch.device) -> None:
        """Compare with the model's own logits: a scale that this module does not know would go unnoticed."""
        ids = torch.arange(4, device=self.device)[None] % head.weight.shape[0]
        with torch.no_grad():
            states = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            wanted = self.model(input_ids=ids, use_cache=False).logits.float()
        got = head.logits(states.to(device)).float().to(wanted.device)
        # The same products rounded a few times more or less: each rounding is at most eps of a logit.
        tolerance = 8 * torch.finfo(head.weight.dtype).eps * wanted.abs().max()
        if not (got - wanted).abs().max() <= tolerance:
            raise TargetMismatch(
                f"{type(self.model).__name__}: its logits differ from head · final state by "
                f"{(got - wanted).abs().max():.3g}, expected at most {tolerance:.3g}. Its head does more than scaling "
                "and soft-capping; this architecture is not supported yet."
            )

    def _hook(self, tap: int) -> Any:
        last = tap == self.taps[-1]

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen.outputs[tap] = output[0] if isinstance(output, tuple) else output
            if last and self._seen.stop:
                raise _LastTap

        return hook

    def _collect(self) -> Tensor:
        outputs = [self._seen.outputs[tap].to(self.devices[-1], torch.bfloat16) for tap in self.taps]
        self._seen = _Taps({}, stop=False)
        return torch.cat(outputs, dim=-1)


def unknown_ids(model: PreTrainedModel, known: Collection[int]) -> Bool[Tensor, " V"] | None:
    """Which rows of the model's head stand for no id of its tokenizer; None where all do for one."""
    unknown = torch.ones(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
    unknown[[token for token in known if token < unknown.numel()]] = False
    return unknown.to(model.device) if unknown.any() else None


def _moved(module: Any, device: torch.device) -> Any:
    """The module itself where it lies there, else a copy, without what accelerate has put around a sharded one."""
    if module.weight.device == device:
        return module
    return remove_hook_from_module(deepcopy(module)).to(device)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's decoder layers.

    Raises TargetMismatch when there is not exactly one list of that length in its decoder.
    """
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        module
        for module in model.get_decoder().children()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if len(found) != 1:
        raise TargetMismatch(
            f"{type(model).__name__} has {len(found)} lists of {wanted} layers in its decoder; expected one. "
            "Its taps are not known; this architecture is not supported yet."
        )
    return found[0]

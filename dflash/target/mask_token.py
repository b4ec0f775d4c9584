"""Which token fills the slots that are to be predicted: an existing row of the target's embedding that no text uses.

A token added by growing the tokenizer has no row in the frozen embedding, and one that text uses would be ambiguous in
slot 0. So the id is explicit; where it is missing, the error names the one that this rule finds:

1. the tokenizer's own mask token;
2. else the first row of the embedding that no token has, as in the public checkpoints for Qwen3;
3. else the special token of the highest id that is not pad, bos, eos, unk, a stop token, or part of the chat template.
"""

from collections.abc import Collection
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from dflash.errors import ConfigMismatch

_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def check_mask_token(
    mask_token_id: int | None, config: PreTrainedConfig, rows: int, stop_ids: Collection[int] = ()
) -> int:
    """The mask token's id; `rows` are those of the target's embedding, `stop_ids` what else ends an answer.

    Raises ConfigMismatch when it is missing, out of range, or one of pad, eos, bos and the stop tokens.
    """
    if mask_token_id is None:
        raise ConfigMismatch(
            "drafter.mask_token_id is not set; expected the id of a token that no text uses, not pad, eos, bos or an "
            f"end of turn.{_proposal(config, rows, stop_ids)}"
        )
    if not 0 <= mask_token_id < rows:
        raise ConfigMismatch(
            f"drafter.mask_token_id={mask_token_id} has no row in the target's embedding of {rows} rows; expected an "
            f"id within 0..{rows - 1}. A token added by growing the tokenizer cannot be the mask."
        )
    meaning = _meanings(config, stop_ids).get(mask_token_id)
    if meaning is not None:
        raise ConfigMismatch(
            f"drafter.mask_token_id={mask_token_id} is the target's {meaning}; expected a token that no text uses."
        )
    return mask_token_id


def find_mask_token(
    tokenizer: Any, config: PreTrainedConfig, rows: int, stop_ids: Collection[int] = ()
) -> tuple[int, str] | None:
    """The id that this module's rule finds, and why; None when it finds none."""
    taken = set(_meanings(config, stop_ids))
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < rows and own not in taken:
        return own, f"the tokenizer's own mask token {tokenizer.mask_token!r}"
    first_free = max(tokenizer.get_vocab().values()) + 1
    if first_free < rows and first_free not in taken:
        return first_free, "the first row of the embedding that no token has"
    named = [getattr(tokenizer, name, None) for name in (*_NAMES, "unk_token_id")]
    taken |= {token for token in named if token is not None}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token, added in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if added.special and token < rows and token not in taken and added.content not in template:
            return token, f"the special token {added.content!r}, which neither ends a text nor stands in the template"
    return None


def _meanings(config: PreTrainedConfig, stop_ids: Collection[int]) -> dict[int, str]:
    meanings = dict.fromkeys(stop_ids, "end of turn")
    for name in _NAMES:
        value = getattr(config, name, None)
        meanings |= {token: name for token in (value if isinstance(value, list) else [value]) if token is not None}
    return meanings


def _proposal(config: PreTrainedConfig, rows: int, stop_ids: Collection[int]) -> str:
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.name_or_path, trust_remote_code=False)  # None would ask
        found = find_mask_token(tokenizer, config, rows, stop_ids)
    except Exception:  # a proposal for a message about another error
        found = None
    return f" Set drafter.mask_token_id={found[0]}: {found[1]}." if found else ""

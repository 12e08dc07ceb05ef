"""Causal attention without a mask tensor, for models of transformers whose batches carry no attention mask.

Where transformers cannot look at values (under torch.compile, under fake tensors) it builds a boolean mask of
(samples, 1, length, length) and hands it to scaled_dot_product_attention: `_ignore_causal_mask_sdpa` and
`find_packed_sequence_indices` in masking_utils.py of transformers 5.17 to 5.23. SDPA then takes no flash kernel and
computes what the mask throws away. In eager mode on CUDA the same look at values makes the host wait in each forward.

Here the decoder's forward runs, where its caller gives it neither mask nor positions nor a cache, under an
implementation name for which transformers makes no mask: the same function of transformers, which then says
`is_causal=True`. In any other forward the model's own name is back.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

NAME = "autoplan_causal_sdpa"
"""Under which the implementation is registered with transformers: attention without a mask function."""

PLAIN_ARGUMENTS = frozenset(
    ("input_ids", "inputs_embeds", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "labels")
)
"""The arguments with which a decoder's attention stays plainly causal."""


def reason_against_maskless(base: Any, implementation: str | None = "sdpa") -> str | None:
    """Why the attention of a decoder is not plainly causal under SDPA, or cannot be told to be; None if it can.

    Args:
        base: The model that makes the mask: `base_model` of a language model.
        implementation: The one that it must have now; None: any.
    """
    config = getattr(base, "config", None)
    now = getattr(config, "_attn_implementation_internal", None)
    if now is None or implementation not in (None, now):
        return "its attention is not scaled_dot_product_attention"
    if not hasattr(sys.modules.get(type(base).__module__), "create_causal_mask"):
        return "it does not make its mask by transformers' create_causal_mask"
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        return "it is not a decoder alone"
    kinds = getattr(config, "layer_types", None)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(kind != "full_attention" for kind in kinds) if kinds else any(windows):
        return "it attends within windows"
    if not all(module.is_causal for module in base.modules() if hasattr(module, "is_causal")):
        return "some of its attention is not causal"
    return None if _register_maskless() else "this transformers has no interface for attention functions"


def _register_maskless() -> bool:
    """Registers the implementation: transformers' own SDPA function, without a function that makes a mask."""
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        return False
    AttentionInterface.register(NAME, sdpa_attention_forward)
    return NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def use_maskless_attention(models: list[Any]) -> int:
    """Has the decoders among these models attend without a mask tensor where nothing needs one.

    Args:
        models: Models of transformers; changed in place.

    Returns:
        How many of them do.
    """
    bases = [getattr(model, "base_model", model) for model in models]
    able = [base for base in bases if reason_against_maskless(base) is None]
    for base in able:
        base.register_forward_pre_hook(_choose, with_kwargs=True)
        base.register_forward_hook(_put_back)
    return len(able)


def _choose(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward: whether what the caller gives leaves the attention plainly causal."""
    config: Any = base.config
    plain = len(args) <= 1 and all(value is None or name in PLAIN_ARGUMENTS for name, value in kwargs.items())
    config._attn_implementation_internal = NAME if plain else "sdpa"


def _put_back(base: nn.Module, args: Any, output: Any) -> None:
    """After a forward: the name that the user knows."""
    config: Any = base.config
    config._attn_implementation_internal = "sdpa"

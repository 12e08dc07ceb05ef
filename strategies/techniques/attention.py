"""The attention knob: which implementation of attention the model calls.

Models of transformers read it from their configuration, also those inside another module (a policy and its reference, a
student and its teacher); any other model keeps its own. Attention dropout moves
torch's scaled_dot_product_attention onto its plain math form on CPU, which saves no memory (torch, sdp_utils_cpp).
Where a batch carries no attention mask, no mask tensor is made.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure, language_models
from autoplan.strategies.config import ATTENTION_BACKENDS
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload

IMPLEMENTATIONS = ("eager", "sdpa")

LARGEST_GROUPED_HEAD = 256
"""Numbers per head up to which transformers lets a kernel share keys between heads (use_gqa_in_sdpa, 5.17 to 5.23)."""


class AttentionStrategy:
    """own keeps the model as it is; eager and sdpa are set through transformers' attention interface."""

    name = "attention"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Both implementations where a model can switch; the one it has already is what own stands for."""
        models = language_models(structure.model)
        if not models:
            return offer(self.name, ("own",), dict.fromkeys((*IMPLEMENTATIONS, *ATTENTION_BACKENDS), NOT_SWITCHABLE))
        reasons = {value: _reason_against(models, value) for value in IMPLEMENTATIONS}
        reasons |= {value: _reason_against_kernel(workload, models, value, device) for value in ATTENTION_BACKENDS}
        return offer(self.name, ("own",), reasons)

    def apply(self, build: Build) -> None:
        """Switches the implementation of every attention module: of the model, or of the models that it holds.

        Raises:
            ConfigError: no model can switch, or none has such an implementation.
        """
        value = build.config.attention
        models = language_models(build.model)
        if value in ATTENTION_BACKENDS and build.device.type != "cuda":
            raise ConfigError(f"attention={value} is a kernel of CUDA", hint="Use attention=sdpa on CPU.")
        if value != "own":
            self._switch(models, "sdpa" if value in ATTENTION_BACKENDS else value)
        if value in ATTENTION_BACKENDS:
            build.hooks.around = functools.partial(only_kernel, value)
        # under fake tensors transformers makes the masks that it makes under compile
        is_traced = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
        makes_masks = build.config.compile == "model" or build.device.type == "cuda" or is_traced
        if makes_masks and build.config.tp * build.config.pp == 1:
            use_maskless_attention(models)

    def _switch(self, models: list[Any], value: str) -> None:
        able = [model for model in models if _reason_against_form(model, value) is None]
        if not able:
            reason = _reason_against_form(models[0], value) if models else NOT_SWITCHABLE
            raise ConfigError(f"attention={value} does not apply: {reason}", hint="Use attention=own.")
        for model in able:
            model.set_attn_implementation(value)
            if model.config._attn_implementation != value:
                raise ConfigError(
                    f"attention={value} was not taken over by {type(model).__name__}", hint="Use attention=own."
                )


def only_kernel(value: str) -> contextlib.AbstractContextManager[None]:
    """The context in which scaled_dot_product_attention runs this kernel or raises."""
    return sdpa_kernel(getattr(SDPBackend, ATTENTION_BACKENDS[value]))


def _reason_against_kernel(workload: Workload, models: Sequence[Any], value: str, device: str) -> str | None:
    """Why a single kernel is not offered; None where it runs on the model's own shape."""
    if device != "cuda":
        return f"{value} is a kernel of CUDA"
    able = [model for model in models if _reason_against_form(model, "sdpa") is None]
    if not able:
        return _reason_against_form(models[0], "sdpa")
    if value != "sdpa_efficient":
        for model in able:
            reason = reason_against_maskless(decoder_of(model), implementation=None)
            batch = workload.make_batch(1, 0) if reason is None else None
            if isinstance(batch, dict) and batch.get("attention_mask") is not None:
                reason = "its batches carry an attention mask"
            if reason is not None:
                return f"{value} takes no mask, and the model may need one: {reason}"
    shape = attention_shape(able[0].config, workload.sequence_length)
    return probe_kernel(value, shape, device, groups=heads_per_key(able[0]))


def attention_shape(config: Any, length: int | None) -> tuple[int, int, int, int]:
    """(samples, heads, length, numbers per head) of a model's attention, for one sample."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(text.num_attention_heads)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 1, heads, length or 128, int(size)


def heads_per_key(model: nn.Module) -> int:
    """How many heads of queries share one of keys and values: the most of any attention inside; 1 without groups.

    Read where transformers' function of SDPA reads it: `num_key_value_groups` of the module.
    """
    return max((int(getattr(module, "num_key_value_groups", 1)) for module in model.modules()), default=1)


def probe_kernel(value: str, shape: tuple[int, int, int, int], device: str, groups: int = 1) -> str | None:
    """Why a kernel does not run forward and backward in bf16 on this shape; None if it does.

    Args:
        value: The kernel.
        shape: (samples, heads, length, numbers per head) of the queries.
        device: Where it would run.
        groups: Heads of queries for each of keys and values. Where they are more than one, the kernel has to take them
            as they are (`enable_gqa`): without a mask, and up to 256 numbers per head, transformers repeats no keys
            (integrations/sdpa_attention.py, use_gqa_in_sdpa). A kernel that takes them only repeated would raise on the
            first batch without padding.
    """
    samples, heads, length, size = shape
    grouped = groups > 1 and size <= LARGEST_GROUPED_HEAD
    keys = (samples, heads // groups if grouped else heads, length, size)
    try:
        query, key, value_states = (
            torch.randn(one, device=device, dtype=torch.bfloat16, requires_grad=True) for one in (shape, keys, keys)
        )
        with only_kernel(value):
            out = F.scaled_dot_product_attention(query, key, value_states, is_causal=True, enable_gqa=grouped)
            out.float().sum().backward()
    except Exception as error:  # "No available kernel", an architecture that it was not built for, no memory
        on = f"{shape}" + (f" with {keys[1]} heads of keys" if grouped else "")
        return f"a probe on the model's shape {on} failed: {type(error).__name__}: {error}".splitlines()[0]
    return None


NOT_SWITCHABLE = "neither the model nor a part of it is one of transformers; its attention is part of its own code"


def attention_dropout(model: nn.Module) -> float:
    """The attention dropout rate of a transformers model, or the highest of those inside; 0 where none states one."""
    names = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "dropout_rate")

    def stated(config: Any) -> float:
        return next((rate for name in names if isinstance(rate := getattr(config, name, None), float)), 0.0)

    return max((stated(inner.config) for inner in language_models(model)), default=0.0)


def _reason_against(models: Sequence[Any], value: str) -> str | None:
    """Why no model here would change; None where one of them does."""
    able = [model for model in models if _reason_against_form(model, value) is None]
    if not able:
        return _reason_against_form(models[0], value)
    if all(model.config._attn_implementation == value for model in able):
        return f"{value} is what the model has already, which own stands for"
    return None


def _reason_against_form(model: nn.Module, value: str) -> str | None:
    if value == "sdpa" and not getattr(model, "_supports_sdpa", False):
        return f"{type(model).__name__} has no scaled_dot_product_attention form"
    return None


# Causal attention without a mask tensor, for models of transformers whose batches carry no attention mask.
#
# Where transformers cannot look at values (under torch.compile, under fake tensors) it builds a boolean mask of
# (samples, 1, length, length) and hands it to scaled_dot_product_attention: `_ignore_causal_mask_sdpa` and
# `find_packed_sequence_indices` in masking_utils.py of transformers 5.17 to 5.23. SDPA then takes no flash kernel and
# computes what the mask throws away. In eager mode on CUDA the same look at values makes the host wait in each forward.
# Here the decoder's forward runs, where its caller gives it neither mask nor positions nor a cache, under a name for
# which transformers makes no mask: its own function, which then says `is_causal=True`. Else the model's name is back.


NAME = "autoplan_causal_sdpa"
"""Under which the implementation is registered with transformers: attention without a mask function."""

PLAIN_ARGUMENTS = frozenset(
    ("input_ids", "inputs_embeds", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "labels")
)
"""The arguments with which a decoder's attention stays plainly causal."""


def decoder_of(model: Any) -> Any:
    """The part of a language model that makes the mask.

    It is its `base_model`; of a PeftModel, whose `base_model` is the adapters' own module, that of the model within.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(inner, "base_model", inner)


def reason_against_maskless(base: Any, implementation: str | None = "sdpa") -> str | None:
    """Why the attention of a decoder is not plainly causal under SDPA, or cannot be told to be; None if it can.

    Args:
        base: The model that makes the mask (`decoder_of`).
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
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers' own SDPA function, without a function that makes a mask
    AttentionInterface.register(NAME, sdpa_attention_forward)
    return None


def use_maskless_attention(models: list[Any]) -> None:
    """Has the decoders among these models attend without a mask tensor where nothing needs one.

    Args:
        models: Models of transformers; changed in place.
    """
    for model in models:
        base = decoder_of(model)
        if reason_against_maskless(base) is None:
            base.register_forward_pre_hook(_choose, with_kwargs=True)
            base.register_forward_hook(_put_back)


def _choose(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward: whether what the caller gives leaves the attention plainly causal."""
    config: Any = base.config
    plain = len(args) <= 1 and all(value is None or name in PLAIN_ARGUMENTS for name, value in kwargs.items())
    config._attn_implementation_internal = NAME if plain else "sdpa"


def _put_back(base: nn.Module, args: Any, output: Any) -> None:
    """After a forward: the name that the user knows."""
    config: Any = base.config
    config._attn_implementation_internal = "sdpa"

"""The attention knob: which implementation of attention the model calls.

Models of transformers read it from their configuration; any other model keeps its own. Attention dropout moves
torch's scaled_dot_product_attention onto its plain math form on CPU, which saves no memory (torch, sdp_utils_cpp).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload

IMPLEMENTATIONS = ("eager", "sdpa")


class AttentionStrategy:
    """own keeps the model as it is; eager and sdpa are set through transformers' attention interface."""

    name = "attention"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Both implementations where the model can switch; the one it has already is what own stands for."""
        model = structure.model
        reason = reason_against_switching(model)
        if reason is not None:
            return offer(self.name, ("own",), dict.fromkeys(IMPLEMENTATIONS, reason))
        own = _config(model)._attn_implementation
        reasons = {value: _reason_against(model, value, own) for value in IMPLEMENTATIONS}
        return offer(self.name, ("own",), reasons)

    def apply(self, build: Build) -> None:
        """Switches the implementation of every attention module.

        Raises:
            ConfigError: the model cannot switch, or has no such implementation.
        """
        value = build.config.attention
        if value == "own":
            return
        reason = reason_against_switching(build.model) or _reason_against(build.model, value, own="")
        if reason is not None:
            raise ConfigError(f"attention={value} does not apply: {reason}", hint="Use attention=own.")
        model: Any = build.model
        model.set_attn_implementation(value)
        if _config(build.model)._attn_implementation != value:
            raise ConfigError(
                f"attention={value} was not taken over by {type(build.model).__name__}", hint="Use attention=own."
            )


def reason_against_switching(model: nn.Module) -> str | None:
    """Why the attention of this model cannot be switched; None if it can."""
    if not hasattr(model, "set_attn_implementation"):
        return "the model is not one of transformers; its attention is part of its own code"
    if _config(model) is None:
        return "the model has no configuration"
    return None


def attention_dropout(model: nn.Module) -> float:
    """The attention dropout rate of a transformers model; 0 where it states none."""
    config = _config(model)
    for name in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "dropout_rate"):
        rate = getattr(config, name, None)
        if isinstance(rate, float):
            return rate
    return 0.0


def _reason_against(model: nn.Module, value: str, own: str) -> str | None:
    if value == own:
        return f"{value} is what the model has already, which own stands for"
    if value == "sdpa" and not getattr(model, "_supports_sdpa", False):
        return f"{type(model).__name__} has no scaled_dot_product_attention form"
    return None


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)

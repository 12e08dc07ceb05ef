"""Which variants a configuration is made of, and which of them a search has to trace. Loads no torch.

In: configurations. Out: `VariantKey`s: what changes the operations or the saved tensors of a micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.planner.trace.model_profile import VariantKey
from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig

PLAIN = VariantKey()
"""The plain fp32 variant: what the workload does without any technique. It alone decides whether the workload runs."""


def variants_of(config: TrainingConfig) -> tuple[VariantKey, VariantKey]:
    """The variant of the blocks that are not checkpointed, and that of the blocks that are; the same where all are one.

    Args:
        config: Any configuration; `every_k` mixes the variants `none` and `full`.
    """
    base = VariantKey(
        precision="half" if config.precision in ("bf16", "fp16") else "fp32",
        attention="sdpa" if config.attention in ATTENTION_BACKENDS else config.attention,
        checkpointing="selective" if config.checkpointing == "selective" else "none",
        loss=config.loss,
        compiled=config.compile != "off",
        parameters="own" if config.parameters == "own" else "bf16",
    )
    whole = config.checkpointing not in ("none", "selective")
    return base, base.model_copy(update={"checkpointing": "full"}) if whole else base


def variants_to_trace(configs: Iterable[TrainingConfig], *, has_blocks: bool = False) -> tuple[VariantKey, ...]:
    """The eager variants that predictions of these configurations read, the plain one first, then the simplest ones.

    A compiled variant is predicted from the eager ones with the same knobs, between no and selective checkpointing.
    Memory that comes and goes in a micro-step is read from the variant without checkpointing.

    Args:
        configs: The candidates.
        has_blocks: The model has repeated blocks, so that selective checkpointing applies.
    """
    keys = {PLAIN}
    for place in {_variant_knobs(config): config for config in configs}.values():
        for key in variants_of(place):
            keys.add(key.model_copy(update={"compiled": False}))
            keys.add(key.model_copy(update={"compiled": False, "checkpointing": "none"}))
            if key.compiled and has_blocks:
                keys.add(key.model_copy(update={"compiled": False, "checkpointing": "selective"}))
    return tuple(sorted(keys, key=lambda key: (_techniques(key), key.text())))


def _variant_knobs(c: TrainingConfig) -> tuple[object, ...]:
    return c.precision, c.attention, c.checkpointing, c.loss, c.compile != "off", c.parameters != "own"


def _techniques(key: VariantKey) -> int:
    """How many knobs of a variant are not the plain one's."""
    return sum(getattr(key, name) != getattr(PLAIN, name) for name in VariantKey.model_fields)

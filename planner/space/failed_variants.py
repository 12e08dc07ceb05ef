"""Leaves out the candidates whose variant failed in the trace. Loads no torch.

In: a `Space`, and `ModelProfile.failed_variants`. Out: the space of what runs, with the reasons for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.errors import ConfigError
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.generate import Space
from autoplan.planner.trace.model_profile import VariantKey
from autoplan.planner.trace.variants import PLAIN, variants_of
from autoplan.strategies.config import TrainingConfig

_KNOBS = ("precision", "attention", "checkpointing", "loss")


def without_failed_variants(space: Space, failed: Mapping[str, str]) -> Space:
    """The space without the candidates that are made of a variant that failed.

    Args:
        space: Its candidates are legal.
        failed: Why a variant does not run, by `VariantKey.text()`. A compiled candidate is left out with the eager
            variant of the same knobs.

    Raises:
        ConfigError: no candidate is left: what the user fixed does not run with this model.
    """
    if not failed:
        return space
    kept: list[TrainingConfig] = []
    dropped: dict[str, int] = {}
    reasons: dict[tuple[str, ...], str | None] = {}
    for config in space.candidates:
        knobs = (config.precision, config.attention, config.checkpointing, config.loss)
        if knobs not in reasons:
            reasons[knobs] = _failed_variant(config, failed)
        variant = reasons[knobs]
        if variant is None:
            kept.append(config)
        else:
            dropped[variant] = dropped.get(variant, 0) + 1
    if not kept:
        name, why = next(iter(failed.items()))
        raise ConfigError(
            f"none of the {len(space.candidates)} configurations runs with this model: {_describe(name)}: {why}",
            hint="Leave the knobs of that variant to the search, or fix them to other values.",
        )
    families = [
        LeftOutFamily(
            family=_describe(name),
            limit=f"it does not run with this model: {failed[name]}",
            by="",
            configurations=count,
        )
        for name, count in dropped.items()
    ]
    used = {knob: {getattr(config, knob) for config in kept} for knob in space.values}
    values = {knob: tuple(value for value in known if value in used[knob]) for knob, known in space.values.items()}
    return replace(space, candidates=tuple(kept), left_out=(*space.left_out, *families), values=values)


def _failed_variant(config: TrainingConfig, failed: Mapping[str, str]) -> str | None:
    """The text of the first variant of a configuration that failed; None if all run."""
    for key in variants_of(config):
        name = key.model_copy(update={"compiled": False}).text()
        if name in failed:
            return name
    return None


def _describe(name: str) -> str:
    """A variant by the knobs that are not the plain one's: `attention=sdpa checkpointing=full`."""
    precision, attention, checkpointing, loss, _ = name.split("/")
    key = VariantKey.model_validate(
        {"precision": precision, "attention": attention, "checkpointing": checkpointing, "loss": loss}
    )
    words = [f"{knob}={getattr(key, knob)}" for knob in _KNOBS if getattr(key, knob) != getattr(PLAIN, knob)]
    return " ".join(words).replace("precision=half", "precision=bf16 or fp16")

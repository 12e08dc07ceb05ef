"""What is tried only where nothing else fits: knobs whose other values save memory at a price that no speed pays back.

A search makes its space with their plain values first. Where none of it is sure to fit, it makes the space again with
all that the techniques offer. What the user fixed or bounded is in the space in any case. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.prune import memory_share_bytes
from autoplan.strategies.analysis.facts import Choices
from autoplan.strategies.config import PLAIN, TrainingConfig, knobs
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import CostTable


def held_back(choices: Sequence[Choices], named: Collection[str]) -> tuple[tuple[str, str], ...]:
    """(knob, value) of what is offered here as a last resort alone, and named by nobody."""
    return tuple(
        (choice.knob, value)
        for choice in choices
        if choice.knob not in named and knobs()[choice.knob].last_resort
        for value in choice.values
        if value != getattr(PLAIN, choice.knob)
    )


def without_last_resorts(choices: Sequence[Choices], named: Collection[str]) -> tuple[Choices, ...]:
    """The choices with the plain value alone of each such knob that nobody named."""
    held = {knob for knob, _ in held_back(choices, named)}
    return tuple(
        choice.model_copy(update={"values": (getattr(PLAIN, choice.knob),)}) if choice.knob in held else choice
        for choice in choices
    )


def needless_last_resorts(
    held: Sequence[tuple[str, str]],
    candidates: Sequence[TrainingConfig],
    table: CostTable,
    memory_limit_bytes: int,
    device: str,
) -> list[LeftOutFamily] | None:
    """The families that need no trial, since other configurations fit at the high end of their predicted peak.

    Args:
        held: (knob, value) of what was held back.
        candidates: The space without.
        table: Their predictions.
        memory_limit_bytes: Of one trial.
        device: cpu or cuda.

    Returns:
        None: none of the candidates is sure to fit.
    """
    shares = np.array([memory_share_bytes(config, memory_limit_bytes, device) for config in candidates])
    fitting = np.flatnonzero(table.peak_memory_high_bytes <= shares)
    if not len(fitting):
        return None
    least = fitting[np.argmin(table.peak_memory_high_bytes[fitting])]
    return [
        LeftOutFamily(
            family=f"{knob}={value}",
            limit=f"configurations with {knob}={getattr(PLAIN, knob)} fit, and that {knobs()[knob].memory_only}",
            by=f"{len(fitting)} of {len(candidates)} are predicted to fit, the smallest in "
            f"{format_bytes(float(table.peak_memory_high_bytes[least]))} of {format_bytes(float(shares[least]))}",
            configurations=len(candidates),
        )
        for knob, value in held
    ]

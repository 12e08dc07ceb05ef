"""The values of every knob that the tests try, and what stands beside them: from the knobs' own metadata."""

from __future__ import annotations

from typing import Any

from autoplan.strategies.config import PLAIN, knob_values, knobs

NUMBERS_TRIED: dict[str, tuple[int, ...]] = {
    "micro_batch": (2, 4),
    "threads": (1, 2),
    "dp_replicate": (2,),
    "dp_shard": (2,),
    "tp": (2,),
    "pp": (2,),
    "pp_microbatches": (2, 4),
    "virtual_stages": (2,),
}
"""Of the knobs without a closed list of values."""


def tried_values(knob: str) -> list[Any]:
    """Every value of a knob but its plain one, or those of NUMBERS_TRIED."""
    return [value for value in knob_values(knob) or NUMBERS_TRIED[knob] if value != getattr(PLAIN, knob)]


def needed_by(knob: str) -> dict[str, Any]:
    """The other knobs that a knob needs, at values that will do for every value of the knob."""
    return {need.knob: need.values[-1] if need.values else need.at_least for need in knobs()[knob].needs}

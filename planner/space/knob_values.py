"""The values that each knob may take here, one by one: offered, not measured to lose, allowed by the user.

What may go with what is `autoplan.planner.space.generate`'s business. Loads no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.bounds import Bound
from autoplan.probes.merge import SEVERE_SPREAD
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.facts import Choices, LeftOut
from autoplan.strategies.config import LOSSY, micro_batches
from autoplan.strategies.knob_input import check_knob

LOSSY_REASON = "it loses bits at each step, which three steps cannot judge; tried by your word alone: --numerics lossy"


def offered_values(
    choices: Sequence[Choices], global_batch: int, *, but: Sequence[str]
) -> tuple[dict[str, list[Any]], list[LeftOut]]:
    """The values that the techniques offer, micro-batches among them, and those that they leave out.

    Args:
        choices: What each technique offers.
        global_batch: Samples per optimizer step.
        but: Knobs that are not taken one by one.
    """
    values: dict[str, list[Any]] = {"micro_batch": list(micro_batches(global_batch))}
    dropped: list[LeftOut] = []
    for choice in choices:
        if choice.knob in but:
            continue
        values[choice.knob] = list(choice.values)
        dropped += choice.left_out
    return values, dropped


def without_lossy(choices: Sequence[Choices]) -> list[Choices]:
    """The choices without the values that lose bits at each step, which are left out with the way to get them.

    What a technique leaves out by itself keeps its own reason.
    """
    kept = []
    for choice in choices:
        dropped = [value for value in choice.values if value in LOSSY.get(choice.knob, ())]
        reasons = (LeftOut(knob=choice.knob, value=value, reason=LOSSY_REASON) for value in dropped)
        values = tuple(value for value in choice.values if value not in dropped)
        kept.append(Choices(knob=choice.knob, values=values, left_out=(*choice.left_out, *reasons)))
    return kept


def paired_rates(device: Device, dtype: str, other: str) -> tuple[float, float] | None:
    """FLOP/s of two dtypes, training a linear layer, each the best over the shapes that were measured in both."""

    def by_shape(name: str) -> dict[tuple[int, ...], float]:
        found = device.readings("linear_train", name)
        return {r.shape: r.rate.value for r in found if r.rate.value is not None}

    mine, theirs = by_shape(dtype), by_shape(other)
    common = set(mine) & set(theirs)
    if not common:
        return None
    return max(mine[shape] for shape in common), max(theirs[shape] for shape in common)


def doubt(device: Device) -> float:
    """By how much more two rates have to differ, as a share, where they had little time or were taken under load."""
    spreads = [reading.rate.spread or 0.0 for reading in device.readings("linear_train")]
    typical = statistics.median(spreads) if spreads else 0.0
    return typical if typical > SEVERE_SPREAD else 0.0


def narrow(
    knob: str, offered: list[Any], dropped: list[LeftOut], fixed: Mapping[str, Any], bounds: Mapping[str, Bound]
) -> list[Any]:
    """The values of a knob that the user allows.

    Raises:
        ConfigError: none of those offered, or a fixed one that is not offered, with the reason.
    """
    if knob in fixed:
        value = check_knob(knob, fixed[knob])
        if value in offered or (knob == "threads" and value is not None):
            return [value]
        if knob == "micro_batch" and not offered:
            return [value]
        raise ConfigError(f"{knob}={value} is not possible here: {_why_not(knob, value, dropped)}", hint=_hint(offered))
    if knob == "micro_batch" and not offered:
        raise WorkloadError(
            "the micro-batch of this workload must be fixed by you: " + _why_not(knob, None, dropped),
            hint="Fix it with --fix micro_batch=N, the micro-batch that the training is meant to have.",
        )
    if knob not in bounds:
        return offered
    allowed = [value for value in offered if bounds[knob].allows(value)]
    if not allowed:
        raise ConfigError(
            f"no value of {knob} that is possible here is within {bounds[knob].describe()}", hint=_hint(offered)
        )
    return allowed


def _why_not(knob: str, value: Any, dropped: Sequence[LeftOut]) -> str:
    reasons = [drop.reason for drop in dropped if drop.knob == knob and (value is None or drop.value == value)]
    if reasons:
        return reasons[0]
    if knob == "micro_batch":
        return "it does not divide the global batch, which is never changed"
    return "this workload does not offer it on this device"


def _hint(offered: Sequence[Any]) -> str:
    return "Possible here: " + ", ".join(map(str, offered)) + "."


def family_of(left_out: LeftOut, configurations: int) -> LeftOutFamily:
    """What was left out, as the plan keeps it.

    Args:
        left_out: A value, or a combination of degrees.
        configurations: How many configurations it stands for.
    """
    return LeftOutFamily(family=left_out.family, limit=left_out.reason, by=left_out.by, configurations=configurations)

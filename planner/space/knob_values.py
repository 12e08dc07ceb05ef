"""The values that each knob may take here, one by one: offered, not measured to lose, allowed by the user.

What may go with what is `autoplan.planner.space.generate`'s business. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.bounds import Bound
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.facts import Choices, LeftOut
from autoplan.strategies.config import LOSSY, micro_batches
from autoplan.strategies.knob_input import check_knob

LOSING_RATE_SHARE = 0.6
"""A precision whose measured rate of a linear layer's forward and backward is below this share of fp32's is left out:
everything else a precision changes (element-wise traffic, memory) is bounded by what it does to the matmuls. Emulated
bf16 shows 0.07 to 0.1; between the two a busy machine may blur the ratio (seen: 1 for a true 4), so that is tried."""

LOSSY_REASON = "it loses bits at each step, which three steps cannot judge; tried by your word alone: --numerics lossy"

PRECISION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}


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


def drop_losing_precisions(
    values: dict[str, list[Any]], dropped: list[LeftOut], device: Device, fixed: Mapping[str, Any]
) -> None:
    """Leaves out precisions that the probes saw to be slower than fp32 (bf16 on a CPU without bf16 units: 10-20 x)."""
    if "fp32" not in values.get("precision", ()) or "precision" in fixed:
        return
    for precision in [p for p in values["precision"] if p in PRECISION_DTYPES]:
        rates = paired_rates(device, PRECISION_DTYPES[precision], "float32")
        if rates is None:
            continue
        rate, plain = rates
        if rate < LOSING_RATE_SHARE * plain:
            values["precision"].remove(precision)
            dropped.append(
                LeftOut(
                    knob="precision",
                    value=precision,
                    reason="measured: a linear layer's forward and backward is slower than in fp32 on this device",
                    by=f"{rate / 1e9:.3g} against {plain / 1e9:.3g} GFLOP/s, {1 - rate / plain:.0%} slower",
                )
            )


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

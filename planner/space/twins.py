"""Leaves out the candidates that cannot beat another one beside them, by rule: trials go to what differs.

The rules go by measured rates; where these are uncertain, they have to be further apart.

In: a `Space`, the probed device, and how long launches take beside the work. Out: the space without the twins, with the
reasons. A knob that the user fixed or bounded keeps the values that the user named. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autoplan.planner.cost.calibrate import PRIOR_SD
from autoplan.planner.cost.columns import Floats
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.generate import Space
from autoplan.planner.space.knob_values import doubt, paired_rates
from autoplan.probes.profile import Device
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig

LOSING_RATE_SHARE = 0.6
"""A precision whose measured rate of a linear layer's forward and backward is below this share of fp32's is left out:
everything else a precision changes (element-wise traffic, memory) is bounded by what it does to the matmuls. Emulated
bf16 shows 0.07 to 0.1; between the two a busy machine may blur the ratio (seen: 1 for a true 4), so that is tried."""

PRECISION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}

SAME_RATE = 0.9
"""bf16 at this share of the rate of fp16, or more, is as fast: the formats have the same size and the same units."""

FASTER = 1.5
"""bf16 at so many times the rate of fp32 is faster in any compiled run: the compiler fuses the casts of autocast."""

LAUNCH_FACTOR = math.exp(1.645 * PRIOR_SD["dispatch"])
"""The host may need so many times as long for its launches as predicted (one-sided 95 %)."""


def without_twins(
    space: Space,
    device: Device,
    *,
    named: Collection[str],
    stored_in_fp32: bool,
    launch_over_work: Callable[[Sequence[TrainingConfig]], Floats],
) -> Space:
    """The space without candidates that cannot win.

    Args:
        space: Its candidates are legal.
        device: With its measured rates.
        named: The knobs that the user fixed or bounded.
        stored_in_fp32: The parameters are; else precision=fp32 is not what it says.
        launch_over_work: Of configurations, the seconds in which the host launches a micro-step over those in which the
            device works at it.
    """
    candidates = list(space.candidates)
    found: list[LeftOutFamily] = []
    if "precision" not in named:
        candidates = _without_losing_precisions(candidates, device, found)
        candidates = _without_fp16(candidates, device, found)
        if device.type == "cuda" and "compile" not in named and stored_in_fp32:
            candidates = _without_compiled_fp32(candidates, device, found)
    if "compile_mode" not in named:
        candidates = _without_needless_graphs(candidates, launch_over_work, found)
    if not found:
        return space
    used = {knob: {getattr(config, knob) for config in candidates} for knob in space.values}
    values = {knob: tuple(value for value in known if value in used[knob]) for knob, known in space.values.items()}
    return replace(space, candidates=tuple(candidates), left_out=(*space.left_out, *found), values=values)


def _without_losing_precisions(
    candidates: list[TrainingConfig], device: Device, found: list[LeftOutFamily]
) -> list[TrainingConfig]:
    """Drops precisions that the probes saw to be slower than fp32 (bf16 on a CPU without bf16 units: 10-20 x)."""
    offered = {config.precision for config in candidates}
    for precision, dtype in PRECISION_DTYPES.items():
        rates = paired_rates(device, dtype, "float32")
        if not {precision, "fp32"} <= offered or rates is None:
            continue
        rate, plain = rates
        if rate < LOSING_RATE_SHARE * max(0.0, 1 - doubt(device)) * plain:
            candidates = _leave_out(
                candidates,
                lambda config, slow=precision: config.precision == slow,  # type: ignore[misc]
                family=f"precision={precision}",
                limit="measured: a linear layer's forward and backward is slower than in fp32 on this device",
                by=f"{rate / 1e9:.3g} against {plain / 1e9:.3g} GFLOP/s, {1 - rate / plain:.0%} slower",
                found=found,
            )
    return candidates


def _without_fp16(candidates: list[TrainingConfig], device: Device, found: list[LeftOutFamily]) -> list[TrainingConfig]:
    rates = paired_rates(device, "bfloat16", "float16")
    has_bf16 = any(config.precision == "bf16" for config in candidates)
    if rates is None or not has_bf16 or rates[0] < SAME_RATE * (1 + doubt(device)) * rates[1]:
        return candidates
    return _leave_out(
        candidates,
        lambda config: config.precision == "fp16",
        family="precision=fp16",
        limit="bf16 is no slower here and needs no loss scaling, which costs time and skips steps",
        by=_rates_text(rates, "bf16", "fp16"),
        found=found,
    )


def _without_compiled_fp32(
    candidates: list[TrainingConfig], device: Device, found: list[LeftOutFamily]
) -> list[TrainingConfig]:
    rates = paired_rates(device, "bfloat16", "float32")
    has_bf16 = any(config.precision == "bf16" and config.compile != "off" for config in candidates)
    if rates is None or not has_bf16 or rates[0] < FASTER * (1 + doubt(device)) * rates[1]:
        return candidates
    return _leave_out(
        candidates,
        lambda config: config.precision == "fp32" and config.compile != "off",
        family="precision=fp32 compile=block or model",
        limit="compiled in bf16 the same runs faster; in fp32 a compilation would be spent on what cannot win",
        by=_rates_text(rates, "bf16", "fp32"),
        found=found,
    )


def _without_needless_graphs(
    candidates: list[TrainingConfig],
    launch_over_work: Callable[[Sequence[TrainingConfig]], Floats],
    found: list[LeftOutFamily],
) -> list[TrainingConfig]:
    """Drops CUDA graphs where the launches of the same configuration without them hide behind the work."""
    plain_mode = dict(zip(CUDAGRAPH_MODES, ("default", "max-autotune-no-cudagraphs"), strict=True))
    known = set(candidates)
    siblings = {
        config: config.model_copy(update={"compile_mode": plain_mode[config.compile_mode]})
        for config in candidates
        if config.compile_mode in plain_mode
    }
    siblings = {config: sibling for config, sibling in siblings.items() if sibling in known}
    if not siblings:
        return candidates
    ratios = dict(zip(siblings, launch_over_work(list(siblings.values())), strict=True))
    needless = {config for config, ratio in ratios.items() if ratio * LAUNCH_FACTOR < 1}
    if not needless:
        return candidates
    shares = [float(ratios[config]) for config in needless]
    return _leave_out(
        candidates,
        lambda config: config in needless,
        family="compile_mode=" + " or ".join(CUDAGRAPH_MODES),
        limit="CUDA graphs save launches, and the GPU works longer than the host launches anyway",
        by=f"launching is predicted to take {min(shares):.0%} to {max(shares):.0%} of the work",
        found=found,
    )


def _leave_out(
    candidates: list[TrainingConfig],
    leaves: Callable[[TrainingConfig], bool],
    *,
    family: str,
    limit: str,
    by: str,
    found: list[LeftOutFamily],
) -> list[TrainingConfig]:
    kept = [config for config in candidates if not leaves(config)]
    if len(kept) < len(candidates):
        found.append(LeftOutFamily(family=family, limit=limit, by=by, configurations=len(candidates) - len(kept)))
    return kept


def _rates_text(rates: tuple[float, float], first: str, second: str) -> str:
    return f"measured: {rates[0] / 1e12:.3g} TFLOP/s in {first}, {rates[1] / 1e12:.3g} in {second}"

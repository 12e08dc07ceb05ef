"""The space of a search: every legal configuration, and what was left out, with the reason.

Only legal candidates are made: the product of what each technique offers here, micro-batches that divide the global
batch, and the rules that couple knobs. What the user fixed or bounded narrows it. Loads no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplan.errors import ConfigError
from autoplan.planner.records import LeftOutFamily
from autoplan.planner.space.bounds import Bound
from autoplan.planner.space.knob_values import drop_losing_precisions, family_of, narrow, offered_values
from autoplan.probes.profile import Device
from autoplan.strategies.config import (
    KNOBS,
    TrainingConfig,
    check_knob,
    knob_values,
    micro_batches,
)
from autoplan.strategies.techniques.data_parallel_knobs import (
    DATA_PARALLEL_KNOBS,
    reason_against_data_parallel,
    with_data_parallel_knobs,
)
from autoplan.strategies.techniques.degrees import coherent_with_pipeline

if TYPE_CHECKING:
    from autoplan.strategies.analysis.facts import KnobChoices

DEGREES = (
    "dp_replicate",
    "dp_shard",
    "reshard_after_forward",
    "tp",
    "pp",
    "pp_schedule",
    "pp_microbatches",
    "virtual_stages",
    *DATA_PARALLEL_KNOBS,
)
"""The knobs that say how ranks share the work; they come as whole combinations, not one by one."""


CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The legal candidates, and the families that were left out.

    Attributes:
        candidates: Each legal configuration once, in a fixed order.
        left_out: What is not among them, and why.
        values: The values each knob takes over the candidates, in a fixed order.
    """

    candidates: tuple[TrainingConfig, ...]
    left_out: tuple[LeftOutFamily, ...]
    values: Mapping[str, tuple[Any, ...]]


def generate(
    choices: Sequence[KnobChoices],
    *,
    global_batch: int,
    device: Device,
    fixed: Mapping[str, Any] | None = None,
    bounds: Mapping[str, Bound] | None = None,
    degrees: Sequence[Mapping[str, Any]] = ({},),
    degrees_left_out: Sequence[LeftOutFamily] = (),
) -> Space:
    """Makes the space.

    Args:
        choices: What each technique offers for this workload on this machine.
        global_batch: Samples per optimizer step; never changed.
        device: The device with its measured rates.
        fixed: Knobs the user fixed.
        bounds: Knobs the user bounded.
        degrees: The legal ways for the ranks to share the work; one rank: the empty one.
        degrees_left_out: What is not among them.

    Raises:
        ConfigError: a fixed or bounded knob that leaves nothing, with the reason.
        WorkloadError: the micro-batch must be fixed by the user, and was not.
    """
    fixed, bounds = dict(fixed or {}), dict(bounds or {})
    for knob in (*fixed, *bounds):
        knob_values(knob)
    values, dropped = offered_values(choices, global_batch, but=DEGREES)
    drop_losing_precisions(values, dropped, device, fixed)
    for knob in list(values):
        values[knob] = narrow(knob, values[knob], dropped, fixed, bounds)
    varied, reasons = with_data_parallel_knobs(degrees, _asked_of_data_parallel(fixed, bounds))
    combinations = [d for d in varied if _degrees_allowed(d, fixed, bounds)]
    if not combinations:
        asked = ", ".join(f"{knob}={value}" for knob, value in fixed.items() if knob in DEGREES)
        raise ConfigError(
            f"no way to share the work over the ranks is left with {asked or 'these bounds'}",
            hint="".join(f"{reason}. " for reason in reasons[:3]) + _degrees_hint(degrees, degrees_left_out),
        )
    candidates = _combine(values, combinations, global_batch)
    if not candidates:
        raise ConfigError(
            "the fixed and bounded knobs leave no legal configuration: "
            + ", ".join([f"{k}={v}" for k, v in fixed.items()] + [f"{k}={b.describe()}" for k, b in bounds.items()]),
            hint=f"micro_batch x dp_replicate x dp_shard must divide the global batch of {global_batch}; compile_mode "
            "needs compile; CUDA-graph modes need compile=model; with ddp_static_graph micro_batch x dp_replicate is "
            "the whole global batch; with gradient_sync=every it is at most half of it.",
        )
    left_out = [family_of(drop, len(candidates), values) for drop in dropped]
    used = {knob: _in_order(knob, {getattr(c, knob) for c in candidates}) for knob in KNOBS}
    return Space(candidates=tuple(candidates), left_out=(*left_out, *degrees_left_out), values=used)


def _asked_of_data_parallel(fixed: Mapping[str, Any], bounds: Mapping[str, Bound]) -> dict[str, list[Any]]:
    """The values of DDP's and FSDP2's knobs that the user names; of a range its ends, and the powers of two within."""
    asked: dict[str, list[Any]] = {}
    for knob in DATA_PARALLEL_KNOBS:
        if knob in fixed:
            asked[knob] = [check_knob(knob, fixed[knob])]
        elif knob in bounds:
            bound = bounds[knob]
            plain = getattr(TrainingConfig(micro_batch=1), knob)
            named = [plain, *(bound.values or ()), bound.low, bound.high, *(2**power for power in range(11))]
            allowed = {value for value in named if value is not None and bound.allows(value)}
            asked[knob] = sorted(bound.values or allowed)
    return asked


def _degrees_allowed(degrees: Mapping[str, Any], fixed: Mapping[str, Any], bounds: Mapping[str, Bound]) -> bool:
    plain = TrainingConfig(micro_batch=1)
    for knob in DEGREES:
        value = degrees.get(knob, getattr(plain, knob))
        if knob in fixed and value != fixed[knob]:
            return False
        if knob in bounds and not bounds[knob].allows(value):
            return False
    return True


def _degrees_hint(degrees: Sequence[Mapping[str, Any]], left_out: Sequence[LeftOutFamily]) -> str:
    texts = [", ".join(f"{k}={v}" for k, v in d.items()) or "one rank" for d in degrees[:8]]
    reasons = [f"{family.family}: {family.limit}" for family in left_out[:3]]
    return "Possible here: " + "; ".join(texts) + ". " + " ".join(reasons) + " Use --nproc N for more ranks."


def _combine(
    values: Mapping[str, Sequence[Any]], degrees: Sequence[Mapping[str, Any]], global_batch: int
) -> list[TrainingConfig]:
    """The product of all values, without what is illegal or says the same twice."""
    knobs = [knob for knob in values if knob != "micro_batch"]
    rows = [dict(zip(knobs, row, strict=True)) for row in itertools.product(*(values[knob] for knob in knobs))]
    rows = [row for row in rows if _is_coherent(row)]
    plain = TrainingConfig(micro_batch=1)
    candidates = []
    for combination in degrees:
        dp = combination.get("dp_replicate", 1) * combination.get("dp_shard", 1)
        fitting = set(micro_batches(global_batch, dp))
        per_pass = combination.get("pp_microbatches", 1)
        for micro_batch in values["micro_batch"]:
            if micro_batch not in fitting or (global_batch // dp // micro_batch) % per_pass:
                continue
            base = plain.model_copy(update={"micro_batch": micro_batch, **combination})
            shared = base.model_dump()
            if reason_against_data_parallel(shared, global_batch) is not None:
                continue
            together = (
                rows if base.pp == 1 else [row for row in rows if coherent_with_pipeline(shared | row, global_batch)]
            )
            candidates += [base.model_copy(update=row) for row in together]
    return candidates


def _is_coherent(row: Mapping[str, Any]) -> bool:
    """The rules between knobs: a compile mode only with compile, CUDA-graph modes only over the whole model."""
    mode, scope = row.get("compile_mode", "default"), row.get("compile", "off")
    if scope == "off":
        return mode == "default"
    return scope == "model" or mode not in CUDAGRAPH_MODES


def _in_order(knob: str, used: set[Any]) -> tuple[Any, ...]:
    allowed = knob_values(knob)
    if allowed is not None:
        return tuple(value for value in allowed if value in used)
    return tuple(sorted(used, key=lambda value: (value is not None, value or 0)))

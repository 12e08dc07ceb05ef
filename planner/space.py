"""The space of a search: every legal configuration, and what was left out, with the reason.

Only legal candidates are made: the product of what each technique offers here, micro-batches that divide the global
batch, and the rules that couple knobs. What the user fixed or bounded narrows it. Loads no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.plan import LeftOutFamily
from autoplan.planner.search.options import Bound
from autoplan.probes.profile import Device, Record
from autoplan.strategies.config import (
    KNOBS,
    TrainingConfig,
    check_knob,
    knob_values,
    micro_batches,
)
from autoplan.strategies.data_parallel_knobs import (
    DATA_PARALLEL_KNOBS,
    reason_against_data_parallel,
    with_data_parallel_knobs,
)
from autoplan.strategies.degrees import coherent_with_pipeline
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.estimate import CostTable
    from autoplan.strategies.inspect import KnobChoices

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

RANK_COUNTS = ("dp_replicate", "dp_shard", "tp", "pp")

MAX_CANDIDATES = 20_000

CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")

LOSING_RATE_SHARE = 0.6
"""A precision whose measured rate of a linear layer's forward and backward is below this share of fp32's is left out:
everything else a precision changes (element-wise traffic, memory) is bounded by what it does to the matmuls. Emulated
bf16 shows 0.07 to 0.1; between the two a busy machine may blur the ratio (seen: 1 for a true 4), so that is tried."""

PRECISION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}


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


class Dropped(Record):
    """A value a knob does not take here."""

    knob: str
    value: Any
    reason: str
    by: str = ""


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
    values, dropped = _offered(choices, global_batch)
    _drop_losing_precisions(values, dropped, device, fixed)
    for knob in list(values):
        values[knob] = _narrow(knob, values[knob], dropped, fixed, bounds)
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
            "the whole global batch.",
        )
    left_out = [_family(drop, len(candidates), values) for drop in dropped]
    used = {knob: _in_order(knob, {getattr(c, knob) for c in candidates}) for knob in KNOBS}
    return Space(candidates=tuple(candidates), left_out=(*left_out, *degrees_left_out), values=used)


def _offered(choices: Sequence[KnobChoices], global_batch: int) -> tuple[dict[str, list[Any]], list[Dropped]]:
    values: dict[str, list[Any]] = {"micro_batch": list(micro_batches(global_batch))}
    dropped: list[Dropped] = []
    for choice in choices:
        if choice.knob in DEGREES:
            continue  # these come as whole combinations
        values[choice.knob] = list(choice.values)
        dropped += [Dropped(knob=choice.knob, value=out.value, reason=out.reason) for out in choice.left_out]
    return values, dropped


def _drop_losing_precisions(
    values: dict[str, list[Any]], dropped: list[Dropped], device: Device, fixed: Mapping[str, Any]
) -> None:
    """Leaves out precisions that the probes saw to be slower than fp32 (bf16 on a CPU without bf16 units: 10-20 x)."""
    if "fp32" not in values.get("precision", ()) or "precision" in fixed:
        return
    for precision in [p for p in values["precision"] if p in PRECISION_DTYPES]:
        rates = _paired_rates(device, PRECISION_DTYPES[precision])
        if rates is None:
            continue
        rate, plain = rates
        if rate < LOSING_RATE_SHARE * plain:
            values["precision"].remove(precision)
            dropped.append(
                Dropped(
                    knob="precision",
                    value=precision,
                    reason="measured: a linear layer's forward and backward is slower than in fp32 on this device",
                    by=f"{rate / 1e9:.3g} against {plain / 1e9:.3g} GFLOP/s, {plain / rate:.1f} times slower",
                )
            )


def _paired_rates(device: Device, dtype: str) -> tuple[float, float] | None:
    """FLOP/s of a precision and of fp32, training a linear layer, the best over the shapes measured in both."""

    def by_shape(name: str) -> dict[tuple[int, ...], float]:
        found = device.readings("linear_train", name)
        return {r.shape: r.rate.value for r in found if r.rate.value is not None}

    mine, plain = by_shape(dtype), by_shape("float32")
    common = set(mine) & set(plain)
    if not common:
        return None
    return max(mine[shape] for shape in common), max(plain[shape] for shape in common)


def _narrow(
    knob: str, offered: list[Any], dropped: list[Dropped], fixed: Mapping[str, Any], bounds: Mapping[str, Bound]
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


def _why_not(knob: str, value: Any, dropped: Sequence[Dropped]) -> str:
    reasons = [drop.reason for drop in dropped if drop.knob == knob and (value is None or drop.value == value)]
    if reasons:
        return reasons[0]
    if knob == "micro_batch":
        return "it does not divide the global batch, which is never changed"
    return "this workload does not offer it on this device"


def _hint(offered: Sequence[Any]) -> str:
    return "Possible here: " + ", ".join(map(str, offered)) + "."


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


def _family(drop: Dropped, candidates: int, values: Mapping[str, Sequence[Any]]) -> LeftOutFamily:
    """A value that a knob does not take, as a family: about as many configurations as each value taken has."""
    return LeftOutFamily(
        family=f"{drop.knob}={drop.value}",
        limit=drop.reason,
        by=drop.by,
        configurations=candidates // max(1, len(values.get(drop.knob, ()))),
    )


def memory_share_bytes(config: TrainingConfig, memory_limit_bytes: float, device: str) -> float:
    """What one rank may take: on CPU the limit is for all ranks together, on CUDA for each device."""
    return memory_limit_bytes / config.world_size if device == "cpu" else memory_limit_bytes


def keep_what_may_win(
    candidates: Sequence[TrainingConfig], table: CostTable, memory_limit_bytes: int, device: str
) -> tuple[list[int], list[LeftOutFamily]]:
    """Indices of the candidates worth a trial, in their order, and the families that are not, with by how much.

    Left out is what cannot fit (even the low end of its predicted peak is above the limit) and, beyond
    MAX_CANDIDATES, what is predicted to be slowest.
    """
    shares = np.array([memory_share_bytes(config, memory_limit_bytes, device) for config in candidates])
    too_big = table.peak_memory_low_bytes > shares
    families: dict[str, list[int]] = {}
    for index in np.flatnonzero(too_big).tolist():
        families.setdefault(_memory_family(candidates[index]), []).append(index)
    left_out = []
    for family, members in families.items():
        least = min(members, key=lambda i: table.peak_memory_bytes[i] / shares[i])
        peak, low, high = (
            float(column[least])
            for column in (table.peak_memory_bytes, table.peak_memory_low_bytes, table.peak_memory_high_bytes)
        )
        share = float(shares[least])
        left_out.append(
            LeftOutFamily(
                family=family,
                limit=f"memory: {format_bytes(share)} for one rank",
                by=f"at the least predicted {format_bytes(peak)} ({format_bytes(low)} to {format_bytes(high)}), "
                f"{format_bytes(peak - share)} too much",
                configurations=len(members),
            )
        )
    kept = np.flatnonzero(~too_big)
    if len(kept) > MAX_CANDIDATES:
        order = kept[np.argsort(table.step_time_low_s[kept], kind="stable")]
        slow = order[MAX_CANDIDATES:]
        factor = float(table.step_time_low_s[slow[0]] / table.step_time_s[order[0]])
        left_out.append(
            LeftOutFamily(
                family=f"all but the {MAX_CANDIDATES} that are predicted to be fastest",
                limit="the number of candidates that are kept in view",
                by=f"at their most optimistic at least {factor:.2f} times the step time of the fastest prediction",
                configurations=len(slow),
            )
        )
        kept = np.sort(order[:MAX_CANDIDATES])
    return [int(index) for index in kept], left_out


def _memory_family(config: TrainingConfig) -> str:
    names = [f"micro_batch={config.micro_batch}", f"checkpointing={config.checkpointing}", f"loss={config.loss}"]
    names += [f"{knob}={getattr(config, knob)}" for knob in RANK_COUNTS if getattr(config, knob) > 1]
    return " ".join(names)


def parse_bound(text: str) -> tuple[str, Bound]:
    """Reads `knob=low..high` (either end may be left out) or `knob=a,b,c`.

    Raises:
        ConfigError: another form, an unknown knob, or values the knob does not take.
    """
    knob, separator, allowed = text.partition("=")
    knob = knob.strip().replace("-", "_")
    if not separator or not allowed.strip():
        raise ConfigError(
            f"{text!r} is not of the form knob=low..high or knob=a,b,c", hint="For example: --bound micro_batch=1..8"
        )
    closed = knob_values(knob)
    if ".." not in allowed:
        return knob, Bound(values=tuple(check_knob(knob, value.strip()) for value in allowed.split(",")))
    if closed is not None:
        raise ConfigError(
            f"{knob} takes {', '.join(map(str, closed))}: a range has no meaning there",
            hint=f"List the values: --bound {knob}={closed[0]},{closed[-1]}",
        )
    low_text, _, high_text = allowed.partition("..")
    low, high = (check_knob(knob, end.strip()) if end.strip() else None for end in (low_text, high_text))
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{knob}={allowed}: the low end is above the high end", hint=f"--bound {knob}={high}..{low}")
    return knob, Bound(low=low, high=high)

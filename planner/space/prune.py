"""Which candidates are worth a trial, and why the others are not. Loads no torch.

Candidates of a `Space` are left out where their variant failed in the trace (`without_failed_variants`); where another
one beside them is never slower by measured rates (`without_twins`); as last resorts, where others fit
(`without_last_resorts`); and by predicted memory and time (`keep_what_may_win`). What the user fixed or bounded keeps
the values that the user named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoplan.errors import ConfigError
from autoplan.planner.cost.calibrate import PRIOR_SD
from autoplan.planner.cost.columns import Bools, ConfigTable, Floats, Ints, first_of_each
from autoplan.planner.records.trials import LeftOutFamily
from autoplan.planner.space.generate import Space
from autoplan.planner.trace.model_profile import PLAIN as PLAIN_VARIANT
from autoplan.planner.trace.model_profile import VARIANT_KNOBS, VariantKey, variants_of
from autoplan.probes.merge import SEVERE_SPREAD
from autoplan.probes.profile import Device
from autoplan.strategies.analysis.facts import Choices
from autoplan.strategies.config import (
    CUDAGRAPH_MODES,
    KNOBS,
    MEMORY_ONLY,
    PLAIN,
    RANK_COUNTS,
    TrainingConfig,
    knobs,
)
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import Outlook

MAX_CANDIDATES = 20_000

HOST_LIMIT = "the host's memory"
"""The limit of a family that is offloaded and does not fit the host begins so."""

LOSING_RATE_SHARE = 0.6
"""A precision whose measured rate of a linear layer's forward and backward is below this share of fp32's is left out:
everything else a precision changes (element-wise traffic, memory) is bounded by what it does to the matmuls. Emulated
bf16 shows 0.07 to 0.1; between the two a busy machine may blur the ratio (seen: 1 for a true 4), so that is tried."""

PRECISION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}

SAME_RATE = 0.9
"""bf16 at this share of the rate of fp16, or more, is as fast: the formats have the same size and the same units."""

EAGER_SHARE = 0.5
"""Attention in single operations at less than this share of a fused kernel's rate loses, compiled or not. Measured on
an H100: 0.12 to 0.16 in bf16, 0.43 to 0.47 in fp32."""

FASTER = 1.5
"""bf16 at so many times the rate of fp32 is faster in any compiled run: the compiler fuses the casts of autocast."""

LAUNCH_FACTOR = math.exp(1.645 * PRIOR_SD["dispatch"])
"""The host may need so many times as long for its launches as predicted (one-sided 95 %)."""

_SHOWN_OF_VARIANT = ("precision", "attention", "checkpointing", "loss", "parameters")
_VALUES_OF_VARIANT = {
    "precision=half": "precision=bf16 or fp16",
    "parameters=bf16": "parameters=bf16 or bf16_stochastic",
}


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
    first, kind = space.candidates.kinds(*VARIANT_KNOBS)
    eager = (
        [key.model_copy(update={"compiled": False}) for key in variants_of(space.candidates[int(place)])]
        for place in first
    )
    broken = [next((key for key in keys if key.text() in failed), None) for keys in eager]
    kept = np.array([variant is None for variant in broken])[kind]
    counts: dict[VariantKey, int] = {}
    for variant, count in zip(broken, np.bincount(kind), strict=True):
        if variant is not None:
            counts[variant] = counts.get(variant, 0) + int(count)
    if not kept.any():
        variant = next(iter(counts))
        raise ConfigError(
            f"none of the {len(space.candidates)} configurations runs with this model: {_describe_variant(variant)}: "
            f"{failed[variant.text()]}",
            hint="Leave the knobs of that variant to the search, or fix them to other values.",
        )
    families = [
        LeftOutFamily(
            family=_describe_variant(variant),
            limit=f"it does not run with this model: {failed[variant.text()]}",
            by="",
            configurations=count,
        )
        for variant, count in counts.items()
    ]
    return space.narrowed(space.candidates.take(kept), families)


def _describe_variant(key: VariantKey) -> str:
    """A variant by the knobs that are not the plain one's: `attention=sdpa checkpointing=full`."""
    words = [
        f"{knob}={getattr(key, knob)}"
        for knob in _SHOWN_OF_VARIANT
        if getattr(key, knob) != getattr(PLAIN_VARIANT, knob)
    ]
    return " ".join(_VALUES_OF_VARIANT.get(word, word) for word in words)


# Twins: by rules on measured rates; where these are uncertain, they have to be further apart.


def without_twins(
    space: Space,
    device: Device,
    *,
    named: Collection[str],
    stored_in_fp32: bool,
    sequence_length: int | None,
    launch_over_work: Callable[[ConfigTable], Floats],
) -> Space:
    """The space without candidates that cannot win.

    Args:
        space: Its candidates are legal.
        device: With its measured rates.
        named: The knobs that the user fixed or bounded.
        stored_in_fp32: The parameters are; else precision=fp32 is not what it says.
        sequence_length: Of the workload; None: samples are no sequences.
        launch_over_work: Of configurations, the seconds in which the host launches a micro-step over those in which the
            device works at it.
    """
    if "precision" not in named:
        space = _without_fp16(_without_losing_precisions(space, device), device)
        if device.type == "cuda" and "compile" not in named and stored_in_fp32:
            space = _without_compiled_fp32(space, device)
    if "attention" not in named and device.type == "cuda":
        space = _without_eager_attention(space, device, sequence_length)
    if "compile_mode" not in named:
        space = _without_needless_graphs(space, launch_over_work)
    return space


def _without_losing_precisions(space: Space, device: Device) -> Space:
    """Drops precisions that the probes saw to be slower than fp32 (bf16 on a CPU without bf16 units: 10-20 x)."""
    offered = space.candidates.used("precision")
    for precision, dtype in PRECISION_DTYPES.items():
        rates = paired_rates(device, dtype, "float32")
        if not {precision, "fp32"} <= offered or rates is None:
            continue
        rate, plain = rates
        if rate < LOSING_RATE_SHARE * max(0.0, 1 - doubt(device)) * plain:
            space = _leave_out(
                space,
                space.candidates.has("precision", precision),
                family=f"precision={precision}",
                limit="measured: a linear layer's forward and backward is slower than in fp32 on this device",
                by=f"{rate / 1e9:.3g} against {plain / 1e9:.3g} GFLOP/s, {1 - rate / plain:.0%} slower",
            )
    return space


def _without_fp16(space: Space, device: Device) -> Space:
    rates = paired_rates(device, "bfloat16", "float16")
    if (
        rates is None
        or "bf16" not in space.candidates.used("precision")
        or rates[0] < SAME_RATE * max(0.0, 1 - doubt(device)) * rates[1]  # in doubt the one that is simpler to train
    ):
        return space
    return _leave_out(
        space,
        space.candidates.has("precision", "fp16"),
        family="precision=fp16",
        limit="bf16 is no slower here and needs no loss scaling, which costs time and skips steps",
        by=_rates_text(rates, "bf16", "fp16"),
    )


def _without_compiled_fp32(space: Space, device: Device) -> Space:
    rates, candidates = paired_rates(device, "bfloat16", "float32"), space.candidates
    compiled = candidates.off_plain("compile")
    has_bf16 = bool(np.any(compiled & candidates.has("precision", "bf16")))
    if rates is None or not has_bf16 or rates[0] < FASTER * (1 + doubt(device)) * rates[1]:
        return space
    return _leave_out(
        space,
        compiled & candidates.has("precision", "fp32"),
        family="precision=fp32 compile=block or model",
        limit="compiled in bf16 the same runs faster; in fp32 a compilation would be spent on what cannot win",
        by=_rates_text(rates, "bf16", "fp32"),
    )


def _without_eager_attention(space: Space, device: Device, sequence_length: int | None) -> Space:
    """Drops attention in torch's single operations where the fused kernels were measured to be far faster.

    It moves a matrix of length x length per head several times, and no compilation saves that. Sequences that are
    shorter than the measured ones say nothing: there launches count.
    """
    shares, shortest = [], np.inf
    for dtype in ("float32", "bfloat16"):
        fused, single = (
            {r.shape: r.rate.value for r in device.readings(kind, dtype) if r.rate.value and r.rate.spread is not None}
            for kind in ("sdpa_train", "eager_attention_train")
        )
        shares += [single[shape] / fused[shape] for shape in fused.keys() & single.keys()]
        shortest = min([shortest, *(shape[2] for shape in fused.keys() & single.keys())])
    fusing = space.candidates.used("attention") - {"own", "eager"}
    worst = max(shares, default=1.0)
    if not fusing or (sequence_length or 0) < shortest or worst > EAGER_SHARE * max(0.0, 1 - doubt(device)):
        return space
    return _leave_out(
        space,
        space.candidates.has("attention", "eager"),
        family="attention=eager",
        limit="measured: training through attention in single operations is slower than through one fused kernel",
        by=f"{worst:.0%} of the rate of sdpa at the most, over {len(shares)} measurement(s)",
    )


def _without_needless_graphs(space: Space, launch_over_work: Callable[[ConfigTable], Floats]) -> Space:
    """Drops CUDA graphs where the launches of the same configuration without them hide behind the work."""
    plain_mode = dict(zip(CUDAGRAPH_MODES, ("default", "max-autotune-no-cudagraphs"), strict=True))
    candidates = space.candidates
    graphs = candidates.has("compile_mode", *CUDAGRAPH_MODES)
    if not graphs.any():
        return space
    keys = candidates.alike(
        KNOBS, lambda knob, value: plain_mode.get(value, value) if knob == "compile_mode" else value
    )
    of, siblings = _partners(keys, graphs, ~graphs)
    ratios = launch_over_work(candidates.take(siblings))
    hidden = ratios * LAUNCH_FACTOR < 1
    if not hidden.any():
        return space
    needless = np.zeros(len(candidates), dtype=np.bool_)
    needless[of[hidden]] = True
    return _leave_out(
        space,
        needless,
        family="compile_mode=" + " or ".join(CUDAGRAPH_MODES),
        limit="CUDA graphs save launches, and the GPU works longer than the host launches anyway",
        by=f"launching is predicted to take {ratios[hidden].min():.0%} to {ratios[hidden].max():.0%} of the work",
    )


def _partners(keys: Ints, of: Bools, among: Bools) -> tuple[Ints, Ints]:
    """The places of some candidates that have one with the same key among others, and the places of these."""
    here, others = np.flatnonzero(of), np.flatnonzero(among)
    others = others[np.argsort(keys[others])]
    if not len(others):
        return others, others
    place = np.minimum(np.searchsorted(keys[others], keys[here]), len(others) - 1)
    found = keys[others[place]] == keys[here]
    return here[found], others[place[found]]


def _leave_out(space: Space, leaves: Bools, *, family: str, limit: str, by: str) -> Space:
    count = int(leaves.sum())
    if not count:
        return space
    left_out = LeftOutFamily(family=family, limit=limit, by=by, configurations=count)
    return space.narrowed(space.candidates.take(~leaves), [left_out])


def _rates_text(rates: tuple[float, float], first: str, second: str) -> str:
    return f"measured: {rates[0] / 1e12:.3g} TFLOP/s in {first}, {rates[1] / 1e12:.3g} in {second}"


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


# Last resorts: knobs whose other values save memory at a price that no speed pays back. A search makes its space with
# their plain values first. Where none of it is sure to fit, it makes it again with all that the techniques offer.


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
    table: Outlook,
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
    shares = _shares(ConfigTable.of(candidates), memory_limit_bytes, device)
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


# By predicted memory and time.


def memory_share_bytes(config: TrainingConfig, memory_limit_bytes: float, device: str) -> float:
    """The memory that one rank may take: on CPU the limit is for all ranks together, on CUDA for each device."""
    return memory_limit_bytes / config.world_size if device == "cpu" else memory_limit_bytes


def _shares(candidates: ConfigTable, memory_limit_bytes: float, device: str) -> Floats:
    """`memory_share_bytes` of each."""
    return (
        memory_limit_bytes / candidates.world_size
        if device == "cpu"
        else np.full(len(candidates), float(memory_limit_bytes))
    )


def keep_what_may_win(
    candidates: Sequence[TrainingConfig],
    table: Outlook,
    memory_limit_bytes: int,
    device: str,
    *,
    spares_memory: bool = True,
    host_limit_bytes: int | None = None,
    named: Collection[str] = (),
) -> tuple[list[int], list[LeftOutFamily]]:
    """Indices of the candidates worth a trial, in their order, and the families that are not, with by how much.

    Left out is what cannot fit (even the low end of its predicted peak is above the limit), what is offloaded and does
    not fit the host, what saves memory that is not needed, what is worth its loss of bits only where it gains and is
    predicted to gain nothing, and, beyond MAX_CANDIDATES, what is predicted to be slowest.

    Args:
        candidates: The legal configurations.
        table: Their predictions.
        memory_limit_bytes: What a trial may take on its device.
        device: cpu or cuda.
        spares_memory: Leave out what saves memory that is not needed; False where little memory is looked for.
        host_limit_bytes: What the ranks of a trial may take of the host's memory together; None: no limit.
        named: The knobs that the user fixed or bounded: their values are tried without a gain.
    """
    configs = ConfigTable.of(candidates)
    shares = _shares(configs, memory_limit_bytes, device)
    too_big = table.peak_memory_low_bytes > shares
    left_out = _memory_families(configs, table, shares, np.flatnonzero(too_big), device)
    worth = ~too_big
    if host_limit_bytes is not None:
        on_host = table.host_bytes * configs.world_size
        beyond = worth & (on_host > host_limit_bytes)
        left_out += _host_families(configs, on_host, host_limit_bytes, np.flatnonzero(beyond))
        worth &= ~beyond
    fits = table.peak_memory_high_bytes <= shares
    for knob in _memory_only(device) if spares_memory else ():
        needless, others = _no_faster(knob, configs, table, where=fits)
        worth[needless] = False
        limit = f"{knob}={getattr(PLAIN, knob)} fits with all else the same, and {knobs()[knob].memory_only}"
        left_out += _slower_families(configs, (knob,), needless, others, table, limit)
    for knob in (name for name, known in knobs().items() if known.must_gain and name not in named):
        needless, others = _no_faster(knob, configs, table)
        worth[needless] = False
        limit = f"no gain: the same with {knob}={getattr(PLAIN, knob)} is predicted to be no slower"
        # by what a run fuses too, which decides what casts cost
        left_out += _slower_families(configs, (knob, "compile"), needless, others, table, limit)
    kept = np.flatnonzero(worth)
    if len(kept) > MAX_CANDIDATES:
        times = table.step_time_low_s[kept]
        last = np.partition(times, MAX_CANDIDATES)[MAX_CANDIDATES]
        faster, tied = times < last, np.flatnonzero(times == last)
        faster[tied[: MAX_CANDIDATES - np.count_nonzero(faster)]] = True
        factor = float(last / table.step_time_s[kept[np.argmin(times)]])
        left_out.append(
            LeftOutFamily(
                family=f"all but the {MAX_CANDIDATES} that are predicted to be fastest",
                limit="the number of candidates that are kept in view",
                by=f"at their most optimistic at least {factor:.2f} times the step time of the fastest prediction",
                configurations=len(kept) - MAX_CANDIDATES,
            )
        )
        kept = kept[faster]
    return kept.tolist(), left_out


def _memory_families(
    candidates: ConfigTable, table: Outlook, shares: Floats, too_big: Ints, device: str
) -> list[LeftOutFamily]:
    """The families that cannot fit, by the knobs that decide memory; of each, the one that comes nearest to fitting."""
    off_plain = (*RANK_COUNTS, *_memory_only(device))
    names = ("micro_batch", "checkpointing", "loss")
    left_out = []
    for members in _grouped(candidates, too_big, (*names, *off_plain)):
        nearest = members[np.argmin(table.peak_memory_bytes[members] / shares[members])]
        peak, low, high = (
            float(column[nearest])
            for column in (table.peak_memory_bytes, table.peak_memory_low_bytes, table.peak_memory_high_bytes)
        )
        share, config = float(shares[nearest]), candidates[int(nearest)]
        shown = [*names, *(knob for knob in off_plain if getattr(config, knob) != getattr(PLAIN, knob))]
        left_out.append(
            LeftOutFamily(
                family=" ".join(f"{knob}={getattr(config, knob)}" for knob in shown),
                limit=f"memory: {format_bytes(share)} for one rank",
                by=f"at the least predicted {format_bytes(peak)} ({format_bytes(low)} to {format_bytes(high)}), "
                f"{format_bytes(peak - share)} too much",
                configurations=len(members),
            )
        )
    return left_out


def _host_families(candidates: ConfigTable, on_host: Floats, limit_bytes: int, beyond: Ints) -> list[LeftOutFamily]:
    """The families that the host cannot hold, by what is offloaded over how many ranks; of each, the least memory."""
    least: dict[tuple[str, int], float] = {}
    counts: dict[tuple[str, int], int] = {}
    for members in _grouped(candidates, beyond, ("offload", *RANK_COUNTS)):
        config = candidates[int(members[0])]
        family = config.offload, config.world_size
        least[family] = min(least.get(family, np.inf), float(on_host[members].min()))
        counts[family] = counts.get(family, 0) + len(members)
    return [
        LeftOutFamily(
            family=f"offload={value}" + (f" on {ranks} ranks" if ranks > 1 else ""),
            limit=f"{HOST_LIMIT}: {format_bytes(limit_bytes)} for all ranks",
            by=f"at the least predicted {format_bytes(smallest)}, {format_bytes(smallest - limit_bytes)} too much",
            configurations=counts[value, ranks],
        )
        for (value, ranks), smallest in least.items()
    ]


def _memory_only(device: str) -> list[str]:
    """The knobs whose other values only save memory on this device."""
    return [knob for knob in MEMORY_ONLY if knobs()[knob].memory_only_on in (None, device)]


def _grouped(candidates: ConfigTable, places: Ints, knobs: Sequence[str]) -> list[Ints]:
    """These places, one array for each combination of the knobs' values, in the order in which they first occur."""
    if not len(places):
        return []
    first, kind = first_of_each(candidates.alike(knobs)[places])
    kind = kind.astype(np.min_scalar_type(len(first)))  # numbers of 16 bits are sorted faster
    return np.split(places[np.argsort(kind, kind="stable")], np.cumsum(np.bincount(kind, minlength=len(first)))[:-1])


def _no_faster(knob: str, candidates: ConfigTable, table: Outlook, where: Bools | None = None) -> tuple[Ints, Ints]:
    """Where another value than the plain one is predicted to gain no time, and where the same with the plain one is.

    Args:
        knob: Of the values.
        candidates, table: All, and their predictions.
        where: Only those with the plain value that are marked here count.
    """
    off = candidates.off_plain(knob)
    if not off.any():
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    plain, unlike = ~off if where is None else ~off & where, candidates.take(off)
    beside = [other for other in KNOBS if other != knob]
    for other in beside:  # far fewer are left to be looked through
        plain &= candidates.has(other, *unlike.used(other))
    found, others = _partners(candidates.alike(beside), off, plain)
    slower = table.step_time_s[others] <= table.step_time_s[found]
    return found[slower], others[slower]


def _slower_families(
    candidates: ConfigTable, by: Sequence[str], places: Ints, others: Ints, table: Outlook, limit: str
) -> list[LeftOutFamily]:
    """Families of candidates that are left out for others beside them, and by how much they are slower.

    Args:
        candidates: All of them.
        by: The knobs of a family: one, or one and `compile`.
        places, others: Of what is left out, in order, and of what it is left out for.
        table: The predictions.
        limit: Why.
    """
    left_out: dict[str, tuple[float, float, int]] = {}
    for members in _grouped(candidates, places, by):
        config = candidates[int(members[0])]
        family = f"{by[0]}={getattr(config, by[0])}"
        if len(by) > 1:
            family += ", not compiled" if config.compile == "off" else ", compiled"
        plain = others[np.searchsorted(places, members)]
        slower = 1 - table.step_time_s[plain] / table.step_time_s[members]
        low, high, count = left_out.get(family, (np.inf, -np.inf, 0))
        left_out[family] = min(low, float(slower.min())), max(high, float(slower.max())), count + len(members)
    return [
        LeftOutFamily(family=family, limit=limit, by=f"predicted {low:.1%} to {high:.1%} slower", configurations=count)
        for family, (low, high, count) in left_out.items()
    ]

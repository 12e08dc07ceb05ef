"""Prunes the space: which candidates are worth a trial, by predicted memory and time, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import LeftOutFamily
from autoplan.strategies.config import MEMORY_ONLY, PLAIN, RANK_COUNTS, TrainingConfig, knobs
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import CostTable


MAX_CANDIDATES = 20_000

HOST_LIMIT = "the host's memory"
"""The limit of a family that is offloaded and does not fit the host begins so."""


def memory_share_bytes(config: TrainingConfig, memory_limit_bytes: float, device: str) -> float:
    """What one rank may take: on CPU the limit is for all ranks together, on CUDA for each device."""
    return memory_limit_bytes / config.world_size if device == "cpu" else memory_limit_bytes


def keep_what_may_win(
    candidates: Sequence[TrainingConfig],
    table: CostTable,
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
    shares = np.array([memory_share_bytes(config, memory_limit_bytes, device) for config in candidates])
    too_big = table.peak_memory_low_bytes > shares
    left_out = _memory_families(candidates, table, shares, np.flatnonzero(too_big).tolist(), device)
    worth = ~too_big
    if host_limit_bytes is not None:
        on_host = table.host_bytes * np.array([config.world_size for config in candidates])
        beyond = worth & (on_host > host_limit_bytes)
        left_out += _host_families(candidates, on_host, host_limit_bytes, np.flatnonzero(beyond).tolist())
        worth &= ~beyond
    for knob in _memory_only(device) if spares_memory else ():
        needless = _needless(knob, candidates, table, shares)
        worth[list(needless)] = False
        left_out += _needless_families(knob, candidates, table, needless)
    for knob in (name for name, known in knobs().items() if known.must_gain and name not in named):
        gainless = _gainless(knob, candidates, table)
        worth[list(gainless)] = False
        left_out += _gainless_families(knob, candidates, table, gainless)
    kept = np.flatnonzero(worth)
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


def _memory_families(
    candidates: Sequence[TrainingConfig],
    table: CostTable,
    shares: NDArray[np.float64],
    too_big: Sequence[int],
    device: str,
) -> list[LeftOutFamily]:
    """What cannot fit, by the knobs that decide memory; of each family the one that comes nearest to fitting."""
    families: dict[str, list[int]] = {}
    for index in too_big:
        families.setdefault(_memory_family(candidates[index], device), []).append(index)
    left_out = []
    for family, members in families.items():
        nearest = min(members, key=lambda i: table.peak_memory_bytes[i] / shares[i])
        peak, low, high = (
            float(column[nearest])
            for column in (table.peak_memory_bytes, table.peak_memory_low_bytes, table.peak_memory_high_bytes)
        )
        share = float(shares[nearest])
        left_out.append(
            LeftOutFamily(
                family=family,
                limit=f"memory: {format_bytes(share)} for one rank",
                by=f"at the least predicted {format_bytes(peak)} ({format_bytes(low)} to {format_bytes(high)}), "
                f"{format_bytes(peak - share)} too much",
                configurations=len(members),
            )
        )
    return left_out


def _host_families(
    candidates: Sequence[TrainingConfig], on_host: NDArray[np.float64], limit_bytes: int, beyond: Sequence[int]
) -> list[LeftOutFamily]:
    """What the host cannot hold, by what is offloaded over how many ranks; of each family the least."""
    families: dict[tuple[str, int], list[int]] = {}
    for index in beyond:
        families.setdefault((candidates[index].offload, candidates[index].world_size), []).append(index)
    return [
        LeftOutFamily(
            family=f"offload={value}" + (f" on {ranks} ranks" if ranks > 1 else ""),
            limit=f"{HOST_LIMIT}: {format_bytes(limit_bytes)} for all ranks",
            by=f"at the least predicted {format_bytes(float(min(on_host[members])))}, "
            f"{format_bytes(float(min(on_host[members])) - limit_bytes)} too much",
            configurations=len(members),
        )
        for (value, ranks), members in families.items()
    ]


def _memory_only(device: str) -> list[str]:
    """The knobs whose other values only save memory on this device."""
    return [knob for knob in MEMORY_ONLY if knobs()[knob].memory_only_on in (None, device)]


def _memory_family(config: TrainingConfig, device: str) -> str:
    names = [f"micro_batch={config.micro_batch}", f"checkpointing={config.checkpointing}", f"loss={config.loss}"]
    off_plain = (
        knob for knob in (*RANK_COUNTS, *_memory_only(device)) if getattr(config, knob) != getattr(PLAIN, knob)
    )
    return " ".join([*names, *(f"{knob}={getattr(config, knob)}" for knob in off_plain)])


def _needless(
    knob: str, candidates: Sequence[TrainingConfig], table: CostTable, shares: NDArray[np.float64]
) -> dict[int, int]:
    """Where a value that only saves memory is not worth a trial, to where the same with the plain value is.

    The latter fits at the high end of its predicted peak, and is predicted to be no slower.
    """
    plain, needs = getattr(PLAIN, knob), knobs()[knob].needs
    saving = [index for index, config in enumerate(candidates) if getattr(config, knob) != plain]
    if not saving:
        return {}
    plain_configs = {
        config: index
        for index, config in enumerate(candidates)
        if getattr(config, knob) == plain and all(need.is_met(getattr(config, need.knob)) for need in needs)
    }
    found = {}
    for index in saving:
        other = plain_configs.get(candidates[index].model_copy(update={knob: plain}))
        if other is None or table.peak_memory_high_bytes[other] > shares[other]:
            continue
        if table.step_time_s[other] <= table.step_time_s[index]:
            found[index] = other
    return found


def _needless_families(
    knob: str, candidates: Sequence[TrainingConfig], table: CostTable, needless: Mapping[int, int]
) -> list[LeftOutFamily]:
    by_value: dict[str, list[int]] = {}
    for index in needless:
        by_value.setdefault(f"{knob}={getattr(candidates[index], knob)}", []).append(index)
    left_out = []
    for family, members in by_value.items():
        slower = 1 - table.step_time_s[[needless[index] for index in members]] / table.step_time_s[members]
        left_out.append(
            LeftOutFamily(
                family=family,
                limit=f"{knob}={getattr(PLAIN, knob)} fits with all else the same, and {knobs()[knob].memory_only}",
                by=f"predicted {slower.min():.1%} to {slower.max():.1%} slower",
                configurations=len(members),
            )
        )
    return left_out


def _gainless(knob: str, candidates: Sequence[TrainingConfig], table: CostTable) -> dict[int, int]:
    """Where another value than the plain one is predicted to gain no time, to where the same with the plain one is."""
    plain = getattr(PLAIN, knob)
    places = {config: index for index, config in enumerate(candidates) if getattr(config, knob) == plain}
    found = {}
    for index, config in enumerate(candidates):
        if getattr(config, knob) != plain:
            other = places.get(config.model_copy(update={knob: plain}))
            if other is not None and table.step_time_s[other] <= table.step_time_s[index]:
                found[index] = other
    return found


def _gainless_families(
    knob: str, candidates: Sequence[TrainingConfig], table: CostTable, gainless: Mapping[int, int]
) -> list[LeftOutFamily]:
    """By value, and by whether the run is compiled: what it fuses decides what casts cost."""
    families: dict[str, list[int]] = {}
    for index in gainless:
        compiled = "compiled" if candidates[index].compile != "off" else "not compiled"
        families.setdefault(f"{knob}={getattr(candidates[index], knob)}, {compiled}", []).append(index)
    left_out = []
    for family, members in families.items():
        slower = 1 - table.step_time_s[[gainless[index] for index in members]] / table.step_time_s[members]
        left_out.append(
            LeftOutFamily(
                family=family,
                limit=f"no gain: the same with {knob}={getattr(PLAIN, knob)} is predicted to be no slower",
                by=f"predicted {slower.min():.1%} to {slower.max():.1%} slower",
                configurations=len(members),
            )
        )
    return left_out

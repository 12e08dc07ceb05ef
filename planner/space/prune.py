"""Prunes the space: which candidates are worth a trial, by predicted memory and time, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import LeftOutFamily
from autoplan.strategies.config import (
    TrainingConfig,
)
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.cost.traced.estimator import CostTable


RANK_COUNTS = ("dp_replicate", "dp_shard", "tp", "pp")


MAX_CANDIDATES = 20_000


def memory_share_bytes(config: TrainingConfig, memory_limit_bytes: float, device: str) -> float:
    """What one rank may take: on CPU the limit is for all ranks together, on CUDA for each device."""
    return memory_limit_bytes / config.world_size if device == "cpu" else memory_limit_bytes


def keep_what_may_win(
    candidates: Sequence[TrainingConfig], table: CostTable, memory_limit_bytes: int, device: str
) -> tuple[list[int], list[LeftOutFamily]]:
    """Indices of the candidates worth a trial, in their order, and the families that are not, with by how much.

    Left out is what cannot fit (even the low end of its predicted peak is above the limit), what saves memory that is
    not needed, and, beyond MAX_CANDIDATES, what is predicted to be slowest.
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
    needless = _needless(candidates, table, shares)
    if needless:
        slower = table.step_time_s[list(needless)] / table.step_time_s[list(needless.values())] - 1
        left_out.append(
            LeftOutFamily(
                family="gradient_sync=every",
                limit="gradient_sync=last fits with all else the same, and sends less",
                by=f"predicted {slower.min():.1%} to {slower.max():.1%} slower",
                configurations=len(needless),
            )
        )
    worth = ~too_big
    worth[list(needless)] = False
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


def _needless(candidates: Sequence[TrainingConfig], table: CostTable, shares: NDArray[np.float64]) -> dict[int, int]:
    """Where gradient_sync=every is not worth a trial, to where the same with gradient_sync=last is.

    The latter fits at the high end of its predicted peak, and is predicted to be no slower.
    """
    every = [index for index, config in enumerate(candidates) if config.gradient_sync == "every"]
    if not every:
        return {}
    last = {config: i for i, config in enumerate(candidates) if config.dp_shard > 1 and config.gradient_sync == "last"}
    found = {}
    for index in every:
        twin = last.get(candidates[index].model_copy(update={"gradient_sync": "last"}))
        if twin is None or table.peak_memory_high_bytes[twin] > shares[twin]:
            continue
        if table.step_time_s[twin] <= table.step_time_s[index]:
            found[index] = twin
    return found


def _memory_family(config: TrainingConfig) -> str:
    names = [f"micro_batch={config.micro_batch}", f"checkpointing={config.checkpointing}", f"loss={config.loss}"]
    names += [f"{knob}={getattr(config, knob)}" for knob in RANK_COUNTS if getattr(config, knob) > 1]
    names += ["gradient_sync=every"] if config.gradient_sync == "every" else []
    return " ".join(names)

"""Estimates of rows: those that can be estimated all at once, and all of them written back in their order."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import AutoplanError, UsageError
from autoplan.planner.cost.analytical.csv_rows import INPUT, parse_row, read_row
from autoplan.planner.cost.analytical.explain import MEMORY_SD, bound, memory_verdicts, step_interval, why
from autoplan.planner.cost.analytical.layouts import Layouts, make_layouts
from autoplan.planner.cost.analytical.step_time import (
    CALIBRATED_SD,
    UNCALIBRATED_SD,
    EstimateTable,
    Factors,
    estimate_layouts,
)
from autoplan.planner.cost.columns import Bools, Floats
from autoplan.planner.cost.prediction import spread

OUTPUT = (
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s",
    "peak_memory_bytes",
    "peak_memory_low_bytes",
    "peak_memory_high_bytes",
    "verdict",
    "bound",
    "reason",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatedRows:
    """A table with its estimates: one entry per row that has one, in order; `reasons` has those that have none.

    Attributes:
        table, layouts: None where no row could be estimated.
        lowest_bytes, highest_bytes: Peaks of memory if what the rows do not say is as it costs least, and most.
        place: For the number of a row its entry.
        reasons: For the number of a row why it has no estimate.
        notes: For the number of a row what of it was read as something else.
    """

    table: EstimateTable | None
    layouts: Layouts | None
    lowest_bytes: Floats | None
    highest_bytes: Floats | None
    place: dict[int, int]
    reasons: dict[int, str]
    notes: dict[int, tuple[str, ...]]


def estimate_rows(rows: Sequence[Mapping[str, Any]], factors: Factors | None = None) -> EstimatedRows:
    """Estimates the rows that can be estimated; the others get a reason."""
    parsed: list[dict[str, Any]] = []
    unsaid: list[tuple[bool, bool]] = []
    place: dict[int, int] = {}
    reasons: dict[int, str] = {}
    notes: dict[int, tuple[str, ...]] = {}
    for i, row in enumerate(rows):
        try:
            inputs = read_row(row)
            parsed.append(parse_row(row))
        except AutoplanError as error:
            reasons[i] = f"{error.message}. {error.hint}" if error.hint else error.message
            continue
        place[i] = len(parsed) - 1
        unsaid.append(("gradient_sync" not in inputs.values, "flat_parameters" not in inputs.values))
        if inputs.notes:
            notes[i] = inputs.notes
    if not parsed:
        return EstimatedRows(
            table=None, layouts=None, lowest_bytes=None, highest_bytes=None, place={}, reasons=reasons, notes={}
        )
    layouts = make_layouts(parsed)
    table = estimate_layouts(layouts, factors)
    sync, flat = np.array(unsaid).T
    return EstimatedRows(
        table=table,
        layouts=layouts,
        lowest_bytes=_lowest_bytes(layouts, table, sync),
        highest_bytes=_highest_bytes(layouts, table, flat),
        place=place,
        reasons=reasons,
        notes=notes,
    )


def _lowest_bytes(layouts: Layouts, table: EstimateTable, unsaid: Bools) -> Floats:
    """Peaks of memory with gradients scattered at every micro-step where the rows do not say when they are."""
    each = unsaid & layouts.shards_gradients & (layouts.pp == 1)
    if not each.any():
        return table.peak_memory_bytes
    return estimate_layouts(replace(layouts, scatters_each=layouts.scatters_each | each)).peak_memory_bytes


def _highest_bytes(layouts: Layouts, table: EstimateTable, unsaid: Bools) -> Floats:
    """Peaks of memory with gradients of frozen parameters too where the rows do not say that there are none."""
    flat = unsaid & layouts.shards_parameters & (layouts.trained_share < 1)
    if not flat.any():
        return table.peak_memory_bytes
    return estimate_layouts(replace(layouts, flat_parameters=layouts.flat_parameters | flat)).peak_memory_bytes


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], estimated: EstimatedRows, *, calibrated: bool) -> None:
    """The same rows with their estimates.

    Raises:
        UsageError: the file cannot be written.
    """
    names = output_names(rows)
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            for i, row in enumerate(rows):
                writer.writerow(merged_row(row, estimated, i, calibrated=calibrated))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="Give another place with --out."
        ) from error


def output_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of an estimated table: those given, a measured step time apart, then the estimates."""
    columns = [name for name in (rows[0] if rows else INPUT) if name is not None]
    names = [name for name in columns if name not in OUTPUT]
    return [*names, *(["measured_step_time_s"] if "step_time_s" in columns else []), *OUTPUT]


def merged_row(row: Mapping[str, Any], estimated: EstimatedRows, i: int, *, calibrated: bool) -> dict[str, Any]:
    """One row with its estimates."""
    kept = {name: value for name, value in row.items() if name not in OUTPUT}
    if "step_time_s" in row:
        kept["measured_step_time_s"] = row["step_time_s"]
    return kept | output_row(estimated, i, calibrated=calibrated)


def output_row(estimated: EstimatedRows, i: int, *, calibrated: bool) -> dict[str, Any]:
    """The output columns of one row."""
    if i not in estimated.place or estimated.table is None or estimated.layouts is None:
        return {"reason": estimated.reasons.get(i, "")}
    j = estimated.place[i]
    table, layouts = estimated.table, estimated.layouts
    fastest, slowest = step_interval(table, layouts, j, sd=CALIBRATED_SD if calibrated else UNCALIBRATED_SD)
    step, peak = float(table.step_time_s[j]), float(table.peak_memory_bytes[j])
    low, high, verdict, more = _memory_of_row(estimated, j)
    notes = "".join(f"; {note}" for note in estimated.notes.get(i, ()))
    return {
        "step_time_s": f"{step:.6g}",
        "step_time_low_s": f"{fastest:.6g}",
        "step_time_high_s": f"{slowest:.6g}",
        "tokens_per_s": f"{layouts.global_batch[j] * layouts.seq_len[j] / step:.6g}",
        "peak_memory_bytes": round(peak),
        "peak_memory_low_bytes": round(low),
        "peak_memory_high_bytes": round(high),
        "verdict": verdict,
        "bound": bound(table, j),
        "reason": why(table, layouts, j, verdict) + more + notes,
    }


def _memory_of_row(estimated: EstimatedRows, j: int) -> tuple[float, float, str, str]:
    """Lower and upper end of a row's peak, the verdict, and what the row does not say and the verdict depends on."""
    assert estimated.table is not None and estimated.layouts is not None
    assert estimated.lowest_bytes is not None and estimated.highest_bytes is not None
    peak, memory = estimated.table.peak_memory_bytes[j], estimated.layouts.memory_bytes[j]
    lowest, highest = estimated.lowest_bytes[j], estimated.highest_bytes[j]
    factor = float(spread(MEMORY_SD))
    verdict = str(memory_verdicts(peak, memory, lowest_bytes=lowest, highest_bytes=highest))
    more = ""
    if verdict == "too_close" and str(memory_verdicts(peak, memory)) == "fits":
        more = f"; fits, unless frozen parameters have gradients (flat_parameters: {(highest - peak) / 2**30:.1f} GiB "
        more += "more), which the row does not say"
    elif verdict == "too_close" and lowest < peak and str(memory_verdicts(lowest, memory)) == "fits":
        more = f"; fits with gradient_sync=every ({(peak - lowest) / 2**30:.1f} GiB less), which the row does not say"
    return float(lowest) / factor, float(highest) * factor, verdict, more

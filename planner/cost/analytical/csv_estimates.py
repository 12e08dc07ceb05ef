"""Prices of rows: those that can be priced together at once, and all of them written back in their order."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import AutoplanError, UsageError
from autoplan.planner.cost.analytical.csv_rows import INPUT, given, parse_row
from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.step_time import CALIBRATED_SD, UNCALIBRATED_SD, Factors, PaperTable, price
from autoplan.planner.cost.analytical.verdicts import MEMORY_SD, Z_90, bound_of, memory_verdict, step_interval, why
from autoplan.planner.cost.candidates import SHARDINGS, Floats

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
class Priced:
    """A table that was priced: one entry per row that has a price, in order; `reasons` has those that have none.

    `place`: where in the table a row is. `highest_bytes`: peaks of memory if what the rows leave unsaid is as it costs
    most.
    """

    table: PaperTable | None
    layouts: Layouts | None
    highest_bytes: Floats | None
    place: dict[int, int]
    reasons: dict[int, str]


def price_rows(rows: Sequence[Mapping[str, Any]], factors: Factors | None = None) -> Priced:
    """Prices the rows that can be priced; the others get a reason."""
    parsed: list[dict[str, Any]] = []
    unsaid: list[tuple[bool, bool]] = []
    place: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            parsed.append(parse_row(row))
        except AutoplanError as error:
            reasons[i] = f"{error.message}. {error.hint}" if error.hint else error.message
            continue
        place[i] = len(parsed) - 1
        unsaid.append((given(row, "gradient_sync") is None, given(row, "flat_parameters") is None))
    if not parsed:
        return Priced(table=None, layouts=None, highest_bytes=None, place={}, reasons=reasons)
    layouts = Layouts(**{f.name: np.array([p[f.name] for p in parsed]) for f in fields(Layouts)})
    table, highest = price(layouts, factors), _unsaid_bytes(layouts, np.array(unsaid))
    return Priced(table=table, layouts=layouts, highest_bytes=highest, place=place, reasons=reasons)


def _unsaid_bytes(layouts: Layouts, unsaid: NDArray[np.bool_]) -> Floats:
    """Peaks if sharded gradients are kept whole where a row does not say, and FSDP1's if it trains a part only."""
    sharded = layouts.sharding >= SHARDINGS.index("zero2")
    return price(
        replace(
            layouts,
            whole_gradients=layouts.whole_gradients | (unsaid[:, 0] & sharded),
            flat_parameters=layouts.flat_parameters | (unsaid[:, 1] & (layouts.sharding == SHARDINGS.index("zero3"))),
        )
    ).peak_memory_bytes


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], priced: Priced, *, calibrated: bool) -> None:
    """The same rows with their prices.

    Raises:
        UsageError: the file cannot be written.
    """
    names = output_names(rows)
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            for i, row in enumerate(rows):
                writer.writerow(merged_row(row, priced, i, calibrated=calibrated))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="Give another place with --out."
        ) from error


def output_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a priced table: those given, then the prices; a measured step time keeps a column of its own."""
    columns = [name for name in (rows[0] if rows else INPUT) if name is not None]
    names = [name for name in columns if name not in OUTPUT]
    return [*names, *(["measured_step_time_s"] if "step_time_s" in columns else []), *OUTPUT]


def merged_row(row: Mapping[str, Any], priced: Priced, i: int, *, calibrated: bool) -> dict[str, Any]:
    """One row with its prices."""
    kept = {name: value for name, value in row.items() if name not in OUTPUT}
    if "step_time_s" in row:
        kept["measured_step_time_s"] = row["step_time_s"]
    return kept | output_row(priced, i, calibrated=calibrated)


def output_row(priced: Priced, i: int, *, calibrated: bool) -> dict[str, Any]:
    """The output columns of one row."""
    if i not in priced.place or priced.table is None or priced.layouts is None or priced.highest_bytes is None:
        return {"reason": priced.reasons.get(i, "")}
    j = priced.place[i]
    table, layouts = priced.table, priced.layouts
    step, peak = float(table.step_time_s[j]), float(table.peak_memory_bytes[j])
    spread = float(np.exp(Z_90 * (CALIBRATED_SD if calibrated else UNCALIBRATED_SD)))
    fastest, slowest = step_interval(table, layouts, j, spread=spread)
    room = float(np.exp(Z_90 * MEMORY_SD))
    high = max(peak, float(priced.highest_bytes[j])) * room
    verdict = memory_verdict(peak / room, high, float(layouts.memory_bytes[j]))
    reason = why(table, layouts, j, verdict)
    if verdict == "too_close" and memory_verdict(peak / room, peak * room, float(layouts.memory_bytes[j])) == "fits":
        more = float(priced.highest_bytes[j]) - peak
        reason += "; fits, unless gradients are kept whole between micro-steps (gradient_sync, flat_parameters: "
        reason += f"{more / 2**30:.1f} GiB more), which the row does not say"
    return {
        "step_time_s": f"{step:.6g}",
        "step_time_low_s": f"{fastest:.6g}",
        "step_time_high_s": f"{slowest:.6g}",
        "tokens_per_s": f"{layouts.global_batch[j] * layouts.seq_len[j] / step:.6g}",
        "peak_memory_bytes": round(peak),
        "peak_memory_low_bytes": round(peak / room),
        "peak_memory_high_bytes": round(high),
        "verdict": verdict,
        "bound": bound_of(table, j),
        "reason": reason,
    }

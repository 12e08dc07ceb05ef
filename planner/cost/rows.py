"""Rows: layouts read from a table, checked one by one, priced together, written back in their order."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import AutoplanError, UsageError, WorkloadError
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS, Floats
from autoplan.planner.cost.chips import Chip, find_chip
from autoplan.planner.cost.layouts import (
    ATTENTION,
    CHECKPOINTING,
    OPTIMIZER_STATE_BYTES,
    PRECISIONS,
    STATES,
    STEP_TEMPORARY_BYTES,
    Layouts,
)
from autoplan.planner.cost.paper import (
    CALIBRATED_SD,
    MEMORY_PARTS,
    TIME_PARTS,
    UNCALIBRATED_SD,
    Factors,
    PaperTable,
    price,
)
from autoplan.planner.cost.transformer import Transformer, from_config

Z_90 = 1.645
# Half-width of the memory interval, as a standard deviation of its logarithm
MEMORY_SD = 0.06
# Left free of the chip's memory: the driver keeps some, and what is not allocated in one piece is lost
RESERVE = 0.04
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
INPUT = (
    "id",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "gated_mlp",
    "tied_embeddings",
    "seq_len",
    "chip",
    "num_gpus",
    "gpus_per_node",
    "intra_gbytes_per_s",
    "inter_gbits_per_s_per_gpu",
    "tp",
    "sequence_parallel",
    "pp",
    "virtual_stages",
    "schedule",
    "dp_replicate",
    "dp_shard",
    "sharding",
    "micro_batch",
    "global_batch",
    "precision",
    "checkpointing",
    "compile",
    "attention",
    "optimizer",
    "states",
    "trainable_parameters",
    "loss",
    "gradient_sync",
    "flat_parameters",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A table that was priced: one entry per row, in order; `reason` says why a row has no price.

    `highest_bytes`: peaks of memory if what the rows leave unsaid is as it costs most.
    """

    table: PaperTable | None
    layouts: Layouts | None
    highest_bytes: Floats | None
    place: dict[int, int]
    reasons: dict[int, str]


@functools.cache
def find_transformer(name: str) -> Transformer:
    """A built-in model's dimensions, or those of a config.json.

    Raises:
        WorkloadError: no such model, or a family without a closed form.
    """
    import json

    from autoplan.strategies.families.registry import canonical_name, list_models, near_names, read_config

    known = canonical_name(name)
    if known is not None:
        return from_config(read_config(known), known)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            return from_config(json.loads(path.read_text()), name)
        except (ValueError, KeyError) as error:
            raise WorkloadError(f"{name} is no usable config.json: {error}", hint="Check the file.") from error
    near = near_names(name)
    raise WorkloadError(
        f"no model is called {name!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"Built in are: {', '.join(list_models())}.",
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        UsageError: it cannot be read, or has a column that nobody knows.
    """
    try:
        with path.open(newline="") as file:
            return [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}", hint="Give a CSV file with a header row.") from error


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
            reasons[i] = error.message
            continue
        place[i] = len(parsed) - 1
        unsaid.append((_text(row, "gradient_sync") is None, _text(row, "flat_parameters") is None))
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
    given = [name for name in (rows[0] if rows else INPUT) if name is not None]
    names = [name for name in given if name not in OUTPUT]
    return [*names, *(["measured_step_time_s"] if "step_time_s" in given else []), *OUTPUT]


def merged_row(row: Mapping[str, Any], priced: Priced, i: int, *, calibrated: bool) -> dict[str, Any]:
    """One row with its prices."""
    given = {name: value for name, value in row.items() if name not in OUTPUT}
    if "step_time_s" in row:
        given["measured_step_time_s"] = row["step_time_s"]
    return given | output_row(priced, i, calibrated=calibrated)


def output_row(priced: Priced, i: int, *, calibrated: bool) -> dict[str, Any]:
    """The output columns of one row."""
    if i not in priced.place or priced.table is None or priced.layouts is None or priced.highest_bytes is None:
        return {"reason": priced.reasons.get(i, "")}
    j = priced.place[i]
    table, layouts = priced.table, priced.layouts
    step, peak = float(table.step_time_s[j]), float(table.peak_memory_bytes[j])
    spread = float(np.exp(Z_90 * (CALIBRATED_SD if calibrated else UNCALIBRATED_SD)))
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
        "step_time_low_s": f"{step / spread:.6g}",
        "step_time_high_s": f"{step * spread:.6g}",
        "tokens_per_s": f"{layouts.global_batch[j] * layouts.seq_len[j] / step:.6g}",
        "peak_memory_bytes": round(peak),
        "peak_memory_low_bytes": round(peak / room),
        "peak_memory_high_bytes": round(high),
        "verdict": verdict,
        "bound": bound_of(table, j),
        "reason": reason,
    }


def memory_verdict(low: float, high: float, memory_bytes: float) -> str:
    """Fits, does not, or too close to call, with the reserve."""
    usable = (1 - RESERVE) * memory_bytes
    if high <= usable:
        return "fits"
    return "does_not_fit" if low > memory_bytes else "too_close"


def bound_of(table: PaperTable, j: int) -> str:
    """What takes the most of a step."""
    shares = {
        "compute": table.matmul_s[j] + table.attention_s[j],
        "memory_bandwidth": table.memory_s[j] + table.optimizer_s[j],
        "launch": table.launch_s[j],
        "communication": table.communication_s[j],
        "bubble": table.bubble_s[j],
    }
    return max(shares, key=lambda name: shares[name])


def why(table: PaperTable, layouts: Layouts, j: int, verdict: str) -> str:
    """One sentence on a price: the largest parts of time, and of memory where it does not fit."""
    step = float(table.step_time_s[j])
    parts = sorted(((float(getattr(table, name)[j]), name.removesuffix("_s")) for name in TIME_PARTS), reverse=True)
    text = ", ".join(f"{name} {seconds / step:.0%}" for seconds, name in parts[:3]) + " of the step"
    if verdict != "fits":
        held = sorted(((float(getattr(table, n)[j]), n.removesuffix("_bytes")) for n in MEMORY_PARTS), reverse=True)
        gib = float(table.peak_memory_bytes[j]) / 2**30
        text += f"; {gib:.1f} GiB against {layouts.memory_bytes[j] / 2**30:.0f}: "
        text += ", ".join(f"{name} {size / 2**30:.1f}" for size, name in held[:3])
    return text


# One row.


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the columns of Layouts, with the defaults filled in.

    Raises:
        UsageError: a value is missing, is no number, or the degrees do not multiply to the GPUs.
    """
    model = _model(row)
    chip = find_chip(_text(row, "chip") or _missing("chip"))
    precision = _choice(row, "precision", PRECISIONS, "bf16")
    degrees = _degrees(row)
    peak = chip.peak(precision)
    if peak is None:
        raise UsageError(f"{chip.sheet.name} has no {precision} units", hint="Choose another precision.")
    sequence = _number(row, "seq_len", float(model.max_length or 2048))
    optimizer = _text(row, "optimizer") or "adamw"
    if optimizer not in OPTIMIZER_STATE_BYTES:
        raise UsageError(f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZER_STATE_BYTES)}", hint="")
    per_node = degrees["gpus_per_node"]
    intra = _number(row, "intra_gbytes_per_s", chip.intra_bytes_per_s / 1e9)
    inter = _number(row, "inter_gbits_per_s_per_gpu", -1.0)
    gpus = degrees["tp"] * degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"]
    if inter <= 0:
        if gpus > per_node:
            raise UsageError(
                f"{gpus} GPUs at {per_node} a node need a link between nodes, and none is given",
                hint="Give inter_gbits_per_s_per_gpu.",
            )
        inter = 1e3
    trainable = _number(row, "trainable_parameters", float(model.parameters))
    states = _states(row, precision)
    narrow = states == "16bit" and not optimizer.endswith("8bit")
    return {
        **dimension_columns(model),
        "trainable": min(trainable, float(model.parameters)),
        "seq_len": sequence,
        **_figures(chip, peak),
        "gpus_per_node": float(per_node),
        "intra_bytes_per_s": intra * 1e9,
        "inter_bytes_per_s": inter * 1e9 / 8,
        **{name: float(degrees[name]) for name in ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch")},
        "global_batch": float(degrees["global_batch"]),
        "virtual_stages": _number(row, "virtual_stages", 1.0),
        "sequence_parallel": _flag(row, "sequence_parallel", degrees["tp"] > 1),
        "schedule": SCHEDULES.index(_choice(row, "schedule", SCHEDULES, "1f1b")),
        "sharding": SHARDINGS.index(_choice(row, "sharding", SHARDINGS, degrees["sharding"])),
        "precision": PRECISIONS.index(precision),
        "checkpointing": CHECKPOINTING.index(_choice(row, "checkpointing", CHECKPOINTING, "none")),
        "compiled": COMPILES.index(_choice(row, "compile", COMPILES, "off")),
        "attention": ATTENTION.index("eager" if (_text(row, "attention") or "flash") == "eager" else "flash"),
        "optimizer_bytes": OPTIMIZER_STATE_BYTES[optimizer] / (2 if narrow else 1),
        "step_bytes": STEP_TEMPORARY_BYTES.get(optimizer, 0.0) / (2 if narrow else 1),
        "half_states": states == "16bit",
        "master_states": states == "master",
        "whole_gradients": _choice(row, "gradient_sync", ("every", "last"), "every") == "last",
        "flat_parameters": _flag(row, "flat_parameters", False),
        "chunked_loss": _choice(row, "loss", ("full", "chunked"), "full") == "chunked",
    }


def _states(row: Mapping[str, Any], precision: str) -> str:
    """What is kept in which width; 16bit: all of it ("bf16-true"); master: the optimizer keeps fp32 copies."""
    states = _choice(row, "states", STATES, "fp32")
    if states != "fp32" and precision not in ("bf16", "fp16"):
        raise UsageError(f"states={states} goes with bf16 or fp16, not with {precision}", hint="")
    return states


def _model(row: Mapping[str, Any]) -> Transformer:
    name = _text(row, "model")
    given = {k: _text(row, k) for k in ("layers", "hidden", "heads", "vocab", "ffn", "kv_heads")}
    if not (given["layers"] and given["hidden"] and given["heads"]):
        if name is None:
            raise UsageError("neither a model nor its layers, hidden and heads are given", hint="Give either.")
        return find_transformer(name)
    hidden, heads = int(_number(row, "hidden", 0)), int(_number(row, "heads", 0))
    gated = _flag(row, "gated_mlp", False)
    if hidden < 1 or heads < 1 or hidden % heads:
        raise UsageError(f"{heads} heads do not divide a hidden size of {hidden}", hint="")
    return Transformer(
        layers=int(_number(row, "layers", 0)),
        hidden=hidden,
        heads=heads,
        kv_heads=int(_number(row, "kv_heads", heads)),
        ffn=int(_number(row, "ffn", 4 * hidden)),
        vocab=int(_number(row, "vocab", 51200)),
        gated_mlp=gated,
        tied_embeddings=_flag(row, "tied_embeddings", not gated),
    )


def dimension_columns(model: Transformer) -> dict[str, Any]:
    """The columns of Layouts that a model fills."""
    return {
        "layers": float(model.layers),
        "hidden": float(model.hidden),
        "heads": float(model.heads),
        "attention_width": float(model.attention_width),
        "kv_width": float(model.kv_width),
        "ffn": float(model.ffn),
        "vocab": float(model.vocab),
        "gated_mlp": model.gated_mlp,
        "tied": model.tied_embeddings,
        "parameters": float(model.parameters),
        "block_parameters": float(model.block_parameters),
        "trainable": float(model.parameters),
    }


def _figures(chip: Chip, peak: float) -> dict[str, Any]:
    return {
        "peak_flops_per_s": peak,
        "memory_bytes_per_s": chip.sheet.memory_bandwidth_bytes_per_s.value,
        "memory_bytes": chip.sheet.memory_bytes.value,
        "processors": chip.processors,
        "matmul_efficiency": chip.matmul_efficiency,
    }


def _degrees(row: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees, with what is not given worked out from the number of GPUs."""
    tp, pp = (int(_number(row, name, 1)) for name in ("tp", "pp"))
    replicate, shard = _number(row, "dp_replicate", 0), _number(row, "dp_shard", 0)
    gpus = int(_number(row, "num_gpus", 0))
    sharding = _text(row, "sharding")
    if not gpus and not (replicate or shard):
        replicate = shard = 1
    if gpus and gpus % (tp * pp):
        raise UsageError(f"tp {tp} x pp {pp} does not divide {gpus} GPUs", hint="")
    dp = gpus // (tp * pp) if gpus else int(max(replicate, 1) * max(shard, 1))
    if not replicate and not shard:
        replicate, shard = (dp, 1) if sharding in (None, "ddp") else (1, dp)
    replicate = int(replicate or dp // max(int(shard), 1))
    shard = int(shard or dp // max(replicate, 1))
    if sharding == "ddp" and shard > 1:
        replicate, shard = replicate * shard, 1
    if replicate * shard != dp:
        raise UsageError(
            f"dp_replicate {replicate} x dp_shard {shard} x tp {tp} x pp {pp} = {replicate * shard * tp * pp}, "
            f"not the {gpus} GPUs",
            hint="",
        )
    micro = int(_number(row, "micro_batch", 1))
    batch = int(_number(row, "global_batch", micro * dp * max(1, pp)))
    if micro < 1 or batch % (micro * dp):
        raise UsageError(f"micro_batch {micro} x dp {dp} does not divide the global batch of {batch}", hint="")
    world = dp * tp * pp
    return {
        "tp": tp,
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "sharding": sharding or ("zero3" if shard > 1 else "ddp"),
        "micro_batch": micro,
        "global_batch": batch,
        "gpus_per_node": int(_number(row, "gpus_per_node", min(world, 8))),
    }


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    return None if value is None or str(value).strip() == "" else str(value).strip()


def _missing(name: str) -> str:
    raise UsageError(f"{name} is not given", hint="")


def _number(row: Mapping[str, Any], name: str, default: float) -> float:
    text = _text(row, name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, not a number", hint="") from None
    if not np.isfinite(value) or value <= 0:
        raise UsageError(f"{name} is {text}; it must be above 0", hint="")
    return value


def _flag(row: Mapping[str, Any], name: str, default: bool) -> bool:
    text = _text(row, name)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise UsageError(f"{name} is {text!r}, not true or false", hint="")


def _choice(row: Mapping[str, Any], name: str, allowed: Sequence[str], default: str) -> str:
    text = (_text(row, name) or default).lower()
    if text not in allowed:
        raise UsageError(f"{name} is {text!r}; it is one of {', '.join(allowed)}", hint="")
    return text


def measured_seconds(rows: Sequence[Mapping[str, Any]]) -> Floats:
    """The measured step times of calibration rows; NaN where a row has none."""
    return np.array([_number(row, "step_time_s", np.nan) if _text(row, "step_time_s") else np.nan for row in rows])

"""Rows of a table: read, checked one by one, estimated all at once, and written back in their order."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import AutoplanError, UsageError
from autoplan.planner.cost.analytical.cluster import Chip, find_chip
from autoplan.planner.cost.analytical.inputs import (
    ALIASES,
    OTHER_INPUTS,
    ROW_ALIASES,
    Inputs,
    flag,
    number,
    read_inputs,
    read_settings,
    read_sharding,
    whole,
)
from autoplan.planner.cost.analytical.layouts import Layout, Layouts, contradiction, make_layouts
from autoplan.planner.cost.analytical.step_time import (
    MEMORY_SD,
    EstimateTable,
    estimate_layouts,
    memory_verdicts,
    peak_bytes,
)
from autoplan.planner.cost.analytical.transformer import Transformer, find_transformer
from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.correction import Correction
from autoplan.planner.cost.prediction import spread
from autoplan.strategies.config import KNOBS, PLAIN
from autoplan.strategies.knob_text import check_knob

DIMENSIONS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "gated_mlp",
    "tied_embeddings",
    "experts",
    "active_experts",
    "expert_ffn",
    "shared_ffn",
)
CLUSTER = ("chip", "num_gpus", "gpus_per_node", "intra_gbytes_per_s", "inter_gbits_per_s_per_gpu", "input_tokens_per_s")
INPUT = ("id", "model", *DIMENSIONS, "seq_len", "global_batch", *CLUSTER, *KNOBS, *OTHER_INPUTS, "dp", "accumulation")
"""The columns that are read, under the names used here."""
_ROW_ALIASES = ALIASES | ROW_ALIASES
READ = (*INPUT, *_ROW_ALIASES)
"""The same with other trainers' names."""
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


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        UsageError: it cannot be read, or has no header.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, columns = [dict(row) for row in reader], reader.fieldnames
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Give a CSV file.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}", hint="Give a CSV file with a header row.") from error
    if not columns:
        raise UsageError(f"{path} is empty", hint="The first line names the columns: docs/estimate.md lists them.")
    return rows


def unread_columns(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """The columns of a table that are not known, each with the near name of one that is, if there is one."""
    out = []
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        out.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRow:
    """A row that can be estimated: its layout, the columns that are no knobs, and the inputs as they were read."""

    layout: Layout
    columns: dict[str, Any]
    inputs: Inputs


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """A row's layout; what is not given is at TrainingConfig's default.

    Raises:
        UsageError: a value is missing, is no number, contradicts another, or the degrees do not multiply to the GPUs;
            or the row has more cells than the header.
        ConfigError: a value that its knob does not take, or two names of one input with different values.
        WorkloadError: no such model.
    """
    if row.get(None) is not None:  # type: ignore[call-overload]
        raise UsageError("the row has more cells than the header", hint="Put cells that hold a comma in quotes.")
    inputs = read_inputs({name: value for name, value in row.items() if name in READ}, _ROW_ALIASES)
    values = inputs.values
    model = _model(values)
    if "chip" not in values:
        raise UsageError("chip is not given", hint="Name the GPU, for example A100 SXM 80GB.")
    chip = find_chip(values["chip"])
    seq_len = whole(values, "seq_len", model.max_length or 2048)
    layout = _layout(values)
    reason = contradiction(layout, model, seq_len)
    if reason is not None:
        raise UsageError(reason[0], hint=reason[1])
    settings = read_settings(values, model, chip, {})
    knobs = settings.knobs | {"checkpointing": check_knob("checkpointing", values.get("checkpointing", "none"))}
    columns = (
        settings.columns | _links(values, chip, layout.config.world_size * layout.cp) | {"seq_len": float(seq_len)}
    )
    layout = replace(layout, config=layout.config.model_copy(update=knobs))
    return ParsedRow(layout=layout, columns=columns, inputs=inputs)


def _links(values: Mapping[str, str], chip: Chip, gpus: int) -> dict[str, Any]:
    """Bandwidths; the one between nodes may be left out where there is one node."""
    per_node = whole(values, "gpus_per_node", min(gpus, 8))
    intra = number(values, "intra_gbytes_per_s", chip.intra_bytes_per_s / 1e9)
    # on one node nothing passes between nodes
    inter = number(values, "inter_gbits_per_s_per_gpu", 1e3)
    if gpus > per_node and gpus % per_node:
        raise UsageError(
            f"{gpus} GPUs are no whole nodes of {per_node}", hint="num_gpus is a multiple of gpus_per_node, or less."
        )
    if gpus > per_node and "inter_gbits_per_s_per_gpu" not in values:
        raise UsageError(
            f"{gpus} GPUs at {per_node} a node need a link between nodes, and none is given",
            hint="Give inter_gbits_per_s_per_gpu, or gpus_per_node if they are in one node.",
        )
    return {
        "gpus_per_node": float(per_node),
        "intra_bytes_per_s": intra * 1e9,
        "inter_bytes_per_s": inter * 1e9 / 8,
        "input_tokens_per_s": number(values, "input_tokens_per_s", np.inf),
    }


def _model(values: Mapping[str, str]) -> Transformer:
    missing = [k for k in ("layers", "hidden", "heads") if k not in values]
    if missing:
        if "model" in values:
            return find_transformer(values["model"])
        if len(missing) < 3:
            raise UsageError(f"{' and '.join(missing)} not given", hint="A model takes layers, hidden and heads.")
        raise UsageError(
            "neither a model nor its layers, hidden and heads are given",
            hint="Give model (a built-in name or a config.json), or layers, hidden and heads.",
        )
    hidden, heads = whole(values, "hidden", 0), whole(values, "heads", 0)
    gated = flag(values, "gated_mlp", False)
    if hidden % heads:
        raise UsageError(
            f"{heads} heads do not divide a hidden size of {hidden}",
            hint="hidden is the width of the whole model, over all heads.",
        )
    experts = whole(values, "experts", 0) if "experts" in values else 0
    if experts and "active_experts" not in values:
        raise UsageError(f"{experts} experts, and active_experts is not given", hint="How many work on one token.")
    active = whole(values, "active_experts", 1) if experts else 0
    if active > experts:
        raise UsageError(f"active_experts={active} of {experts} experts", hint="At most all of them work on a token.")
    return Transformer(
        experts=experts,
        active_experts=active,
        expert_ffn=whole(values, "expert_ffn", whole(values, "ffn", 4 * hidden)) if experts else 0,
        shared_ffn=whole(values, "shared_ffn", 0) if "shared_ffn" in values else 0,
        layers=whole(values, "layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=whole(values, "kv_heads", heads),
        ffn=whole(values, "ffn", 4 * hidden),
        vocab=whole(values, "vocab", 51200),
        gated_mlp=gated,
        tied_embeddings=flag(values, "tied_embeddings", not gated),
    )


def _layout(values: Mapping[str, str]) -> Layout:
    """The degrees, with what is not given worked out from the number of GPUs; other knobs are plain."""
    tp, pp = whole(values, "tp", 1), whole(values, "pp", 1)
    cp, ep = whole(values, "cp", 1), whole(values, "ep", 1)
    replicate, shard, sharding = _data_parallel(values, tp * pp * cp)
    accumulation = _accumulation(values, replicate * shard, pp)
    virtual = whole(values, "virtual_stages", 1)
    per_pass = whole(values, "pp_microbatches", accumulation) if pp > 1 else 1
    if accumulation % per_pass:
        raise UsageError(
            f"pp_microbatches={per_pass} does not divide the {accumulation} micro-batches of a step",
            hint="Leave it out: a pipeline then takes all of them in one pass.",
        )
    schedule = check_knob("pp_schedule", values.get("pp_schedule", "interleaved_1f1b" if virtual > 1 else "1f1b"))
    degrees = {
        "micro_batch": whole(values, "micro_batch", 1),
        "tp": tp,
        "pp": pp,
        "virtual_stages": virtual,
        "pp_schedule": schedule,
        "pp_microbatches": per_pass,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "gradient_sync": check_knob("gradient_sync", values.get("gradient_sync", "last")),
    }
    return Layout(
        config=PLAIN.model_copy(update=degrees),
        sharding=sharding,
        accumulation=accumulation,
        sequence_parallel=flag(values, "sequence_parallel", False) if "sequence_parallel" in values else None,
        flat_parameters=flag(values, "flat_parameters", False),
        cp=cp,
        ep=ep,
    )


def _data_parallel(values: Mapping[str, str], model_ranks: int) -> tuple[int, int, str]:
    """dp_replicate, dp_shard and what is sharded; of the degrees those that are not given come from the GPUs.

    Args:
        values: The row's inputs.
        model_ranks: tp x pp x cp.
    """
    gpus = whole(values, "num_gpus", 0) or model_ranks * whole(values, "dp", 0)
    if gpus % model_ranks:
        raise UsageError(
            f"tp x pp of {model_ranks} does not divide {gpus} GPUs",
            hint="num_gpus is tp x pp x dp_replicate x dp_shard.",
        )
    sharding = read_sharding(values)
    replicate, shard = whole(values, "dp_replicate", 0), whole(values, "dp_shard", 0)
    dp = gpus // model_ranks or max(replicate, 1) * max(shard, 1)
    if not replicate and not shard:
        replicate, shard = (dp, 1) if sharding in (None, "ddp") else (1, dp)
    replicate = replicate or max(1, dp // shard)
    shard = shard or max(1, dp // replicate)
    if replicate * shard != dp or ("dp" in values and whole(values, "dp", 0) != dp):
        raise UsageError(
            f"dp_replicate {replicate} x dp_shard {shard} x tp x pp of {model_ranks} = "
            f"{replicate * shard * model_ranks}, not the {gpus} GPUs",
            hint="Leave out num_gpus or one of the degrees: it is worked out.",
        )
    return replicate, shard, sharding or ("zero3" if shard > 1 else "ddp")


def _accumulation(values: Mapping[str, str], dp: int, pp: int) -> int:
    """Micro-batches of a step on a rank: from the global batch, or as given; else as many as there are stages."""
    micro = whole(values, "micro_batch", 1)
    batch = whole(values, "global_batch", micro * dp * whole(values, "accumulation", pp))
    if batch % (micro * dp):
        raise UsageError(
            f"micro_batch {micro} x dp {dp} does not divide the global batch of {batch}",
            hint="global_batch, in sequences, is micro_batch x dp_replicate x dp_shard x accumulation.",
        )
    accumulation = batch // (micro * dp)
    if whole(values, "accumulation", accumulation) != accumulation:
        raise UsageError(
            f"accumulation is {values['accumulation']}, and micro_batch {micro} x dp {dp} in a global batch of {batch} "
            f"makes {accumulation}",
            hint="Leave it out: it is worked out.",
        )
    return accumulation


def measured_seconds(rows: Sequence[Mapping[str, Any]]) -> Floats:
    """The measured step times of calibration rows; NaN where a row has none.

    Raises:
        UsageError: one is no number above 0, and in which row.
    """
    seconds = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        try:
            seconds[i] = number(row, "step_time_s", np.nan)
        except UsageError as error:
            raise UsageError(f"row {i + 1}: {error.message}", hint=error.hint) from None
    return seconds


UNSAID = ("gradient_sync", "flat_parameters")
"""The inputs that change memory and that rows often leave out. Memory is least if gradients are scattered at every
micro-step, and most if frozen parameters have gradients too."""


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

    reasons: dict[int, str]
    table: EstimateTable | None = None
    layouts: Layouts | None = None
    lowest_bytes: Floats | None = None
    highest_bytes: Floats | None = None
    place: dict[int, int] = field(default_factory=dict)
    notes: dict[int, tuple[str, ...]] = field(default_factory=dict)


def estimate_rows(rows: Sequence[Mapping[str, Any]], correction: Correction | None = None) -> EstimatedRows:
    """Estimates the rows that can be estimated; the others get a reason."""
    found: dict[int, ParsedRow] = {}
    reasons: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            found[i] = parse_row(row)
        except AutoplanError as error:
            reasons[i] = f"{error.message}. {error.hint}" if error.hint else error.message
    if not found:
        return EstimatedRows(reasons=reasons)
    parsed = list(found.values())
    layouts = make_layouts([p.layout for p in parsed], [p.columns for p in parsed])
    sync, flat = (np.array([name not in p.inputs.values for p in parsed]) for name in UNSAID)
    each = layouts.scatters_each | (sync & layouts.shards_gradients & (layouts.pp == 1))
    frozen = layouts.flat_parameters | (flat & layouts.shards_parameters & (layouts.trained_share < 1))
    return EstimatedRows(
        table=estimate_layouts(layouts, correction),
        layouts=layouts,
        lowest_bytes=peak_bytes(replace(layouts, scatters_each=each)),
        highest_bytes=peak_bytes(replace(layouts, flat_parameters=frozen)),
        place={i: j for j, i in enumerate(found)},
        reasons=reasons,
        notes={i: p.inputs.notes for i, p in found.items()},
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], estimated: EstimatedRows) -> None:
    """The same rows with their estimates.

    Raises:
        UsageError: the file cannot be written.
    """
    columns = [name for name in (rows[0] if rows else INPUT) if name is not None]
    names = [name for name in columns if name not in OUTPUT]
    names += [*(["measured_step_time_s"] if "step_time_s" in columns else []), *OUTPUT]
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            for i, row in enumerate(rows):
                writer.writerow(merged_row(row, estimated, i))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="Give another place with --out."
        ) from error


def merged_row(row: Mapping[str, Any], estimated: EstimatedRows, i: int) -> dict[str, Any]:
    """One row with its estimates."""
    kept = {name: value for name, value in row.items() if name not in OUTPUT}
    if "step_time_s" in row:
        kept["measured_step_time_s"] = row["step_time_s"]
    return kept | output_row(estimated, i)


def output_row(estimated: EstimatedRows, i: int) -> dict[str, Any]:
    """The output columns of one row."""
    if i not in estimated.place or estimated.table is None or estimated.layouts is None:
        return {"reason": estimated.reasons.get(i, "")}
    j = estimated.place[i]
    table, layouts = estimated.table, estimated.layouts
    fastest, slowest = table.step_interval(j)
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
        "bound": table.bound(j),
        "reason": _why(table, layouts, j, verdict) + more + notes,
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


def _why(table: EstimateTable, layouts: Layouts, j: int, verdict: str) -> str:
    """One sentence on an estimate: the largest parts of time, and of memory where it does not fit."""
    step = float(table.step_time_s[j])
    parts = sorted(((seconds, name) for name, seconds in table.time_parts_s(j).items()), reverse=True)
    text = ", ".join(f"{name} {seconds / step:.0%}" for seconds, name in parts[:3]) + " of the step"
    if verdict != "fits":
        held = sorted(((size, name) for name, size in table.memory_parts_bytes(j).items()), reverse=True)
        gib = float(table.peak_memory_bytes[j]) / 2**30
        text += f"; {gib:.1f} GiB against {layouts.memory_bytes[j] / 2**30:.0f}: "
        text += ", ".join(f"{name} {size / 2**30:.1f}" for size, name in held[:3])
    return text

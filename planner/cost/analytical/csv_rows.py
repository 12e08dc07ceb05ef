"""Rows: layouts read from a table and checked one by one."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import UsageError
from autoplan.planner.cost.analytical.chips import Chip, find_chip
from autoplan.planner.cost.analytical.layouts import (
    ATTENTION,
    CHECKPOINTING,
    OPTIMIZER_STATE_BYTES,
    PRECISIONS,
    STATES,
    STEP_TEMPORARY_BYTES,
    chip_columns,
    dimension_columns,
)
from autoplan.planner.cost.analytical.transformer import Transformer, find_transformer
from autoplan.planner.cost.candidates import COMPILES, SCHEDULES, SHARDINGS, Floats

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
    "input_tokens_per_s",
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
_PLAIN_NUMBER = "Write a plain number above 0, without a unit, or leave the cell empty."


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


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the columns of Layouts, with the defaults filled in.

    Raises:
        UsageError: a value is missing, is no number, or the degrees do not multiply to the GPUs.
        WorkloadError: no such model.
    """
    if row.get(None) is not None:  # type: ignore[call-overload]
        raise UsageError("the row has more cells than the header", hint="Put cells that hold a comma in quotes.")
    model = _model(row)
    name = given(row, "chip")
    if name is None:
        raise UsageError("chip is not given", hint="Name the GPU, for example A100 SXM 80GB.")
    chip = find_chip(name)
    precision = _choice(row, "precision", PRECISIONS, "bf16")
    peak = chip.peak(precision)
    if peak is None:
        have = ", ".join(p for p in PRECISIONS if chip.peak(p) is not None)
        raise UsageError(f"{chip.sheet.name} has no {precision} units", hint=f"It has {have}.")
    degrees = _degrees(row, model)
    optimizer = _choice(row, "optimizer", tuple(OPTIMIZER_STATE_BYTES), "adamw")
    states = _states(row, precision)
    narrow = states == "16bit" and not optimizer.endswith("8bit")
    return {
        **dimension_columns(model),
        "trainable": min(_number(row, "trainable_parameters", float(model.parameters)), float(model.parameters)),
        "seq_len": float(_whole(row, "seq_len", model.max_length or 2048)),
        **chip_columns(chip, peak),
        **_links(row, chip, degrees),
        "input_tokens_per_s": _number(row, "input_tokens_per_s", np.inf),
        **{name: float(degrees[name]) for name in ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch")},
        "gpus_per_node": float(degrees["gpus_per_node"]),
        "global_batch": float(degrees["global_batch"]),
        "virtual_stages": float(_whole(row, "virtual_stages", 1)),
        "sequence_parallel": _flag(row, "sequence_parallel", degrees["tp"] > 1),
        "schedule": SCHEDULES.index(_choice(row, "schedule", SCHEDULES, "1f1b")),
        "sharding": SHARDINGS.index(_choice(row, "sharding", SHARDINGS, degrees["sharding"])),
        "precision": PRECISIONS.index(precision),
        "checkpointing": CHECKPOINTING.index(_choice(row, "checkpointing", CHECKPOINTING, "none")),
        "compiled": COMPILES.index(_choice(row, "compile", COMPILES, "off")),
        "attention": ATTENTION.index("eager" if (given(row, "attention") or "flash").lower() == "eager" else "flash"),
        "optimizer_bytes": OPTIMIZER_STATE_BYTES[optimizer] / (2 if narrow else 1),
        "step_bytes": STEP_TEMPORARY_BYTES.get(optimizer, 0.0) / (2 if narrow else 1),
        "half_states": states == "16bit",
        "master_states": states == "master",
        "whole_gradients": _choice(row, "gradient_sync", ("every", "last"), "every") == "last",
        "flat_parameters": _flag(row, "flat_parameters", False),
        "chunked_loss": _choice(row, "loss", ("full", "chunked"), "full") == "chunked",
    }


def _links(row: Mapping[str, Any], chip: Chip, degrees: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidths; the one between nodes may be left out where there is one node."""
    intra = _number(row, "intra_gbytes_per_s", chip.intra_bytes_per_s / 1e9)
    # on one node nothing passes between nodes
    inter = _number(row, "inter_gbits_per_s_per_gpu", 1e3)
    per_node = degrees["gpus_per_node"]
    gpus = degrees["tp"] * degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"]
    if gpus > per_node and given(row, "inter_gbits_per_s_per_gpu") is None:
        raise UsageError(
            f"{gpus} GPUs at {per_node} a node need a link between nodes, and none is given",
            hint="Give inter_gbits_per_s_per_gpu, or gpus_per_node if they are in one node.",
        )
    return {"intra_bytes_per_s": intra * 1e9, "inter_bytes_per_s": inter * 1e9 / 8}


def _states(row: Mapping[str, Any], precision: str) -> str:
    """What is kept in which width; 16bit: all of it ("bf16-true"); master: the optimizer keeps fp32 copies."""
    states = _choice(row, "states", STATES, "fp32")
    if states != "fp32" and precision not in ("bf16", "fp16"):
        raise UsageError(
            f"states={states} goes with bf16 or fp16, not with {precision}",
            hint="Give one of these as precision, or leave states out.",
        )
    return states


def _model(row: Mapping[str, Any]) -> Transformer:
    name = given(row, "model")
    missing = [k for k in ("layers", "hidden", "heads") if given(row, k) is None]
    if missing:
        if name is not None:
            return find_transformer(name)
        if len(missing) < 3:
            raise UsageError(f"{' and '.join(missing)} not given", hint="A model takes layers, hidden and heads.")
        raise UsageError(
            "neither a model nor its layers, hidden and heads are given",
            hint="Give model (a built-in name or a config.json), or layers, hidden and heads.",
        )
    hidden, heads = _whole(row, "hidden", 0), _whole(row, "heads", 0)
    gated = _flag(row, "gated_mlp", False)
    if hidden % heads:
        raise UsageError(
            f"{heads} heads do not divide a hidden size of {hidden}",
            hint="hidden is the width of the whole model, over all heads.",
        )
    return Transformer(
        layers=_whole(row, "layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(row, "kv_heads", heads),
        ffn=_whole(row, "ffn", 4 * hidden),
        vocab=_whole(row, "vocab", 51200),
        gated_mlp=gated,
        tied_embeddings=_flag(row, "tied_embeddings", not gated),
    )


def _degrees(row: Mapping[str, Any], model: Transformer) -> dict[str, Any]:
    """The degrees, with what is not given worked out from the number of GPUs."""
    tp, pp = _whole(row, "tp", 1), _whole(row, "pp", 1)
    if pp > model.layers or tp > model.heads:
        raise UsageError(
            f"tp {tp} x pp {pp} is more than the {model.heads} heads and {model.layers} layers can be split into",
            hint="tp splits heads and pp splits layers.",
        )
    gpus = _whole(row, "num_gpus", 0)
    if gpus % (tp * pp):
        raise UsageError(
            f"tp {tp} x pp {pp} does not divide {gpus} GPUs",
            hint="num_gpus is tp x pp x dp_replicate x dp_shard.",
        )
    sharding = given(row, "sharding")
    replicate, shard = _data_parallel(row, gpus // (tp * pp), sharding)
    dp = replicate * shard
    if gpus and dp * tp * pp != gpus:
        raise UsageError(
            f"dp_replicate {replicate} x dp_shard {shard} x tp {tp} x pp {pp} = {dp * tp * pp}, not the {gpus} GPUs",
            hint="Leave out num_gpus or one of the degrees: it is worked out.",
        )
    micro = _whole(row, "micro_batch", 1)
    batch = _whole(row, "global_batch", micro * dp * pp)
    if batch % (micro * dp):
        raise UsageError(
            f"micro_batch {micro} x dp {dp} does not divide the global batch of {batch}",
            hint="global_batch, in sequences, is micro_batch x dp_replicate x dp_shard x accumulation.",
        )
    return {
        "tp": tp,
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "sharding": sharding or ("zero3" if shard > 1 else "ddp"),
        "micro_batch": micro,
        "global_batch": batch,
        "gpus_per_node": _whole(row, "gpus_per_node", min(dp * tp * pp, 8)),
    }


def _data_parallel(row: Mapping[str, Any], dp: int, sharding: str | None) -> tuple[int, int]:
    """(dp_replicate, dp_shard) for so many data-parallel ranks; dp 0: as many as the row's degrees come to."""
    replicate, shard = _whole(row, "dp_replicate", 0), _whole(row, "dp_shard", 0)
    dp = dp or max(replicate, 1) * max(shard, 1)
    if not replicate and not shard:
        replicate, shard = (dp, 1) if sharding in (None, "ddp") else (1, dp)
    replicate = replicate or max(1, dp // shard)
    shard = shard or max(1, dp // replicate)
    return (replicate * shard, 1) if sharding == "ddp" else (replicate, shard)


def given(row: Mapping[str, Any], name: str) -> str | None:
    """The text of a cell; None where it is empty or there is no such column."""
    value = row.get(name)
    return None if value is None or str(value).strip() == "" else str(value).strip()


def _number(row: Mapping[str, Any], name: str, default: float) -> float:
    text = given(row, name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, not a number", hint=_PLAIN_NUMBER) from None
    if not np.isfinite(value) or value <= 0:
        raise UsageError(f"{name} is {text}; it must be above 0", hint=_PLAIN_NUMBER)
    return value


def _whole(row: Mapping[str, Any], name: str, default: int) -> int:
    value = _number(row, name, float(default))
    if value != int(value):
        raise UsageError(f"{name} is {value:g}, not a whole number", hint=_PLAIN_NUMBER)
    return int(value)


def _flag(row: Mapping[str, Any], name: str, default: bool) -> bool:
    text = given(row, name)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise UsageError(f"{name} is {text!r}, not true or false", hint="Or leave the cell empty for the default.")


def _choice(row: Mapping[str, Any], name: str, allowed: Sequence[str], default: str) -> str:
    text = (given(row, name) or default).lower()
    if text not in allowed:
        raise UsageError(f"{name} is {text!r}, which is none of its values", hint=f"It is one of {', '.join(allowed)}.")
    return text


def measured_seconds(rows: Sequence[Mapping[str, Any]]) -> Floats:
    """The measured step times of calibration rows; NaN where a row has none.

    Raises:
        UsageError: one is no number above 0, and in which row.
    """
    seconds = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        try:
            seconds[i] = _number(row, "step_time_s", np.nan)
        except UsageError as error:
            raise UsageError(f"row {i + 1}: {error.message}", hint=error.hint) from None
    return seconds

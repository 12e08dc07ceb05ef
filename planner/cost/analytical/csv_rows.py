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
from autoplan.planner.cost.analytical.inputs import (
    ALIASES,
    IGNORED_KNOBS,
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
from autoplan.planner.cost.analytical.legality import Degrees, contradiction
from autoplan.planner.cost.analytical.transformer import Transformer, find_transformer
from autoplan.planner.cost.columns import CHECKPOINTING, SCHEDULES, SHARDINGS, Floats, checkpointed_share
from autoplan.strategies.config import KNOBS
from autoplan.strategies.knob_input import check_knob

DIMENSIONS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "gated_mlp",
    "tied_embeddings",
)
CLUSTER = ("chip", "num_gpus", "gpus_per_node", "intra_gbytes_per_s", "inter_gbits_per_s_per_gpu", "input_tokens_per_s")
INPUT = ("id", "model", *DIMENSIONS, "seq_len", "global_batch", *CLUSTER, *KNOBS, *OTHER_INPUTS, "dp", "accumulation")
"""The columns that are read, under the names used here."""
_ROW_ALIASES = ALIASES | ROW_ALIASES
READ = (*INPUT, *_ROW_ALIASES)
"""The same with other trainers' names."""


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


def read_row(row: Mapping[str, Any]) -> Inputs:
    """A row's inputs under the names used here, and what was read as something else.

    Raises:
        UsageError: the row has more cells than the header.
        ConfigError: two names of one input with different values.
    """
    if row.get(None) is not None:  # type: ignore[call-overload]
        raise UsageError("the row has more cells than the header", hint="Put cells that hold a comma in quotes.")
    inputs = read_inputs({name: value for name, value in row.items() if name in READ}, _ROW_ALIASES)
    ignored = [f"{knob} changes nothing here ({why})" for knob, why in IGNORED_KNOBS.items() if knob in inputs.values]
    return Inputs(values=inputs.values, notes=(*inputs.notes, *ignored))


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the columns of Layouts; what is not given is at TrainingConfig's default.

    Raises:
        UsageError: a value is missing, is no number, contradicts another, or the degrees do not multiply to the GPUs.
        ConfigError: a value that its knob does not take.
        WorkloadError: no such model.
    """
    values = read_row(row).values
    model = _model(values)
    if "chip" not in values:
        raise UsageError("chip is not given", hint="Name the GPU, for example A100 SXM 80GB.")
    chip = find_chip(values["chip"])
    seq_len = whole(values, "seq_len", model.max_length or 2048)
    degrees = _degrees(values, model)
    reason = contradiction(degrees, model, seq_len)
    if reason is not None:
        raise UsageError(reason[0], hint=reason[1])
    policy = check_knob("checkpointing", values.get("checkpointing", "none"))
    return {
        **read_settings(values, model, chip, {}).columns,
        **_links(values, chip, degrees),
        **_degree_columns(values, degrees),
        "seq_len": float(seq_len),
        "checkpointing": CHECKPOINTING.index(policy),
        "checkpointed": checkpointed_share(policy, model.layers),
    }


def _degree_columns(values: Mapping[str, str], d: Degrees) -> dict[str, Any]:
    micro = whole(values, "micro_batch", 1)
    per_pass = whole(values, "pp_microbatches", d.accumulation) if d.pp > 1 else d.accumulation
    if d.accumulation % per_pass:
        raise UsageError(
            f"pp_microbatches={per_pass} does not divide the {d.accumulation} micro-batches of a step",
            hint="Leave it out: a pipeline then takes all of them in one pass.",
        )
    return {
        **{name: float(getattr(d, name)) for name in ("tp", "pp", "virtual_stages", "dp_replicate", "dp_shard")},
        "micro_batch": float(micro),
        "accumulation": float(d.accumulation),
        "passes": d.accumulation / per_pass if d.pp > 1 else 1.0,
        "global_batch": float(micro * d.accumulation * d.dp_replicate * d.dp_shard),
        "schedule": SCHEDULES.index(d.pp_schedule),
        "sharding": SHARDINGS.index(d.sharding),
        "scatters_each": d.gradient_sync == "every",
        "sequence_parallel": d.tp > 1 if d.sequence_parallel is None else d.sequence_parallel,
    }


def _links(values: Mapping[str, str], chip: Chip, d: Degrees) -> dict[str, Any]:
    """Bandwidths; the one between nodes may be left out where there is one node."""
    gpus = d.tp * d.pp * d.dp_replicate * d.dp_shard
    per_node = whole(values, "gpus_per_node", min(gpus, 8))
    intra = number(values, "intra_gbytes_per_s", chip.intra_bytes_per_s / 1e9)
    # on one node nothing passes between nodes
    inter = number(values, "inter_gbits_per_s_per_gpu", 1e3)
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
    return Transformer(
        layers=whole(values, "layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=whole(values, "kv_heads", heads),
        ffn=whole(values, "ffn", 4 * hidden),
        vocab=whole(values, "vocab", 51200),
        gated_mlp=gated,
        tied_embeddings=flag(values, "tied_embeddings", not gated),
    )


def _degrees(values: Mapping[str, str], model: Transformer) -> Degrees:
    """The degrees, with what is not given worked out from the number of GPUs."""
    tp, pp = whole(values, "tp", 1), whole(values, "pp", 1)
    if pp > model.layers or tp > model.heads:
        raise UsageError(
            f"tp {tp} x pp {pp} is more than the {model.heads} heads and {model.layers} layers can be split into",
            hint="tp splits heads and pp splits layers.",
        )
    replicate, shard, sharding = _data_parallel(values, tp * pp)
    virtual = whole(values, "virtual_stages", 1)
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    return Degrees(
        tp=tp,
        pp=pp,
        virtual_stages=virtual,
        pp_schedule=check_knob("pp_schedule", values.get("pp_schedule", schedule)),
        dp_replicate=replicate,
        dp_shard=shard,
        sharding=sharding,
        gradient_sync=check_knob("gradient_sync", values.get("gradient_sync", "last")),
        accumulation=_accumulation(values, replicate * shard, pp),
        sequence_parallel=flag(values, "sequence_parallel", False) if "sequence_parallel" in values else None,
        flat_parameters=flag(values, "flat_parameters", False),
    )


def _data_parallel(values: Mapping[str, str], model_ranks: int) -> tuple[int, int, str]:
    """dp_replicate, dp_shard and what is sharded; of the degrees those that are not given come from the GPUs.

    Args:
        values: The row's inputs.
        model_ranks: tp x pp.
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

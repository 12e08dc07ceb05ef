"""`autoplan.estimate(...)`: what `autoplan estimate` says, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.errors import NoFeasiblePlanError, UsageError
from autoplan.planner.cost.analytical import rows as tables
from autoplan.planner.cost.analytical.answer import estimate_cluster
from autoplan.planner.cost.analytical.cluster import Cluster, find_chip, parse_cluster, with_links
from autoplan.planner.cost.analytical.inputs import read_inputs
from autoplan.planner.cost.analytical.layout_search import Asked, Question
from autoplan.planner.cost.analytical.rent import MOST_GPUS, Prices, advise, read_prices
from autoplan.planner.cost.analytical.step_time import learn_correction
from autoplan.planner.cost.analytical.transformer import find_transformer, is_traced
from autoplan.planner.cost.correction import Correction
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_tokens

if TYPE_CHECKING:
    from autoplan.planner.plan.plan import Plan

DEFAULT_TOKENS_PER_STEP = 4_194_304  # 2^22: what Llama 2 was trained with
GPUS_OF_A_NODE = 8  # where only kinds of GPUs are named
DEFAULT_SEQ_LEN = 2048  # of a model whose config.json does not say its own

_Answerable = tuple[Asked, str, tuple[str, ...], tuple[str, ...]]
"""A question, the name of its model, and what was assumed of the model and of the cluster."""


def estimate(
    model: Any = None,
    cluster: str | Path | Cluster | None = None,
    *,
    tokens: str | float | None = None,
    prices: str | Path | Mapping[str, Any] | None = None,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    fix: Mapping[str, Any] | None = None,
    inter_gbits_per_gpu: float | None = None,
    intra_gbytes_per_s: float | None = None,
    input_tokens_per_s: float | None = None,
    top: int = 5,
    rows: str | Path | Sequence[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    calibrate: str | Path | None = None,
    anchor: str | Path | Plan | None = None,
) -> dict[str, Any]:
    """Estimates memory, time and cost of a training on a cluster that need not be here.

    Either a model on a cluster, or on any of the GPUs that have a price; or the rows of a table. Transformers of known
    families are estimated in closed form, in milliseconds and without torch. Anything else is traced first, as a search
    does it, without values and without the device: some ten seconds.

    Args:
        model: A built-in model's name, the path of a Hugging Face config.json or of a folder with one, or
            `file.py:function`; or a Workload, or a Trainer of transformers or TRL.
        cluster: `nodes x GPUs x chip` ("256x8xH100"), `GPUs x chip`, the path of a JSON file, or a Cluster.
        tokens: Tokens to train on, like "2T" or 2e12, for days, cost, and advice on what to rent.
        prices: Of one GPU for an hour, by its name: {"H100": "2.5 USD/h"}, or a YAML file of such lines. Without a
            cluster every kind that has a price is looked at.
        sequence_length: Tokens per sequence; None: the model's own.
        global_batch: Sequences per optimizer step; None: some 4 million tokens.
        fix: Values of knobs, under TrainingConfig's names or other trainers' (docs/estimate.md).
        inter_gbits_per_gpu: Between nodes, Gbit/s per GPU and direction.
        intra_gbytes_per_s: Inside a node, GB/s per GPU and direction.
        input_tokens_per_s: Tokens per second that all loader workers of a node deliver together.
        top: How many layouts the answer has.
        rows: A CSV file, or one mapping per layout, in place of model and cluster.
        out: With rows: a CSV file that the estimated table is written to.
        calibrate: A CSV file of layouts with their measured step_time_s, which correct the estimate where
            that makes it better out of sample.
        anchor: A plan, or the file of one: what its search measured is carried to the cluster, whose chip may be
            "here" (4xhere). Without a model the plan's own workload is estimated.

    Returns:
        What `autoplan estimate --json` prints (docs/estimate.md): seconds, bytes, tokens per second.
        `best[i]["layout"]` has knobs that a search can be given as fixed.

    Raises:
        UsageError: arguments that do not go together, an unknown chip or cluster, a file that cannot be read, an anchor
            of another workload.
        PlanError: an anchor that cannot be read, is unverified, has no trials, or whose code changed.
        ConfigError: a knob or a value that does not exist, or no legal layout.
        WorkloadError: an unknown model, or one that cannot be traced, and why.
        NoFeasiblePlanError: no layout fits, and by how much.
    """
    _check_arguments(model, cluster, rows, out, tokens, prices, anchor)
    cluster = str(cluster) if isinstance(cluster, Path) else cluster
    tokens = None if tokens is None else parse_tokens(tokens)
    for option, value in {"seq-len": sequence_length, "global-batch": global_batch, "top": top}.items():
        if value is not None and value < 1:
            raise UsageError(f"--{option} is {value}", hint="Give a whole number of at least 1.")
    if calibrate is not None and anchor is not None:
        raise UsageError("an anchor has its own measurements", hint="Leave out --calibrate.")
    correction = None if calibrate is None else learn_from_table(Path(calibrate))
    if rows is not None:
        table = tables.read_rows(Path(rows)) if isinstance(rows, str | Path) else [dict(row) for row in rows]
        return _table_document(table, correction, None if out is None else Path(out))
    priced = None if prices is None else read_prices(prices)
    links = {
        "inter_gbits_per_s_per_gpu": inter_gbits_per_gpu,
        "intra_gbytes_per_s": intra_gbytes_per_s,
        "input_tokens_per_s": input_tokens_per_s,
    }
    if anchor is not None:
        assert cluster is not None, "checked above"
        return _anchored_document(model, cluster, links, anchor, sequence_length, global_batch, fix or {}, tokens, top)
    assert model is not None, "checked above"

    def ask(place: str | Cluster) -> _Answerable:
        if isinstance(place, str):
            found, of_cluster = parse_cluster(place, **links)
        else:
            given = {name: value for name, value in links.items() if value is not None}
            found, of_cluster = with_links(place.model_copy(update=given), usual=False)
        return *_question(model, found, sequence_length, global_batch, fix or {}, correction), of_cluster

    if cluster is None:
        assert priced is not None and tokens is not None, "checked above"
        return _advice([ask(f"{GPUS_OF_A_NODE}x{name}") for name in priced.names], tokens, priced)
    question, name, assumed, of_cluster = ask(cluster)
    if priced is not None:
        _check_price(priced, question.cluster.chip)
    document = estimate_cluster(question, model_name=name, tokens=tokens, assumed=(*of_cluster, *assumed), top=top)
    document["rent"] = None if tokens is None else advise([question], tokens, priced, question.cluster.num_gpus)
    return document


def _check_price(prices: Prices, chip: str) -> None:
    name = find_chip(chip).sheet.name
    if name not in prices.per_hour:
        raise UsageError(
            f"the {name} has no price, only {', '.join(prices.per_hour)}",
            hint="Add a line for it to the prices, or leave out --cluster to compare the kinds that have one.",
        )


def _advice(asked: Sequence[_Answerable], tokens: float, prices: Prices) -> dict[str, Any]:
    """The document if no cluster is given.

    Raises:
        NoFeasiblePlanError: no kind of GPU holds the training.
    """
    rent = advise([question for question, *_ in asked], tokens, prices, MOST_GPUS)
    question, model, *_ = asked[0]
    assumed = [
        line
        for one, _, of_model, of_cluster in asked
        for line in (*(f"{one.cluster.chip}: {line}" for line in of_cluster), *of_model)
    ]
    if not rent["options"]:
        raise NoFeasiblePlanError(
            f"{model} fits none of {', '.join(prices.names)}, on up to {MOST_GPUS} of them",
            hint="Add larger GPUs, give --inter-gbits-per-gpu, shorter sequences, or a lighter optimizer.",
        )
    return {
        "status": "ok",
        "model": {"name": model, **question.show_model()},
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "fixed": dict(question.fixed),
        "assumed": tuple(dict.fromkeys(assumed)),
        "calibration": None if question.correction is None else question.correction.describe(),
        "rent": rent,
    }


def _anchored_document(
    model: Any,
    cluster: str | Cluster,
    links: Mapping[str, float | None],
    anchor: str | Path | Plan,
    seq_len: int | None,
    global_batch: int | None,
    fix: Mapping[str, Any],
    tokens: float | None,
    top: int,
) -> dict[str, Any]:
    """The document of a cluster beside what was measured on the anchor's device.

    The workload is that of the model that was given, if it is the same training, else the plan's.
    """
    from autoplan.api import make_workload_spec
    from autoplan.planner.estimate.anchor import (
        anchored_question,
        anchored_spec,
        read_anchor,
        read_target,
        search_flags,
    )

    plan = read_anchor(anchor)
    target, own = read_target(plan, cluster, links), plan.workload
    code = str(model) if isinstance(model, str | Path) and own.kind == "function" else None
    given = None
    if model is not None and code is None:
        batch, length = global_batch or own.global_batch, seq_len or own.sequence_length
        given = make_workload_spec(model, global_batch=batch, sequence_length=length)
    spec = anchored_spec(plan, given, code=code, global_batch=global_batch)
    spec = spec if seq_len is None else spec.model_copy(update={"sequence_length": seq_len})
    question, assumed = anchored_question(plan, spec, target, {k.replace("-", "_"): str(v) for k, v in fix.items()})
    document = estimate_cluster(question, model_name=spec.name, tokens=tokens, assumed=assumed, top=top)
    for entry in document["best"]:
        entry["search_flags"] = search_flags(entry["layout"], question.cluster.num_gpus, question.device)
    document["anchor"] = question.describe(document)
    document["rent"] = None
    return document


def _check_arguments(model: Any, cluster: Any, rows: Any, out: Any, tokens: Any, prices: Any, anchor: Any) -> None:
    """Raises where arguments do not go together.

    Raises:
        UsageError: which, and what to give.
    """
    if anchor is not None:
        others = {"rows": rows, "prices": prices, "out": out}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise UsageError(
                f"an anchor does not go with {' and '.join(given)}",
                hint="For example: autoplan estimate --anchor plan.json --cluster 8x8xH100",
            )
        if cluster is None:
            raise UsageError(
                "an anchor needs a cluster to be carried to",
                hint="For example: --cluster 8x8xH100, or 4xhere for four of the anchor's own devices.",
            )
        return
    if prices is not None and tokens is None:
        raise UsageError(
            "prices go with tokens, of which the cost is", hint="Give --tokens too: how many the training takes."
        )
    if rows is not None and not (model is None and cluster is None and prices is None):
        raise UsageError(
            "a table of rows does not go with a model, a cluster or prices",
            hint="A table has a column for each: model, chip, num_gpus, ... (docs/estimate.md).",
        )
    if out is not None and rows is None:
        raise UsageError("out goes with rows alone", hint="A cluster's estimate is what is returned, or printed.")
    if rows is None and (model is None or (cluster is None and prices is None)):
        raise UsageError(
            "an estimate needs a model and a cluster or prices, or a table of rows",
            hint="For example: autoplan estimate --model llama2-70b --cluster 256x8xH100 --tokens 2T",
        )


def _question(
    model: Any,
    cluster: Cluster,
    seq_len: int | None,
    global_batch: int | None,
    fix: Mapping[str, Any],
    correction: Correction | None,
) -> tuple[Asked, str, tuple[str, ...]]:
    """The question, the model's name, and what was assumed where nothing was said."""
    fixed = {knob.replace("-", "_"): str(value) for knob, value in fix.items()}
    name = str(model) if isinstance(model, str | Path) else None
    closed = name is not None and not is_traced(name, read_inputs(fixed).values)
    transformer = find_transformer(name) if closed else None
    spec: WorkloadSpec | None = None
    length: int | None
    if transformer is not None:
        length = seq_len or transformer.max_length or DEFAULT_SEQ_LEN
    else:
        from autoplan.api import make_workload_spec

        spec = make_workload_spec(model, global_batch=global_batch, sequence_length=seq_len)
        length = spec.sequence_length
    assumed: tuple[str, ...] = ()
    if global_batch is None and length is not None and (spec is None or spec.kind in ("config", "folder")):
        gpus = cluster.num_gpus
        # whole multiples of the GPUs, so that every layout divides it
        global_batch = max(gpus, round(DEFAULT_TOKENS_PER_STEP / length / gpus) * gpus)
        assumed = (f"global batch: {global_batch} sequences, {global_batch * length / 1e6:.1f}M tokens a step",)
    if spec is not None:
        from autoplan.planner.estimate.traced import trace_for

        if correction is not None:
            raise UsageError(
                "calibrate fits the closed form, and this model is traced", hint="Leave it out, or give --rows."
            )
        if assumed:
            spec = make_workload_spec(model, global_batch=global_batch, sequence_length=seq_len)
        question: Asked = trace_for(spec, cluster, fixed)
        return question, spec.name, assumed
    assert transformer is not None and length is not None and global_batch is not None and name is not None
    question = Question(
        model=transformer,
        cluster=cluster,
        seq_len=length,
        global_batch=global_batch,
        fixed=fixed,
        correction=correction,
    )
    return question, name, assumed


def learn_from_table(path: Path) -> Correction:
    """What the measured step times of a table teach.

    Raises:
        UsageError: no row of it has one and can be estimated.
    """
    table = tables.read_rows(path)
    seconds = tables.measured_seconds(table)
    estimated = tables.estimate_rows(table)
    timed = np.isfinite(seconds)
    failed = [f"row {i + 1}: {reason}" for i, reason in estimated.reasons.items() if timed[i]]
    failed += [f"row {i + 1}: no step_time_s" for i in np.flatnonzero(~timed)] if timed.any() else []
    usable = [i for i in estimated.place if timed[i]]
    if not usable or estimated.layouts is None:
        why = failed[0] if failed else "none has a step_time_s"
        raise UsageError(
            f"no row of {path} can be calibrated on: {why}",
            hint="It takes the columns of --rows, and step_time_s as it was measured.",
        )
    layouts = estimated.layouts.take([estimated.place[i] for i in usable])
    return replace(learn_correction(layouts, seconds[usable]), left_out=tuple(failed))


def _table_document(table: list[dict[str, Any]], correction: Correction | None, out: Path | None) -> dict[str, Any]:
    estimated = tables.estimate_rows(table, correction)
    if out is not None:
        tables.write_rows(out, table, estimated)
    names = [name for name in (table[0] if table else {}) if name is not None]
    return {
        "status": "ok",
        "rows": [tables.merged_row(row, estimated, i) for i, row in enumerate(table)],
        "rows_estimated": len(estimated.place),
        "unread": tables.unread_columns(names, (*tables.READ, *tables.OUTPUT)),
        "reasons": {str(i + 1): reason for i, reason in estimated.reasons.items()},
        "calibration": None if correction is None else correction.describe(),
    }

"""autoplan estimate: memory, time and cost of training a transformer on a cluster that one need not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.cli.output import JsonOption, console, print_json
from autoplan.errors import UsageError

DEFAULT_TOKENS_PER_STEP = 4_194_304  # 2^22: what Llama 2 was trained with
MOST_REASONS = 5
_SCALE = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def estimate_command(
    model: Annotated[str | None, typer.Option("--model", help="A built-in model or a config.json.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="nodes x GPUs x chip (256x8xH100), GPUs x chip, or a JSON file.")
    ] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Tokens to train on: 2T, 300B.")] = None,
    price: Annotated[float | None, typer.Option("--price-per-gpu-hour", min=0.0, help="For the cost.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Default: the model's own length.")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Sequences per step. Default: some 4M tokens.")
    ] = None,
    fix: Annotated[list[str] | None, typer.Option("--fix", help="knob=value, for example tp=8; repeat.")] = None,
    inter: Annotated[
        float | None, typer.Option("--inter-gbits-per-gpu", help="Between nodes, per GPU and direction.")
    ] = None,
    intra: Annotated[
        float | None, typer.Option("--intra-gbytes-per-s", help="Inside a node, per GPU and direction.")
    ] = None,
    input_rate: Annotated[
        float | None, typer.Option("--input-tokens-per-s", help="What all loader workers of a node deliver together.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many layouts to show.")] = 5,
    rows: Annotated[Path | None, typer.Option("--rows", help="Price the rows of a CSV table instead.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="With --rows: where the priced table goes.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="A CSV table with measured step_time_s: fits first.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Price a transformer on a cluster: the best layouts, memory and time by part, time to train, cost."""
    if rows is not None and not (model is None and cluster is None):
        raise UsageError(
            "--rows and --model or --cluster do not go together",
            hint="A table has a column for each: model, chip, num_gpus, ... (docs/estimate.md).",
        )
    if out is not None and rows is None:
        raise UsageError("--out goes with --rows", hint="A cluster's estimate is printed: --json > FILE keeps it.")
    factors = _fit(calibrate) if calibrate is not None else None
    if rows is not None:
        _price_table(rows, out, factors, as_json)
        return
    if model is None or cluster is None:
        raise UsageError(
            "estimate needs --model and --cluster, or --rows",
            hint="For example: autoplan estimate --model llama2-70b --cluster 256x8xH100 --tokens 2T",
        )
    document = _price_cluster(
        model, cluster, tokens, price, seq_len, global_batch, fix or [], inter, intra, input_rate, top, factors
    )
    if as_json:
        print_json(document)
    else:
        from autoplan.report.estimate import show_estimate

        show_estimate(document, console(stderr=False))


def _price_cluster(
    model: str,
    cluster_text: str,
    tokens_text: str | None,
    price: float | None,
    seq_len: int | None,
    global_batch: int | None,
    fix: list[str],
    inter: float | None,
    intra: float | None,
    input_rate: float | None,
    top: int,
    factors: Any,
) -> dict[str, Any]:
    from autoplan.planner.cost.analytical.cluster import parse_cluster
    from autoplan.planner.cost.analytical.cluster_report import estimate_cluster
    from autoplan.planner.cost.analytical.layout_search import Question
    from autoplan.planner.cost.analytical.transformer import find_transformer

    transformer = find_transformer(model)
    tokens = parse_tokens(tokens_text) if tokens_text is not None else None
    cluster, assumed = parse_cluster(
        cluster_text, inter_gbits_per_s_per_gpu=inter, intra_gbytes_per_s=intra, input_tokens_per_s=input_rate
    )
    if price is not None:
        cluster = cluster.model_copy(update={"price_per_gpu_hour": price})
    length = seq_len or transformer.max_length or 2048
    if global_batch is None:
        gpus = cluster.num_gpus
        # whole multiples of the GPUs, so that every layout divides it
        global_batch = max(gpus, round(DEFAULT_TOKENS_PER_STEP / length / gpus) * gpus)
        assumed = (
            *assumed,
            f"global batch: {global_batch} sequences, {global_batch * length / 1e6:.1f}M tokens a step",
        )
    question = Question(
        model=transformer,
        cluster=cluster,
        seq_len=length,
        global_batch=global_batch,
        fixed=dict(_parse_fix(text) for text in fix),
        factors=factors,
    )
    return estimate_cluster(question, model_name=model, tokens=tokens, assumed=assumed, top=top)


def _parse_fix(text: str) -> tuple[str, str]:
    knob, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"{text!r} is not of the form knob=value", hint="For example: --fix tp=8")
    return knob.strip().replace("-", "_"), value.strip()


def parse_tokens(text: str) -> float:
    """`2T`, `300B`, `1.5e12` as a number.

    Raises:
        UsageError: no number above 0.
    """
    body = text.strip().lower()
    scale = _SCALE.get(body[-1:], 1.0)
    try:
        value = float(body[:-1] if body[-1:] in _SCALE else body) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--tokens {text!r} is no number of tokens", hint="For example: --tokens 2T or 300B.")
    return value


def _fit(path: Path) -> Any:
    import numpy as np

    from autoplan.planner.cost.analytical.csv_estimates import price_rows
    from autoplan.planner.cost.analytical.csv_rows import measured_seconds, read_rows
    from autoplan.planner.cost.analytical.fit import fit_factors

    table = read_rows(path)
    seconds = measured_seconds(table)
    priced = price_rows(table)
    usable = [i for i in priced.place if np.isfinite(seconds[i])]
    if not usable or priced.layouts is None:
        failed = [reason for i, reason in priced.reasons.items() if np.isfinite(seconds[i])]
        reason = failed[0] if failed else "none has a step_time_s"
        raise UsageError(
            f"no row of {path} can be calibrated on: {reason}",
            hint="It takes the columns of --rows, and step_time_s as it was measured.",
        )
    layouts = priced.layouts.take([priced.place[i] for i in usable])
    return fit_factors(layouts, seconds[usable])


def _price_table(path: Path, out: Path | None, factors: Any, as_json: bool) -> None:
    from autoplan.planner.cost.analytical.csv_estimates import OUTPUT, merged_row, price_rows, write_rows
    from autoplan.planner.cost.analytical.csv_rows import INPUT, read_rows, unread_columns

    table = read_rows(path)
    priced = price_rows(table, factors)
    calibrated = factors is not None
    names = [name for name in (table[0] if table else {}) if name is not None]
    unread = unread_columns(names, (*INPUT, *OUTPUT))
    if out is not None:
        write_rows(out, table, priced, calibrated=calibrated)
    if as_json:
        rows = [merged_row(row, priced, i, calibrated=calibrated) for i, row in enumerate(table)]
        found = None if factors is None else factors.model_dump()
        print_json({"status": "ok", "rows": rows, "priced": len(priced.place), "unread": unread, "factors": found})
    else:
        told = console(stderr=True)

        def say(text: str) -> None:
            told.print(text, markup=False, soft_wrap=True)

        say(f"{len(priced.place)} of {len(table)} rows priced" + (f", written to {out}" if out else ""))
        if unread:
            say(f"  not read: {', '.join(unread)}")
        for i, reason in list(priced.reasons.items())[:MOST_REASONS]:
            say(f"  row {i + 1}: {reason}")
        if len(priced.reasons) > MOST_REASONS:
            say(f"  and {len(priced.reasons) - MOST_REASONS} more, each with its reason in the table")
        if out is None:
            _print_rows(table, priced, calibrated)


def _print_rows(table: list[dict[str, str]], priced: Any, calibrated: bool) -> None:
    import csv
    import sys

    from autoplan.planner.cost.analytical.csv_estimates import merged_row, output_names

    writer = csv.DictWriter(sys.stdout, output_names(table), extrasaction="ignore")
    writer.writeheader()
    for i, row in enumerate(table):
        writer.writerow(merged_row(row, priced, i, calibrated=calibrated))

"""autoplan estimate: memory, time and cost of a training on a cluster that one need not have."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.cli.output import JsonOption, console, print_json, say
from autoplan.errors import UsageError
from autoplan.planner.search.options import each_once

MOST_REASONS = 5


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


def estimate_command(
    model: Annotated[
        str | None, _option("MODEL", "A built-in model, a config.json, a folder, or file.py:function.", "--model")
    ] = None,
    cluster: Annotated[
        str | None, _option("CLUSTER", "nodes x GPUs x chip (256x8xH100), GPUs x chip, or a JSON file.", "--cluster")
    ] = None,
    tokens: Annotated[str | None, _option("NUMBER", "Tokens to train on: 2T, 300B.", "--tokens")] = None,
    prices: Annotated[
        Path | None, _option("FILE", "Prices by GPU, in YAML (H100: 2.5 USD/h): what to rent.", "--prices")
    ] = None,
    sequence_length: Annotated[
        int | None, _option("N", "Tokens per sequence. Default: the model's own length.", "--seq-len")
    ] = None,
    global_batch: Annotated[
        int | None, _option("N", "Sequences per step. Default: some 4M tokens.", "--global-batch")
    ] = None,
    fix: Annotated[
        list[str] | None,
        _option("KNOB=VALUE", "Keep a knob at one value: tp=8, precision=bf16. Repeat it for more knobs.", "--fix"),
    ] = None,
    inter: Annotated[
        float | None, _option("X", "Gbit/s between nodes, per GPU and direction.", "--inter-gbits-per-gpu")
    ] = None,
    intra: Annotated[
        float | None, _option("X", "GB/s inside a node, per GPU and direction.", "--intra-gbytes-per-s")
    ] = None,
    input_rate: Annotated[
        float | None, _option("X", "Tokens/s that all loader workers of a node deliver.", "--input-tokens-per-s")
    ] = None,
    top: Annotated[int, _option("N", "How many layouts to show.", "--top")] = 5,
    rows: Annotated[Path | None, _option("FILE", "Estimate the rows of a CSV table instead.", "--rows")] = None,
    out: Annotated[
        Path | None, _option("FILE", "Where the table of --rows goes; else a page of HTML.", "--out")
    ] = None,
    calibrate: Annotated[
        Path | None, _option("FILE", "A CSV table with measured step_time_s: corrects by it.", "--calibrate")
    ] = None,
    anchor: Annotated[
        Path | None,
        _option("FILE", "A plan.json: what its search measured is carried to --cluster (4xhere: 4 such).", "--anchor"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate a training on a cluster.

    The best layouts of a model, memory and time by part, time to train, cost.
    """
    from autoplan.estimates import estimate

    document = estimate(
        model,
        cluster,
        tokens=tokens,
        prices=prices,
        sequence_length=sequence_length,
        global_batch=global_batch,
        fix=each_once("fix", fix or [], _parse_fix, str, "Give it once."),
        inter_gbits_per_gpu=inter,
        intra_gbytes_per_s=intra,
        input_tokens_per_s=input_rate,
        top=top,
        rows=rows,
        out=out if rows is not None or anchor is not None else None,
        calibrate=calibrate,
        anchor=anchor,
    )
    if out is not None and rows is None:
        _write_rent(document, out)  # before anything is printed, so that what cannot be written is all that is said
    if as_json:
        print_json({name: value for name, value in document.items() if name != "reasons"})
    elif rows is not None:
        _show_table(document, out)
    else:
        from autoplan.report.estimate import show_estimate

        show_estimate(document, console(stderr=False))


def _write_rent(document: dict[str, Any], out: Path) -> None:
    """The page of what to rent.

    Raises:
        UsageError: there are no tokens, or the page cannot be written.
    """
    from autoplan.cli.report import write_page
    from autoplan.report.html import render_rent

    if document["rent"] is None:
        raise UsageError("the page shows what to rent, and no tokens are given", hint="For example: --tokens 2e9")
    write_page(out, render_rent(document))


def _parse_fix(text: str) -> tuple[str, str]:
    """knob=value in two; UsageError: no `=`."""
    knob, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"{text!r} is not of the form knob=value", hint="For example: --fix tp=8")
    return knob.strip().replace("-", "_"), value.strip()


def _show_table(document: dict[str, Any], out: Path | None) -> None:
    """Prints on stderr what was not read and not estimated, and on stdout the table if it is not written to a file."""
    count = f"{document['rows_estimated']} of {len(document['rows'])} rows estimated"
    say(count + (f", written to {out}" if out else ""))
    if document["calibration"] is not None:
        say(f"  {document['calibration']}")
    if document["unread"]:
        say(f"  not read: {', '.join(document['unread'])}")
    reasons = document["reasons"]
    for row, reason in list(reasons.items())[:MOST_REASONS]:
        say(f"  row {row}: {reason}")
    if len(reasons) > MOST_REASONS:
        say(f"  and {len(reasons) - MOST_REASONS} more, each with its reason in the table")
    if out is not None:
        return
    from autoplan.planner.cost.analytical.rows import OUTPUT

    rows = document["rows"]
    given = list(dict.fromkeys(name for row in rows for name in row if name is not None and name not in OUTPUT))
    writer = csv.DictWriter(sys.stdout, [*given, *OUTPUT], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)

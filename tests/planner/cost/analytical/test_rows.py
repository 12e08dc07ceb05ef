"""Rows of a table and what the command says of them; layouts as they are described."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.errors import UsageError
from autoplan.planner.cost.analytical.answer import scaling, show_layout, smallest_cluster, why_others_lose
from autoplan.planner.cost.analytical.cluster import parse_cluster
from autoplan.planner.cost.analytical.layout_search import Question, search_layouts
from autoplan.planner.cost.analytical.rows import (
    INPUT,
    estimate_rows,
    measured_seconds,
    parse_row,
    read_rows,
    unread_columns,
)
from autoplan.planner.cost.analytical.transformer import find_transformer

ROW = {"model": "llama2-7b", "chip": "A100 SXM 80GB", "num_gpus": "8", "global_batch": "64", "precision": "bf16"}


def question(cluster: str = "8xA100", batch: int = 64, **fixed: str) -> Question:
    parsed, _ = parse_cluster(cluster)
    return Question(model=find_transformer("llama2-7b"), cluster=parsed, seq_len=4096, global_batch=batch, fixed=fixed)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"tp": "0.5"}, "tp is 0.5, not a whole number"),
        ({"tp": "64", "num_gpus": "64"}, "tp=64 does not divide the 32 heads"),
        ({"tp": "3"}, "does not divide 8 GPUs"),
        ({"dp_shard": "16"}, "not the 8 GPUs"),
        ({"num_gpus": "0"}, "above 0"),
        ({"optimizer": "adamx"}, "adamw_8bit"),
        ({"precision": "int8"}, "fp32, tf32, bf16"),
        ({"chip": "T4", "precision": "bf16"}, "It has fp32"),
        ({"chip": "H1000"}, "Did you mean"),
        ({"sequence_parallel": "perhaps"}, "true or false"),
        ({"input_tokens_per_s": "fast"}, "input_tokens_per_s is 'fast', not a number"),
        ({"layers": "32", "model": ""}, "hidden and heads not given"),
        ({"layers": "0.5", "hidden": "4096", "heads": "32"}, "layers is 0.5"),
        ({None: ["8", "9"]}, "more cells than the header"),
    ],
)
def test_a_row_that_cannot_be_says_what_and_what_to_do(more: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_row(ROW | more)
    assert caught.value.hint
    reason = estimate_rows([ROW | more]).reasons[0]
    assert words in reason and str(caught.value.hint) in reason


def test_degrees_that_are_not_given_are_worked_out() -> None:
    found = parse_row(ROW | {"tp": "2", "dp_replicate": "2", "sharding": "zero3"})
    config = found.layout.config
    assert (config.dp_replicate, config.dp_shard, found.columns["gpus_per_node"]) == (2, 2, 8)
    found = parse_row({"model": "gpt2", "chip": "L4", "dp_shard": "2"})
    assert (found.layout.config.dp_shard, found.layout.config.micro_batch, found.layout.global_batch) == (2, 1, 2)


def test_columns_that_nobody_reads_are_named() -> None:
    assert unread_columns(["id", "microbatch", "lab"], INPUT) == ["microbatch (did you mean micro_batch?)", "lab"]


def test_a_table_without_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("")
    with pytest.raises(UsageError, match="empty"):
        read_rows(path)
    with pytest.raises(UsageError, match="row 2: step_time_s"):
        measured_seconds([ROW, ROW | {"step_time_s": "OOM"}])


def test_a_layout_says_how_often_its_gradients_are_reduced() -> None:
    asked = question(tp="1", pp="1", checkpointing="full")
    answer = search_layouts(asked)
    shown = [show_layout(asked, answer, i) for i in range(len(answer.layouts))]
    every = [entry for entry in shown if entry["layout"]["gradient_sync"] == "every"]
    assert every and all(entry["accumulation"] > 1 and entry["layout"]["dp_shard"] > 1 for entry in every)
    assert {entry["layout"]["gradient_sync"] for entry in shown if entry["layout"]["dp_shard"] == 1} == {"last"}


def test_virtual_stages_need_a_pipeline_and_whole_blocks() -> None:
    layouts = search_layouts(question(virtual_stages="2")).layouts
    assert len(layouts) and set(layouts.virtual_stages) == {2}
    assert (layouts.pp > 1).all() and ((layouts.layers / layouts.pp) % 2 == 0).all()


def test_scaling_counts_the_gpus_that_it_prices() -> None:
    """An eighth of three nodes is three GPUs of one node; a half is one node and a half, so two."""
    counts = [entry["num_gpus"] for entry in scaling(question("3x8xA100", batch=96))]
    assert counts == [3, 6, 16, 24, 48, 96]


def test_what_does_not_fit_on_one_node_says_how_many_would_do() -> None:
    smallest = smallest_cluster(question("1xRTX 4090", batch=64))
    assert smallest is None, "a GeForce has no usual link to other nodes"
    smallest = smallest_cluster(question("2xA100 40GB", batch=64))
    assert smallest is not None and smallest["num_gpus"] in (2, 4)


def test_families_that_are_too_close_are_not_said_to_be_too_large() -> None:
    """Seven billion parameters on two A100s: at 16 bytes over two GPUs it nearly fits, at more it does not."""
    told = [entry["why"] for entry in why_others_lose(search_layouts(question("2xA100", tp="1", pp="1")))]
    large = [why for why in told if "of 80.0 GiB" in why]
    assert {why.split(":")[0] for why in large} == {"too close to call", "does not fit"}
    for why in large:
        assert why.startswith("does not fit") == (float(why.split("at least ")[1].split(" of ")[0]) > 88)


def command(*arguments: str) -> tuple[int, str, str]:
    from autoplan.cli.app import build_app

    result = CliRunner().invoke(build_app(), ["estimate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 1), "", str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def test_the_screen_has_all_that_was_asked_for(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("A100: 2 USD/h")
    code, text, _ = command(
        "--model", "llama2-7b", "--cluster", "8xA100", "--tokens", "1B", "--prices", str(prices),
        "--global-batch", "256", "--input-tokens-per-s", "5000", "--fix", "precision=bf16",
    )  # fmt: skip
    assert code == 0
    for words in (
        "MFU", "HFU", "days", "USD", "fewest GPUs", "how it scales", "why the others lose", "gradient_sync=every",
        "input binds", "5,000 tokens/s from the loaders", "fixed: precision=bf16", "optimizer=adamw", "4 GPUs:",
    ):  # fmt: skip
        assert words in text, words


def test_the_table_is_told_from_the_cluster_and_columns_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    rows = [ROW | {"microbatch": "2", "input_tokens_per_s": "1000"}, ROW | {"chip": "none [of] these"}]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*ROW, "microbatch", "input_tokens_per_s"])
        writer.writeheader()
        writer.writerows(rows)
    code, text, told = command("--rows", str(path))
    assert code == 0 and "microbatch (did you mean micro_batch?)" in told and "none [of] these" in told
    assert [row["bound"] for row in csv.DictReader(text.splitlines())] == ["input", ""]
    code, text, _ = command("--rows", str(path), "--json")
    assert code == 0 and json.loads(text)["unread"] == ["microbatch (did you mean micro_batch?)"]
    assert command("--rows", str(path), "--model", "gpt2")[0] == 2
    assert command("--model", "gpt2", "--cluster", "8xA100", "--out", str(path))[0] == 2

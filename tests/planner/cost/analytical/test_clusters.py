"""Transformers on clusters: formulas against the literature, rows and clusters that cannot be, layouts, the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autoplan.errors import NoFeasiblePlanError, UsageError, WorkloadError
from autoplan.planner.cost.analytical.answer import (
    estimate_cluster,
    scaling,
    show_layout,
    smallest_cluster,
    why_others_lose,
)
from autoplan.planner.cost.analytical.cluster import parse_cluster
from autoplan.planner.cost.analytical.layout_search import Question
from autoplan.planner.cost.analytical.rows import (
    INPUT,
    OUTPUT,
    estimate_rows,
    measured_seconds,
    output_row,
    parse_row,
    read_rows,
    unread_columns,
)
from autoplan.planner.cost.analytical.step_time import activation_bytes, node_share
from autoplan.planner.cost.analytical.transformer import find_transformer
from autoplan.strategies.config import KNOBS
from autoplan.strategies.workloads.registry import list_models

ROW = {
    "model": "llama2-7b",
    "chip": "A100 SXM 80GB",
    "num_gpus": 8,
    "micro_batch": 2,
    "global_batch": 64,
    "sharding": "zero3",
    "precision": "bf16",
}


def question(model: str = "llama2-70b", cluster: str = "8x8xH100", batch: int = 512, **fixed: str) -> Question:
    parsed, _ = parse_cluster(cluster)
    return Question(model=find_transformer(model), cluster=parsed, seq_len=4096, global_batch=batch, fixed=fixed)


@pytest.mark.parametrize(
    "name, billions",
    [("gpt2", 0.1244), ("gpt2-xl", 1.5576), ("llama2-7b", 6.738), ("llama2-70b", 68.977), ("llama3-8b", 8.030)],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert find_transformer(name).parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("name", [n for n in list_models() if not n.startswith("t5")])
def test_every_decoder_that_is_built_in_has_a_closed_form(name: str) -> None:
    assert find_transformer(name).parameters > 1e8


def plain_layout(**more: object) -> dict[str, object]:
    dims = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq_len": 1024, "chip": "A100 SXM 80GB"}
    return {
        **dims,
        "num_gpus": 1,
        "micro_batch": 4,
        "global_batch": 4,
        "attention": "eager",
        "precision": "bf16",
    } | more


def test_activations_are_those_of_the_paper() -> None:
    """sbh (34 + 5as/h) a block; with selective recomputation and sequence parallelism 34 sbh / t (arXiv 2205.05198)."""
    s, b, h, a, layers = 1024, 4, 2048, 16, 24
    estimated = estimate_rows(
        [
            plain_layout(),
            plain_layout(num_gpus=8, gpus_per_node=8, tp=8, checkpointing="selective", sequence_parallel="true"),
            plain_layout(num_gpus=8, gpus_per_node=8, tp=8, sequence_parallel="false"),
        ]
    )
    rows = estimated.layouts
    assert rows is not None
    kept = activation_bytes(rows)
    assert kept[0] == pytest.approx(layers * s * b * h * (34 + 5 * a * s / h))
    assert kept[1] == pytest.approx(layers * s * b * h * 34 / 8)
    assert kept[2] == pytest.approx(layers * s * b * h * (10 + 24 / 8 + 5 * a * s / (h * 8)))


def test_flops_are_the_72_and_96_forms() -> None:
    estimated = estimate_rows([plain_layout(), plain_layout(checkpointing="full")])
    assert estimated.table is not None
    model, hardware = estimated.table.model_flops, estimated.table.hardware_flops
    b, s, h, layers, vocab = 4, 1024, 2048, 24, 51200
    assert model[0] == pytest.approx(72 * b * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)))
    assert hardware[1] == pytest.approx(96 * b * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h)))


def test_states_are_18_bytes_replicated_and_16_over_d_sharded() -> None:
    sharded = plain_layout(num_gpus=8, global_batch=32, sharding="zero3", attention="flash")
    rows = [plain_layout(states="megatron"), sharded, plain_layout(global_batch=8)]
    table = estimate_rows(rows).table
    assert table is not None
    parameters = 24 * (12 * 2048**2 + 2 * 2048) + 51200 * 2048 + 2048
    held = table.parameters_bytes + table.gradients_bytes + table.optimizer_bytes
    assert held[0] == pytest.approx(18 * parameters)
    assert held[1] == pytest.approx(16 * parameters / 8)
    assert held[2] == pytest.approx(16 * parameters), "autocast over fp32 parameters has no master copies"


def test_rows_that_cannot_be_estimated_keep_their_place_and_say_why() -> None:
    bad = [
        ROW | {"chip": "H1000"},
        ROW | {"micro_batch": 3},
        ROW | {"num_gpus": 16},
        ROW | {"model": "llama-70"},
        ROW | {"precision": "fp8"},
        ROW | {"tp": "many"},
        ROW | {"chip": ""},
        {"chip": "A100 SXM 80GB"},
    ]
    rows = [ROW, *bad, ROW]
    estimated = estimate_rows(rows)
    assert set(estimated.place) == {0, len(rows) - 1}
    words = ["H1000", "global batch", "link between nodes", "llama-70", "fp8", "tp", "chip", "model"]
    for i, word in enumerate(words, start=1):
        assert word in estimated.reasons[i]


def test_estimated_together_is_estimated_alone() -> None:
    rows = [ROW, ROW | {"tp": 2, "num_gpus": 8}, ROW | {"pp": 2, "sharding": "zero1"}, ROW | {"checkpointing": "full"}]
    together = estimate_rows(rows).table
    assert together is not None
    for i, row in enumerate(rows):
        alone = estimate_rows([row]).table
        assert alone is not None and alone.step_time_s[0] == together.step_time_s[i]
        assert alone.peak_memory_bytes[0] == together.peak_memory_bytes[i]


def test_search_estimates_legal_layouts_only_and_sorts_them() -> None:
    answer = question().solve()
    rows = answer.layouts
    assert np.all(rows.num_ranks == 64)
    assert np.all(rows.global_batch % (rows.micro_batch * rows.dp) == 0)
    assert np.all(80 % rows.pp == 0) and np.all(rows.tp <= 8)
    times = answer.table.step_time_s[answer.order]
    assert np.all(np.diff(times) >= 0) and len(times) > 10


def test_fixed_knobs_are_kept() -> None:
    rows = question(tp="8", pp="4", checkpointing="full", micro_batch="2").solve().layouts
    assert (
        set(rows.tp) == {8} and set(rows.pp) == {4} and set(rows.micro_batch) == {2} and set(rows.checkpointed) == {1.0}
    )


def test_more_gpus_are_faster_and_the_smallest_cluster_is_named() -> None:
    document = estimate_cluster(question(), model_name="llama2-70b", tokens=1e12, assumed=(), top=3)
    times = [entry["step_time_s"] for entry in document["scaling"] if entry["step_time_s"] is not None]
    assert times == sorted(times, reverse=True) and len(times) >= 3
    assert 14 <= document["smallest_cluster"]["num_gpus"] <= 64
    assert len(document["best"]) == 3 and document["training"]["days"] > 0
    families = {entry["family"].split("=")[0] for entry in document["why_others_lose"]}
    assert {"tp", "pp", "reshard_after_forward", "checkpointing"} <= families
    assert families - {"sharding"} <= set(KNOBS), "what a search can be told"


def test_what_fits_nowhere_says_how_many_gpus_it_takes() -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        estimate_cluster(question(cluster="8xA100"), model_name="llama2-70b", tokens=None, assumed=(), top=1)
    assert "GiB" in caught.value.message and "More" in str(caught.value.hint) or "larger" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text, words",
    [("0x8xH100", "nodes"), ("4x0xH100", "gpus_per_node"), ("4x8xH1000", "H1000"), ("2x8xL4", "link between")],
)
def test_clusters_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_cluster(text)


def test_a_cluster_file_without_a_link_between_nodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": 2, "gpus_per_node": 8, "chip": "A100 SXM 80GB"}))
    with pytest.raises(UsageError, match="link between"):
        parse_cluster(str(path))
    path.write_text(json.dumps({"nodes": 2, "gpus_per_node": 8, "chip": "A100 SXM 80GB", "nodez": 1}))
    with pytest.raises(UsageError, match="nodez"):
        parse_cluster(str(path))


def test_a_model_without_a_closed_form_says_so() -> None:
    with pytest.raises(WorkloadError, match="t5"):
        find_transformer("t5-small")


def command(*arguments: str) -> tuple[int, str, str]:
    """The exit code of `autoplan estimate`, and what it printed where; of an error its text."""
    from autoplan.cli.app import build_app

    result = CliRunner().invoke(build_app(), ["estimate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 1), "", str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_command_prints_one_document() -> None:
    code, text, _ = command("--model", "llama2-70b", "--cluster", "256x8xH100", "--tokens", "2T", "--json")
    document = json.loads(text)
    assert code == 0 and document["schema_version"] == 1
    assert document["configurations_estimated"] > 1000
    best = document["best"][0]
    assert sum(best["time_parts_s"].values()) == pytest.approx(best["step_time_s"], rel=1e-6)
    assert sum(best["memory_parts_bytes"].values()) == pytest.approx(best["peak_memory_bytes"], rel=1e-6)


def test_the_command_estimates_a_table_and_calibrates(tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    rows = [{"id": str(i), **{k: str(v) for k, v in ROW.items()}, "step_time_s": "9.0"} for i in range(3)]
    rows[1]["chip"] = "nothing"
    write_table(source, rows)
    code, *_ = command("--rows", str(source), "--out", str(out), "--calibrate", str(source))
    assert code == 0
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["id"] for row in written] == ["0", "1", "2"]
    assert set(OUTPUT) <= set(written[0])
    assert float(written[0]["step_time_s"]) == pytest.approx(9.0, rel=0.15)
    assert written[0]["verdict"] in ("fits", "too_close", "does_not_fit")
    assert written[0]["measured_step_time_s"] == "9.0"
    assert written[1]["step_time_s"] == "" and "nothing" in written[1]["reason"]


@pytest.mark.parametrize(
    "arguments, code",
    [
        ((), 2),
        (("--model", "llama-7000b", "--cluster", "8xA100"), 2),
        (("--model", "llama2-70b", "--cluster", "8xA100", "--tokens", "many"), 2),
        (("--model", "llama2-70b", "--cluster", "8xA100", "--fix", "tp"), 2),
        (("--model", "llama2-70b", "--cluster", "8xA100"), 3),
        (("--rows", "/no/such/file.csv"), 2),
    ],
)
def test_bad_input_ends_with_its_code(arguments: tuple[str, ...], code: int) -> None:
    assert command(*arguments)[0] == code


def test_frozen_parameters_have_weights_only_and_16_bit_states_are_8_bytes() -> None:
    plain = plain_layout(states="16bit", global_batch=16)
    rows = [plain, plain | {"trainable_parameters": 1e6}, plain | {"optimizer": "adamw_8bit"}]
    estimated = estimate_rows(rows)
    table, layouts = estimated.table, estimated.layouts
    assert table is not None and layouts is not None
    parameters = layouts.parameters[0]
    held = table.parameters_bytes + table.gradients_bytes + table.optimizer_bytes
    assert held[0] == pytest.approx(8 * parameters)
    assert held[1] == pytest.approx(2 * parameters + 6e6)
    assert held[2] == pytest.approx(6 * parameters)
    assert table.matmul_s[1] < 0.75 * table.matmul_s[0]
    assert estimate_rows([plain | {"precision": "fp32"}]).reasons[0].startswith("states=16bit")


def test_gradients_that_pass_are_not_held_beside_the_activations() -> None:
    """One micro-batch a step: the peak is the start of the backward or its end."""
    one, several = plain_layout(states="16bit", global_batch=4), plain_layout(states="16bit", global_batch=16)
    table = estimate_rows([one, several]).table
    assert table is not None
    assert table.peak_memory_bytes[0] < table.peak_memory_bytes[1]
    chunked = estimate_rows([several | {"loss": "chunked"}]).table
    assert chunked is not None and chunked.activations_bytes[0] < 0.95 * table.activations_bytes[1]


def test_gradients_kept_whole_between_micro_steps_are_held_and_not_reduced() -> None:
    """FSDP under no_sync: the shard's gradients are whole until the last micro-step, and exchanged once."""
    every = plain_layout(num_gpus=4, gpus_per_node=4, global_batch=64, sharding="zero3", states="16bit")
    table = estimate_rows([every | {"gradient_sync": "every"}, every | {"gradient_sync": "last"}]).table
    assert table is not None
    assert table.gradients_bytes[1] == pytest.approx(4 * table.gradients_bytes[0])
    assert table.communication_s[1] < table.communication_s[0]
    once = every | {"global_batch": 16}
    estimated = estimate_rows([once | {"gradient_sync": "every"}, once | {"gradient_sync": "last"}])
    assert "several micro-batches" in estimated.reasons[0]
    assert estimated.table is not None
    assert estimated.table.gradients_bytes[0] == pytest.approx(table.gradients_bytes[0]), "scattered as they are made"


def test_a_flat_parameter_has_gradients_of_what_is_frozen() -> None:
    """FSDP1 with LoRA on 4 x A100 40 GB: LitGPT published 35.57 GB for Llama 2 13B, out of memory on 2."""
    lora = {"model": "llama2-13b", "chip": "A100 SXM 40GB", "seq_len": 1304, "states": "16bit", "sharding": "zero3"}
    lora |= {
        "trainable_parameters": 6_553_600,
        "checkpointing": "full",
        "loss": "chunked",
        "micro_batch": 1,
        "precision": "bf16",
    }
    lora |= {"gradient_sync": "last", "flat_parameters": "true"}
    rows = [lora | {"num_gpus": gpus, "gpus_per_node": gpus, "global_batch": 16} for gpus in (4, 2)]
    estimated = estimate_rows(rows)
    assert estimated.table is not None
    peak = estimated.table.peak_memory_bytes[0] - estimated.table.overhead_bytes[0]
    assert peak == pytest.approx(35.57e9, rel=0.03)
    assert output_row(estimated, 1)["verdict"] != "fits"


def test_what_a_row_does_not_say_is_in_its_interval() -> None:
    row = {"model": "llama2-13b", "chip": "A100 SXM 80GB", "num_gpus": 8, "global_batch": 64, "sharding": "zero3"}
    row |= {"checkpointing": "full", "seq_len": 2048, "precision": "bf16", "states": "megatron"}
    estimated = estimate_rows([row, row | {"gradient_sync": "every"}, row | {"gradient_sync": "last"}])
    unsaid, every, last = (output_row(estimated, i) for i in range(3))
    assert unsaid["peak_memory_bytes"] == last["peak_memory_bytes"], "TrainingConfig's default"
    assert unsaid["peak_memory_low_bytes"] == every["peak_memory_low_bytes"]
    assert unsaid["peak_memory_high_bytes"] - every["peak_memory_high_bytes"] > 4 * 13e9 * 0.9 * 7 / 8
    assert every["verdict"] == "fits" and unsaid["verdict"] == "too_close"
    assert last["verdict"] != "fits" and "gradient_sync=every" in unsaid["reason"]
    lora = row | {"trainable_parameters": 1e7, "gradient_sync": "last"}
    estimated = estimate_rows([lora, lora | {"flat_parameters": "true"}])
    unsaid, flat = (output_row(estimated, i) for i in range(2))
    assert unsaid["peak_memory_high_bytes"] == flat["peak_memory_high_bytes"] > 2 * unsaid["peak_memory_bytes"]


def test_an_optimizer_with_fp32_masters_holds_16_bytes_and_makes_fp32_gradients_for_its_step() -> None:
    """InternEvo's FSDP optimizer: 2 + 2 + 4 + 8 over the shards, and in the step 4 and torch's foreach 4 more."""
    row = {"model": "llama2-7b", "chip": "A800", "num_gpus": 8, "sharding": "zero3", "states": "master"}
    row |= {"seq_len": 128, "checkpointing": "full", "precision": "bf16", "flat_parameters": "false"}
    table = estimate_rows([row, row | {"optimizer": "adamw_fused"}]).table
    assert table is not None
    parameters = find_transformer("llama2-7b").parameters
    held = table.parameters_bytes + table.gradients_bytes + table.optimizer_bytes
    assert held[0] == pytest.approx(16 * parameters / 8)
    assert table.peak_memory_bytes[1] < table.peak_memory_bytes[0]


def test_the_first_stage_has_the_input_embedding_and_a_whole_number_of_blocks() -> None:
    row = {"model": "llama2-7b", "chip": "A800", "num_gpus": 3, "pp": 3, "states": "16bit", "precision": "bf16"}
    table = estimate_rows([row]).table
    assert table is not None
    model = find_transformer("llama2-7b")
    assert table.parameters_bytes[0] == pytest.approx(2 * (11 * model.block_parameters + 32000 * 4096), rel=1e-3)


def test_slow_input_binds_and_without_a_rate_nothing_changes() -> None:
    """256 sequences of 4,096 tokens on a node that delivers 10,000 a second: 105 s, whatever the GPUs take."""
    row = ROW | {"global_batch": 256, "seq_len": 4096}
    estimated = estimate_rows([row, row | {"input_tokens_per_s": 1e9}, row | {"input_tokens_per_s": 1e4}])
    table = estimated.table
    assert table is not None
    assert table.step_time_s[0] == table.step_time_s[1] < table.step_time_s[2]
    assert list(table.input_s[:2]) == [0.0, 0.0]
    assert table.step_time_s[2] == pytest.approx(256 * 4096 / 1e4)
    assert table.input_s[2] == pytest.approx(table.step_time_s[2] - table.step_time_s[0])
    assert np.array_equal(table.peak_memory_bytes, np.full(3, table.peak_memory_bytes[0]))
    written = [output_row(estimated, i) for i in range(3)]
    assert [row["bound"] for row in written] == ["compute", "compute", "input"]
    assert written[2]["reason"].startswith("input") and float(written[2]["tokens_per_s"]) == pytest.approx(1e4)
    assert written[2]["step_time_low_s"] == written[2]["step_time_s"], "the given rate is a floor"


def test_only_data_parallel_ranks_need_samples_of_their_own() -> None:
    """Two nodes of 8: each loads half the batch; where pipeline stages part them, each loads all of it."""
    rows = [ROW | {"num_gpus": 16, "inter_gbits_per_s_per_gpu": 200} | more for more in (
        {}, {"tp": 8, "sharding": "ddp"}, {"pp": 2, "sharding": "ddp"}, {"tp": 8, "pp": 2, "sharding": "ddp"}
    )]  # fmt: skip
    layouts = estimate_rows(rows).layouts
    assert layouts is not None
    assert list(64 * node_share(layouts, layouts.gpus_per_node)) == [32, 32, 64, 64]


def test_more_gpus_on_a_node_do_not_help_a_job_that_waits_for_its_input() -> None:
    cluster, _ = parse_cluster("8xA100", input_tokens_per_s=5000)
    asked = Question(model=find_transformer("llama2-7b"), cluster=cluster, seq_len=4096, global_batch=256, fixed={})
    document = estimate_cluster(asked, model_name="llama2-7b", tokens=None, assumed=(), top=1)
    best, by_gpus = document["best"][0], {entry["num_gpus"]: entry for entry in document["scaling"]}
    assert best["bound"] == by_gpus[4]["bound"] == "input" and best["input_tokens_per_s_needed"] > 5000
    assert by_gpus[4]["tokens_per_s"] == pytest.approx(by_gpus[8]["tokens_per_s"]) == pytest.approx(5000)
    assert by_gpus[16]["tokens_per_s"] == pytest.approx(10_000), "a second node has loaders of its own"


# Rows as a file has them, and what is said of layouts.

TEXTS = {"model": "llama2-7b", "chip": "A100 SXM 80GB", "num_gpus": "8", "global_batch": "64", "precision": "bf16"}


def of_seven_billion(cluster: str = "8xA100", batch: int = 64, **fixed: str) -> Question:
    return question("llama2-7b", cluster, batch, **fixed)


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
        parse_row(TEXTS | more)
    assert caught.value.hint
    reason = estimate_rows([TEXTS | more]).reasons[0]
    assert words in reason and str(caught.value.hint) in reason


def test_degrees_that_are_not_given_are_worked_out() -> None:
    found = parse_row(TEXTS | {"tp": "2", "dp_replicate": "2", "sharding": "zero3"})
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
        measured_seconds([TEXTS, TEXTS | {"step_time_s": "OOM"}])


def test_a_layout_says_how_often_its_gradients_are_reduced() -> None:
    asked = of_seven_billion(tp="1", pp="1", checkpointing="full")
    answer = asked.solve()
    shown = [show_layout(asked, answer, i) for i in range(len(answer.layouts))]
    every = [entry for entry in shown if entry["layout"]["gradient_sync"] == "every"]
    assert every and all(entry["accumulation"] > 1 and entry["layout"]["dp_shard"] > 1 for entry in every)
    assert {entry["layout"]["gradient_sync"] for entry in shown if entry["layout"]["dp_shard"] == 1} == {"last"}


def test_virtual_stages_need_a_pipeline_and_whole_blocks() -> None:
    layouts = of_seven_billion(virtual_stages="2").solve().layouts
    assert len(layouts) and set(layouts.virtual_stages) == {2}
    assert (layouts.pp > 1).all() and ((layouts.layers / layouts.pp) % 2 == 0).all()


def test_scaling_counts_the_gpus_that_it_prices() -> None:
    """An eighth of three nodes is three GPUs of one node; a half is one node and a half, so two."""
    counts = [entry["num_gpus"] for entry in scaling(of_seven_billion("3x8xA100", batch=96))]
    assert counts == [3, 6, 16, 24, 48, 96]


def test_what_does_not_fit_on_one_node_says_how_many_would_do() -> None:
    smallest = smallest_cluster(of_seven_billion("1xRTX 4090", batch=64))
    assert smallest is None, "a GeForce has no usual link to other nodes"
    smallest = smallest_cluster(of_seven_billion("2xA100 40GB", batch=64))
    assert smallest is not None and smallest["num_gpus"] in (2, 4)


def test_families_that_are_too_close_are_not_said_to_be_too_large() -> None:
    """Seven billion parameters on two A100s: at 16 bytes over two GPUs it nearly fits, at more it does not."""
    told = [entry["why"] for entry in why_others_lose(of_seven_billion("2xA100", tp="1", pp="1").solve())]
    large = [why for why in told if "of 80.0 GiB" in why]
    assert {why.split(":")[0] for why in large} == {"too close to call", "does not fit"}
    for why in large:
        assert why.startswith("does not fit") == (float(why.split("at least ")[1].split(" of ")[0]) > 88)


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
    first = TEXTS | {"microbatch": "2", "input_tokens_per_s": "1000"}
    write_table(path, [first, TEXTS | {"chip": "none [of] these"}])
    code, text, told = command("--rows", str(path))
    assert code == 0 and "microbatch (did you mean micro_batch?)" in told and "none [of] these" in told
    assert [row["bound"] for row in csv.DictReader(text.splitlines())] == ["input", ""]
    code, text, _ = command("--rows", str(path), "--json")
    assert code == 0 and json.loads(text)["unread"] == ["microbatch (did you mean micro_batch?)"]
    assert command("--rows", str(path), "--model", "gpt2")[0] == 2
    assert command("--model", "gpt2", "--cluster", "8xA100", "--out", str(path))[0] == 2

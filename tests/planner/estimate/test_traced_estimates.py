"""`autoplan estimate` of what has no closed form: traced here without a GPU, priced on a cluster that is not here."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import autoplan
from autoplan.cli.estimate import estimate_command
from autoplan.errors import ConfigError, UsageError, WorkloadError
from autoplan.planner.cost.analytical.cluster import cluster_hardware, parse_cluster
from autoplan.planner.cost.communication import ASSUMED_LINK_EFFICIENCY, links_of
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.estimate import traced
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.like_cuda import LikeCuda
from autoplan.planner.trace.model_profile import ModelProfile, TraceRequest, VariantKey
from autoplan.probes.run import read_host_profile
from autoplan.processes import Zygote
from autoplan.strategies.workloads.language_model import causal_loss, count_labels
from autoplan.strategies.workloads.workload import Workload
from benchmarks.data import llama_lora, vision
from tests.planner.cost.test_operations import CONFIGS
from tests.strategies.tiny_trainers import t5_trainer

CLUSTER = "2x8xH100"


@pytest.fixture
def one_zygote(training_zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all but one estimate: each would start its own, which imports torch and transformers."""
    monkeypatch.setattr(traced, "Zygote", lambda **given: nullcontext(training_zygote))


def whole(document: dict[str, Any]) -> dict[str, Any]:
    """The best layout, after what holds of any answer: it fits, and its parts add up to its step and its peak."""
    best: dict[str, Any] = document["best"][0]
    assert best["verdict"] == "fits"
    assert sum(best["time_parts_s"].values()) == pytest.approx(best["step_time_s"], rel=1e-6)
    assert sum(best["memory_parts_bytes"].values()) == pytest.approx(best["peak_memory_bytes"], rel=1e-6)
    assert best["step_time_low_s"] < best["step_time_s"] < best["step_time_high_s"]
    assert document["model"]["from"].startswith("trace")
    assert any("datasheet of the NVIDIA H100 SXM 80GB" in line for line in document["assumed"])
    layout = best["layout"]
    dp = layout["dp_replicate"] * layout["dp_shard"]
    assert layout["tp"] * layout["pp"] * dp == document["cluster"]["num_gpus"]
    assert layout["micro_batch"] * best["accumulation"] * dp == document["global_batch"]
    assert {entry["num_gpus"] for entry in document["scaling"]} > {16}
    return best


@pytest.mark.usefixtures("one_zygote")
def test_lora_trains_few_parameters_and_its_states_are_small() -> None:
    document = autoplan.estimate(llama_lora.workload(64), CLUSTER, fix={"dp_replicate": 16, "checkpointing": "none"})
    best = whole(document)
    trainable = document["model"]["trainable"]
    assert trainable < 0.1 * document["model"]["parameters"]
    assert best["memory_parts_bytes"]["optimizer"] == pytest.approx(8 * trainable, rel=0.01)
    assert best["layout"]["dp_replicate"] == 16


@pytest.mark.usefixtures("one_zygote")
def test_an_image_model_counts_samples() -> None:
    document = autoplan.estimate(
        vision.vision(64), CLUSTER, tokens=1e6, prices={"H100": "2 USD/h"}, fix={"checkpointing": "none"}
    )
    whole(document)
    assert document["seq_len"] == 1 and document["model"]["unit"] != "tokens"
    assert document["training"]["steps"] == pytest.approx(1e6 / 64, abs=1)
    assert any(option["num_gpus"] == 16 for option in document["rent"]["options"])


@pytest.mark.usefixtures("one_zygote")
def test_a_trainer_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    document = autoplan.estimate(t5_trainer(tmp_path, micro_batch=32), CLUSTER, fix={"checkpointing": "none"})
    whole(document)
    assert document["global_batch"] == 32


def test_a_mixture_of_experts_from_a_config_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["mixtral"]))
    estimate_command(str(path), CLUSTER, global_batch=64, fix=["checkpointing=none"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["model"]["from"] == "trace (traced)"
    best = whole(document)
    assert best["layout"]["checkpointing"] == "none"
    # of four experts two work on each token
    per_block = document["model"]["parameters"] * 6 * 64 * 128
    assert 0.4 * per_block < best["mfu"] * best["step_time_s"] * 16 * 989.4e12 < per_block


def test_what_contradicts_itself_is_said_before_anything_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["mixtral"]))
    for fixed, words in (
        ({"sharding": "zero1"}, "the workload says it itself"),
        ({"tp_size": "2"}, "no knob"),
        ({"precision": "fp7"}, "precision"),
    ):
        with pytest.raises(ConfigError, match=words):
            autoplan.estimate(str(path), CLUSTER, fix=fixed, global_batch=64)
    with pytest.raises(UsageError, match="no chip"):
        autoplan.estimate(str(path), "2x8xX100")


@pytest.mark.usefixtures("one_zygote")
def test_a_batch_that_no_layout_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layout of 16 GPUs is legal") as caught:
        autoplan.estimate(vision.vision(6), CLUSTER)
    assert "divide the global batch" in str(caught.value.hint)


def broken() -> Workload:
    """A model that fails in its forward."""

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            raise ValueError("seven is no length")

    workload: Workload = llama_lora.workload(64)
    return Workload(
        name="broken",
        build_model=Broken,
        make_batch=workload.make_batch,
        loss=causal_loss,
        count=lambda batch: count_labels(batch, shifted=True),
        build_optimizer=torch.optim.SGD,
        global_batch=64,
    )


@pytest.mark.usefixtures("one_zygote")
def test_a_model_that_does_not_run_gives_its_own_reason() -> None:
    with pytest.raises(WorkloadError, match="seven is no length"):
        autoplan.estimate(broken(), CLUSTER)


def test_the_profile_of_a_cluster_has_its_datasheet_and_both_links() -> None:
    cluster, _ = parse_cluster("4x8xA100 80GB", inter_gbits_per_s_per_gpu=100)
    hardware = cluster_hardware(cluster, read_host_profile().host)
    links = links_of(hardware, "cuda")
    assert len(hardware.devices) == links.ranks_per_node == 8
    assert links.intra_bytes_per_s == pytest.approx(ASSUMED_LINK_EFFICIENCY * 300e9)
    assert links.inter_bytes_per_s == pytest.approx(ASSUMED_LINK_EFFICIENCY * 12.5e9)
    rates = from_device(hardware.device("cuda"))
    assert 0.4 * 312e12 < rates.matmul_fit("bfloat16").flops_per_s < 312e12


@pytest.fixture(scope="module")
def half() -> dict[str, ModelProfile]:
    """A Llama's operations in 16 bits, on the CPU and as CUDA has them."""
    request = TraceRequest(variants=(VariantKey(precision="half"),))
    return {
        device: profile_workload(llama_lora.workload(), device, identity="test", request=request)
        for device in ("cpu", "cuda")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_products_and_attention_are_those_of_the_cpu(half: dict[str, ModelProfile]) -> None:
    key = VariantKey(precision="half").text()
    work = {
        device: sum(group.count * group.flops.at(4.0) for group in profile.variants[key].groups)
        for device, profile in half.items()
    }
    assert work["cuda"] == pytest.approx(work["cpu"], rel=1e-9)
    assert half["cuda"].device == "cuda" and any("no GPU is here" in note for note in half["cuda"].notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_cuda_runs_otherwise_is_run_otherwise() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with LikeCuda(), torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ torch.ones(4, 4)
        assert product.dtype == torch.bfloat16 and product.pow(2.0).dtype == torch.float32
        assert torch.nn.functional.softmax(product, -1).dtype == torch.float32
        dropped = torch.nn.functional.dropout(x, 0.5)
    assert type(dropped.grad_fn).__name__ == "NativeDropoutBackward0"
    assert (x.detach() @ torch.ones(4, 4)).pow(2.0).dtype == torch.float32


def test_grouped_products_are_those_of_equal_groups() -> None:
    rows, weights = torch.randn(8, 3), torch.randn(4, 3, 5)
    with LikeCuda():
        found = torch.nn.functional.grouped_mm(rows, weights, offs=torch.tensor([2, 4, 6, 8], dtype=torch.int32))
    expected = torch.cat([rows[2 * i : 2 * i + 2] @ weights[i] for i in range(4)])
    assert torch.allclose(found, expected, atol=1e-6)

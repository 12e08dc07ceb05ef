"""Experts, shared sequences, packed documents, quantised and narrow states, latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.cli.estimate import estimate_command
from autoplan.errors import ConfigError
from autoplan.planner.cost.analytical.cluster import parse_cluster
from autoplan.planner.cost.analytical.layout_search import Question
from autoplan.planner.cost.analytical.rows import estimate_rows
from autoplan.planner.cost.analytical.step_time import EstimateTable
from autoplan.planner.cost.analytical.transformer import from_config

MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ROW: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}
ROW |= {"gated_mlp": "true", "seq_len": 4096, "chip": "H100 SXM", "num_gpus": 8, "precision": "bf16"}
ROW |= {"global_batch": 64, "checkpointing": "full", "states": "megatron"}
EXPERTS = ROW | {"experts": 8, "active_experts": 2}


def table(*rows: dict[str, Any]) -> EstimateTable:
    found = estimate_rows(rows)
    assert found.table is not None and not found.reasons, found.reasons
    return found.table


@pytest.mark.parametrize(
    "config, billions", [(MIXTRAL, 46.70), (DEEPSEEK_V3, 671.0)], ids=["Mixtral 8x7B", "DeepSeek-V3"]
)
def test_parameters_of_sparse_models_are_the_published_ones(config: dict[str, Any], billions: float) -> None:
    """Mixtral: 46.7 of arXiv 2401.04088; DeepSeek-V3: 671 without the module that predicts a second token."""
    assert from_config(config, "test").parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_token_costs_what_its_experts_cost_and_memory_is_that_of_all() -> None:
    dense, sparse, one = table(ROW, EXPERTS, EXPERTS | {"active_experts": 1}).model_flops
    assert one == pytest.approx(dense, rel=0.001), "but for the router"
    feed_forward = 6 * 3 * 4096 * 14336 * 32 * 64 * 4096
    assert sparse - one == pytest.approx(feed_forward)


def test_ranks_that_share_experts_hold_fewer_and_exchange_tokens() -> None:
    found = table(EXPERTS, EXPERTS | {"ep": 8}, EXPERTS | {"ep": 8, "expert_capacity": 1.5})
    of_experts = 2.0 * 32 * 8 * 3 * 4096 * 14336
    assert found.parameters_bytes[0] - found.parameters_bytes[1] == pytest.approx(of_experts * 7 / 8)
    assert found.matmul_s[2] > found.matmul_s[1]
    assert found.communication_s[2] > found.communication_s[1]


def test_tokens_that_leave_the_node_take_longer() -> None:
    far = EXPERTS | {"num_gpus": 64, "inter_gbits_per_s_per_gpu": 400, "ep": 8}
    near_s, far_s = table(far, far | {"tp": 4, "sequence_parallel": "true"} | {"gpus_per_node": 8}).communication_s
    assert near_s > 0 and far_s > 0
    slow = table(far | {"tp": 4}, far | {"tp": 4, "inter_gbits_per_s_per_gpu": 50}).communication_s
    assert slow[1] > slow[0]


def test_an_interval_is_wider_where_the_busiest_rank_sets_the_pace() -> None:
    alone, shared, worse = table(EXPERTS, EXPERTS | {"ep": 8}, EXPERTS | {"ep": 8, "expert_imbalance": 0.5}).log_sd
    assert alone < shared < worse


def test_shared_sequences_divide_activations_and_a_ring_hides_what_a_gather_shows() -> None:
    long = ROW | {"seq_len": 65536, "global_batch": 8}
    alone, ring, gather = (0, 1, 2)
    found = table(long, long | {"cp": 8}, long | {"cp": 8, "cp_exchange": "gather"})
    assert found.activations_bytes[ring] == pytest.approx(found.activations_bytes[alone] / 8, rel=1e-6)
    assert found.communication_s[ring] < found.communication_s[gather]
    assert found.model_flops[ring] == pytest.approx(found.model_flops[alone])
    assert found.attention_s[ring] == pytest.approx(found.attention_s[alone])


def test_packed_documents_attend_to_themselves() -> None:
    whole, packed = table(ROW, ROW | {"document_len": 512}).attention_s
    assert packed == pytest.approx(whole / 8)


def test_quantised_weights_take_half_a_byte_and_are_widened_for_each_product() -> None:
    """QLoRA: 65 billion parameters on one GPU of 48 GB (Dettmers et al. 2023, arXiv 2305.14314)."""
    llama = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 22016, "vocab": 32000, "gated_mlp": "true"}
    llama |= {"chip": "RTX 6000 Ada", "seq_len": 512, "precision": "bf16", "states": "16bit", "checkpointing": "full"}
    llama |= {"trainable_parameters": 8e8, "optimizer": "adamw_8bit", "loss": "chunked", "global_batch": 16}
    found = table(llama, llama | {"frozen": "nf4"})
    # what is trained stays wide
    assert found.parameters_bytes[1] == pytest.approx(0.516 / 2 * found.parameters_bytes[0] + 2 * 8e8, rel=0.02)
    assert found.peak_memory_bytes[1] < 48e9 < found.peak_memory_bytes[0]
    assert found.memory_s[1] > found.memory_s[0]


def test_gradients_in_16_bits_are_half() -> None:
    wide, narrow = table(ROW | {"num_gpus": 8}, ROW | {"gradient_dtype": "16bit"}).gradients_bytes
    assert narrow == wide / 2


@pytest.mark.parametrize(
    "more, words",
    [
        ({"ep": 2}, "the model has none"),
        ({"experts": 8}, "active_experts is not given"),
        ({"experts": 8, "active_experts": 9}, "active_experts=9 of 8"),
        ({"experts": 8, "active_experts": 2, "ep": 3}, "does not divide the 8 experts"),
        ({"cp": 3}, "does not divide 8 GPUs"),
        ({"cp": 8, "seq_len": 1000}, "into 2 x 8 parts"),
        ({"cp_exchange": "star"}, "ring, gather"),
        ({"frozen": "int3"}, "nf4"),
        ({"frozen": "nf4"}, "are not trained, and all are"),
        ({"experts": 8, "active_experts": 2, "ep": 4, "tp": 4}, "does not divide the 2 ranks"),
    ],
)
def test_shared_work_that_contradicts_itself_is_not_estimated(more: dict[str, Any], words: str) -> None:
    assert words in estimate_rows([ROW | more]).reasons[0]


def test_a_search_shares_experts_as_far_as_they_go() -> None:
    cluster, _ = parse_cluster("8x8xH100")
    model = from_config(MIXTRAL, "mixtral")
    answer = Question(model=model, cluster=cluster, seq_len=4096, global_batch=512, fixed={}).solve()
    assert set(np.unique(answer.layouts.ep)) == {1, 2, 4, 8} and answer.best is not None


def test_experts_of_a_config_are_shared_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `ep` such a model is traced: tests/planner/estimate/test_traced_estimates.py."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    estimate_command(str(path), "8x8xH100", fix=["expert_model_parallel_size=8"], sequence_length=4096, as_json=True)
    assert json.loads(capsys.readouterr().out)["best"][0]["other_inputs"] == {"ep": 8}


@pytest.mark.parametrize(
    "config, fixed, words",
    [
        (MIXTRAL, {"ep": 3}, "ep=3 does not divide the 8 experts"),
        (MIXTRAL, {"cp": 3}, "does not divide the sequence of 4096 tokens into 2 x 3 parts"),
        (MIXTRAL, {"ep": 8, "pp": 16}, "no layout of 16 GPUs is legal with ep=8 pp=16"),
    ],
)
def test_nonsense_on_a_cluster_is_refused(
    config: dict[str, Any], fixed: dict[str, int], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        autoplan.estimate(str(path), "2x8xH100", sequence_length=4096, fix=fixed)

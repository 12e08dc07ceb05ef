"""The operations of transformers that are written down are those that the trace of transformers' modules records."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from autoplan.api import make_workload_spec
from autoplan.planner.cost.analytical.transformer import _GATED, _SPARSE, Transformer, from_config
from autoplan.planner.cost.operations import Shape, checkpointed_groups, transformer_groups
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import ModelProfile, OperationGroup, TraceRequest, VariantKey
from autoplan.strategies.workloads.sources import load_workload

LENGTH = 128
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 4, "n_head": 4}
    | {"n_positions": LENGTH, "vocab_size": 500},
    "llama": LLAMA,
    "mixtral": LLAMA | EXPERTS | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": LENGTH,
}
PARAMETERS_OFF = {"gpt2": 0.015}  # biases are not written down
KEYS = (VariantKey(), VariantKey(precision="half"))


@pytest.fixture(scope="module", params=CONFIGS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModelProfile]:
    """A tiny model's name and its profile: random weights, no values, as CUDA has them."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, trace_config(CONFIGS[request.param], folder, *KEYS, VariantKey(checkpointing="full"))


def trace_config(config: dict[str, Any], folder: Path, *variants: VariantKey) -> ModelProfile:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    workload = load_workload(make_workload_spec(str(path), global_batch=8, sequence_length=LENGTH))
    return profile_workload(workload, "cuda", identity="test", request=TraceRequest(variants=variants))


def products(groups: Any) -> Counter[tuple[Any, ...]]:
    """How often each product occurs: segment, pass, sizes at three samples, FLOPs.

    The gradient of a weight is (out x in), or (in x out) as GPT-2 and experts store it: so m and n have no order.
    """
    found: Counter[tuple[Any, ...]] = Counter()
    for group in groups:
        if group.kind == "matmul" and group.count:
            m, n, k, batch = (round(float(fit.at(3.0))) for fit in (group.m, group.n, group.k, group.batch))
            sizes = (*sorted((m, n)), k, max(batch, 1), round(float(group.flops.at(3.0))))
            found[group.segment, group.phase, *sizes] += round(float(group.count))
    return found


def attention(groups: Any, phase: str) -> float:
    return sum(float(g.count * g.flops.at(3.0)) for g in groups if g.kind == "attention" and g.phase == phase)


def written(name: str) -> tuple[Transformer, list[OperationGroup]]:
    model = from_config(CONFIGS[name], name)
    return model, transformer_groups(model.shape(LENGTH))


@pytest.mark.parametrize("kind", ("gpt2", "bert", *_GATED, *_SPARSE))
def test_a_head_is_tied_by_default_where_it_is_in_transformers(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    said = {name: value for name, value in (LLAMA | EXPERTS).items() if name != "tie_word_embeddings"}
    assert from_config(said | {"model_type": kind}, kind).tied_embeddings is CONFIG_MAPPING[kind]().tie_word_embeddings


def test_latent_attention_is_traced_as_cudas_kernels_do_it(tmp_path: Path) -> None:
    """Its queries are wider than its values, for which a CPU has no fused kernel and CUDA has."""
    model = from_config(LATENT, "latent")
    profile = trace_config(LATENT, tmp_path, *KEYS)
    assert model.parameters == profile.parameters
    for key in KEYS:
        found, groups = profile.variants[key.text()].groups, transformer_groups(model.shape(LENGTH))
        assert products(groups) == products(found)
        for phase in ("forward", "backward"):
            assert attention(groups, phase) == pytest.approx(attention(found, phase))


def test_products_and_attention_agree_one_by_one(traced: tuple[str, ModelProfile]) -> None:
    name, profile = traced
    model, groups = written(name)
    assert model.layers == profile.num_blocks
    assert model.parameters == pytest.approx(profile.parameters, rel=PARAMETERS_OFF.get(name, 1e-9))
    for key in KEYS:
        found = profile.variants[key.text()].groups
        assert products(groups) == products(found)
        for phase in ("forward", "backward"):
            assert attention(groups, phase) == pytest.approx(attention(found, phase))


def test_a_checkpointed_block_runs_its_forward_again(traced: tuple[str, ModelProfile]) -> None:
    name, profile = traced
    assert not profile.failed_variants
    found = profile.variants[VariantKey(checkpointing="full").text()].groups
    again = checkpointed_groups(written(name)[1])
    missing = products(found) - products(again), products(again) - products(found)
    # torch stops the second forward at the last tensor that the backward asks for: the last product is not among them
    assert not missing[0] and sum(missing[1].values()) <= 1, missing
    assert attention(again, "backward") == pytest.approx(attention(found, "backward"))


def kept_by_modules(d: Shape, norm: Literal["layer", "rms"], autocast: bool) -> dict[str, float]:
    """What modules of transformers keep without a compiler, tensor by tensor, in bytes of a token.

    Under autocast the stream between blocks and what norms make of it is fp32, and each product that reads it keeps a
    cast of its own.
    """
    w = float(np.asarray(d.width))
    r = 4.0 if autocast else w
    h, f, a, kv = (float(np.asarray(x)) for x in (d.hidden, d.ffn, d.attention_width, d.kv_width))
    experts, active = float(np.asarray(d.experts)), float(np.asarray(d.active))
    casts = 3.0 if autocast and d.apart else 1.0
    kept = {"input of norms": 2 * r * h, "input of queries, keys, values": casts * w * h, "attention": w * a}
    kept["queries, keys, values"] = w * (3 * a if experts else a + 2 * kv)
    kept["sums of attention's rows"] = 4.0 * float(np.asarray(d.heads))
    if norm == "layer":
        kept |= {"means and deviations": 16.0, "dropout masks": 2 * h, "input of up": w * h}
        # gelu_new keeps its input for the power, the tanh, half of its input, one plus the tanh, and its result
        kept |= {"input and tanh of gelu": 3 * r * f, "half and result of gelu": 2 * w * f}
        return kept
    kept |= {"normalised": 2 * r * h, "deviations": 8.0}
    if not experts:
        return kept | {"input of gate and up": (2 if autocast else 1) * w * h, "gate, up, silu, product": 4 * w * f}
    f, t = float(np.asarray(d.expert_ffn)), float(np.asarray(d.seq_len))
    # of each expert that works on a token: its row, gate and up, silu, their product, and what comes back
    kept |= {"input of router": w * h, "experts": active * (2 * w * h + 4 * w * f), "mask of attention": w * t}
    # probabilities, their sum, the chosen ones before and after it, and where each row goes and comes from (64 bits)
    return kept | {"router": 4 * experts + 4 + active * (8 + 4 * 8)}


@pytest.mark.parametrize("key", KEYS, ids=["fp32", "autocast"])
def test_what_a_block_keeps_agrees_tensor_by_tensor(traced: tuple[str, ModelProfile], key: VariantKey) -> None:
    name, profile = traced
    half = key.precision == "half"
    shape = from_config(CONFIGS[name], name).shape(LENGTH, width=2.0 if half else 4.0)
    kept = kept_by_modules(shape, "layer" if name == "gpt2" else "rms", autocast=half)
    traced_bytes = profile.variants[key.text()].block_saved_bytes.per_sample / LENGTH
    assert sum(kept.values()) == pytest.approx(traced_bytes), kept

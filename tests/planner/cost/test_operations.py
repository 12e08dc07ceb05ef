"""The operations of transformers that are written down are those that the trace of transformers' modules records."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from autoplan.api import make_workload_spec
from autoplan.planner.cost.analytical.transformer import Transformer, from_config
from autoplan.planner.cost.operations import checkpointed_groups, kept_by_modules, transformer_groups
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
PARAMETERS_OFF = {"gpt2": 0.015}  # biases are not written down
KEYS = (VariantKey(), VariantKey(precision="half"))


@pytest.fixture(scope="module", params=CONFIGS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModelProfile]:
    """A tiny model's name and its profile: random weights, no values, as CUDA has them."""
    path = tmp_path_factory.mktemp(request.param) / "config.json"
    path.write_text(json.dumps(CONFIGS[request.param]))
    workload = load_workload(make_workload_spec(str(path), global_batch=8, sequence_length=LENGTH))
    asked = TraceRequest(variants=(*KEYS, VariantKey(checkpointing="full")))
    return request.param, profile_workload(workload, "cuda", identity="test", request=asked)


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


@pytest.mark.parametrize("key", KEYS, ids=["fp32", "autocast"])
def test_what_a_block_keeps_agrees_tensor_by_tensor(traced: tuple[str, ModelProfile], key: VariantKey) -> None:
    name, profile = traced
    half = key.precision == "half"
    shape = from_config(CONFIGS[name], name).shape(LENGTH, width=2.0 if half else 4.0)
    kept = kept_by_modules(shape, "layer" if name == "gpt2" else "rms", autocast=half)
    traced_bytes = profile.variants[key.text()].block_saved_bytes.per_sample / LENGTH
    assert sum(kept.values()) == pytest.approx(traced_bytes), kept

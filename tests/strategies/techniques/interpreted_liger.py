"""Liger's kernels in models of transformers, by Triton's interpreter on a CPU. Run by test_kernels.py."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import nn
from triton.runtime import interpreter

from autoplan.strategies.techniques.kernels import use_liger
from autoplan.strategies.workloads.language_model import causal_loss
from tests.strategies.tiny import LLAMA, language


@pytest.fixture(autouse=True)
def what_the_interpreter_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a float argument of a kernel is a scalar tensor (`eps.to(...)`); the interpreter leaves it a float.

    It has none of CUDA's libdevice either, from which Liger takes two functions.
    """
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr("liger_kernel.ops.geglu.tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    convert = interpreter._implicit_cvt

    def with_floats(arg: Any) -> Any:
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(arg)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)


SIZES = {name: LLAMA[name] for name in LLAMA if name not in ("model_type", "architectures")}
QWEN3 = SIZES | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
GEMMA = SIZES | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 16}


def outcome(model: nn.Module, batch: Any) -> tuple[float, list[torch.Tensor]]:
    loss = causal_loss(model, batch)
    gradients = torch.autograd.grad(loss.total, list(model.parameters()))
    return float(loss.total.detach()), list(gradients)


@pytest.mark.parametrize("fields", [LLAMA, QWEN3, GEMMA], ids=["llama", "qwen3", "gemma"])
def test_the_model_computes_the_same_and_nothing_else_is_changed(fields: dict[str, Any]) -> None:
    workload = language(fields, length=16)
    torch.manual_seed(0)
    model = workload.build_model()
    other = copy.deepcopy(model)
    batch = workload.make_batch(2, 0)
    file = __import__(type(model).__module__, fromlist=["x"])
    names = dict(vars(file))
    methods = {kind: dict(vars(kind)) for kind in names.values() if isinstance(kind, type)}
    functional = nn.functional.cross_entropy
    expected, wanted = outcome(model, batch)

    changed = use_liger(model)
    layers = fields["num_hidden_layers"]
    assert changed >= 4 * layers + 1, "two norms, the attention and the MLP of each block, and the last norm"
    assert dict(vars(file)) == names and nn.functional.cross_entropy is functional
    assert all(dict(vars(kind)) == before for kind, before in methods.items())
    assert not any("forward" in vars(module) for module in other.modules())
    assert "forward" not in vars(model), "the loss stays the workload's"

    found, gradients = outcome(model, batch)
    assert found == pytest.approx(expected, rel=2e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine - theirs).norm() <= 2e-5 * theirs.norm() + 1e-9
    assert outcome(other, batch)[0] == expected


def test_the_attention_finds_ligers_rotary_embedding() -> None:
    model: Any = language(LLAMA, length=16).build_model()
    own = type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]
    use_liger(model)
    attention = model.model.layers[0].self_attn
    used = attention.forward.__func__.__globals__["apply_rotary_pos_emb"]
    assert used is not own and used.__module__.startswith("liger_kernel")
    assert type(attention).forward.__globals__["apply_rotary_pos_emb"] is own


def test_a_copy_of_a_changed_model_is_its_own() -> None:
    model: Any = language(LLAMA, length=16).build_model()
    use_liger(model)
    twin: Any = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.fill_(0.0)
    norm = twin.model.norm
    assert norm.forward.__self__ is norm and float(norm(torch.ones(1, 64)).abs().max()) == 0.0

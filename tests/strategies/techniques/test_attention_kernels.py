"""The single kernels of attention: what they are, when they are left out, and what runs under them."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, LlamaConfig

from autoplan.errors import ConfigError
from autoplan.planner.export.pytorch import PytorchTarget
from autoplan.planner.export.transformers import TransformersTarget
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.attention import (
    AttentionStrategy,
    attention_shape,
    heads_per_key,
    only_kernel,
    probe_kernel,
)
from autoplan.strategies.techniques.rules import incompatible
from tests.recorded import make_hardware, make_plan
from tests.strategies.tiny import GPT2, LLAMA, language


def test_one_kernel_and_no_other():
    flags = {
        "sdpa_flash": torch.backends.cuda.flash_sdp_enabled,
        "sdpa_cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "sdpa_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    }
    assert set(flags) == set(ATTENTION_BACKENDS)
    for value in flags:
        with only_kernel(value):
            assert {name: enabled() for name, enabled in flags.items()} == {name: name == value for name in flags}
            assert not torch.backends.cuda.math_sdp_enabled()


def test_they_are_left_out_on_a_cpu_with_the_reason():
    workload = language(LLAMA)
    choices = AttentionStrategy().choices(workload, find_structure(workload.build_model()), make_hardware(), "cpu")
    reasons = {found.value: found.reason for found in choices.left_out}
    assert all("kernel of CUDA" in reasons[value] for value in ATTENTION_BACKENDS)
    with pytest.raises(ConfigError, match="kernel of CUDA"):
        prepare(workload, TrainingConfig(micro_batch=2, precision="bf16", attention="sdpa_flash"))


def test_flash_and_cudnn_take_16_bits():
    for value in ("sdpa_flash", "sdpa_cudnn"):
        assert "16 bits" in (incompatible(TrainingConfig(micro_batch=1, attention=value)) or "")
        assert incompatible(TrainingConfig(micro_batch=1, attention=value, precision="bf16")) is None
    assert incompatible(TrainingConfig(micro_batch=1, attention="sdpa_efficient")) is None


def test_the_probe_takes_the_models_own_shape():
    assert attention_shape(GPT2Config(), 1024) == (1, 12, 1024, 64)
    llama = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32)
    assert attention_shape(llama, 128) == (1, 4, 128, 32)
    assert heads_per_key(language(LLAMA).build_model()) == 2
    assert heads_per_key(language(GPT2).build_model()) == 1
    assert probe_kernel("sdpa_flash", (1, 4, 16, 32), "cpu") is None, "torch has a flash kernel on the CPU too"
    assert "a probe on the model's shape (1, 4, 16, 32) failed" in (
        probe_kernel("sdpa_efficient", (1, 4, 16, 32), "cpu") or ""
    )


@pytest.mark.parametrize(
    ("groups", "size", "heads_of_keys", "shares"), [(1, 32, 4, False), (2, 32, 2, True), (2, 512, 4, False)]
)
def test_the_probe_shares_keys_between_heads_where_the_model_does(
    groups: int, size: int, heads_of_keys: int, shares: bool, monkeypatch: pytest.MonkeyPatch
):
    """The efficient kernel of CUDA takes no shared keys, and transformers repeats them only beyond 256 per head."""
    asked = []
    attend = F.scaled_dot_product_attention

    def noted(query, key, value, **options):
        asked.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    refused = probe_kernel("sdpa_efficient", (1, 4, 16, size), "cpu", groups)
    assert asked == [(4, heads_of_keys, heads_of_keys, shares)]
    assert refused is not None and ("with 2 heads of keys failed" in refused) is shares


def test_the_context_is_around_forward_and_backward():
    run = prepare(language(LLAMA), TrainingConfig(micro_batch=2, checkpointing="full"))
    events = []

    @contextlib.contextmanager
    def around():
        events.append("open")
        yield
        events.append("close")

    run._build.hooks.around = around
    run.model.lm_head.weight.register_hook(lambda gradient: events.append("backward"))
    run.step(run.workload.make_batch(4, 0))
    assert events == ["open", "backward", "close"] * 2


def test_the_exports_carry_the_kernel():
    plan = make_plan(TrainingConfig(micro_batch=4, precision="bf16", attention="sdpa_flash"), device="cuda")
    (script,) = PytorchTarget().render(plan, "plan").files.values()
    assert "ATTENTION = 'sdpa'" in script and "ATTENTION_KERNEL = 'FLASH_ATTENTION'" in script
    assert "functools.partial(sdpa_kernel, getattr(SDPBackend, ATTENTION_KERNEL))" in script
    companion = list(TransformersTarget().render(plan, "plan").files.values())[1]
    assert "ATTENTION_KERNEL = 'FLASH_ATTENTION'" in companion and "enable_math_sdp(False)" in companion

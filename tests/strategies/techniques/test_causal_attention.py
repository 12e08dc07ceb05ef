"""Attention without a mask tensor: the same loss, no mask reaches SDPA; given a mask or positions, nothing changes."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig

from autoplan.planner.trace.model_profile import VariantKey
from autoplan.planner.trace.record_step import record_step
from autoplan.planner.trace.variant_tracer import TruncatedModels
from autoplan.strategies.analysis.structure import language_models
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.attention import NAME, decoder_of, reason_against_maskless, use_maskless_attention
from tests.cases import some
from tests.strategies.tiny import GPT2, LLAMA, language


@pytest.fixture
def masks_seen(monkeypatch):
    """(whether SDPA got a mask, is_causal) of each of its calls."""
    seen = []
    own = F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, is_causal=False, **kwargs):
        seen.append((attn_mask is not None, is_causal))
        return own(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_traced_attention_has_no_mask(fields, masks_seen):
    workload, mode = language(fields), FakeTensorMode(allow_non_fake_inputs=True)
    model = TruncatedModels(workload, "cpu", mode).copy()
    record_step(workload, "cpu", VariantKey(), model, 2, mode)
    assert masks_seen and set(masks_seen) == {(False, True)}


@pytest.mark.parametrize("checkpointing", some(["none", "full"], ["full"]))
def test_compiled_attention_has_no_mask_and_the_same_loss(checkpointing, masks_seen, graphs_alone):
    losses = {}
    for scope in ("off", "model"):
        masks_seen.clear()
        config = TrainingConfig.model_validate({"micro_batch": 2, "compile": scope, "checkpointing": checkpointing})
        run = prepare(language(LLAMA), config)
        losses[scope] = [float(run.step(run.workload.make_batch(4, index)).loss) for index in range(2)]
        assert run.model.config._attn_implementation == "sdpa"
    assert set(masks_seen) == {(False, True)}
    assert losses["model"] == pytest.approx(losses["off"], rel=1e-5)


class Adapters(torch.nn.Module):
    """As a PeftModel holds its model: `base_model` is the adapters' own module, and the model lies within."""

    def __init__(self, model):
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model
        self.config = model.config

    def get_base_model(self):
        return self.base_model.model

    def forward(self, **inputs):
        return self.base_model.model.forward(**inputs)


def test_a_model_with_adapters_attends_without_a_mask_too():
    model = language(LLAMA).build_model()
    held = Adapters(model)
    assert decoder_of(held) is decoder_of(model) is model.model
    assert reason_against_maskless(decoder_of(held)) is None
    seen = []
    use_maskless_attention([held])
    model.model.register_forward_pre_hook(lambda module, args: seen.append(model.config._attn_implementation))
    held(input_ids=torch.arange(8)[None])
    assert seen == [NAME] and model.config._attn_implementation == "sdpa"


def test_each_forward_decides_by_what_it_is_given(masks_seen):
    model = language(LLAMA).build_model()
    ids = torch.arange(8)[None].repeat(2, 1)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    given = [{}, {"attention_mask": padded}, {"position_ids": packed, "use_cache": False}]
    wanted = [model(input_ids=ids, **more).logits for more in given]
    before = masks_seen.copy()
    use_maskless_attention(language_models(model))
    assert len(model.base_model._forward_pre_hooks) == 1
    masks_seen.clear()
    names = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: names.append(model.config._attn_implementation))
    for more, logits in zip(given, wanted, strict=True):
        torch.testing.assert_close(model(input_ids=ids, **more).logits, logits)
    assert names == [NAME, "sdpa", "sdpa"] and masks_seen == before
    assert model.config._attn_implementation == "sdpa"
    generated = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 11)


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SIZES, **TOKENS), None),
        (GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, **TOKENS), None),
        (MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4, **TOKENS), "windows"),
        # transformers 5.17 has it begin with SDPA; its windows speak against it then
        (Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, **TOKENS), "not scaled_dot_product|windows"),
    ],
    ids=["llama", "gpt2", "mistral", "gemma2"],
)
def test_which_models_can(config, reason):
    found = reason_against_maskless(AutoModelForCausalLM.from_config(config).base_model)
    assert found is None if reason is None else re.search(reason, found)


def test_eager_runs_on_a_cpu_are_left_alone():
    run = prepare(language(LLAMA), TrainingConfig(micro_batch=2))
    assert not run.model.model._forward_pre_hooks

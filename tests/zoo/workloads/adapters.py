"""Fine-tuning: LoRA with peft and in plain torch, preference optimisation, reward models, distillation, bf16."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from decoders import LENGTH, SIZES, documents, own_loss, pretraining, text
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from zoo_data import VOCABULARY, padded

import autoplan

GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64)
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)


def _peft_model(base: Any, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))


def lora_gpt2() -> autoplan.Workload:
    """peft over GPT-2's fused projection, dropout on the adapters."""
    build = lambda config: _peft_model(  # noqa: E731
        GPT2LMHeadModel(config), target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.05
    )
    return pretraining("lora-gpt2", GPT2, build=build, make_batch=documents, learning_rate=5e-3)


def lora_llama() -> autoplan.Workload:
    """peft over all linear layers, embeddings and head trained too."""
    build = lambda config: _peft_model(  # noqa: E731
        LlamaForCausalLM(config), target_modules="all-linear", modules_to_save=["lm_head"]
    )
    return pretraining("lora-llama", LLAMA, build=build, make_batch=documents, learning_rate=5e-3)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T


def _adapted(config: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


def lora_plain() -> autoplan.Workload:
    """Low-rank updates written by hand: layers replaced inside a frozen model."""
    return pretraining("lora-plain", LLAMA, build=_adapted, learning_rate=1e-2)


class Preference(nn.Module):
    """The policy and the frozen reference that it started from."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LlamaForCausalLM(LLAMA)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()


def _preferences(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    chosen, chosen_mask = padded(num_samples, LENGTH, index)
    rejected, rejected_mask = padded(num_samples, LENGTH, index + 70)
    return {
        "chosen_ids": chosen,
        "chosen_mask": chosen_mask,
        "rejected_ids": rejected,
        "rejected_mask": rejected_mask,
    }


def _log_likelihood(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    taken = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (taken * mask[:, 1:]).sum(-1)


def _margin(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return _log_likelihood(model, batch["chosen_ids"], batch["chosen_mask"]) - _log_likelihood(
        model, batch["rejected_ids"], batch["rejected_mask"]
    )


def _dpo_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    with torch.no_grad():
        reference = _margin(model.reference, batch)
    losses = -F.logsigmoid(0.1 * (_margin(model.policy, batch) - reference))
    return autoplan.LossSum(losses.sum(), len(losses))


def dpo() -> autoplan.Workload:
    """Policy and frozen reference in one module; each runs twice for a step."""
    return autoplan.Workload(
        name="dpo",
        build_model=Preference,
        make_batch=_preferences,
        loss=_dpo_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=4,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


def dpo_closure() -> autoplan.Workload:
    """The reference is a model that the loss function holds."""
    torch.manual_seed(1)
    start = GPT2LMHeadModel(GPT2)
    reference = copy.deepcopy(start).requires_grad_(False).eval()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        with torch.no_grad():
            held = _margin(reference, batch)
        losses = -F.logsigmoid(0.1 * (_margin(model, batch) - held))
        return autoplan.LossSum(losses.sum(), len(losses))

    return autoplan.Workload(
        name="dpo-closure",
        build_model=lambda: copy.deepcopy(start),
        make_batch=_preferences,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=4,
        sequence_length=LENGTH,
    )


def _reward_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    good = model(input_ids=batch["chosen_ids"], attention_mask=batch["chosen_mask"]).logits[:, 0]
    bad = model(input_ids=batch["rejected_ids"], attention_mask=batch["rejected_mask"]).logits[:, 0]
    return autoplan.LossSum(-F.logsigmoid(good - bad).sum(), len(good))


def reward() -> autoplan.Workload:
    """A reward model: two passes over one classifier."""
    config = LlamaConfig(**SIZES, num_key_value_heads=2, num_labels=1)
    return autoplan.Workload(
        name="reward",
        build_model=lambda: LlamaForSequenceClassification(config),
        make_batch=_preferences,
        loss=_reward_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
    )


class Distillation(nn.Module):
    """A small student beside a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = GPT2LMHeadModel(GPT2).requires_grad_(False).eval()
        self.student = GPT2LMHeadModel(GPT2Config(**(GPT2.to_diff_dict() | {"n_layer": 2})))

    def train(self, mode: bool = True) -> Distillation:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            wanted = self.teacher(ids).logits
        return self.student(ids).logits, wanted


def _distillation_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    given, wanted = model(batch["input_ids"])
    soft = F.kl_div(given.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum")
    hard = F.cross_entropy(given[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    return autoplan.LossSum(soft + 0.5 * hard, batch["labels"].numel())


def distillation() -> autoplan.Workload:
    """The teacher stays in eval mode whatever train() says."""
    return autoplan.Workload(
        name="distillation",
        build_model=Distillation,
        make_batch=text,
        loss=_distillation_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
    )


def bf16_llama() -> autoplan.Workload:
    """All parameters in bf16."""
    build = lambda config: LlamaForCausalLM(config).to(torch.bfloat16)  # noqa: E731
    return pretraining("bf16-llama", LLAMA, build=build, loss=own_loss)


def bf16_gpt2() -> autoplan.Workload:
    """Built in bf16 by transformers itself."""
    build = lambda config: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # noqa: E731
    return pretraining("bf16-gpt2", GPT2, build=build, make_batch=documents)

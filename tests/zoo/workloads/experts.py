"""Mixtures of experts of transformers, with and without the router's auxiliary loss."""

from __future__ import annotations

import torch
from decoders import SIZES, documents, own_loss, pretraining, text
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    Qwen3MoeConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from zoo_data import VOCABULARY, tokens

import autoplan


def mixtral() -> autoplan.Workload:
    """The router's auxiliary loss is part of the model's own loss; it is a mean over the tokens of a micro-batch."""
    config = MixtralConfig(
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )
    return pretraining("mixtral", config, build=MixtralForCausalLM)


def qwen3_moe() -> autoplan.Workload:
    """No auxiliary loss; dense and sparse layers in turn."""
    config = Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
    )
    return pretraining("qwen3-moe", config)


def olmoe() -> autoplan.Workload:
    """Many small experts, padded documents."""
    config = OlmoeConfig(**SIZES, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2)
    return pretraining("olmoe", config, make_batch=documents, loss=own_loss)


def _translate(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(num_samples, 32, index), "labels": tokens(num_samples, 16, index + 7)}


def _mean_times_count(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    count = batch["labels"].numel()
    return autoplan.LossSum(model(**batch).loss * count, count)


def switch() -> autoplan.Workload:
    """Switch transformers: top-1 routing with a capacity; router losses inside the model's own."""
    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=4,
        num_decoder_layers=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        decoder_start_token_id=0,
        router_aux_loss_coef=0.01,
        router_z_loss_coef=0.001,
        dropout_rate=0.1,
    )
    return autoplan.Workload(
        name="switch",
        build_model=lambda: SwitchTransformersForConditionalGeneration(config),
        make_batch=_translate,
        loss=_mean_times_count,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=32,
    )


class Router(nn.Module):
    """Sends each token to its two best experts; adds up how uneven the load is."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)]
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        probabilities = self.gate(flat).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        share = torch.nn.functional.one_hot(chosen, len(self.experts)).float().sum(1).mean(0)
        self.balance = (share * probabilities.mean(0)).sum() * len(self.experts)
        return out.view_as(x)


class SparseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.router = Router(width, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.router(self.norm2(x))


class SparseModel(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([SparseLayer(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def _balanced_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    balance = sum(layer.router.balance for layer in model.layers)
    return autoplan.LossSum(total + 0.01 * balance * labels.numel(), labels.numel())


def plain_experts() -> autoplan.Workload:
    """A mixture of experts in plain torch: routing by index, a balance loss kept on the module."""
    return autoplan.Workload(
        name="plain-experts",
        build_model=SparseModel,
        make_batch=text,
        loss=_balanced_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=8,
        fixed_micro_batch=4,
    )

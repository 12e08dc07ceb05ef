"""A small Llama of which only low-rank adapters of the attention's projections are trained (LoRA, in plain torch)."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from autoplan.strategies.workloads.language_model import causal_loss, count_labels
from autoplan.strategies.workloads.workload import Workload

VOCABULARY, LENGTH, RANK, BATCH = 6000, 96, 8, 16


class LowRank(nn.Module):
    """A linear layer that stays as it is, plus a product of two thin matrices that is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _build_model(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(small | sizes), tie_word_embeddings=False))
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), RANK))
    return model


def _make_batch(num_samples: int, index: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(VOCABULARY, (num_samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def workload(global_batch: int = BATCH) -> Workload:
    """The training."""
    return Workload(
        name="llama with LoRA",
        build_model=_build_model,
        make_batch=_make_batch,
        loss=causal_loss,
        count=lambda batch: count_labels(batch, shifted=True),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=global_batch,
        sequence_length=LENGTH,
    )


def workload_7b() -> Workload:
    """The same with the sizes of a Llama of 7B, its weights in bf16, 2,048 tokens."""
    sizes = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    }  # fmt: skip
    return dataclasses.replace(
        workload(),
        build_model=lambda: _build_model(**sizes).bfloat16(),
        make_batch=functools.partial(_make_batch, length=2048),
        sequence_length=2048,
    )

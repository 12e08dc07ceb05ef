"""Workloads small enough for a test: two language models, an image classifier with and without BatchNorm."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.strategies.workloads.language_model import language_model_workload
from autoplan.strategies.workloads.workload import LossSum, Workload

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 131,
    "n_positions": 64,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 131,
    "n_positions": 64,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}


def language(fields: dict[str, Any] = GPT2, *, length: int = 32, global_batch: int = 4, **options: Any) -> Workload:
    return language_model_workload(
        fields, name="tiny", sequence_length=length, global_batch=global_batch, options=options
    )


class Residual(nn.Module):
    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.second(F.relu(self.norm(self.first(images))))


class Classifier(nn.Module):
    """Stages of residual blocks, as image models have them."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(
            nn.Sequential(Residual(8, norm), Residual(8, norm)), nn.Sequential(Residual(8, norm), Residual(8, norm))
        )
        self.classify = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.stages(self.stem(images)).mean((2, 3)))


def image_batch(count: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "image": torch.randn(count, 3, 8, 8, generator=generator),
        "label": torch.randint(0, 5, (count,), generator=generator),
    }


def image_loss(model: nn.Module, batch: Any) -> LossSum:
    return LossSum(F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"]))


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Pair(torch.optim.Optimizer):
    """Steps one optimizer for half of the parameters, and another for the rest; it has no state itself."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        held = list(parameters)
        super().__init__(held, {"lr": 1e-3})
        half = len(held) // 2
        self.pair = [torch.optim.AdamW(held[:half], lr=1e-3, weight_decay=0.1), sgd(held[half:])]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.pair:
            optimizer.step()


def classifier(*, norm: bool = False, global_batch: int = 8, **fields: Any) -> Workload:
    return Workload(
        name="classifier",
        build_model=functools.partial(Classifier, norm),
        make_batch=image_batch,
        loss=image_loss,
        build_optimizer=sgd,
        global_batch=global_batch,
        **fields,
    )

"""Training loops as strangers write them, for the tests that read them: small models, real loaders, real loops."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 61


class Regressor(nn.Module):
    """A small network for (inputs, targets)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Points(Dataset[Any]):
    """Samples of (12 numbers, a class)."""

    def __init__(self, length: int = 96) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, 12, generator=generator)
        self.y = torch.randint(0, 3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Sentences(Dataset[Any]):
    """Token sequences of different lengths."""

    def __init__(self, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        sizes = torch.randint(6, 20, (length,), generator=generator)
        self.ids = [torch.randint(1, VOCABULARY, (int(size),), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A padded batch as for a causal language model."""
    longest = max(len(sample) for sample in samples)
    ids = torch.stack([F.pad(sample, (0, longest - len(sample))) for sample in samples])
    mask = torch.stack([F.pad(torch.ones_like(sample), (0, longest - len(sample))) for sample in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def tiny_gpt2() -> nn.Module:
    """A GPT-2 with random weights and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": VOCABULARY}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def loader_of(dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    """A shuffled loader with a generator of its own."""
    generator = torch.Generator().manual_seed(11)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, **options)


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters by name."""
    return {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}


def worst_difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest distance of a parameter, over the largest number in it."""
    assert got.keys() == wanted.keys()
    return max(float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-6)) for n in wanted)

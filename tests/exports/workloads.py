"""Two small trainings with what an export must not lose: clipping, a schedule, decay groups, counts that differ.

`language` is a causal language model of transformers over padded sequences; `images` a classifier with BatchNorm. Six
steps of either are under a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan import LossSum, Workload

STEPS, LENGTH, VOCABULARY = 6, 16, 67


def build_language_model() -> nn.Module:
    """A Llama of 20,000 parameters, the same at each call; no dropout, no biases, output head not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return LlamaForCausalLM(config)


def padded_batch(count: int, index: int) -> dict[str, torch.Tensor]:
    """`count` sequences of 4 to 16 tokens, padded at the right to 16: (count, 16) each; padding has the label -100."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask.long(),
        "labels": torch.where(mask, tokens, -100),
    }


def causal_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    total = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="sum")
    return LossSum(total, count_targets(batch))


def count_targets(batch: dict[str, torch.Tensor]) -> int:
    """The labels that are counted: those after the first of each sequence, without padding."""
    return int((batch["labels"][:, 1:] != -100).sum())


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Weight decay on matrices alone, and betas, epsilon and rates that are nobody's defaults."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-5)


def linear_warmup(optimizer: torch.optim.Optimizer) -> Any:
    """Rates of 0, 1/2, 1, 3/4, 1/2 and 1/4 of the optimizer's."""
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=STEPS)


def language(global_batch: int = 8) -> Workload:
    """Global batch 8, clipped at 0.1 where the norms are above 0.5."""
    return Workload(
        name="padded-llama",
        build_model=build_language_model,
        make_batch=padded_batch,
        loss=causal_loss,
        count=count_targets,
        build_optimizer=adamw,
        build_schedule=linear_warmup,
        global_batch=global_batch,
        sequence_length=LENGTH,
        max_grad_norm=0.1,
        seed=11,
    )


class Classifier(nn.Module):
    """Two convolutions with BatchNorm over (count, 3, 8, 8) images, and five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(8)
        self.classify = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first_norm(self.first(pixels)))
        hidden = F.relu(self.second_norm(self.second(hidden)))
        return self.classify(hidden.mean((2, 3)))


def build_classifier() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Classifier()


def image_batch(count: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2000 + index)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    return {"pixels": pixels + 0.1 * index, "labels": torch.randint(0, 5, (count,), generator=generator)}


def image_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    logits = model(batch["pixels"])
    return LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"]))


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01)


def rising_rates(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)


def images(global_batch: int = 8) -> Workload:
    """Global batch 8 in micro-batches of 2, which BatchNorm's statistics depend on; clipped at 0.05."""
    return Workload(
        name="batch-norm",
        build_model=build_classifier,
        make_batch=image_batch,
        loss=image_loss,
        count=lambda batch: len(batch["labels"]),
        build_optimizer=sgd,
        build_schedule=rising_rates,
        global_batch=global_batch,
        max_grad_norm=0.05,
        fixed_micro_batch=2,
        seed=5,
    )

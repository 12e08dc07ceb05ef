"""What trainings do beside the model: stochastic depth, checkpointing, frozen parts, optimizers, schedules, losses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from decoders import LENGTH, SIZES, documents, next_token_loss, own_loss, pretraining, text
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig
from zoo_data import VOCABULARY, images, lengths, tokens

import autoplan

LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64)


# Modules that draw random numbers, or whose mode matters.


class DropPath(nn.Module):
    """Stochastic depth as timm has it: the whole residual of a sample, or nothing."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop_path = DropPath(rate) if rate else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop_path(self.channels(self.norm2(x)))


class Mixer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        rates = [0.2 * number / (depth - 1) for number in range(depth)]
        self.blocks = nn.Sequential(*[MixerBlock(16, width, rate) for rate in rates])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


def _pictures(num_samples: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return images(num_samples, 32, index)


def _class_loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
    pixels, labels = batch
    return autoplan.LossSum(F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels))


def _pictures_training(name: str, build_model: Callable[[], nn.Module], **more: Any) -> autoplan.Workload:
    options: dict[str, Any] = {
        "loss": _class_loss,
        "build_optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "global_batch": 8,
    }
    return autoplan.Workload(name=name, build_model=build_model, make_batch=_pictures, **(options | more))


def stochastic_depth() -> autoplan.Workload:
    """An MLP-Mixer whose residuals are dropped per sample, each block at its own rate."""
    return _pictures_training("stochastic-depth", Mixer)


class DropLayers(nn.Module):
    """Whole layers left out at random in training, as LayerDrop does; Python's own random numbers decide."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embedding(ids)
        for layer in self.layers:
            if self.training and random.random() < 0.1:
                continue
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def _token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return autoplan.LossSum(total, labels.numel())


def layerdrop() -> autoplan.Workload:
    """Layers dropped by Python's random module."""
    return autoplan.Workload(
        name="layerdrop",
        build_model=DropLayers,
        make_batch=text,
        loss=_token_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
    )


def _convolutions(channels: int = 16) -> nn.Module:
    def stage(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
        )

    return nn.Sequential(
        stage(3, channels),
        stage(channels, channels),
        stage(channels, channels),
        nn.Flatten(),
        nn.Linear(16 * channels, 4),
    )


def batchnorm() -> autoplan.Workload:
    """BatchNorm; the workload says its own micro-batch."""
    return _pictures_training("batchnorm", _convolutions, fixed_micro_batch=4, global_batch=16)


class FrozenBackbone(nn.Module):
    """A pretrained backbone (BatchNorm and dropout in eval mode) under a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Conv2d(16, 32, 4, stride=4),
        )
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def frozen_backbone() -> autoplan.Workload:
    """The backbone was set to eval() once; nothing holds it there but the loop that doesn't call train()."""
    return _pictures_training("frozen-backbone", FrozenBackbone)


class FrozenNorms(nn.Module):
    """BatchNorm with its statistics frozen, the rest trained: train() is overridden, as detection code does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _convolutions()
        self.train()  # frozen from the start

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def frozen_norms() -> autoplan.Workload:
    """train() keeps BatchNorm in eval mode."""
    return _pictures_training("frozen-norms", FrozenNorms)


class Recomputing(nn.Module):
    """A model that checkpoints its own layers."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return self.head(x)


def own_checkpointing() -> autoplan.Workload:
    """torch.utils.checkpoint inside the forward."""
    return autoplan.Workload(
        name="own-checkpointing",
        build_model=Recomputing,
        make_batch=text,
        loss=_token_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
    )


def _checkpointed(config: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable()
    return model


def hf_checkpointing() -> autoplan.Workload:
    """transformers' own gradient checkpointing, enabled by the user."""
    return pretraining("hf-checkpointing", LLAMA, build=_checkpointed)


# Batches.


def _ragged(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """A question and an answer; only the answer is trained, and it may be one token long."""
    long = lengths(num_samples, LENGTH, index)
    asked = (long * torch.rand(num_samples, generator=torch.Generator().manual_seed(index))).long().clamp(max=long - 2)
    place = torch.arange(LENGTH)[None]
    ids = tokens(num_samples, LENGTH, index).masked_fill(place >= long[:, None], 0)
    answer = (place >= asked[:, None]) & (place < long[:, None])
    return {
        "input_ids": ids,
        "attention_mask": (place < long[:, None]).long(),
        "labels": ids.masked_fill(~answer, -100),
    }


def ragged() -> autoplan.Workload:
    """Padded instructions with very uneven numbers of labels."""
    return pretraining("ragged", GPT2, build=GPT2LMHeadModel, make_batch=_ragged, loss=next_token_loss)


def _longest(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    batch = documents(num_samples, index)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: tensor[:, :longest] for name, tensor in batch.items()}


def ragged_collator() -> autoplan.Workload:
    """A collator that pads to the longest sample of the batch: batches differ in shape."""
    return pretraining("ragged-collator", LLAMA, make_batch=_longest)


def _packed(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids = tokens(num_samples, LENGTH, index)
    place = torch.arange(LENGTH).expand(num_samples, -1)
    cut = lengths(num_samples, LENGTH - 4, index)[:, None]
    labels = ids.masked_fill(place == cut, -100)
    return {"input_ids": ids, "position_ids": torch.where(place < cut, place, place - cut), "labels": labels}


def packed() -> autoplan.Workload:
    """Two documents in one sequence, told apart by position_ids."""
    return pretraining("packed", LLAMA, make_batch=_packed)


# Optimizers and schedules.


def _decay_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in given if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )


def _with_optimizer(name: str, build_optimizer: Any, **more: Any) -> autoplan.Workload:
    return autoplan.Workload(
        name=name,
        build_model=lambda: GPT2LMHeadModel(GPT2),
        make_batch=text,
        loss=own_loss,
        build_optimizer=build_optimizer,
        global_batch=8,
        sequence_length=LENGTH,
        **more,
    )


def decay_groups() -> autoplan.Workload:
    """No weight decay and another learning rate for vectors."""
    return _with_optimizer("decay-groups", _decay_groups, max_grad_norm=0.5)


def adafactor() -> autoplan.Workload:
    """torch's Adafactor."""
    return _with_optimizer("adafactor", lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as a user writes it: the sign of a moving mean."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - second)


def lion() -> autoplan.Workload:
    """An optimizer class of the user's own."""
    return _with_optimizer("lion", lambda parameters: Lion(parameters, lr=1e-3, weight_decay=0.1))


def nesterov() -> autoplan.Workload:
    """SGD with Nesterov's momentum."""
    return _with_optimizer(
        "nesterov",
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        max_grad_norm=1.0,
    )


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    def factor(step: int) -> float:
        if step < 4:
            return (step + 1) / 4
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 4) / 100)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def warmup() -> autoplan.Workload:
    """Warm-up from zero, then a cosine."""
    return _with_optimizer(
        "warmup",
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        build_schedule=_cosine,
        max_grad_norm=1.0,
    )


# Losses.


def _label_smoothing(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum")
    return autoplan.LossSum(total, labels.numel())


def label_smoothing() -> autoplan.Workload:
    """Smoothed labels over a language model: the fused loss would lose them."""
    return pretraining("label-smoothing", LLAMA, loss=_label_smoothing)


def _z_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    total = total + 1e-3 * logits.logsumexp(-1).square().sum()
    return autoplan.LossSum(total, labels.numel())


def z_loss() -> autoplan.Workload:
    """The z-loss of PaLM over a language model."""
    return pretraining("z-loss", LLAMA, loss=_z_loss)


# What autoplan has to refuse.


def mean_loss() -> autoplan.Workload:
    """A mean handed over as a sum of one item: what it trains depends on the micro-batch."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        return autoplan.LossSum(model(**batch).loss, 1)

    return pretraining("mean-loss", GPT2, build=GPT2LMHeadModel, make_batch=_ragged, loss=loss)

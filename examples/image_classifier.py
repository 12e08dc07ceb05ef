"""An image classifier as a workload: any nn.Module with a batch function can be planned, not only language models.

    autoplan search --model examples/image_classifier.py:classifier --global-batch 64

The images are drawn: a bright disc somewhere, and the class is the quarter of the image that it is in. The model
normalises by groups (GroupNorm). BatchNorm would make the loss depend on the micro-batch, and autoplan would ask for
the micro-batch that the training is meant to have: --fix micro_batch=N.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autoplan

CLASSES = 4


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels) for _ in range(2)])
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.relu(norm(y)))
        return x + y


class Classifier(nn.Module):
    """A stem, residual blocks, a linear head."""

    def __init__(self, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Block(channels) for _ in range(num_blocks)])
        self.head = nn.Linear(channels * 16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))


def draw_batch(size: int, num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Noise with a bright disc; the label is the disc's quarter. The same index gives the same batch."""
    generator = torch.Generator().manual_seed(index)
    places = torch.rand(num_samples, 2, generator=generator)
    axis = torch.linspace(0, 1, size)
    down, across = places[:, 0, None, None], places[:, 1, None, None]
    distance = (axis[None, :, None] - down) ** 2 + (axis[None, None] - across) ** 2
    disc = (distance < 0.03).float()[:, None]
    images = torch.randn(num_samples, 3, size, size, generator=generator) * 0.3 + disc
    labels = (places[:, 0] > 0.5).long() * 2 + (places[:, 1] > 0.5).long()
    return {"image": images, "label": labels}


def classification_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Cross-entropy as a sum and a count."""
    total = F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")
    return autoplan.LossSum(total, len(batch["label"]))


def build_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.003, momentum=0.9, weight_decay=1e-4)


def classifier(global_batch: int = 64, size: int = 64, channels: int = 64, num_blocks: int = 6) -> autoplan.Workload:
    """The workload: autoplan calls this with the options it was given."""
    return autoplan.Workload(
        name="image-classifier",
        build_model=functools.partial(Classifier, channels, num_blocks),
        make_batch=functools.partial(draw_batch, size),
        loss=classification_loss,
        build_optimizer=build_optimizer,
        count=lambda batch: len(batch["label"]),
        global_batch=global_batch,
    )


def tiny_classifier(global_batch: int = 16) -> autoplan.Workload:
    """A small one, for a quick look."""
    return classifier(global_batch=global_batch, size=16, channels=16, num_blocks=2)

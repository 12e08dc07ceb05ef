"""A small vision transformer for benchmarks: with the compile cache as it is or an empty one, at any global batch."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import nn

from autoplan.strategies.workloads.workload import LossSum, Workload

IMAGE, PATCH, WIDTH, LAYERS, HEADS, CLASSES, BATCH = 32, 4, 192, 6, 3, 100, 32


def _build_model() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=IMAGE, patch_size=PATCH, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _build_with_an_empty_cache() -> nn.Module:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="empty-cache-", dir=os.environ["EMPTY_CACHES"])
    return _build_model()


def _make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    images = torch.randn(num_samples, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (num_samples,), generator=generator)}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return LossSum(nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"]))


def _make(name: str, global_batch: int = BATCH) -> Workload:
    return Workload(
        name=name,
        build_model=_build_with_an_empty_cache if name == "empty cache" else _build_model,
        make_batch=_make_batch,
        loss=_loss,
        count=lambda batch: len(batch["labels"]),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=global_batch,
    )


def warm() -> Workload:
    """Compiled kernels come from the cache, where they are in it."""
    return _make("warm cache")


def cold() -> Workload:
    """Everything is compiled anew."""
    return _make("empty cache")


def vision(global_batch: int = BATCH) -> Workload:
    """At a global batch of the caller's."""
    return _make("vision transformer", global_batch)

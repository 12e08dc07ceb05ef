"""Vision: classifiers, segmentation, self-supervision and detection, of transformers and in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)
from zoo_data import VOCABULARY, images, tokens

import autoplan

SIZE = 32
VIT_SIZES: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def pictures(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Images with a bright disc; the class is the quarter that it is in."""
    pixels, labels = images(num_samples, SIZE, index)
    return {"pixel_values": pixels, "labels": labels}


def classification_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Cross-entropy, summed."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    return autoplan.LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))


def classifier(name: str, build_model: Any, **more: Any) -> autoplan.Workload:
    """A classifier of four classes."""
    return autoplan.Workload(
        name=name,
        build_model=build_model,
        make_batch=pictures,
        loss=classification_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05),
        global_batch=8,
        **more,
    )


def vit() -> autoplan.Workload:
    """Learned positions, a class token."""
    return classifier("vit", lambda: ViTForImageClassification(ViTConfig(**VIT_SIZES, num_labels=4)))


def deit() -> autoplan.Workload:
    """A second token for distillation, which this training leaves alone; dropout."""
    config = DeiTConfig(**VIT_SIZES, num_labels=4, hidden_dropout_prob=0.1)
    return classifier("deit", lambda: DeiTForImageClassification(config), max_grad_norm=1.0)


def dinov2() -> autoplan.Workload:
    """Layer scale and stochastic depth."""
    config = Dinov2Config(
        **{k: v for k, v in VIT_SIZES.items() if k != "intermediate_size"},
        mlp_ratio=2,
        drop_path_rate=0.1,
        num_labels=4,
    )
    return classifier("dinov2", lambda: Dinov2ForImageClassification(config))


def swin() -> autoplan.Workload:
    """Shifted windows in two stages, stochastic depth; the configuration has lists where others have numbers."""
    config = SwinConfig(
        image_size=SIZE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=4
    )
    return classifier("swin", lambda: SwinForImageClassification(config))


def convnext() -> autoplan.Workload:
    """Depthwise convolutions in stages."""
    config = ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[2, 2], drop_path_rate=0.1, num_labels=4)
    return classifier("convnext", lambda: ConvNextForImageClassification(config))


def _resnet() -> nn.Module:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4)
    )


def resnet() -> autoplan.Workload:
    """BatchNorm: the user says which micro-batch with --fix."""
    return classifier("resnet", _resnet)


def _segments(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, _ = images(num_samples, SIZE, index)
    return {"pixel_values": pixels, "labels": (pixels.mean(1) > 0.6).long()}


def _pixel_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = F.interpolate(model(pixel_values=batch["pixel_values"]).logits, size=SIZE, mode="bilinear")
    return autoplan.LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), batch["labels"].numel())


def segformer() -> autoplan.Workload:
    """Segmentation; BatchNorm in the head, stochastic depth, a configuration with lists."""
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=2,
    )
    return autoplan.Workload(
        name="segformer",
        build_model=lambda: SegformerForSemanticSegmentation(config),
        make_batch=_segments,
        loss=_pixel_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


def _mae_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    count = len(batch["pixel_values"])
    return autoplan.LossSum(model(pixel_values=batch["pixel_values"]).loss * count, count)


def mae() -> autoplan.Workload:
    """Masked autoencoder: which patches are masked is drawn in the forward."""
    config = ViTMAEConfig(
        **VIT_SIZES,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )
    return autoplan.Workload(
        name="mae",
        build_model=lambda: ViTMAEForPreTraining(config),
        make_batch=pictures,
        loss=_mae_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
        global_batch=8,
    )


def _captions(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, labels = images(num_samples, SIZE, index)
    ids = tokens(num_samples, 12, index)
    ids[:, 0] = 3 + labels
    ids[:, -1] = 2
    return {"pixel_values": pixels, "input_ids": ids}


def _contrastive_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    count = len(batch["input_ids"])
    return autoplan.LossSum(model(**batch, return_loss=True).loss * count, count)


def clip() -> autoplan.Workload:
    """A contrastive loss over the micro-batch, which the user gives with --fix. Two towers, two configurations."""
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 2,
        "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": SIZE, "patch_size": 8, "projection_dim": 16,
    }  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return autoplan.Workload(
        name="clip",
        build_model=lambda: CLIPModel(config),
        make_batch=_captions,
        loss=_contrastive_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-4),
        global_batch=16,
    )


class Detector(nn.Module):
    """A convolutional stem, an encoder-decoder transformer, learned queries: boxes and classes, as DETR has them."""

    def __init__(self, width: int = 32, queries: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 8, stride=8), nn.GELU())
        self.positions = nn.Parameter(torch.randn((SIZE // 8) ** 2, width) * 0.02)
        self.queries = nn.Embedding(queries, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.classify = nn.Linear(width, classes + 1)
        self.boxes = nn.Linear(width, 4)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.stem(pixels).flatten(2).transpose(1, 2) + self.positions
        found = self.transformer(memory, self.queries.weight.expand(len(pixels), -1, -1))
        return self.classify(found), self.boxes(found).sigmoid()


def _objects(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, labels = images(num_samples, SIZE, index)
    center = torch.stack([labels % 2, labels // 2], -1).float() * 0.5 + 0.25
    boxes = torch.cat([center, torch.full((num_samples, 2), 0.4)], -1)
    return {"pixels": pixels, "labels": labels, "boxes": boxes}


def _matching_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits, boxes = model(batch["pixels"])
    total = logits.new_zeros(())
    for sample in range(len(logits)):
        with torch.no_grad():
            cost = (boxes[sample] - batch["boxes"][sample]).abs().sum(-1)
            cost -= logits[sample].softmax(-1)[:, int(batch["labels"][sample])]
            chosen = int(cost.argmin())
        wanted = torch.full((logits.shape[1],), logits.shape[2] - 1, device=logits.device)
        wanted[chosen] = batch["labels"][sample]
        total = total + F.cross_entropy(logits[sample], wanted)
        total = total + 5 * F.l1_loss(boxes[sample, chosen], batch["boxes"][sample])
    return autoplan.LossSum(total, len(logits))


def detector() -> autoplan.Workload:
    """Matches queries with objects by value, in Python."""
    return autoplan.Workload(
        name="detector",
        build_model=Detector,
        make_batch=_objects,
        loss=_matching_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        max_grad_norm=0.1,
    )

"""Diffusion, flow matching and a variational autoencoder in plain torch: the noise is drawn in the loss."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_data import images

import autoplan

SIZE = 16
STEPS = 100


def time_features(time: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of the time, (samples, width)."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = time[:, None].float() * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], -1)


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(width, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self, channels: int = 16, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            [ResidualBlock(channels, channels, width), ResidualBlock(channels, 2 * channels, width)]
        )
        self.middle = ResidualBlock(2 * channels, 2 * channels, width)
        self.up = nn.ModuleList(
            [ResidualBlock(4 * channels, channels, width), ResidualBlock(2 * channels, channels, width)]
        )
        self.leave = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        t = self.time(time_features(time, self.width))
        x = self.enter(x)
        kept = []
        for block in self.down:
            x = block(x, t)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, t)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), t)
        return self.leave(x)


def pictures(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Images with a bright disc and their class."""
    pixels, labels = images(num_samples, SIZE, index)
    return {"pixels": pixels, "labels": labels}


def denoising_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """DDPM: noise and time are drawn anew for each sample."""
    clean = batch["pixels"]
    time = torch.randint(0, STEPS, (len(clean),), device=clean.device)
    noise = torch.randn_like(clean)
    kept = torch.cos(0.5 * math.pi * time / STEPS)[:, None, None, None]
    noisy = kept * clean + (1 - kept**2).sqrt() * noise
    return autoplan.LossSum(F.mse_loss(model(noisy, time), noise, reduction="sum"), clean.numel())


def unet() -> autoplan.Workload:
    """A U-Net with skip connections."""
    return autoplan.Workload(
        name="unet",
        build_model=UNet,
        make_batch=pictures,
        loss=denoising_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        global_batch=8,
        max_grad_norm=1.0,
    )


class DiTBlock(nn.Module):
    """Attention and MLP, shifted and scaled by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, classes: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.width, self.classes, self.patch = width, classes, patch
        self.enter = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // patch) ** 2, width))
        self.labels = nn.Embedding(classes + 1, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([DiTBlock(width, 4) for _ in range(depth)])
        self.leave = nn.Linear(width, 3 * patch * patch)

    def forward(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:  # for guidance without a classifier the label is dropped now and then
            dropped = torch.rand(len(labels), device=labels.device) < 0.1
            labels = torch.where(dropped, self.classes, labels)
        c = self.time(time_features(1000 * time, self.width)) + self.labels(labels)
        x = self.enter(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, c)
        return F.fold(self.leave(x).transpose(1, 2), SIZE, self.patch, stride=self.patch)


def flow_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Flow matching: the velocity between noise and image at a time drawn for each sample."""
    clean = batch["pixels"]
    time = torch.rand(len(clean), device=clean.device)
    noise = torch.randn_like(clean)
    mixed = torch.lerp(noise, clean, time[:, None, None, None])
    error = model(mixed, time, batch["labels"]) - (clean - noise)
    return autoplan.LossSum(error.square().mean(dim=(1, 2, 3)).sum(), len(clean))


def dit() -> autoplan.Workload:
    """A diffusion transformer; labels dropped at random in the forward."""
    return autoplan.Workload(
        name="dit",
        build_model=DiT,
        make_batch=pictures,
        loss=flow_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
        global_batch=8,
    )


class Autoencoder(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 16, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, 32 * 16), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance


def _evidence_loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
    (pixels,) = batch
    again, mean, log_variance = model(pixels)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return autoplan.LossSum(F.mse_loss(again, pixels, reduction="sum") + divergence, len(pixels))


def vae() -> autoplan.Workload:
    """A sample of the latent is drawn in the forward; the batch is a tuple."""
    return autoplan.Workload(
        name="vae",
        build_model=Autoencoder,
        make_batch=lambda num_samples, index: (images(num_samples, SIZE, index)[0],),
        loss=_evidence_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=16,
    )

"""Small data sets for the zoo: drawn, never downloaded. The same index gives the same batch."""

from __future__ import annotations

import math

import torch

VOCABULARY = 256
PAD = 0


def tokens(num_samples: int, length: int, index: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids with the frequencies of text: few are common, most are rare; 0 to 2 are kept for special tokens."""
    generator = torch.Generator().manual_seed(1000 + index)
    uniform = torch.rand(num_samples, length, generator=generator)
    return 3 + (uniform.pow(3) * (vocabulary - 3)).long().clamp_(max=vocabulary - 4)


def lengths(num_samples: int, longest: int, index: int) -> torch.Tensor:
    """How long each sample is: between a quarter of the longest and the longest."""
    generator = torch.Generator().manual_seed(2000 + index)
    return torch.randint(longest // 4, longest + 1, (num_samples,), generator=generator)


def padded(num_samples: int, longest: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids padded at the right to `longest`, and the attention mask."""
    mask = torch.arange(longest)[None] < lengths(num_samples, longest, index)[:, None]
    return torch.where(mask, tokens(num_samples, longest, index), PAD), mask.long()


def images(num_samples: int, size: int, index: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright disc, and the quarter of the image that it is in."""
    generator = torch.Generator().manual_seed(3000 + index)
    places = torch.rand(num_samples, 2, generator=generator)
    axis = torch.linspace(0, 1, size)
    distance = (axis[None, :, None] - places[:, :1, None]) ** 2 + (axis[None, None] - places[:, 1:, None]) ** 2
    disc = (distance < 0.04).float()[:, None]
    noise = torch.randn(num_samples, channels, size, size, generator=generator) * 0.3
    return noise + disc, (places[:, 0] > 0.5).long() * 2 + (places[:, 1] > 0.5).long()


def waves(num_samples: int, length: int, index: int, classes: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tones with noise, and which tone it is."""
    generator = torch.Generator().manual_seed(4000 + index)
    pitch = torch.randint(0, classes, (num_samples,), generator=generator)
    time = torch.linspace(0, 1, length)[None]
    tone = torch.sin(2 * math.pi * (4 + 6 * pitch[:, None]) * time)
    return tone + 0.2 * torch.randn(num_samples, length, generator=generator), pitch


def table(num_samples: int, features: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, and a smooth function of them."""
    generator = torch.Generator().manual_seed(5000 + index)
    rows = torch.randn(num_samples, features, generator=generator)
    return rows, torch.sin(rows[:, :1]) + rows[:, 1:2] * rows[:, 2:3]

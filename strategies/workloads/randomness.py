"""The random generators that a training may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds torch (CPU and CUDA), `random` and NumPy's global generator.

    transformers draws layerdrop from `random` or torch, and the masks of its audio models from NumPy.

    Args:
        seed: Any whole number; NumPy takes it modulo 2**32.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

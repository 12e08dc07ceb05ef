"""The script by hand: its search for a micro-batch leaves nothing of what did not fit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from benchmarks.gpu import by_hand


def test_a_model_that_does_not_fit_is_gone_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: each step says what torch says of a full one. Models, and what holds them, are real."""
    models: list[weakref.ref[Any]] = []

    class Full(by_hand.Training):
        def __init__(self, *given: Any) -> None:
            assert not any(model() is not None for model in models)
            super().__init__(*given)
            models.append(weakref.ref(self.model))

        def step(self, *given: Any, **options: Any) -> torch.Tensor:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(by_hand, "Training", Full)
    with pytest.raises(SystemExit, match="not even one sample"):
        by_hand.find_micro_batch(by_hand.SMALL, torch.device("cpu"), 8)
    assert len(models) == 4

"""Datasets that are ready to train on: `from autoplan.data import TokenFile`.

A plan makes the loader of one: `plan.loader(TokenFile("train.bin", 1024), run=run)`. Loads torch.
"""

from __future__ import annotations

from autoplan.strategies.workloads.loading.order import SampleOrder
from autoplan.strategies.workloads.loading.token_file import TokenFile

__all__ = ["SampleOrder", "TokenFile"]

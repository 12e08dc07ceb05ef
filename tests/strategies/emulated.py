"""fp8 without a chip for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest.mock import patch

from autoplan.strategies.techniques import fp8
from autoplan.strategies.techniques.sizes import MULTIPLE


def reason_against_odd_sizes(out_features: int, in_features: int, recipe: str) -> str | None:
    """In the place of `reason_against_sizes`: small layers too, as long as fp8 takes their sizes."""
    return "odd" if out_features % MULTIPLE or in_features % MULTIPLE else None


@contextlib.contextmanager
def emulated_fp8() -> Iterator[None]:
    """Here fp8 runs on any device and on small layers too: torchao rounds the operands and multiplies in fp32."""
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name
    emulated = staticmethod(lambda name: dataclasses.replace(recipe(name), emulate=True))
    with (
        patch.object(fp8, "_reason_against_chip", lambda *_: None),
        patch.object(fp8, "reason_against_sizes", reason_against_odd_sizes),
        patch.object(Float8LinearConfig, "from_recipe_name", emulated),
    ):
        yield

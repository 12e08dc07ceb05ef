"""The code that the target `fabric` copies besides the step: the Fabric of a plan."""

from __future__ import annotations

from typing import Any

from lightning import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from autoplan.planner.export.kit.model import shard
from autoplan.planner.export.kit.settings import *


def fabric_arguments() -> dict[str, Any]:
    """Keyword arguments of Fabric(...)."""
    arguments = dict(ARGUMENTS)
    if STRATEGY == "DDPStrategy":
        arguments["strategy"] = DDPStrategy(**STRATEGY_OPTIONS)
    if STRATEGY == "ModelParallelStrategy":
        arguments["strategy"] = ModelParallelStrategy(parallelize_fn=shard, **STRATEGY_OPTIONS)
    if PLUGIN_OPTIONS:
        arguments["plugins"] = [MixedPrecision(**PLUGIN_OPTIONS)]
    return arguments


def make_fabric(**more: Any) -> Fabric:
    """A Fabric of the plan; `more` are your own arguments (loggers, callbacks, ...)."""
    return Fabric(**(fabric_arguments() | more))

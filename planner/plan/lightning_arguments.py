"""A plan as keyword arguments of Lightning's Trainer and of Fabric: for the exports, and for a plan that is applied.

In: a configuration, and what the Trainer does of the workload (clipping). Out: plain values by the name of the
argument, and how its strategy and its precision plugin are made. Only `LightningArguments.make` imports Lightning. The
names of the arguments are in keys/lightning.json, one table per version.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from autoplan.errors import ExportError
from autoplan.planner.plan.key_tables import installed_version, pick_table
from autoplan.planner.plan.trainer_arguments import refuse_model_parallelism
from autoplan.strategies.config import TrainingConfig, not_carried

Kind = Literal["trainer", "fabric"]

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""By value of the knob, Lightning's name; tf32 is besides a setting of torch."""


@dataclass(frozen=True, slots=True)
class LightningArguments:
    """Keyword arguments, and what they do not say.

    Attributes:
        values: Plain values by the name of the argument.
        strategy: The class of the strategy; "": a value says it.
        strategy_options: Its arguments. Fabric's ModelParallelStrategy takes the function that shards a model besides;
            a LightningModule calls that in its configure_model().
        plugin_options: The arguments of the plugin MixedPrecision; empty: a value says the precision.
        not_carried: Sentences on knobs that no argument says.
    """

    values: dict[str, Any]
    strategy: str
    strategy_options: dict[str, Any]
    plugin_options: dict[str, Any]
    not_carried: tuple[str, ...]

    def make(self, package: str = "lightning.pytorch") -> dict[str, Any]:
        """The keyword arguments of a lightning.Trainer with their objects; imports Lightning.

        Args:
            package: Whose Trainer it is: lightning.pytorch or pytorch_lightning.
        """
        made = dict(self.values)
        if self.strategy:
            strategies = importlib.import_module(f"{package}.strategies")
            made["strategy"] = getattr(strategies, self.strategy)(**self.strategy_options)
        if self.plugin_options:
            plugins = importlib.import_module(f"{package}.plugins")
            made["plugins"] = [plugins.MixedPrecision(**self.plugin_options)]
        return made


def lightning_arguments(
    config: TrainingConfig,
    *,
    device: str,
    accumulation: int,
    max_grad_norm: float | None,
    find_unused: bool = False,
    kind: Kind = "trainer",
) -> LightningArguments:
    """The parts of a plan that are arguments of `Trainer(...)` or `Fabric(...)`.

    Args:
        config: The plan's configuration.
        device: cuda or cpu.
        accumulation: Micro-batches per optimizer step on a rank.
        max_grad_norm: The norm that the workload clips at; None: it does not clip.
        find_unused: A backward may leave a parameter without a gradient.
        kind: Of the Trainer or of Fabric, which has no argument for accumulation and clipping.

    Raises:
        ExportError: Lightning has nothing for the degrees of parallelism, or no table fits its version.
    """
    keys = pick_table("lightning", installed_version("lightning"))[kind]
    refuse_model_parallelism("Lightning", config, replicas_of_shards=False)
    if config.dp_shard > 1 and config.precision == "fp16":
        raise ExportError(
            f"Lightning's ModelParallelStrategy takes no fp16 autocast, and the plan has precision=fp16 with "
            f"dp_shard={config.dp_shard}",
            hint="Use plan.prepare() under torchrun, or search with --fix precision=bf16.",
        )
    strategy, options = _strategy(config, find_unused)
    values: dict[str, Any] = {
        "accelerator": device,
        "devices": config.world_size,
        "strategy": None if strategy else "auto",
        "accumulation": accumulation,
        "max_grad_norm": max_grad_norm,
        "clip_algorithm": "norm",
        "sync_batchnorm": True if config.batch_norm == "sync" else None,
        "precision": PRECISIONS[config.precision],
    }
    plugin_options = {}
    if config.precision == "fp16" and device == "cpu":
        # By its name, Lightning would take bf16 in its place, with a warning.
        plugin_options = {"precision": values.pop("precision"), "device": device}
    left = not_carried(config, "Lightning")
    if config.precision == "fp16":
        left.append("a step that fp16 skips (inf or NaN in the gradients): Lightning's schedule moves on all the same")
    if drops_fused_step(config, max_grad_norm):
        left.append(
            "optimizer_step=fused: Lightning does not clip fp16 gradients for fused optimizers; torch's default form"
        )
    named = {keys[term]: value for term, value in values.items() if keys.get(term) is not None and value is not None}
    return LightningArguments(named, strategy, options, plugin_options, tuple(left))


def drops_fused_step(config: TrainingConfig, max_grad_norm: float | None) -> bool:
    """Whether Lightning refuses to clip for torch's fused optimizers: they unscale fp16 gradients themselves."""
    return config.precision == "fp16" and config.optimizer_step == "fused" and max_grad_norm is not None


def _strategy(config: TrainingConfig, find_unused: bool) -> tuple[str, dict[str, Any]]:
    """The class of the strategy, and its arguments; "": Lightning's own choice for one process."""
    if config.dp_shard > 1:
        return "ModelParallelStrategy", {"data_parallel_size": config.dp_shard, "tensor_parallel_size": 1}
    if config.dp_replicate == 1:
        return "", {}
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}  # as data_parallel.py has them
    return "DDPStrategy", options | ({"find_unused_parameters": True} if find_unused else {})

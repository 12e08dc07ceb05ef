"""A plan as keyword arguments of Lightning's Trainer and of Fabric: for the exports, and for a plan that is applied.

In: a configuration, and what the Trainer does of the workload (clipping). Out: values by the name of the argument;
what is an object there (a strategy, a plugin) is a `Call`, which can be written as source or made. Only `Call.make`
imports Lightning. The names of the arguments are in keys/lightning.json, one table per version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass, field
from typing import Any, Literal

from autoplan.errors import ExportError
from autoplan.planner.plan.key_tables import pick_table
from autoplan.strategies.config import TrainingConfig, not_carried

Kind = Literal["trainer", "fabric"]
PACKAGES = {"trainer": "lightning.pytorch", "fabric": "lightning.fabric"}
"""Where the strategies and plugins of the Trainer are, and those of Fabric."""

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""By value of the knob, Lightning's name; tf32 is besides a setting of torch."""


@dataclass(frozen=True, slots=True)
class Call:
    """An object of Lightning: its class, and the arguments that make it.

    Attributes:
        module: Where its class is.
        name: Of the class.
        options: Keyword arguments that are plain values.
        functions: Those that are functions of the user's: the name that the export gives each.
    """

    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)

    def source(self) -> str:
        """The expression that makes it, where the class is imported."""
        given = [f"{key}={value!r}" for key, value in self.options.items()]
        return f"{self.name}({', '.join([*(f'{key}={name}' for key, name in self.functions.items()), *given])})"

    def make(self, **functions: Any) -> Any:
        """Makes it, with the functions that it needs; imports Lightning."""
        return getattr(importlib.import_module(self.module), self.name)(**self.options, **functions)


@dataclass(frozen=True, slots=True)
class LightningArguments:
    """Keyword arguments, and what they do not say.

    Attributes:
        values: By the name of the argument; a Call, or a list of them, where it is an object.
        not_carried: Sentences on knobs that no argument says.
    """

    values: dict[str, Any]
    not_carried: tuple[str, ...]

    def calls(self) -> list[Call]:
        """The objects among the values."""
        return [one for value in self.values.values() for one in _several(value) if isinstance(one, Call)]

    def make(self, **functions: Any) -> dict[str, Any]:
        """The keyword arguments with their objects; imports Lightning.

        Args:
            **functions: What the strategy calls, by the name of its argument: `parallelize_fn`, for shards in Fabric.
        """
        return {name: _made(value, functions) for name, value in self.values.items()}


def lightning_arguments(
    config: TrainingConfig,
    *,
    device: str,
    accumulation: int,
    max_grad_norm: float | None,
    kind: Kind = "trainer",
    version: str | None = None,
) -> LightningArguments:
    """The parts of a plan that are arguments of `Trainer(...)` or `Fabric(...)`.

    Args:
        config: The plan's configuration.
        device: cuda or cpu.
        accumulation: Micro-batches per optimizer step on a rank.
        max_grad_norm: The norm that the workload clips at; None: it does not clip.
        kind: Of the Trainer or of Fabric, which has no argument for accumulation and clipping.
        version: Of lightning; None: the installed one, else the newest that there is a table for.

    Raises:
        ExportError: Lightning has nothing for the degrees of parallelism, or no table fits its version.
    """
    keys = pick_table("lightning", version or installed_version())[kind]
    _refuse(config)
    package = PACKAGES[kind]
    values: dict[str, Any] = {
        "accelerator": device,
        "devices": config.world_size,
        "strategy": _strategy(config, package),
        "accumulation": accumulation,
        "max_grad_norm": max_grad_norm,
        "clip_algorithm": "norm",
        "sync_batchnorm": True if config.batch_norm == "sync" else None,
    }
    if config.precision == "fp16" and device == "cpu":
        # By its name, Lightning would take bf16 in its place, with a warning.
        options = {"precision": PRECISIONS["fp16"], "device": device}
        values["plugins"] = [Call(f"{package}.plugins", "MixedPrecision", options)]
    else:
        values["precision"] = PRECISIONS[config.precision]
    named = {keys[term]: value for term, value in values.items() if keys.get(term) is not None and value is not None}
    return LightningArguments(named, tuple(_not_carried(config, max_grad_norm)))


def drops_fused_step(config: TrainingConfig, max_grad_norm: float | None) -> bool:
    """Whether Lightning refuses to clip for torch's fused optimizers: they unscale fp16 gradients themselves."""
    return config.precision == "fp16" and config.optimizer_step == "fused" and max_grad_norm is not None


def _strategy(config: TrainingConfig, package: str) -> str | Call:
    if config.dp_shard > 1:
        options = {"data_parallel_size": config.dp_shard, "tensor_parallel_size": 1}
        # Fabric calls the function that shards a model; a LightningModule calls it in its configure_model().
        functions = {"parallelize_fn": "shard"} if package == PACKAGES["fabric"] else {}
        return Call(f"{package}.strategies", "ModelParallelStrategy", options, functions)
    if config.dp_replicate == 1:
        return "auto"
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}  # as data_parallel.py has them
    return Call(f"{package}.strategies", "DDPStrategy", options)


def _refuse(config: TrainingConfig) -> None:
    """Refuses what Lightning cannot run as the plan has it.

    Raises:
        ExportError: tensor or pipeline parallelism, replicas of shards, fp16 over shards.
    """
    if config.pp > 1:
        raise ExportError(
            f"Lightning has no pipeline parallelism, and the plan has pp={config.pp}",
            hint="The targets torchtitan and megatron have it, or use plan.prepare() under torchrun.",
        )
    if config.tp > 1:
        raise ExportError(
            f"the plan has tp={config.tp}; Lightning's ModelParallelStrategy leaves to its user how a model is split",
            hint="The targets torchtitan and megatron split their own models; plan.prepare() under torchrun splits "
            "yours as it was measured.",
        )
    if config.dp_shard > 1 and config.dp_replicate > 1:
        raise ExportError(
            f"Lightning's ModelParallelStrategy has one data-parallel mesh, and the plan has "
            f"dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard}",
            hint="Use the target accelerate or torchtitan, or plan.prepare() under torchrun.",
        )
    if config.dp_shard > 1 and config.precision == "fp16":
        raise ExportError(
            f"Lightning's ModelParallelStrategy takes no fp16 autocast, and the plan has precision=fp16 with "
            f"dp_shard={config.dp_shard}",
            hint="Use plan.prepare() under torchrun, or search with --fix precision=bf16.",
        )


def _not_carried(config: TrainingConfig, max_grad_norm: float | None) -> list[str]:
    found = not_carried(config, "Lightning")
    if config.precision == "fp16":
        found.append("a step that fp16 skips (inf or NaN in the gradients): Lightning's schedule moves on all the same")
    if drops_fused_step(config, max_grad_norm):
        found.append(
            "optimizer_step=fused: Lightning does not clip fp16 gradients for fused optimizers; torch's default form"
        )
    return found


def installed_version() -> str | None:
    """The installed version of Lightning; None where it is not installed."""
    for name in ("lightning", "pytorch-lightning"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _made(value: Any, functions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_made(one, functions) for one in value]
    return value.make(**{key: functions[key] for key in value.functions}) if isinstance(value, Call) else value

"""Which targets carry what another one cannot: for the hint of a refusal.

In: what a plan needs. Out: the names of targets, as far as they are there.
"""

from __future__ import annotations

from typing import Literal

from autoplan.errors import ExportError
from autoplan.planner.export.run import TARGETS
from autoplan.strategies.config import TrainingConfig

Need = Literal["tensor parallelism", "pipeline parallelism", "replicas of shards", "shards on a CPU"]

_CARRIED_BY: dict[Need, tuple[str, ...]] = {
    "tensor parallelism": ("pytorch", "ray", "torchtitan", "megatron"),
    "pipeline parallelism": ("torchrun", "slurm", "torchtitan", "megatron"),
    "replicas of shards": ("pytorch", "accelerate", "torchtitan"),
    "shards on a CPU": ("pytorch", "deepspeed", "lightning", "fabric"),
}


def nearest(need: Need) -> str:
    """A hint that names what carries it."""
    names = [name for name in _CARRIED_BY[need] if name in TARGETS]
    targets = f"the target{'s' if len(names) > 1 else ''} {' and '.join(names)}, or " if names else ""
    return f"{targets}plan.prepare() in your own loop, under torchrun."


def refusal(tool: str, need: Need, given: str) -> ExportError:
    """The error of a target that cannot express a plan.

    Args:
        tool: The tool, as a subject.
        need: What it lacks.
        given: What the plan has.
    """
    return ExportError(f"{tool} cannot run {need}, and the plan has {given}", hint=f"What does: {nearest(need)}")


def refuse_model_parallelism(tool: str, config: TrainingConfig, *, replicas_of_shards: bool) -> None:
    """Refuses tensor and pipeline parallelism, and replicas of shards.

    Args:
        tool: The tool, as a subject.
        config: The plan's.
        replicas_of_shards: Whether the tool has them.

    Raises:
        ExportError: the plan has one of these.
    """
    if config.tp > 1:
        raise refusal(tool, "tensor parallelism", f"tp={config.tp}")
    if config.pp > 1:
        raise refusal(tool, "pipeline parallelism", f"pp={config.pp}")
    if config.dp_shard > 1 and config.dp_replicate > 1 and not replicas_of_shards:
        given = f"dp_replicate={config.dp_replicate} dp_shard={config.dp_shard}"
        raise refusal(tool, "replicas of shards", given)

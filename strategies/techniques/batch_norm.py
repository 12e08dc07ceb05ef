"""The batch_norm knob: BatchNorm over the micro-batches of all data-parallel ranks (torch's SyncBatchNorm), on request.

It trains something else than BatchNorm on one rank: statistics are those of micro_batch x dp samples. So no search
chooses it; the user does. Parity then compares with a plain loop in micro-batches of that many samples.
"""

from __future__ import annotations

from torch import nn

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.workloads.workload import Workload

ONLY_ON_CUDA = "torch's SyncBatchNorm runs on CUDA alone"


class BatchNormStrategy:
    """own: each rank normalises its own micro-batch; sync: all of them together."""

    name = "batch_norm"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """sync on CUDA, where BatchNorm is in training mode."""
        return offer(self.name, ("own",), {"sync": reason_against_sync(structure.model, device)})

    def apply(self, build: Build) -> None:
        """Puts SyncBatchNorm in the place of each BatchNorm that trains.

        Raises:
            ConfigError: on a CPU, or without BatchNorm.
        """
        if build.config.batch_norm == "own":
            return
        hint = "Use batch_norm=own: each rank then normalises its own micro-batches, as accumulation does."
        check_applies(build.config, self.name, reason_against_sync(build.model, build.device.type), hint)
        axis = "dp_replicate" if build.config.dp_replicate > 1 else "dp_shard"
        group = None if build.mesh is None else build.mesh.get_group(axis)  # None, for another trainer: all its ranks
        synchronise(build.model, group)


def training_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm modules that normalise by their micro-batch, by name; those in evaluation mode are left alone."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    }


def reason_against_sync(model: nn.Module, device: str) -> str | None:
    """Why SyncBatchNorm does not apply; None if it does."""
    if device != "cuda":
        return ONLY_ON_CUDA
    return None if training_norms(model) else "the model has no BatchNorm in training mode"


def synchronise(model: nn.Module, group: object) -> None:
    """Converts each BatchNorm that trains, in place; parameters and running statistics stay the same tensors."""
    for name, module in training_norms(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.SyncBatchNorm.convert_sync_batchnorm(module, group))

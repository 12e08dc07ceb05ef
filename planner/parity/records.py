"""The records of the parity check: `ParityRequest` to a rank, `ParityMeasurement` from it. Loads no torch."""

from __future__ import annotations

from pydantic import Field

from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

CHECK_SEQUENCE_LENGTH = 128
CHECK_MICRO_BATCH = 2


class ParityRequest(Record):
    """What one run of the check does."""

    spec: WorkloadSpec
    config: TrainingConfig = Field(description="the candidate's; the rank makes its micro-batch small")
    plain: bool = Field(description="True: the reference, one process of plain PyTorch, without the config")
    device: str
    samples: str = Field(description="path of the files for sampled gradient elements, without .RANK.npz")
    steps: int | None = Field(default=None, description="number of steps; None: until a parameter changes")

    @property
    def accumulation(self) -> int:
        """Micro-steps per step of the check: two, or those of one pipeline pass; one if a knob allows only one."""
        if self.config.ddp_static_graph:
            return 1
        return 2 if self.config.pp == 1 else max(2, self.config.pp_microbatches)


class ModuleMeasure(Record):
    """The norms of one module's own parameters."""

    gradient_norm: float = Field(description="before clipping, at the first step")
    update_norm: float = Field(description="of the change of the parameters over all steps")


class ParityMeasurement(Record):
    """What one run of the check measured."""

    loss: float
    modules: dict[str, ModuleMeasure]
    steps: int
    global_batch: int
    micro_batch: int
    fixed_micro_batch: int | None
    sequence_length: int | None
    uneven_counts: bool = Field(description="whether the micro-batches count different numbers of items")
    additive: bool | None = Field(
        default=None, description="whether the loss of two samples is the sum of their losses"
    )
    deterministic: bool | None = Field(default=None, description="whether the loss is the same twice with dropout off")

"""What the parity check asks of its ranks and what they answer. Loads no torch."""

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
    config: TrainingConfig = Field(description="the candidate's, as it is; the rank makes it small")
    plain: bool = Field(description="the reference: one process, plain PyTorch, nothing of the config applied")
    device: str
    samples: str = Field(description="where the gradient's sampled elements go: this and .RANK.npz")
    steps: int | None = Field(default=None, description="the reference's number of steps; None: until a change")

    @property
    def accumulation(self) -> int:
        """Micro-steps of the check: two, or as many as a pipeline pass takes; one where a knob allows no more."""
        if self.config.ddp_static_graph:
            return 1
        return 2 if self.config.pp == 1 else max(2, self.config.pp_microbatches)


class ModuleMeasure(Record):
    """What one module's own parameters went through."""

    gradient_norm: float = Field(description="before clipping, at the first step")
    update_norm: float = Field(description="of the change of the parameters over all steps")


class ParityMeasurement(Record):
    """What one run of the check saw."""

    loss: float
    modules: dict[str, ModuleMeasure]
    steps: int
    global_batch: int
    micro_batch: int
    fixed_micro_batch: int | None
    sequence_length: int | None
    uneven_counts: bool = Field(description="the micro-batches count different numbers of items")
    additive: bool | None = Field(default=None, description="the loss of two samples is the sum of each one's")
    deterministic: bool | None = Field(default=None, description="the same loss twice, with dropout off")

"""What the planner asks of a trial (`TrialRequest`), and what each rank answers (`TrialAnswer`). Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autoplan.planner.records import Interval, Outcome, PeakMemory, Window
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

WHOLE_STEP_SHARE = 0.2
"""Whole steps are timed if one takes less than this share of the trial's time box; otherwise its parts are timed."""

FITS_MICRO_STEPS = 3
"""Most micro-steps in each of the two short steps that show that a configuration fits. Adam's state is allocated at the
end of the first step; in the second, accumulated gradients need memory beside it."""

EXPENSIVE, VERY_EXPENSIVE = 0.15, 1.0
"""If the first micro-step takes more than these shares of the time box, the short steps have only 2 + 2, or 1 + 2,
micro-steps. The time box is 1/30 of the budget, so 2 + 2 very expensive ones would take over 13 % of the budget."""


class TrialRequest(Record):
    """One configuration to measure, and for how long."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    time_box_s: float = Field(description="seconds for warm-up and measuring together, including the two short steps")
    best_high_s: float | None = Field(default=None, description="high bound of the best step time so far")
    memory_limit_bytes: int | None = Field(default=None, description="device memory a rank may take (CUDA)")
    method: Literal["whole_steps", "parts"] | None = Field(default=None, description="None: by WHOLE_STEP_SHARE")
    narrow: float = 0.02
    remeasure: float = Field(default=2.0, description="further time boxes to measure disturbed stretches again")
    seed: int = 0


class CompileRequest(Record):
    """One configuration to compile ahead of its trial; nothing is measured."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    memory_limit_bytes: int | None = Field(default=None, description="device memory it may take (CUDA)")


class CompileAnswer(Record):
    """What compiling ahead took, and what it found in the compile cache."""

    compile_s: float = Field(description="the first micro-step: forward and backward compiled, and run once")
    own_cpu_s: float = Field(description="CPU time of the process itself meanwhile: tracing and lowering")
    children_cpu_s: float = Field(description="CPU time of the compilers that it started and waited for")
    hits: int
    misses: int


class TrialAnswer(Record):
    """What one rank measured. All its times are those of the slowest rank."""

    outcome: Outcome = Outcome.OK
    detail: str | None = None
    reason: str | None = None
    step_time_s: Interval | None = None
    method: Literal["whole_steps", "parts"] | None = None
    parts_s: dict[str, float] = Field(default_factory=dict)
    peak_memory: PeakMemory = PeakMemory()
    loss: float | None = None
    first_losses: tuple[float, ...] = ()
    items_per_step: int = Field(default=0, description="tokens, or samples, of the global batch")
    warnings: tuple[str, ...] = ()
    window: Window | None = None
    startup_s: float = 0.0

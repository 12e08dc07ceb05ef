"""The request of the parity check to its ranks (`ParityRequest`), and their answers. Loads no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ConfigDict, Field

from autoplan.record import Record
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.techniques.rules import SIXTEEN_BITS_ONLY
from autoplan.strategies.workloads.spec import WorkloadSpec

CHECK_SEQUENCE_LENGTH = 128
SMALL_MODEL_PARAMETERS = 20_000_000
LARGE_MODEL_SEQUENCE_LENGTH = 16
"""Of the steps of a model that is larger than that: steps at 128 tokens would cost more than all the rest. Its own
length is checked in one forward and backward."""

CHECK_MICRO_BATCH = 2
CHECK_STEPS = 12
LARGE_MODEL_STEPS, WHOLE_STEPS = 10, 2
"""Where a model is large or slow, or the shapes are those of training: all steps, and those that the reference takes
too. Later ones of the candidate have one micro-batch; they show the optimizer, beside its replay, and the schedule."""

MOST_STEPS_S = 6.0
"""Seconds of all steps of the reference, over which a model counts as slow."""

CHECK_ACCUMULATION = 5
RESUMED_AFTER = 2
"""Steps, after which the candidate's state is saved, and loaded into a run that is as it was made."""

DROPOUT_SEQUENCE_LENGTH = 16
DROPOUT_SEEDS = 2
SOURCE_SEEDS = 2
LEAST_CHUNKS = 3

# The parts of a check, by the prefix of the names under which the sampled elements are kept.
START, OWN_LENGTH, DROPOUT = "start", "own_length", "dropout"
MASKS = {"samples": "for two samples of a micro-batch", "places": "in two places of the model"}
AGAIN = "again "
"""Before the name of a part: the same of a second plain run, whose gradients are off by NOISE of themselves."""

NOISE = 1e-3
TWIN = "fp32 "
"""Before the name of a part: the same of the candidate's knobs in fp32."""


Rung = Literal["plain", "checkpointing", "none"]
"""Which plain run fits at the workload's own length: as it is, with full checkpointing, or one that moves or fuses
more, in whose place that length is not checked."""

RUNGS: tuple[Rung, ...] = ("plain", "checkpointing", "none")
"""The same, each with less memory than the one before."""


def step_part(number: int) -> str:
    """The prefix of the gradients of a step, counted from 0."""
    return f"step{number}"


def check_accumulation(config: TrainingConfig) -> int:
    """Micro-steps per step of the check: five, or the next multiple of a pipeline pass."""
    if config.pp == 1:
        return CHECK_ACCUMULATION
    return math.ceil(CHECK_ACCUMULATION / config.pp_microbatches) * config.pp_microbatches


def dropout_accumulation(config: TrainingConfig) -> int:
    """Micro-steps of a step with dropout on: two, whose masks have to differ, or those of a pipeline pass."""
    return config.pp_microbatches if config.pp > 1 else 2


def samples_at_once(config: TrainingConfig) -> int:
    """Samples of the smallest part of a step: one micro-batch of each data-parallel rank, or one pipeline pass."""
    return config.micro_batch * config.dp * (config.pp_microbatches if config.pp > 1 else 1)


def twin_of(config: TrainingConfig) -> TrainingConfig | None:
    """The same knobs in fp32, not compiled; None: there is nothing that this would see.

    Products in fp8 are compared with a reference that rounds them too.
    """
    if config.fp8 != "off" or (config.precision == "fp32" and config.compile == "off"):
        return None
    left = ("precision", "compile", "compile_mode", "parameters", "optimizer_state")
    changes = {knob: getattr(PLAIN, knob) for knob in left}
    if config.attention in SIXTEEN_BITS_ONLY:
        changes["attention"] = "sdpa"
    return config.model_copy(update=changes)


class Measure(Record):
    """Figures of a run of the check. One may be NaN or infinite, which is a finding: JSON keeps it, and not as null."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class ParameterMeasure(Measure):
    """One trainable parameter of the plain model."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class GroupMeasure(Measure):
    """One parameter group of the optimizer as a step used it."""

    parameters: tuple[str, ...]
    options: dict[str, float | bool | tuple[float, ...] | None] = Field(
        description="lr, weight_decay, betas, momentum, ...; without the flags that say how the step runs"
    )


class StepMeasure(Measure):
    """The measurements of one optimizer step."""

    loss: float
    gradient_norms: dict[str, float] = Field(description="by parameter, before clipping")
    gradient_norm: float = Field(description="of all gradients, before clipping, added up by the check itself")
    clipping_norm: float | None = Field(default=None, description="the norm before clipping as the run reports it")
    clipped_share: dict[str, float] = Field(
        default_factory=dict, description="by parameter, the norm of its gradient after clipping over that before"
    )
    gradient_factor: float = Field(
        default=1.0, description="gradients were multiplied by it before clipping, so that clipping binds"
    )
    groups: tuple[GroupMeasure, ...]
    samples: int = Field(default=0, description="0: of a reference, the step was not taken")
    optimizer_steps: int = Field(default=1, description="how often the optimizer was stepped")
    cleared: bool = Field(default=True, description="no gradient was left after the step")


class PassMeasure(Measure):
    """The measurements of one forward and backward beside the optimizer's steps."""

    loss: float
    gradient_norms: dict[str, float]
    samples: int = 0
    sequence_length: int | None = None


class DropoutMeasure(Measure):
    """The measurements of passes with dropout on."""

    passes: tuple[PassMeasure, ...] = Field(description="one for each seed")
    repeated_loss: float | None = Field(default=None, description="the first seed's loss once more")
    rates: dict[str, float] = Field(description="by dropout module: its rate, 0 where it is in evaluation mode")
    unseeded: tuple[tuple[float, ...], ...] = Field(
        default=(), description="losses of one micro-batch again and again, nothing seeded: by step, of each of its own"
    )
    alike: tuple[str, ...] = Field(
        default=(), description="MASKS that are the same in one forward, as far as dropout modules draw them"
    )
    sources: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="by kind of dropout, alone: the losses of some seeds; '': no module's"
    )


class TwinMeasure(Measure):
    """The measurements of the candidate's knobs in fp32, beside the same reference."""

    step: PassMeasure = Field(description="the first step, up to where the optimizer would step")
    second: PassMeasure | None = Field(default=None, description="the second step, after the optimizer's first")
    own_length: PassMeasure | None = None
    dropout: DropoutMeasure | None = None
    buffers: dict[str, float] = Field(default_factory=dict, description="by saved buffer, its change in the first step")


class ReplayMeasure(Measure):
    """The parameters after each step, beside those of the workload's own optimizer on the same gradients."""

    method: str = Field(description="whole: whole tensors; sampled: sampled elements; norms: not replayed")
    reason: str = Field(default="", description="why it was not replayed")
    differences: dict[str, float] = Field(
        default_factory=dict,
        description="by parameter, the largest distance over the steps, beyond the rounding of the parameter's own "
        "dtype, over the norm of the change",
    )
    moments: dict[str, float] = Field(
        default_factory=dict,
        description="by parameter, the largest distance of moments that are kept rounded from what the step gave",
    )
    rounding: dict[str, float] = Field(
        default_factory=dict, description="by parameter that is kept in bf16, its error past what rounding allows"
    )
    chance: float = Field(
        default=0.0, description="how far rounding by chance is from its probabilities, in standard deviations"
    )
    unresolved: tuple[str, ...] = Field(
        default=(), description="parameters whose change is not larger than the rounding of their dtype"
    )


class ParityMeasurement(Measure):
    """The measurements of one run of the check."""

    steps: tuple[StepMeasure, ...]
    parameters: dict[str, ParameterMeasure] = Field(description="those that train, in the model's order")
    changes: dict[str, float] = Field(description="by parameter, the norm of its change over all steps (sampled)")
    buffers: dict[str, float] = Field(
        default_factory=dict, description="by saved buffer, the norm of its change; of a candidate, on its own rank"
    )
    first_buffers: dict[str, float] = Field(
        default_factory=dict, description="of a reference, by saved buffer, the norm of its change in the first step"
    )
    rank_buffers: tuple[dict[str, float], ...] = Field(
        default=(), description="of a reference, the same for each data-parallel rank of the candidate"
    )
    data_rank: int = Field(default=0, description="of a candidate, its data-parallel rank")
    data_ranks: int = Field(default=1, description="of a candidate, how many there are")
    schedule_steps: int | None = Field(default=None, description="how often the schedule was stepped, as it says")
    learning_rates: tuple[float, ...] = Field(default=(), description="by group, after the last step")
    replay: ReplayMeasure | None = None
    products: dict[str, float] = Field(
        default_factory=dict,
        description="of a candidate, by layer in fp8: how far its products are from the recipe",
    )
    own_length: PassMeasure | None = None
    dropout: DropoutMeasure | None = Field(
        default=None, description="None: seeds make no difference to the loss; of a candidate also: its twin has it"
    )
    twin: TwinMeasure | None = None
    hides_nan: str = Field(
        default="",
        description="of a candidate: what stays finite if the loss is NaN; of a reference: why that is not asked",
    )
    unproved: str = Field(default="", description="of a reference: what is wrong with the checkpointing that it needs")
    uneven: str = Field(default="", description="of a candidate: a step that did not take all its micro-batches")
    lost: str = Field(default="", description="of a candidate: what was not as it had been saved after loading")
    chunk_rows: int | None = Field(default=None, description="rows of logits at once in the fused loss of the check")
    not_checked: tuple[str, ...] = Field(default=(), description="what was left out, and why, in sentences")
    micro_batch: int
    # Of a reference alone: a candidate has the same sizes, and leaves these empty.
    global_batch: int = 0
    fixed_micro_batch: int | None = None
    accumulation: int = 0
    length: int = Field(default=0, description="longer sequences were cut to it in the steps")
    sequence_length: int | None = Field(default=None, description="in the steps; None: samples are not sequences")
    labels_masked: bool = Field(
        default=False, description="labels of later samples are masked, so that micro-batches count unevenly"
    )
    has_labels: bool = False
    max_grad_norm: float | None = None
    additive: bool | None = Field(default=None, description="the loss of two samples is the sum of each one's")
    deterministic: bool | None = Field(
        default=None,
        description="the same loss with any seed, dropout off; False: each micro-batch is seeded in the check",
    )

    @property
    def trained(self) -> int:
        """Steps that were taken."""
        return sum(step.samples > 0 for step in self.steps)

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the parameters that train."""
        return {parameter.dtype for parameter in self.parameters.values()}


class ParityRequest(Measure):
    """The request for one run of the check."""

    spec: WorkloadSpec
    config: TrainingConfig = Field(description="the candidate's, as it is; the rank makes it small")
    device: str
    reference: ParityMeasurement | None = Field(
        default=None, description="what the reference saw, which a candidate repeats; None: this is the reference"
    )
    own_shapes: bool = Field(
        default=False, description="with the candidate's own micro-batch and sequences, whose kernels are in the cache"
    )
    rung: Rung = Field(default="plain", description="what fits at the workload's own sequence length")
    time_s: float | None = Field(
        default=None, description="seconds for all of it; what is not needed for a verdict is left out where it is late"
    )
    sample_s: float | None = Field(
        default=None, description="seconds of a plain forward and backward of a sample of its own length, where known"
    )

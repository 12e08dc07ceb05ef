"""What the parity check asks of its ranks (`ParityRequest`) and what they answer. Loads no torch."""

from __future__ import annotations

import math

from pydantic import ConfigDict, Field

from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

CHECK_SEQUENCE_LENGTH = 128
SMALL_MODEL_PARAMETERS = 20_000_000
LARGE_MODEL_SEQUENCE_LENGTH = 32
"""Of the steps of a model that is larger than that: three steps at 128 tokens would cost more than all the rest. Its
own length is checked in one forward and backward."""

CHECK_MICRO_BATCH = 2
CHECK_STEPS = 3
CHECK_ACCUMULATION = 3
DROPOUT_SEQUENCE_LENGTH = 32
DROPOUT_SEEDS = 2
LEAST_CHUNKS = 3

# The parts of a check, by the prefix of the names under which the sampled elements are kept.
START, OWN_LENGTH, DROPOUT = "start", "own_length", "dropout"


def step_part(number: int) -> str:
    """The prefix of the gradients of a step, counted from 0."""
    return f"step{number}"


def check_accumulation(config: TrainingConfig) -> int:
    """Micro-steps per step of the check: three, or the next multiple of a pipeline pass; one where no more is allowed.

    With two, a run that drops every micro-batch after the second is not seen.
    """
    if config.ddp_static_graph:
        return 1
    if config.pp == 1:
        return CHECK_ACCUMULATION
    return math.ceil(CHECK_ACCUMULATION / config.pp_microbatches) * config.pp_microbatches


def dropout_accumulation(config: TrainingConfig) -> int:
    """Micro-steps of the passes with dropout on: as few as the config can be built with."""
    if config.pp > 1:
        return config.pp_microbatches
    return 2 if config.gradient_sync == "every" else 1


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
    """What one optimizer step saw."""

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
    optimizer_steps: int = Field(default=1, description="how often the optimizer was stepped")
    cleared: bool = Field(default=True, description="no gradient was left after the step")


class PassMeasure(Measure):
    """What one forward and backward beside the steps saw."""

    loss: float
    gradient_norms: dict[str, float]
    samples: int = 0
    sequence_length: int | None = None


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
    """What one run of the check saw."""

    steps: tuple[StepMeasure, ...]
    parameters: dict[str, ParameterMeasure] = Field(description="those that train, in the model's order")
    changes: dict[str, float] = Field(description="by parameter, the norm of its change over all steps (sampled)")
    buffers: dict[str, float] = Field(
        default_factory=dict, description="by saved buffer, the norm of its change; of a candidate, on its own rank"
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
    dropout: tuple[PassMeasure, ...] = Field(default=(), description="with dropout on, one for each seed")
    dropout_repeated_loss: float | None = Field(default=None, description="the first seed's loss once more")
    dropout_rates: dict[str, float] = Field(
        default_factory=dict, description="by dropout module: its rate, 0 where it is in evaluation mode"
    )
    chunk_rows: int | None = Field(default=None, description="rows of logits at once in the fused loss of the check")
    not_checked: tuple[str, ...] = Field(default=(), description="what was left out, and why, in sentences")
    global_batch: int
    micro_batch: int
    fixed_micro_batch: int | None
    accumulation: int
    length: int = Field(description="longer sequences were cut to it in the steps")
    sequence_length: int | None = Field(description="in the steps; None: samples are not sequences")
    labels_masked: bool = Field(description="labels of later samples are masked, so that micro-batches count unevenly")
    has_labels: bool = False
    max_grad_norm: float | None = None
    additive: bool | None = Field(default=None, description="the loss of two samples is the sum of each one's")
    deterministic: bool | None = Field(
        default=None,
        description="the same loss with any seed, dropout off; False: each micro-batch is seeded in the check",
    )

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the parameters that train."""
        return {parameter.dtype for parameter in self.parameters.values()}


class ParityRequest(Measure):
    """What one run of the check does."""

    spec: WorkloadSpec
    config: TrainingConfig = Field(description="the candidate's, as it is; the rank makes it small")
    device: str
    reference: ParityMeasurement | None = Field(
        default=None, description="what the reference saw, which a candidate repeats; None: this is the reference"
    )
    own_shapes: bool = Field(
        default=False, description="with the candidate's own micro-batch and sequences, whose kernels are in the cache"
    )
    plain_fits: bool = Field(
        default=True, description="the plain run at its own sequence length; else that length is not checked"
    )
    time_s: float | None = Field(
        default=None, description="seconds for all of it; what is not needed for a verdict is left out where it is late"
    )

"""ModelProfile: what one micro-step of a model computes, moves and keeps, each as a straight line in the samples.

And the variants: which of them a configuration is made of, and which a search has to trace. Loads no torch.
`planner/trace/trace.py` makes profiles of real programs; `planner/cost/operations.py` those of a transformer by its
dimensions. The cost model reads nothing else about a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field

from autoplan.record import Record
from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROFILE_VERSION = 13
IN_FUSED_LOSS = "fused loss: "
"""Before the names of operations between the products of the fused loss. On CUDA they are compiled, except in fp16."""
IN_RNN = "rnn: "
"""Before the names of operations of a torch.nn.RNN, GRU or LSTM: torch.compile leaves them as they are
(`torch._dynamo.config.allow_rnn`)."""

Samples = TypeVar("Samples", float, "NDArray[np.float64]")
Kind = Literal["matmul", "attention", "convolution", "memory"]
Segment = Literal["block", "rest"]
TensorSplit = Literal["m", "n", "k", "batch", "all", "none"]


class LinearFit(Record):
    """A quantity that is linear in the samples of a micro-batch: fixed + per_sample x samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: Samples) -> Samples:
        """The quantity at a number of samples, or at each of several."""
        return self.fixed + self.per_sample * samples

    def __add__(self, other: LinearFit) -> LinearFit:
        return LinearFit(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)

    def __sub__(self, other: LinearFit) -> LinearFit:
        return LinearFit(fixed=self.fixed - other.fixed, per_sample=self.per_sample - other.per_sample)

    def __rmul__(self, factor: float) -> LinearFit:
        return LinearFit(fixed=factor * self.fixed, per_sample=factor * self.per_sample)


ZERO = LinearFit()


class OperationGroup(Record):
    """Operations that are alike: same kind, dtype, pass and sizes.

    `m`, `n`, `k`, `batch` are the sizes of a matrix product: `batch` products of m x k by k x n. They are zero for
    other kinds. `bytes_moved` counts every tensor that is read or written, once. `count` is per block in the segment
    "block", and in the whole model in the segment "rest".
    """

    name: str
    kind: Kind
    segment: Segment
    phase: Literal["forward", "backward"]
    dtype: str
    count: float
    flops: LinearFit = ZERO
    bytes_moved: LinearFit = ZERO
    output_bytes: LinearFit = Field(default=ZERO, description="what one operation allocates")
    m: LinearFit = ZERO
    n: LinearFit = ZERO
    k: LinearFit = ZERO
    batch: LinearFit = ZERO
    of_experts: bool = Field(default=False, description="`batch` counts experts, which expert parallelism divides")
    measured_s: float | None = Field(default=None, description="seconds of one operation by itself on the device")
    measured_samples: float = 0.0
    measured_more_s: float | None = Field(default=None, description="the same at more samples; None: not measured")
    measured_more_samples: float = 0.0
    scaled: bool = Field(
        default=False, description="`measured_s` is in proportion to an operation of its kind, for lack of time"
    )
    tensor_split: TensorSplit = Field(
        default="none", description="the size that tensor parallelism divides; all: the bytes, by sequence parallelism"
    )


class PeakFit(Record):
    """The peak of the live bytes, beyond parameters and optimizer states, in one part of a micro-step.

    `first` counts the gradients that the micro-step has made so far: it is for the first micro-step of a step. `later`
    does not count them: it is for the later micro-steps, which add to gradients that are allocated already.
    """

    part: Literal["forward", "head", "backward", "tail"]
    first: LinearFit
    later: LinearFit


class VariantKey(Record):
    """The knobs that change what a micro-step does or keeps."""

    precision: Literal["fp32", "half"] = "fp32"
    attention: str = "own"
    checkpointing: Literal["none", "selective", "full"] = "none"
    loss: Literal["full", "fused"] = "full"
    compiled: bool = False
    parameters: Literal["own", "bf16"] = "own"

    def text(self) -> str:
        """One line, the key of `ModelProfile.variants`."""
        form = "compiled" if self.compiled else "eager"
        stored = "" if self.parameters == "own" else f"/{self.parameters}"
        return f"{self.precision}/{self.attention}/{self.checkpointing}/{self.loss}/{form}{stored}"


PLAIN = VariantKey()
"""The plain fp32 variant: what the workload does without any technique. It alone decides whether the workload runs."""


VARIANT_KNOBS = ("precision", "attention", "checkpointing", "loss", "compile", "parameters")
"""The knobs that the variant of a configuration depends on."""


def variants_of(config: TrainingConfig) -> tuple[VariantKey, VariantKey]:
    """The variant of the blocks that are not checkpointed, and that of the blocks that are; the same where all are one.

    Args:
        config: Any configuration; `every_k` mixes the variants `none` and `full`.
    """
    base = VariantKey(
        precision="half" if config.precision in ("bf16", "fp16") else "fp32",
        attention="sdpa" if config.attention in ATTENTION_BACKENDS else config.attention,
        checkpointing="selective" if config.checkpointing == "selective" else "none",
        loss=config.loss,
        compiled=config.compile != "off",
        parameters="own" if config.parameters == "own" else "bf16",
    )
    whole = config.checkpointing not in ("none", "selective")
    return base, base.model_copy(update={"checkpointing": "full"}) if whole else base


def variants_to_trace(configs: Iterable[TrainingConfig], *, has_blocks: bool = False) -> tuple[VariantKey, ...]:
    """The eager variants that predictions of these configurations read, the plain one first, then the simplest ones.

    A compiled variant is predicted from the eager ones with the same knobs, between no and selective checkpointing.
    Memory that comes and goes in a micro-step is read from the variant without checkpointing.

    Args:
        configs: The candidates.
        has_blocks: The model has repeated blocks, so that selective checkpointing applies.
    """
    keys = {PLAIN}
    different = {tuple(getattr(config, knob) for knob in VARIANT_KNOBS): config for config in configs}
    for config in different.values():
        for key in variants_of(config):
            keys.add(key.model_copy(update={"compiled": False}))
            keys.add(key.model_copy(update={"compiled": False, "checkpointing": "none"}))
            if key.compiled and has_blocks:
                keys.add(key.model_copy(update={"compiled": False, "checkpointing": "selective"}))

    def techniques(key: VariantKey) -> int:
        return sum(getattr(key, name) != getattr(PLAIN, name) for name in VariantKey.model_fields)

    return tuple(sorted(keys, key=lambda key: (techniques(key), key.text())))


class VariantProfile(Record):
    """One micro-step under one variant, of the whole model on one rank."""

    key: VariantKey
    groups: tuple[OperationGroup, ...]
    kernels: float = Field(description="operations launched in forward and backward, without views")
    peaks: tuple[PeakFit, ...]
    block_saved_bytes: LinearFit = Field(description="kept by one block for the backward, at the end of its forward")
    rest_saved_bytes: LinearFit = Field(
        description="kept by the rest of the model and the loss, at the end of the forward"
    )


class ModelProfile(Record):
    """The model as the cost model knows it: parameters, blocks, and its variants."""

    version: int = PROFILE_VERSION
    identity: str = Field(description="WorkloadSpec.identity, or the name of a closed form")
    method: Literal["traced", "closed_form", "measured_block", "rough"]
    device: str
    parameters: int = Field(description="elements; tied weights count once")
    trainable: int
    parameter_bytes: int
    block_parameters: float = Field(description="elements of one block; 0 where no repeated blocks were found")
    largest_unit_parameters: float = Field(description="elements of the largest unit that FSDP gathers at once")
    num_blocks: int
    sequence_length: int | None
    hidden: int | None = None
    optimizer_name: str = "AdamW"
    optimizer_form: str | None = Field(default=None, description="of its own step: fused, ...; None: torch chooses")
    optimizer_state_bytes_per_parameter: float = 8.0
    parameter_tensors: int = Field(default=0, description="trainable tensors: what a for-loop optimizer visits")
    largest_parameter: int = 0
    clips_gradients: bool = False
    unused_parameters: bool = Field(
        default=False, description="a backward left a parameter that trains without a gradient"
    )
    linear_weights: tuple[tuple[int, int, int], ...] = Field(
        default=(), description="of the linear layers that fp8 may take: outputs, inputs, how many in the whole model"
    )
    boundary_bytes: LinearFit = Field(default=ZERO, description="the activation between two blocks, fp32")
    batch_bytes: LinearFit = Field(default=ZERO, description="the batch itself on the device")
    input_s_per_sample: float | None = Field(
        default=None, description="seconds of make_batch per sample on one thread; None: not measured, see notes"
    )
    tokens_per_sample: int = 1
    fewest_samples: float = Field(default=1.0, description="the smallest micro-batch that was traced")
    variants: dict[str, VariantProfile]
    failed_variants: dict[str, str] = Field(
        default_factory=dict, description="variants that do not run here, by VariantKey.text(), and why"
    )
    rough_variants: tuple[str, ...] = Field(
        default=(), description="variants that were not traced for lack of time or memory: their figures are estimates"
    )
    timing_s: float = Field(default=0.0, description="what timing the operations was allowed; 0: none was timed")
    notes: tuple[str, ...] = ()
    seconds_spent: float = 0.0


class TraceRequest(Record):
    """The variants to trace, and the time for it.

    Attributes:
        variants: The variants to trace; None: all that the model has. The plain one is always traced, and first.
        time_limit_s: No further variant is begun when it could not end within so many seconds; None: no limit. The
            plain variant has no limit, nor has the first one besides it, unless this is 0.
        timing_budget_s: Seconds for timing the recorded operations on the device, one by one; 0: none is timed.
        memory_limit_bytes: Host memory of the process; None: no limit.
        known: The profile of an earlier trace: its operations are not timed again.
        not_fake: Why micro-steps are run for real from the start; None: fake tensors are tried first.
    """

    variants: tuple[VariantKey, ...] | None = None
    time_limit_s: float | None = None
    timing_budget_s: float = 0.0
    memory_limit_bytes: int | None = None
    known: ModelProfile | None = None
    not_fake: str | None = None

"""Facts about a workload, read from its model on the meta device. Records only; loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from autoplan.errors import ConfigError, DeviceError, UsageError, WorkloadError
from autoplan.record import Record
from autoplan.strategies.analysis.training_facts import TrainingFacts
from autoplan.strategies.workloads.spec import WorkloadSpec


class LeftOut(Record):
    """A value of a knob that is not offered here, and why.

    A combination of degrees is named by the knob that rules it out, or by `dp` (dp_replicate x dp_shard).
    """

    knob: str
    value: Any = Field(description="a value, or a range in words: `1..`, `>1`")
    reason: str
    by: str = Field(default="", description="by how much the limit is broken, or the measurement")
    configurations: int = Field(default=0, description="how many combinations of degrees; 0 for a value of one knob")

    @property
    def family(self) -> str:
        """`precision=tf32` or `pp>1`."""
        return f"{self.knob}{self.value}" if str(self.value).startswith(">") else f"{self.knob}={self.value}"


class Choices(Record):
    """The values of one knob for this workload on this machine, the plain one first, and what was left out."""

    knob: str
    values: tuple[Any, ...]
    left_out: tuple[LeftOut, ...] = ()


def offer(knob: str, values: Iterable[Any], others: Mapping[Any, str | None] | None = None) -> Choices:
    """The choices of a knob.

    Args:
        knob: Its name.
        values: What is offered in any case, the plain value first.
        others: By other value, why it is not offered; None: it is offered too.
    """
    against = (others or {}).items()
    return Choices(
        knob=knob,
        values=(*values, *(value for value, reason in against if reason is None)),
        left_out=tuple(LeftOut(knob=knob, value=value, reason=reason) for value, reason in against if reason),
    )


def limited(choices: Choices, knobs: Mapping[str, tuple[Any, ...] | None] | None) -> Choices:
    """The choices of a knob within `Workload.knobs`: those that are not among them keep the plain value."""
    if knobs is None or choices.knob == "micro_batch" or (choices.knob in knobs and knobs[choices.knob] is None):
        return choices
    allowed = knobs.get(choices.knob) or choices.values[:1]
    reason = "the step is a program of its own: only its environment and a context around it can be changed"
    if choices.knob in knobs:
        reason = f"it changes the numbers inside of the step, and was not allowed: bound {choices.knob} to allow it"
    kept = tuple(value for value in choices.values if value in allowed)
    dropped = (LeftOut(knob=choices.knob, value=value, reason=reason) for value in choices.values if value not in kept)
    return Choices(knob=choices.knob, values=kept, left_out=(*choices.left_out, *dropped))


class Dependence(Record):
    """A module whose result for one sample depends on the other samples of its micro-batch."""

    module: str
    kind: str
    why: str


class ParallelFacts(Record):
    """Facts about the tensor and pipeline parallelism that a model allows (`autoplan.strategies.inspect`)."""

    num_blocks: int
    tp_unit: int | None = Field(default=None, description="tp divides this; None: no tensor parallelism")
    tp_unit_of: str = Field(default="", description="what the unit counts, in words")
    tp_reason: str | None = Field(default=None, description="why there is no tensor parallelism")
    pp_reason: str | None = Field(default=None, description="why there is no pipeline parallelism")
    noisy: bool = Field(default=False, description="the loss draws random numbers with dropout off: no tp, no pp")
    block_costs: tuple[float, ...] = Field(default=(), description="FLOPs per token of each block's forward")
    first_cost: float = Field(default=0.0, description="FLOPs per token before the blocks")
    last_cost: float = Field(default=0.0, description="FLOPs per token after the blocks: the output head")


class WorkloadFacts(Record):
    """Facts about a workload: its parts, and the values that each knob may have for it here.

    `spec` is the spec with everything filled in that only the user's own function knew.
    """

    spec: WorkloadSpec
    parameters: int = Field(description="each tied tensor counted once")
    trainable_parameters: int
    embedding_parameters: int
    parameter_bytes: int
    num_blocks: int
    hidden_size: int | None = None
    num_heads: int | None = None
    num_key_value_heads: int | None = None
    logits_per_sample: int | None = Field(default=None, description="elements: sequence length x vocabulary")
    attention_dropout: float = 0.0
    optimizer: str
    optimizer_states: int = Field(description="fp32 tensors the optimizer keeps per parameter: 2 for Adam")
    tied: tuple[tuple[str, ...], ...]
    micro_batch_dependent: tuple[Dependence, ...]
    fixed_micro_batch: int | None
    choices: tuple[Choices, ...]
    parallel: ParallelFacts | None = Field(default=None, description="what its model allows of tp and pp")
    step_s: float | None = Field(
        default=None,
        description="seconds of a plain step, where steps are a program of their own (Workload.knobs); else None",
    )
    training: TrainingFacts | None = Field(default=None, description="what the workload trains with, as numbers")

    def knob(self, name: str) -> Choices:
        """The choices of one knob; KeyError for a knob without."""
        return {choice.knob: choice for choice in self.choices}[name]


FUNCTIONS = {
    "load": "the workload's own function or file",
    "build_model": "build_model()",
    "make_batch": "make_batch(2, 0)",
    "facts": "build_optimizer(parameters)",
    "loss": "loss(model, batch) of two samples",
}
"""The phases of an inspection, and the function of the user's that runs in each."""

LOSS_PHASE = "loss"
"""The last phase. The facts are reported before it: where it takes too much memory, they are still known."""


class Inspection(Record):
    """The answer of a rank: facts, or the user's error; and what it imported of `inspect.LIBRARIES`."""

    facts: WorkloadFacts | None = None
    imported: tuple[str, ...] = ()
    error_code: str | None = None
    error: str | None = None
    hint: str | None = None

    @property
    def met_no_values(self) -> bool:
        """Whether the error may come of a tensor without values that an earlier phase left in a package's globals."""
        return any(word in (self.error or "") for word in ("meta", "FakeTensor"))


def read_inspection(result: Any) -> WorkloadFacts:
    """The facts in what `inspect.run_inspect_rank` gave back: a record, or its JSON form.

    Raises:
        WorkloadError, ConfigError, UsageError, DeviceError: as the rank met them.
    """
    inspection = Inspection.model_validate(result)
    if inspection.facts is not None:
        return inspection.facts
    kinds = {kind.code: kind for kind in (WorkloadError, ConfigError, DeviceError)}
    kind = kinds.get(inspection.error_code or "", UsageError)
    raise kind(inspection.error or "the workload cannot be inspected", hint=inspection.hint)

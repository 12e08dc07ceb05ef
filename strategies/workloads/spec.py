"""WorkloadSpec: how a workload is found again, in another process or another run. Data; loads no torch.

`autoplan.strategies.workloads.sources` makes specs from what the user gave, and workloads from specs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autoplan.errors import WorkloadError
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig


class Counted(Record):
    """The units that throughput counts (`autoplan.strategies.workloads.counting` finds them)."""

    unit: Literal["tokens", "samples"]
    by: Literal["function", "fields", "tensor", "length", "samples"] = Field(
        description="the workload's own function; fields of the batch; a tensor of the batch by its number; samples "
        "times the sequence length; samples"
    )
    fields: tuple[str, ...] = ()
    without_padding: tuple[str, ...] = Field(default=(), description="those whose padding is known and not counted")
    tensor: int = 0

    def describe(self) -> str:
        """The units that are counted, for a screen."""
        match self.by:
            case "function":
                return "the workload's own tokens(batch)"
            case "fields":
                known = [name for name in self.fields if name in self.without_padding]
                whole = [name for name in self.fields if name not in self.without_padding]
                parts = [f"{' and '.join(known)} without padding"] if known else []
                parts += [f"{' and '.join(whole)} whole (the batch has no padding mask for it)"] if whole else []
                return ", and ".join(parts)
            case "tensor":
                return "all elements of the batch's first tensor of whole numbers, padding included"
            case "length":
                return "samples times the sequence length"
            case "samples":
                return "samples"


class SizeRange(Record):
    """The smallest, the mean and the largest of some sizes."""

    min: int
    mean: float
    max: int


class BatchSizes(Record):
    """How the size of a workload's batches varies, as its own make_batch made them."""

    batches: int = Field(description="how many were made")
    samples: int = Field(description="in each: the global batch")
    elements: SizeRange = Field(description="elements of all tensors of a batch")
    positions: SizeRange = Field(description="of a batch, with padding: tokens, or elements where samples are counted")
    items: SizeRange = Field(description="of a batch: tokens without padding, or samples")
    largest: int = Field(description="index of the largest batch: what it takes is what must fit")
    typical: tuple[int, ...] = Field(description="indices of those nearest to the mean: what is timed")

    @property
    def vary(self) -> bool:
        """Whether the batches differ in size."""
        return self.elements.min != self.elements.max

    def describe(self, counted: Counted | None) -> str:
        """How the sizes vary, for a screen."""
        unit = "tokens" if counted is not None and counted.unit == "tokens" else "elements"
        sizes = self.positions.min, self.positions.mean, self.positions.max
        low, mean, high = (f"{size / self.samples:,.4g}" for size in sizes)
        seen = f"seen on {self.batches} batches of {self.samples} samples"
        if not self.vary:
            return f"all of one size, {mean} {unit} a sample with padding; {seen}"
        return (
            f"of {low} to {high} {unit} a sample with padding, mean {mean}; {seen}. The largest decides what fits; "
            "speed is measured on those nearest to the mean"
        )


class WorkloadSpec(Record):
    """A workload by reference: what is trained.

    `identity` is a hash of all that makes the training what it is: the model's configuration, the source of the
    user's functions, the sequence length, the global batch, the options.
    """

    kind: Literal["model", "config", "folder", "function", "object"]
    reference: str = Field(description="gpt2; a path of a config.json or a folder; file.py:function; a Python name")
    name: str
    sequence_length: int | None
    global_batch: int
    unit: Literal["tokens", "samples"] = "tokens"
    options: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="learning_rate, max_grad_norm, seed, ... as the source takes them"
    )
    arguments: tuple[str, ...] = Field(
        default=(), description="what sys.argv has after the file's name while the user's function runs"
    )
    payload: str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="objects of a library call, cloudpickled in base64; never written to a plan",
    )
    open_fields: tuple[str, ...] = Field(
        default=(),
        description="global_batch and sequence_length where the user's function decides them and has not been asked "
        "yet; inspection (strategies/inspect.py) fills them in and empties this",
    )
    identity: str
    digests: dict[str, str] = Field(
        default_factory=dict,
        description="a hash per part of what is trained (model, loss, optimizer, data, weights, versions, ...); the "
        "identity is made of them; empty in specs of earlier versions",
    )
    sources: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="for each part (model, loss, optimizer, schedule, data, weights, files) a hash for each piece of "
        "code and each value by name, so that what changed can be named; empty in specs of earlier versions",
    )
    unhashed: tuple[str, ...] = Field(default=(), description="types of values that no digest covers")
    counted: Counted | None = Field(default=None, description="what throughput counts; None: not looked at yet")
    batch_sizes: BatchSizes | None = Field(
        default=None, description="how the batches of a user's own function vary; None: not looked at, or fixed"
    )
    find_unused_parameters: bool = Field(
        default=False, description="a backward left a parameter that trains without a gradient; known after the trace"
    )
    taken_from: str = Field(
        default="", description="the class of the training that it was read from (Trainer); empty where there is none"
    )
    own_setting: TrainingConfig | None = Field(
        default=None,
        description="the setting that the training has now, as it was read or as the user says: the baseline of the "
        "search, where it runs. None: not known",
    )
    notes: tuple[str, ...] = Field(
        default=(), description="on where the workload came from, in sentences; known after the inspection"
    )
    defaults_used: tuple[str, ...] = Field(
        default=(), description="what the user did not give, in sentences for the screen"
    )

    @property
    def is_step(self) -> bool:
        """Whether it is a function of one step, of which no part is known; known after the inspection."""
        return self.taken_from == STEP_FUNCTION


STEP_FUNCTION = "step function"
"""What a workload is taken from that is a function of one step."""


DEFAULT_GLOBAL_BATCH = 32


def check_count(what: str, value: object, example: str) -> None:
    """Raises WorkloadError unless the value is None or a whole number of at least 1."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return
    raise WorkloadError(f"{what} is {value!r}; it is a whole number of at least 1", hint=f"For example: {example}")

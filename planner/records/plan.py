"""The record of a plan: its fields, and the rules between its figures, whatever was measured.

`Plan` (planner/plan/plan.py) adds what a user does with one. The code below it, which applies it, takes a `PlanRecord`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from autoplan.errors import ConfigError
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.trials import (
    Attempt,
    Claim,
    Interval,
    LeftOutFamily,
    Objective,
    Parity,
    Prediction,
    Trial,
    WorkLine,
)
from autoplan.planner.records.untried import Untried
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.analysis.training_facts import TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

SCHEMA_VERSION = 1

MAX_COUNT = 2**40
"""Largest global batch, sequence length, degree and count of memory in a plan; more is a slip of the keyboard."""

LARGEST_NUMBER = 1e30
"""No figure of a plan is larger: the fastest machines of 2026 have 1e19 FLOP/s."""


class Measurement(Record):
    """The figures measured of one configuration: the medians over its finalist runs, or over its one trial."""

    step_time_s: Interval
    tokens_per_s: Interval
    peak_memory_bytes: int | None
    mfu: float | None = Field(description="model FLOPs/s over the dense peak of the device in the plan's precision")
    mfu_peak_source: str | None = Field(description="where that peak comes from: datasheet or measured matmul")
    method: str
    trials: tuple[int, ...] = Field(description="numbers of the trials behind it")


DISTURBED = "other work disturbed"
"""So begins why an alternative has no ratio that compares."""


class Alternative(Record):
    """A configuration that lost, and by how much."""

    config: TrainingConfig
    measurement: Measurement | None
    speed_ratio: Interval | None = Field(
        description="its tokens/s over the plan's; an interval that contains 1 is a tie"
    )
    why: str


class HandSetting(Record):
    """The setting that a careful person would choose without a search, and how the plan compares with it."""

    config: TrainingConfig
    measurement: Measurement
    speedup: Interval = Field(description="tokens/s of the plan over the hand setting's")
    claim: Claim


class Choice(Record):
    """Why one knob has the value it has."""

    knob: str
    value: Any
    reason: str


class Environment(Record):
    """The software that was installed, and the variables that were set, where the plan was found."""

    autoplan: str
    torch: str
    python: str
    transformers: str | None
    liger_kernel: str | None = None
    triton: str | None = None
    torchao: str | None = None
    platform: str
    variables: dict[str, str] = Field(default_factory=dict)


class PlanNodes(Record):
    """The nodes that the ranks of a plan were measured on: all of the kind of its `hardware`."""

    count: int = Field(description="of the nodes that its ranks were on")
    ranks_per_node: int
    launcher: str = Field(description="what started its ranks there: elastic, slurm or ray")
    kind: str = Field(description="the same for all of them: 16 hex digits over CPU, GPUs, memory and versions")

    def describe(self) -> str:
        """`2 nodes with up to 8 rank(s) on each (slurm)`."""
        return f"{self.count} nodes with up to {self.ranks_per_node} rank(s) on each ({self.launcher})"


class PlanRecord(Record):
    """A plan as data: a verified one, or the best so far of a search that ended before (`unverified`)."""

    schema_version: int = SCHEMA_VERSION
    created: str
    study: str = Field(description="identity of the study that found it")
    workload: WorkloadSpec
    config: TrainingConfig
    accumulation: int
    device: Literal["cuda", "cpu"]
    hardware: HardwareProfile
    nodes: PlanNodes | None = Field(
        default=None, description="where its ranks were on several nodes; None: they were on one machine"
    )
    prediction: Prediction | None
    measurement: Measurement
    baseline: Trial = Field(
        description="what it is compared with: workload.own_setting where that ran, else the plain run"
    )
    speedup: Interval = Field(description="tokens/s of the plan over the baseline's")
    claim: Claim | None = Field(
        default=None, description="whether that is a claim, and why not; None in plans of earlier versions"
    )
    hand: HandSetting | None = Field(
        default=None,
        description="against a careful hand setting; None where it was not measured, as beside own_setting",
    )
    alternatives: tuple[Alternative, ...]
    untried: Untried | None = Field(
        default=None, description="what a longer search tries next; None: all were tried, or not known"
    )
    parity: Parity
    unverified: str | None = Field(
        default=None, description="why nobody verified it: the search ended before; None: it is verified"
    )
    failed_parity: tuple[TrainingConfig, ...] = Field(default=(), description="checked, and they would train otherwise")
    choices: tuple[Choice, ...]
    left_out: tuple[LeftOutFamily, ...]
    evidence: tuple[Trial, ...]
    ledger: tuple[WorkLine, ...] = Field(default=(), description="where the time of the search went, piece by piece")
    attempts: tuple[Attempt, ...] = Field(default=(), description="runs that something outside ended; none counts")
    notes: tuple[str, ...] = ()
    environment: Environment
    training: TrainingFacts | None = Field(
        default=None,
        description="optimizer, clipping, schedule and seed of the workload; None in plans of earlier versions",
    )
    objective: Objective = Field(default=Objective(), description="what the search looked for")
    loading: Loading | None = Field(default=None, description="the loader beside the step; None: no dataset was given")
    seal: dict[str, str] = Field(
        default_factory=dict,
        description="a digest of each section of the measured part, which shows an accidental edit; it is "
        "no signature. Empty in plans of earlier versions",
    )
    _edited: tuple[str, ...] = PrivateAttr(default=())
    _load_notes: tuple[str, ...] = PrivateAttr(default=())
    _unverified_ok: bool = PrivateAttr(default=False)
    _changed_ok: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_payload(cls, document: Any) -> Any:
        """A plan from a file carries no pickled objects: loading them would run code."""
        workload = document.get("workload") if isinstance(document, dict) else None
        if isinstance(workload, dict) and "payload" in workload:
            raise ValueError("workload.payload: a plan from a file carries no objects, since loading them runs code")
        return document

    @property
    def has_own_baseline(self) -> bool:
        """Whether it is compared with the setting that the training had; else with the plain run, or its stand-in."""
        return self.baseline.config == self.workload.own_setting

    @property
    def edited(self) -> tuple[str, ...]:
        """The sections of its file that were edited after it was written; empty where it is from no file."""
        return self._edited

    @property
    def load_notes(self) -> tuple[str, ...]:
        """Sentences to say about the file that the plan was loaded from."""
        return self._load_notes

    @property
    def unverified_ok(self) -> bool:
        """Whether the user takes it although it is unverified."""
        return self._unverified_ok

    @property
    def changed_ok(self) -> bool:
        """Whether the user takes it although it was edited, or what it is of changed."""
        return self._changed_ok

    def accepted(self, unverified_ok: bool, *, changed_ok: bool = False) -> Self:
        """The plan as the user takes it: although it is unverified, or although it or its code changed."""
        plan = self.model_copy()
        plan._unverified_ok = self._unverified_ok or unverified_ok
        plan._changed_ok = self._changed_ok or changed_ok
        return plan


def broken_rules(plan: PlanRecord) -> list[str]:
    """Sentences on what does not add up in a plan."""
    found = [*_sizes(plan)]
    if found:
        return found  # what follows divides by them
    return [*_batch(plan), *_device(plan), *_options(plan), *_training(plan), *_figures(plan)]


def _sizes(plan: PlanRecord) -> Iterator[str]:
    length = plan.workload.sequence_length
    counts = {
        "workload.global_batch": plan.workload.global_batch,
        "workload.sequence_length": 1 if length is None else length,
        "accumulation": plan.accumulation,
    }
    if plan.nodes is not None:
        counts |= {"nodes.count": plan.nodes.count, "nodes.ranks_per_node": plan.nodes.ranks_per_node}
    for name, value in counts.items():
        if not 1 <= value <= MAX_COUNT:
            yield f"{name} is {value}; it is at least 1 and at most 2**40"
    for place, config in _configs(plan):
        for knob, value in config.model_dump().items():
            if isinstance(value, int) and value > MAX_COUNT:
                yield f"{place}.{knob} is {value}; it is at most 2**40"


def _batch(plan: PlanRecord) -> Iterator[str]:
    config, batch = plan.config, plan.workload.global_batch
    if config.micro_batch * plan.accumulation * config.dp != batch:
        yield (
            f"micro_batch {config.micro_batch} x accumulation {plan.accumulation} x {config.dp} data-parallel rank(s) "
            f"= {config.micro_batch * plan.accumulation * config.dp}, and the global batch is {batch}"
        )
    for place, other in _configs(plan):
        try:
            other.accumulation(batch)
        except ConfigError as error:
            yield f"{place}: {error.message}"


def _device(plan: PlanRecord) -> Iterator[str]:
    devices = [device for device in plan.hardware.devices if device.type == plan.device]
    ranks, nodes = plan.config.world_size, plan.nodes
    if nodes is not None and ranks > nodes.count * nodes.ranks_per_node:
        yield f"it has {ranks} ranks, and its nodes have {nodes.count} x {nodes.ranks_per_node}"
    here = ranks if nodes is None else nodes.ranks_per_node
    if not devices:
        yield f"it is for {plan.device}, and its hardware has no such device"
    elif plan.device == "cuda" and here > len(devices):
        named = f"dp_replicate x dp_shard x tp x pp = {ranks} ranks" if nodes is None else f"{here} ranks on each node"
        yield f"{named}, and its hardware has {len(devices)} GPU(s)"


def _options(plan: PlanRecord) -> Iterator[str]:
    """The options of the workload that autoplan itself reads; those of a user's function are the function's."""
    options = plan.workload.options
    for name in ("learning_rate", "weight_decay"):
        if plan.workload.kind != "function" and name in options and not _is_number(options[name]):
            yield f"workload.options.{name} is {options[name]!r}; it is a number"
    norm = options.get("max_grad_norm")
    if plan.workload.kind != "function" and norm is not None and not _is_number(norm):
        yield f"workload.options.max_grad_norm is {norm!r}; it is a number, or null for no clipping"
    for name in ("seed", "fixed_micro_batch"):
        value = options.get(name)
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool)):
            yield f"workload.options.{name} is {value!r}; it is a whole number"


_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "lr_decay")
_FLAGS = ("nesterov", "centered", "amsgrad", "maximize")
_PLAIN_OPTIONS = ("adam.Adam", "adamw.AdamW", "sgd.SGD", "adagrad.Adagrad", "rmsprop.RMSprop", "nadam.NAdam")
"""Of torch.optim, those whose options are numbers; Adafactor's eps is a pair, another class may have anything."""


def _training(plan: PlanRecord) -> Iterator[str]:
    training = plan.training
    if training is None:
        return
    if not training.groups:
        yield "training.groups is empty; an optimizer has at least one group"
    if training.schedule is not None and not all(training.schedule.learning_rates):
        yield "training.schedule.learning_rates has an empty step"
    if training.optimizer.removeprefix("torch.optim.") not in _PLAIN_OPTIONS:
        return
    for number, group in enumerate(training.groups):
        options, place = group.options, f"training.groups.{number}.options"
        for name in _NUMBERS:
            if name in options and not _is_number(options[name]):
                yield f"{place}.{name} is {options[name]!r}; it is a number"
        for name in _FLAGS:
            if name in options and not isinstance(options[name], bool):
                yield f"{place}.{name} is {options[name]!r}; it is true or false"
        betas = options.get("betas", [0.9, 0.999])
        if not (isinstance(betas, list | tuple) and len(betas) >= 2 and all(map(_is_number, betas))):
            yield f"{place}.betas is {betas!r}; it is a list of numbers"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figures(plan: PlanRecord) -> Iterator[str]:
    """Every interval holds its median, the plan's own figures are above 0, and those of its parity check agree."""
    parity = plan.parity
    if parity.passed and parity.failures:
        yield f"parity passed, and parity.failures says: {parity.failures[0]}"
    if parity.tolerance < 0:
        yield f"parity.tolerance is {parity.tolerance}; it is at least 0"
    for place, value in _walk(plan, ""):
        if isinstance(value, Interval) and not value.low <= value.median * (1 + 1e-9) <= value.high * (1 + 2e-9):
            yield f"{place}: {value.median} is not between {value.low} and {value.high}"
        if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
            yield f"{place} is {value}; no figure of a plan is so large"
    measured, baseline = plan.measurement, plan.baseline
    for number, line in enumerate(plan.ledger):
        if line.began_s < 0 or line.seconds < 0:
            yield f"ledger.{number} began at {line.began_s} s and took {line.seconds} s; both are at least 0"
    for name, interval in (
        ("measurement.step_time_s", measured.step_time_s),
        ("measurement.tokens_per_s", measured.tokens_per_s),
        ("speedup", plan.speedup),
        ("hand.speedup", None if plan.hand is None else plan.hand.speedup),
        ("baseline.step_time_s", baseline.step_time_s),
        ("baseline.tokens_per_s", baseline.tokens_per_s),
    ):
        if interval is not None and not (interval.median > 0 and interval.low >= 0):
            yield f"{name} is {interval.median} ({interval.low} to {interval.high}); it is above 0"
    if measured.peak_memory_bytes is not None and measured.peak_memory_bytes < 0:
        yield f"measurement.peak_memory_bytes is {measured.peak_memory_bytes}; it is at least 0"


def _configs(plan: PlanRecord) -> list[tuple[str, TrainingConfig]]:
    found = {
        "config": plan.config,
        "baseline.config": plan.baseline.config,
        "workload.own_setting": plan.workload.own_setting,
        "hand.config": None if plan.hand is None else plan.hand.config,
    }
    for name in ("evidence", "ledger", "alternatives"):
        found |= {f"{name}.{number}.config": one.config for number, one in enumerate(getattr(plan, name))}
    return [(place, config) for place, config in found.items() if config is not None]


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every record and every number of a plan, with its place."""
    yield place, value
    if isinstance(value, BaseModel):
        inner = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, dict):
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        inner = [(str(number), item) for number, item in enumerate(value)]
    else:
        return
    for name, item in inner:
        yield from _walk(item, f"{place}.{name}" if place else name)

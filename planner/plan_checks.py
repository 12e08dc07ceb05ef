"""The plan's own arithmetic: what must hold between its figures, whatever was measured.

In: a plan. Out: sentences, one for each rule that it breaks; a plan that a search wrote breaks none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from autoplan.errors import ConfigError
from autoplan.planner.records import Interval, Parity, Trial, WorkLine
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.training_facts import TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

MAX_COUNT = 2**40
"""Largest global batch, sequence length, degree and count of memory in a plan; more is a slip of the keyboard."""

LARGEST_NUMBER = 1e30
"""No figure of a plan is larger: the fastest machines of 2026 have 1e19 FLOP/s."""


class PlanFigures(Protocol):
    """What the checks read of a plan."""

    @property
    def workload(self) -> WorkloadSpec: ...

    @property
    def config(self) -> TrainingConfig: ...

    @property
    def accumulation(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def hardware(self) -> HardwareProfile: ...

    @property
    def measurement(self) -> Any: ...

    @property
    def baseline(self) -> Trial: ...

    @property
    def speedup(self) -> Interval: ...

    @property
    def hand(self) -> Any: ...

    @property
    def ledger(self) -> Sequence[WorkLine]: ...

    @property
    def alternatives(self) -> Sequence[Any]: ...

    @property
    def parity(self) -> Parity: ...

    @property
    def evidence(self) -> Sequence[Trial]: ...

    @property
    def training(self) -> TrainingFacts | None: ...


def broken_rules(plan: PlanFigures) -> list[str]:
    """What does not add up in a plan, in sentences."""
    found = [*_sizes(plan)]
    if found:
        return found  # what follows divides by them
    return [*_batch(plan), *_device(plan), *_parity(plan), *_options(plan), *_training(plan), *_figures(plan)]


def _sizes(plan: PlanFigures) -> Iterator[str]:
    length = plan.workload.sequence_length
    counts = {
        "workload.global_batch": plan.workload.global_batch,
        "workload.sequence_length": 1 if length is None else length,
        "accumulation": plan.accumulation,
    }
    for name, value in counts.items():
        if not 1 <= value <= MAX_COUNT:
            yield f"{name} is {value}; it is at least 1 and at most 2**40"
    for place, config in _configs(plan):
        for knob, value in config.model_dump().items():
            if isinstance(value, int) and value > MAX_COUNT:
                yield f"{place}.{knob} is {value}; it is at most 2**40"


def _batch(plan: PlanFigures) -> Iterator[str]:
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


def _device(plan: PlanFigures) -> Iterator[str]:
    devices = [device for device in plan.hardware.devices if device.type == plan.device]
    if not devices:
        yield f"it is for {plan.device}, and its hardware has no such device"
    elif plan.device == "cuda" and plan.config.world_size > len(devices):
        yield (
            f"dp_replicate x dp_shard x tp x pp = {plan.config.world_size} ranks, and its hardware has "
            f"{len(devices)} GPU(s)"
        )


def _parity(plan: PlanFigures) -> Iterator[str]:
    parity = plan.parity
    if parity.passed and parity.failures:
        yield f"parity passed, and parity.failures says: {parity.failures[0]}"
    if parity.tolerance < 0:
        yield f"parity.tolerance is {parity.tolerance}; it is at least 0"


def _options(plan: PlanFigures) -> Iterator[str]:
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


def _training(plan: PlanFigures) -> Iterator[str]:
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


def _figures(plan: PlanFigures) -> Iterator[str]:
    """Every interval holds its median, and the plan's own figures are above 0."""
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


def _configs(plan: PlanFigures) -> Iterator[tuple[str, TrainingConfig]]:
    yield "config", plan.config
    yield "baseline.config", plan.baseline.config
    if plan.hand is not None:
        yield "hand.config", plan.hand.config
    for number, trial in enumerate(plan.evidence):
        yield f"evidence.{number}.config", trial.config
    for number, line in enumerate(plan.ledger):
        if line.config is not None:
            yield f"ledger.{number}.config", line.config
    for number, alternative in enumerate(plan.alternatives):
        yield f"alternatives.{number}.config", alternative.config


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

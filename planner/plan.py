"""Plan: the result of a search. Data only: JSON, readable and diffable; loading one never runs code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from autoplan.errors import PlanError
from autoplan.planner.apply import AS_SEARCHED, prepare_plan
from autoplan.planner.records import Attempt, Claim, Interval, LeftOutFamily, Parity, Prediction, Trial
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.analysis.training_facts import TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.workload import LossSum, OutputHead

SCHEMA_VERSION = 1


class Measurement(Record):
    """What was measured of one configuration: the medians over its finalist runs, or over its one trial."""

    step_time_s: Interval
    tokens_per_s: Interval
    peak_memory_bytes: int | None
    mfu: float | None = Field(description="model FLOPs/s over the dense peak of the device in the plan's precision")
    mfu_peak_source: str | None = Field(description="where that peak comes from: datasheet or measured matmul")
    method: str
    trials: tuple[int, ...] = Field(description="numbers of the trials behind it")


class Alternative(Record):
    """A configuration that lost, and by how much."""

    config: TrainingConfig
    measurement: Measurement | None
    speed_ratio: Interval | None = Field(
        description="its tokens/s over the plan's; an interval that contains 1 is a tie"
    )
    why: str


class HandSetting(Record):
    """What a careful person would set without a search, and how the plan compares with it."""

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
    """What was installed and set where the plan was found."""

    autoplan: str
    torch: str
    python: str
    transformers: str | None
    platform: str
    variables: dict[str, str] = Field(default_factory=dict)


class Plan(Record):
    """A verified plan."""

    schema_version: int = SCHEMA_VERSION
    created: str
    study: str = Field(description="identity of the study that found it")
    workload: WorkloadSpec
    config: TrainingConfig
    accumulation: int
    device: Literal["cuda", "cpu"]
    hardware: HardwareProfile
    prediction: Prediction | None
    measurement: Measurement
    baseline: Trial
    speedup: Interval = Field(description="tokens/s of the plan over the baseline's")
    claim: Claim | None = Field(
        default=None, description="whether that is a claim, and why not; None in plans of earlier versions"
    )
    hand: HandSetting | None = Field(
        default=None, description="against a careful hand setting; None where it was not measured"
    )
    alternatives: tuple[Alternative, ...]
    parity: Parity
    choices: tuple[Choice, ...]
    left_out: tuple[LeftOutFamily, ...]
    evidence: tuple[Trial, ...]
    attempts: tuple[Attempt, ...] = Field(
        default=(), description="runs that something outside ended; each was made again, and none counts"
    )
    notes: tuple[str, ...] = ()
    environment: Environment
    training: TrainingFacts | None = Field(
        default=None,
        description="optimizer, clipping, schedule and seed of the workload; None in plans of earlier versions",
    )

    def save(self, path: str | Path) -> Path:
        """Writes the plan as indented JSON, atomically; returns the path.

        Raises:
            PlanError: the file cannot be written.
        """
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.model_dump_json(indent=2) + "\n")
            temporary.replace(path)
        except OSError as error:
            raise PlanError(
                f"the plan cannot be written to {path}: {error.strerror}", hint="Give another place with --out."
            ) from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            PlanError: no such file, not JSON (truncated), not a plan, or of a newer schema.
        """
        path = Path(path)
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise PlanError(
                f"{path} cannot be read: {error.strerror}", hint="autoplan search writes a plan."
            ) from error
        except ValueError as error:
            raise PlanError(
                f"{path} is not JSON: {error}",
                hint="The file may be cut short. The search's store keeps its record: run the same autoplan search "
                "again, and it writes the plan without repeating a trial.",
            ) from error
        version = document.get("schema_version") if isinstance(document, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise PlanError(
                f"{path} has plan schema {version}; this autoplan reads up to {SCHEMA_VERSION}",
                hint="Update autoplan, or make the plan again with this version.",
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the document"
            raise PlanError(
                f"{path} is not a plan: {place}: {first['msg']} ({error.error_count()} problem(s) in all)",
                hint="Write plans with autoplan search; autoplan schema prints what a plan contains.",
            ) from None

    def prepare(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        loss: Callable[[Any, Any], LossSum] | None = None,
        *,
        device: str | torch.device | None = None,
        make_batch: Callable[[int, int], Any] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = AS_SEARCHED,
        max_grad_norm: float | None = AS_SEARCHED,
        global_batch: int | None = None,
        head: OutputHead | None = None,
        changed_ok: bool = False,
    ) -> TrainingRun:
        """Builds the training run that was measured, on your own model, optimizer and loss.

        With nothing given it builds the workload that the search knew, where the plan can name it.

        Args:
            model: A module, which is changed in place, or a function that makes one. None: the model of the search.
            optimizer: An optimizer over the model's parameters (made anew over them, with its groups, hyper-parameters
                and state), or a function that makes one from parameters. None: as the workload of the search has it.
            loss: `loss(model, batch)` gives a LossSum: the summed loss and the count of its items. None: the loss of
                the search, where the plan can name it, or the causal loss of a transformers model with `labels`.
            device: Where it runs. None: the device the plan was found for, the current one of its kind.
            make_batch: `make_batch(num_samples, index)` gives a batch on the CPU. Training itself needs none: batches
                are handed to `run.step`.
            schedule: Makes the learning-rate schedule from the optimizer; it is stepped once per optimizer step.
                None: a constant rate. Not given: as in the search; refused where the plan cannot contain it (Python
                objects).
            max_grad_norm: The gradients are clipped to this norm (L2, of the whole gradient) before each optimizer
                step; None: no clipping. Not given: as in the search.
            global_batch: Samples per optimizer step. Must be the plan's own, if given: a plan never changes it.
            head: With a loss of your own: how the output head splits off (`Workload.head`), where the plan's loss is
                fused.
            changed_ok: Train otherwise than the search did: with an optimizer of another class, with other parameter
                groups or other values in them, or from files whose code changed. Without it that is refused; changed
                weights and versions are a warning.

        Returns:
            The run: `run.step(batch)` takes the `run.local_batch` samples of this rank.

        Raises:
            PlanError: the global batch, the optimizer or the code is not the search's, or its schedule was not given.
            ConfigError: the world does not have the plan's ranks, or a knob does not apply to this model.
            WorkloadError: the parts do not make a workload.
            DeviceError: the plan's kind of device is not here.
        """
        return prepare_plan(
            self,
            model,
            optimizer,
            loss,
            device=device,
            make_batch=make_batch,
            schedule=schedule,
            max_grad_norm=max_grad_norm,
            global_batch=global_batch,
            head=head,
            changed_ok=changed_ok,
        )

"""Plan: what a search hands over. Data only: JSON, readable and diffable; loading one never runs code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from autoplan.errors import PlanError
from autoplan.planner.records import Interval, LeftOutFamily, Parity, Prediction, Trial
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from autoplan.strategies.run import TrainingRun

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
    speed_ratio: Interval | None = Field(description="its tokens/s over the plan's; an interval that holds 1 is a tie")
    why: str


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
    alternatives: tuple[Alternative, ...]
    parity: Parity
    choices: tuple[Choice, ...]
    left_out: tuple[LeftOutFamily, ...]
    evidence: tuple[Trial, ...]
    notes: tuple[str, ...] = ()
    environment: Environment

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
                hint="Write plans with autoplan search; autoplan schema prints what a plan holds.",
            ) from None

    def prepare(self, model: Any = None, optimizer: Any = None, loss: Any = None, **options: Any) -> TrainingRun:
        """Applies the plan: see `autoplan.planner.apply.prepare_plan`, which this calls."""
        from autoplan.planner.apply import prepare_plan

        return prepare_plan(self, model, optimizer, loss, **options)

"""What goes into a search, what it tells while it runs, and what comes out. Loads neither torch nor optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autoplan.planner.plan import Plan
from autoplan.planner.records import LeftOutFamily, Prediction, Trial
from autoplan.planner.space.bounds import Bound
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

DEFAULT_BUDGET_S = 600.0

Sampler = Literal["ours", "tpe", "random"]
Status = Literal["plan_found", "dry_run", "no_feasible_plan", "budget_ended", "interrupted"]
EXIT_CODES: Mapping[str, int] = {
    "plan_found": 0,
    "dry_run": 0,
    "no_feasible_plan": 3,
    "budget_ended": 5,
    "interrupted": 130,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What a search is asked for.

    Attributes:
        spec: What is trained.
        budget_s: Seconds for the search over all its runs; None: 600, or what an earlier run of it was given.
            A larger figure than before extends the search.
        max_trials: Trials over all its runs, finalist runs not counted; None: no limit.
        fixed: Knobs the user fixed, values in the knobs' own types (`config.parse_knob`).
        bounds: Knobs the user bounded: `(low, high)` inclusive for numbers, or the allowed values.
        device: "cuda" or "cpu"; None: CUDA where there is one.
        memory_limit_bytes: What one trial may take on the device (host memory on CPU); None: 80 % of what is
            available.
        out: Where the plan is written; None: only into the store.
        store: The folder of the search's record; None: the user's state folder, by the study's identity.
        fresh: Start over; the old folder is renamed aside.
        sampler: Ours, or Optuna's TPE or random one.
        nproc: The largest number of ranks a candidate may use.
        dry_run: The space with predicted memory and time; nothing is run.
        seed: Of the sampler and the bootstrap.
    """

    spec: WorkloadSpec
    budget_s: float | None = None
    max_trials: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    device: Literal["cuda", "cpu"] | None = None
    memory_limit_bytes: int | None = None
    out: Path | None = None
    store: Path | None = None
    fresh: bool = False
    sampler: Sampler = "ours"
    nproc: int = 1
    dry_run: bool = False
    seed: int = 0

    def allows(self, config: TrainingConfig) -> bool:
        """Whether a configuration keeps what the user fixed and bounded; the plain baseline need not."""
        return all(getattr(config, knob) == value for knob, value in self.fixed.items()) and all(
            bound.allows(getattr(config, knob)) for knob, bound in self.bounds.items()
        )


class BudgetState(Record):
    """Where the search stands with its time."""

    budget_s: float
    spent_s: float = Field(description="over all runs of this search")
    reserved_s: float = Field(description="kept for the finalists and the parity check")
    trials_done: int
    max_trials: int | None

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return max(0.0, self.budget_s - self.spent_s)


class Candidate(Record):
    """One legal configuration with what the cost model says of it."""

    config: TrainingConfig
    prediction: Prediction | None


class SearchObserver:
    """Is told what the search does; every method does nothing unless overridden. Called from the search's thread."""

    def on_phase(self, name: str, detail: str = "") -> None:
        """A phase begins: probe, inspect, trace, space, baseline, search, finalists, parity, plan."""

    def on_note(self, text: str) -> None:
        """A sentence the user should see."""

    def on_hardware(self, hardware: HardwareProfile, memory_limit_bytes: int) -> None:
        """The probes are done."""

    def on_workload(self, spec: WorkloadSpec) -> None:
        """The workload has been read: what a user's function decides itself (its global batch) is known now."""

    def on_space(self, candidates: int, left_out: tuple[LeftOutFamily, ...]) -> None:
        """The legal candidates that are predicted to fit are known."""

    def on_trial_started(
        self,
        number: int,
        purpose: Literal["baseline", "reference", "search", "finalist"],
        config: TrainingConfig,
        prediction: Prediction | None,
        budget: BudgetState,
    ) -> None:
        """A trial starts."""

    def on_progress(self, phase: str, facts: dict[str, Any], budget: BudgetState) -> None:
        """A trial (or the parity check) goes on; several times a second at most."""

    def on_trial_finished(self, trial: Trial, best: Trial | None, budget: BudgetState) -> None:
        """A trial has ended and is on disk; also called for each trial taken from the record of an earlier run."""


class SearchResult(Record):
    """How a search ended."""

    schema_version: int = 1
    status: Status
    reason: str | None = Field(default=None, description="a sentence, where there is no plan")
    hint: str | None = Field(default=None, description="what to do then")
    plan: Plan | None = None
    plan_path: str | None = None
    baseline: Trial | None = None
    best: Trial | None = Field(default=None, description="fastest so far, verified or not")
    trials: tuple[Trial, ...] = ()
    left_out: tuple[LeftOutFamily, ...] = ()
    candidates: tuple[Candidate, ...] = Field(default=(), description="dry run: the space, fastest prediction first")
    from_record: bool = Field(default=False, description="a finished search answered without running anything")
    resumed_trials: int = 0
    budget_s: float = 0.0
    spent_s: float = 0.0
    study: str = ""
    store: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 plan found or dry run; 3 nothing feasible; 5 budget ended; 130 interrupted."""
        return EXIT_CODES[self.status]

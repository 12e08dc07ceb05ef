"""What goes into a search, what it says while it runs, and what comes out. Loads neither torch nor optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from autoplan.errors import UsageError
from autoplan.planner.plan import Plan
from autoplan.planner.records import (
    Attempt,
    LeftOutFamily,
    Objective,
    Prediction,
    Purpose,
    Recheck,
    Trial,
    WorkLine,
)
from autoplan.planner.search.option_checks import (
    CHECKS,
    DeviceName,
    Numerics,
    SamplerName,
    refuse_lossy,
)
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s, parse_memory_bytes

if TYPE_CHECKING:
    import optuna

    from autoplan.planner.search.next_work import Work

DEFAULT_BUDGET_S = 600.0

Status = Literal["plan_found", "dry_run", "no_feasible_plan", "did_not_run", "budget_ended", "interrupted"]
EXIT_CODES: Mapping[str, int] = {
    "plan_found": 0,
    "dry_run": 0,
    "no_feasible_plan": 3,
    "did_not_run": 4,
    "budget_ended": 5,
    "interrupted": 130,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """What a search is asked for: the one list that `autoplan.search` and `autoplan search` fill.

    Each value is as a person gives it, and is checked when the options are made. `fix` and `bound` then have values of
    the knobs' own types; `sampler="ours"` is the earlier name of "autoplan".

    Attributes:
        spec: What is trained.
        budget: Time for the search over all its runs, like "10m", or seconds; None: 10 minutes, or what an earlier run
            of it was given. A larger one than before extends the search.
        max_trials: Trials over all its runs, finalist runs not counted; None: no limit.
        fix: Knobs to keep at one value, like `{"precision": "bf16"}`.
        bound: Knobs to keep within bounds: `(low, high)` inclusive, a list of values, the text `1..8` or `a,b`, or a
            Bound. When it is read, each is a Bound.
        device: "cuda" or "cpu"; None: CUDA where there is one.
        memory_limit: What one trial may take on the device (host memory on CPU): "8GiB", bytes, or "80%" of all the
            memory there is; None: 80 % of what is available, of a GPU 95 % less its context.
        nproc: The largest number of ranks; None: all visible GPUs, 1 on CPU.
        sampler: "autoplan", "tpe", "random", or a sampler of Optuna.
        out: Where the plan is written; None: only into the store.
        store: The folder of the searches' records, one folder in it for each; None: the user's state folder.
        fresh: Start over; what the store has of this search is moved aside.
        wait: Wait where another search has the device or the store; waiting costs no budget. False: an error.
        numerics: "kept", or "lossy": parameters, optimizer states and products in fewer bits are in the space too.
        dry_run: The space with predicted memory and time; nothing is run.
        seed: Of the sampler and the bootstrap.
        objective: "throughput"; "memory": the least of it at a floor of throughput; "cost": the least time of all ranks
            together.
        min_throughput: With "memory", the floor as a share of the best throughput; None: 0.9.
        price_per_hour: Of one device, for the cost of a million tokens; None: costs are not shown.
        recheck: Where the search has finished before, its plan runs one short trial, and the result says whether it is
            still as fast (`autoplan.search` and the command do it; `run_search` does not).
        loader: The dataset of the training, whose loader is measured beside the plan's step; None: it is not.

    Raises:
        UsageError: a value is wrong, and what it may be (ConfigError for a knob).
    """

    spec: WorkloadSpec
    budget: str | float | None = None
    max_trials: int | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    device: DeviceName | None = None
    memory_limit: str | int | None = None
    nproc: int | None = None
    sampler: SamplerName | optuna.samplers.BaseSampler = "autoplan"
    out: str | Path | None = None
    store: str | Path | None = None
    fresh: bool = False
    wait: bool = False
    numerics: Numerics = "kept"
    dry_run: bool = False
    seed: int = 0
    loader: LoaderSpec | None = None
    recheck: bool = False
    objective: str = "throughput"
    min_throughput: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.min_throughput is not None and self.objective != "memory":
            raise UsageError(
                f"--min-throughput is {self.min_throughput}, and the objective is {self.objective}",
                hint="It goes with --objective memory.",
            )
        if self.numerics == "kept":
            refuse_lossy(self.fix, self.bound)
        if "micro_batch" in self.fix:
            # The workload has to know: one with BatchNorm refuses a micro-batch that the user did not choose.
            options = dict(self.spec.options) | {"fixed_micro_batch": self.fix["micro_batch"]}
            object.__setattr__(self, "spec", self.spec.model_copy(update={"options": options}))

    @property
    def wanted(self) -> Objective:
        """What is looked for."""
        return Objective(
            name=self.objective,  # type: ignore[arg-type]  # checked
            min_throughput=self.min_throughput,
            price_per_hour=self.price_per_hour,
        )

    @property
    def budget_s(self) -> float | None:
        """The budget in seconds; None: none was given."""
        return None if self.budget is None else parse_duration_s(self.budget)

    def memory_limit_bytes(self, total_bytes: float | None) -> int | None:
        """The limit in bytes; None: none was given.

        Args:
            total_bytes: All the memory of the device, which a share is of; None: not known.

        Raises:
            UsageError: a share was given, and the memory of the device is not known.
        """
        limit = None if self.memory_limit is None else parse_memory_bytes(self.memory_limit)
        if not isinstance(limit, float):
            return limit
        if total_bytes is None:
            raise UsageError(
                f"--memory-limit is {self.memory_limit!r}, and the memory of the device is not known",
                hint="Give the limit as a size, for example --memory-limit 8GiB.",
            )
        return int(limit * total_bytes)

    def allows(self, config: TrainingConfig) -> bool:
        """Whether a configuration keeps what the user fixed and bounded; the plain baseline need not."""
        return all(getattr(config, knob) == value for knob, value in self.fix.items()) and all(
            bound.allows(getattr(config, knob)) for knob, bound in self.bound.items()
        )


# The one place that checks values. Texts name an option as the command line does; in Python an error says them as


class BudgetState(Record):
    """The time of a search: its budget, and what is spent of it."""

    budget_s: float
    spent_s: float = Field(description="over all runs of this search")
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
    """Its methods are called with what the search does, in the search's thread; each does nothing unless overridden."""

    def on_budget(self, budget: BudgetState) -> None:
        """The clock of the search begins, or goes on where an earlier run ended."""

    def on_phase(self, name: str, detail: str = "") -> None:
        """A phase begins: probe, inspect, trace, space, baseline, compile ahead, hand setting, pair,
        parity, claim, loader, plan.
        """

    def on_note(self, text: str) -> None:
        """A sentence the user should see."""

    def on_hardware(self, hardware: HardwareProfile, memory_limit_bytes: int) -> None:
        """The probes are done."""

    def on_workload(self, spec: WorkloadSpec) -> None:
        """The workload has been read: what a user's function decides itself (its global batch) is known now."""

    def on_space(self, candidates: int, left_out: tuple[LeftOutFamily, ...]) -> None:
        """The legal candidates that are predicted to fit are known."""

    def on_work(self, work: Work, best: Trial | None, budget: BudgetState) -> None:
        """The next piece of work is chosen: what it is, why, and what it was preferred to."""

    def on_trial_started(
        self,
        number: int,
        purpose: Purpose,
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
    unverified_path: str | None = Field(default=None, description="the best so far as a plan that is not verified")
    baseline: Trial | None = None
    best: Trial | None = Field(default=None, description="fastest so far, verified or not")
    trials: tuple[Trial, ...] = ()
    ledger: tuple[WorkLine, ...] = Field(default=(), description="where the time went, piece by piece")
    attempts: tuple[Attempt, ...] = Field(default=(), description="runs that something outside ended; none counts")
    left_out: tuple[LeftOutFamily, ...] = ()
    candidates: tuple[Candidate, ...] = Field(default=(), description="dry run: the space, fastest prediction first")
    from_record: bool = Field(default=False, description="a finished search answered without running anything")
    resumed_trials: int = 0
    budget_s: float = 0.0
    spent_s: float = 0.0
    study: str = ""
    store: str = ""
    notes: tuple[str, ...] = ()
    recheck: Recheck | None = Field(default=None, description="with --recheck: a short trial of a plan from the record")

    @property
    def exit_code(self) -> int:
        """0 plan found or dry run; 3 nothing feasible; 4 it did not run; 5 budget ended; 130 interrupted.

        Of a plan that was checked again: as of `autoplan verify`.
        """
        if self.recheck is not None:
            return self.recheck.exit_code
        return EXIT_CODES[self.status]

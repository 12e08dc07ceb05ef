"""What goes into a search, what it says while it runs, and what comes out. Loads neither torch nor optuna."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from autoplan.errors import UsageError
from autoplan.planner.plan import Plan
from autoplan.planner.records import Attempt, LeftOutFamily, Prediction, Purpose, Trial
from autoplan.planner.space.bounds import Bound, parse_bound
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig, check_knob
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import parse_duration_s, parse_memory_bytes

if TYPE_CHECKING:
    import optuna

DEFAULT_BUDGET_S = 600.0

DeviceName = Literal["cuda", "cpu"]
SamplerName = Literal["autoplan", "tpe", "random", "ours"]
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
        dry_run: The space with predicted memory and time; nothing is run.
        seed: Of the sampler and the bootstrap.

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
    dry_run: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if "micro_batch" in self.fix:
            # The workload has to know: one with BatchNorm refuses a micro-batch that the user did not choose.
            options = dict(self.spec.options) | {"fixed_micro_batch": self.fix["micro_batch"]}
            object.__setattr__(self, "spec", self.spec.model_copy(update={"options": options}))

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
# keyword arguments (`autoplan.errors.as_keywords`).


def flag(name: str) -> str:
    """An option as the command line has it."""
    return "--" + name.replace("_", "-")


def _check_budget(name: str, value: Any) -> Any:
    if value is not None:
        parse_duration_s(value, option=flag(name))
    return value


def _check_memory(name: str, value: Any) -> Any:
    if value is not None:
        parse_memory_bytes(value, option=flag(name))
    return value


def _check_count(name: str, value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is a whole number of at least 1.")
    return value


def _check_seed(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is a whole number from 0 to 4294967295.")
    return value


def _check_switch(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is True or False.")
    return value


def _check_device(name: str, value: Any) -> Any:
    if value not in (None, *get_args(DeviceName)):
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is cuda or cpu.")
    return value


def _check_sampler(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value in get_args(SamplerName):
            return "autoplan" if value == "ours" else value
    elif all(callable(getattr(value, method, None)) for method in ("infer_relative_search_space", "sample_relative")):
        return value  # of optuna.samplers.BaseSampler; importing that here would load optuna
    raise UsageError(
        f"{flag(name)} is {value!r}",
        hint="It is autoplan, tpe or random; autoplan.search also takes a sampler object of Optuna.",
    )


def _check_place(name: str, value: Any) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is a path.")
    return Path(value)


def _check_fix(name: str, value: Any) -> dict[str, Any]:
    return {knob: check_knob(knob, one) for knob, one in _as_mapping(name, value, '{"precision": "bf16"}').items()}


def _check_bound(name: str, value: Any) -> dict[str, Bound]:
    return {knob: _bound(knob, one) for knob, one in _as_mapping(name, value, '{"micro_batch": (1, 8)}').items()}


def _as_mapping(name: str, value: Any, example: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{flag(name)} is {value!r}", hint=f"It is a mapping from knobs, for example {example}.")
    return value


def _bound(knob: str, value: Any) -> Bound:
    """A bound from `(low, high)`, a list of values, or the text `1..8` or `a,b`."""
    if isinstance(value, Bound):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(end is None or _is_whole(end) for end in value):
        low, high = ("" if end is None else end for end in value)
        return parse_bound(f"{knob}={low}..{high}")[1]
    if isinstance(value, (list, tuple, set, frozenset)):
        return Bound(values=tuple(check_knob(knob, one) for one in value))
    return parse_bound(f"{knob}={value}")[1]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "budget": _check_budget,
    "max_trials": _check_count,
    "fix": _check_fix,
    "bound": _check_bound,
    "device": _check_device,
    "memory_limit": _check_memory,
    "nproc": _check_count,
    "sampler": _check_sampler,
    "out": _check_place,
    "store": _check_place,
    "fresh": _check_switch,
    "wait": _check_switch,
    "dry_run": _check_switch,
    "seed": _check_seed,
}


class BudgetState(Record):
    """The time of a search: its budget, what is spent and what is reserved."""

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
    """Its methods are called with what the search does, in the search's thread; each does nothing unless overridden."""

    def on_phase(self, name: str, detail: str = "") -> None:
        """A phase begins: probe, inspect, trace, space, baseline, search, finalists, parity, claim, plan."""

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
    baseline: Trial | None = None
    best: Trial | None = Field(default=None, description="fastest so far, verified or not")
    trials: tuple[Trial, ...] = ()
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

    @property
    def exit_code(self) -> int:
        """0 plan found or dry run; 3 nothing feasible; 4 it did not run; 5 budget ended; 130 interrupted."""
        return EXIT_CODES[self.status]

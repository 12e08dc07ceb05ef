"""The options of a search, its observer, and its result. Loads neither torch nor optuna.

Each option is one field of `SearchOptions`: its type and its check, its description, and its `Flag`. From these come
the keywords of `autoplan.search` (autoplan/api.py) and the flags of `autoplan search` (autoplan/cli/search.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypedDict

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    model_validator,
)

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Attempt, LeftOutFamily, Objective, Prediction, Purpose, Trial, WorkLine
from autoplan.planner.space.bounds import Bound, bound_of, parse_bound
from autoplan.probes.profile import HardwareProfile
from autoplan.processes.nodes import parse_layout
from autoplan.record import Record
from autoplan.strategies.config import LOSSY, TORCHAO_INSTALL, TrainingConfig, knobs
from autoplan.strategies.knob_text import check_knob, parse_knob
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_bytes, parse_duration_s, parse_memory_bytes

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

DeviceName = Literal["cuda", "cpu"]
Numerics = Literal["kept", "lossy"]
SamplerName = Literal["autoplan", "tpe", "random"]
LauncherName = Literal["local", "elastic", "slurm", "ray"]
ObjectiveName = Literal["throughput", "memory", "cost"]

# The panels of `autoplan search --help`, in their order.
WORKLOAD = "What is trained"
SEARCH = "The search"
GOAL = "What the plan is best in"
LIMITS = "Limits"
RECORD = "Records and output"


@dataclass(frozen=True, slots=True)
class Flag:
    """How a person gives an option."""

    panel: str  # of the command's help; the options of a panel are in the order of the fields
    metavar: str = ""  # what stands for the value there; "": it is a switch
    rule: str = ""  # what the value is, for the error of a wrong one; "": its own check says it
    kind: type = str  # what the command line reads it as; `list`: it may be given several times
    default: str | None = None  # of the command line, where that has another one than Python
    in_python: str = ""  # what only a call can give, for the docstring of `autoplan.search`
    everyday: bool = True  # it is in --help; the others are in --help-all


def flag_name(option: str | None) -> str:
    """An option as the command line has it: `--max-trials`."""
    return "--" + str(option).replace("_", "-")


# The checks that types do not express. Texts name an option as the command line does; in Python an error says them as
# keyword arguments (autoplan/errors.py). What they raise is a UsageError, which pydantic lets through as it is.


def _read_by(read: Callable[[Any], object]) -> PlainValidator:
    """The check that a value can be read; it stays as it was given."""

    def check(value: Any) -> Any:
        if value is not None:
            read(value)
        return value

    return PlainValidator(check)


def _check_path(value: Any, info: ValidationInfo) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise UsageError(f"{flag_name(info.field_name)} is {value!r}", hint="It is a path.")
    return Path(value)


def _check_storage(value: Any, info: ValidationInfo) -> str | None:
    from autoplan.planner.store.database import check_storage

    return None if value is None else check_storage(str(value))


def _check_sampler(value: Any, info: ValidationInfo) -> Any:
    is_sampler = (callable(getattr(value, name, None)) for name in ("infer_relative_search_space", "sample_relative"))
    if value in ("autoplan", "tpe", "random") or all(is_sampler):
        return value  # of optuna.samplers.BaseSampler; importing that here would load optuna
    raise UsageError(
        f"{flag_name(info.field_name)} is {value!r}",
        hint="It is autoplan, tpe or random; autoplan.search also takes a sampler object of Optuna.",
    )


def _check_loader(value: Any, info: ValidationInfo) -> LoaderSpec | None:
    """The spec of a loader: a text by reference, objects by cloudpickle."""
    if value is None or isinstance(value, LoaderSpec):
        return value
    from autoplan.strategies.workloads.loading.source import spec_of_object, spec_of_text

    if not isinstance(value, (str, Path)):
        return spec_of_object(value)
    spec = info.data.get("spec")  # None where it is wrong itself, which is the error then
    return spec_of_text(str(value), arguments=() if spec is None else spec.arguments)


def _check_fix(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return each_once("fix", value, parse_knob, str, "Fix it once, or give --bound {knob}={then},{now}.")
    return {knob: check_knob(knob, one) for knob, one in _mapping(value, info, '{"precision": "bf16"}').items()}


def _check_bound(value: Any, info: ValidationInfo) -> dict[str, Bound]:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        hint = "Bound it once: a range (1..8), or all its values in one list (1,2,8)."
        return each_once("bound", value, parse_bound, Bound.describe, hint)
    return {knob: bound_of(knob, one) for knob, one in _mapping(value, info, '{"micro_batch": (1, 8)}').items()}


def _check_baseline(value: Any, info: ValidationInfo) -> Any:
    if value is None or value == "plain":
        return value
    if isinstance(value, str):
        texts = [text for text in value.split(",") if text.strip()]
        return each_once("baseline", texts, partial(parse_knob, option="baseline"), str, "Name it once.")
    return {knob: check_knob(knob, one) for knob, one in _mapping(value, info, '{"precision": "bf16"}').items()}


def each_once(
    name: str, texts: list[str], parse: Callable[[str], tuple[str, Any]], say: Callable[[Any], str], hint: str
) -> dict[str, Any]:
    """Reads `knob=...` texts of the command line; UsageError for a knob that is given twice with other values."""
    found: dict[str, Any] = {}
    for knob, value in map(parse, texts):
        if found.setdefault(knob, value) != value:
            then, now = say(found[knob]), say(value)
            raise UsageError(
                f"--{name} {knob} is given twice, as {then} and as {now}",
                hint=hint.format(knob=knob, then=then, now=now),
            )
    return found


def _mapping(value: Any, info: ValidationInfo, example: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{flag_name(info.field_name)} is {value!r}", hint=f"It is a mapping from knobs, for example {example}."
        )
    return value


def refuse_lossy(fix: Mapping[str, Any], bound: Mapping[str, Bound]) -> None:
    """ConfigError for a knob that is fixed or bounded to lossy values; it says too what these need installed."""
    for knob, lossy in LOSSY.items():
        fixed = f"{knob}={fix[knob]}" if fix.get(knob) in lossy else None
        values = bound[knob].values if knob in bound else None
        asked = fixed or (f"{knob} in {', '.join(map(str, values))}" if values and set(values) & set(lossy) else None)
        if asked is not None:
            wanted = {fix[knob]} if fixed else set(values or ())
            missing = wanted & set(knobs()[knob].made_by_torchao) and importlib.util.find_spec("torchao") is None
            install = f" Besides, it needs torchao, which is not installed here: {TORCHAO_INSTALL}." if missing else ""
            raise ConfigError(
                f"{asked} loses bits at each step, and --numerics is kept: a lossy choice is tried by your word alone",
                hint=f"Add --numerics lossy. The plan then names what its parity check cannot show.{install}",
            )


Count = Annotated[int, Field(strict=True, ge=1)] | None
Switch = Annotated[bool, Field(strict=True)]
COUNT = "a whole number of at least 1"
YES_OR_NO = "True or False"


class SearchOptions(BaseModel):
    """All options of a search: the one list that `autoplan.search` and `autoplan search` fill.

    Each value is as a person gives it, and is checked when the options are made. When they are read, `fix` has values
    of the knobs' own types, `bound` has Bounds, `out` and `store` are paths, and `loader` is a LoaderSpec.

    Raises:
        UsageError: a value is wrong, and what it may be (ConfigError for a knob).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    spec: WorkloadSpec = Field(description="What is trained.")
    budget: Annotated[
        str | float | None, _read_by(parse_duration_s), Flag(SEARCH, "TIME", in_python="A number: seconds.")
    ] = Field(
        default=None,
        description="Time for the whole search, over all its runs: 90s, 10m, 1h30m. A larger one extends an earlier "
        "search. Default: 10m.",
    )
    fix: Annotated[Mapping[str, Any], PlainValidator(_check_fix), Flag(SEARCH, "KNOB=VALUE", kind=list)] = Field(
        default_factory=dict, description="Keep a knob at one value: --fix precision=bf16."
    )
    bound: Annotated[
        Mapping[str, Any],
        PlainValidator(_check_bound),
        Flag(
            SEARCH,
            "KNOB=VALUES",
            kind=list,
            in_python="Also a pair, `(1, 8)` inclusive, a list of values, or a Bound.",
        ),
    ] = Field(
        default_factory=dict,
        description="Keep a knob in a range, --bound micro_batch=1..8, or a list, --bound precision=fp32,bf16.",
    )
    baseline: Annotated[
        Any,
        PlainValidator(_check_baseline),
        Flag(SEARCH, "KNOB=VALUE,...", everyday=False, in_python='Knobs as in `fix`, or "plain".'),
    ] = Field(
        default=None,
        description="Your setting, which plans are compared with: precision=bf16,micro_batch=4; or plain: the plain "
        "fp32 run. Default: as read of a Trainer or loop.",
    )
    device: Annotated[DeviceName | None, Flag(SEARCH, "DEVICE", "cuda or cpu")] = Field(
        default=None, description="cuda or cpu. Default: cuda if the machine has a GPU."
    )
    loader: Annotated[
        Any,
        PlainValidator(_check_loader),
        Flag(
            WORKLOAD,
            "FILE.PY:FUNCTION",
            everyday=False,
            in_python="Also a dataset, a DataLoader, or the function. `plan.loading` is the setting, and "
            "`plan.loader(dataset)` makes the DataLoader.",
        ),
    ] = Field(
        default=None,
        description="Measure the training's own data, with several numbers of workers, beside the plan's step: a "
        "function that returns a dataset or a DataLoader.",
    )
    dry_run: Annotated[Switch, Flag(SEARCH, rule=YES_OR_NO, kind=bool)] = Field(
        default=False, description="List the configurations with their predicted memory and time. Run no trial."
    )
    out: Annotated[str | Path | None, PlainValidator(_check_path), Flag(SEARCH, "FILE", default="plan.json")] = Field(
        default=None, description="The plan file to write."
    )
    objective: Annotated[ObjectiveName, Flag(GOAL, "NAME", "throughput, memory or cost", everyday=False)] = Field(
        default="throughput",
        description="What the plan should be best in: throughput, memory (the least, at a floor of throughput) or "
        "cost (the least time of all ranks together).",
    )
    min_throughput: Annotated[
        Annotated[float, Field(strict=True, gt=0, le=1)] | None,
        Flag(GOAL, "SHARE", "a share of the best throughput, above 0 and at most 1", float, everyday=False),
    ] = Field(
        default=None,
        description="With --objective memory: the floor, as a share of the best throughput. Default: 0.9.",
    )
    price_per_hour: Annotated[
        Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None,
        Flag(GOAL, "X", "a number above 0", float, everyday=False),
    ] = Field(default=None, description="Of one device: the plan says what a million tokens cost.")
    numerics: Annotated[Numerics, Flag(GOAL, "KIND", "kept or lossy", everyday=False)] = Field(
        default="kept",
        description="kept, or lossy: also try parameters, states and products in fewer bits (docs/techniques.md). The "
        "plan names the risk.",
    )
    memory_limit: Annotated[str | int | None, _read_by(parse_memory_bytes), Flag(LIMITS, "SIZE")] = Field(
        default=None,
        description="Memory that one trial may use: 8GiB, or 80% of all memory. Default: 80% of the free memory; of a "
        "GPU 95%, less what CUDA itself takes.",
    )
    nproc: Annotated[Count, Flag(LIMITS, "N", COUNT, int, everyday=False)] = Field(
        default=None,
        description="Use at most this number of processes (ranks). Default: the number of visible GPUs; 1 on CPU.",
    )
    side_by_side: Annotated[Count, Flag(LIMITS, "N", COUNT, int, everyday=False)] = Field(
        default=None,
        description="Look at N candidates at once, each on a GPU or an Nth of the cores. On CPU every trial has so "
        "many cores, and the plan is for a training with as many (docs/search.md). Default: 1.",
    )
    launcher: Annotated[LauncherName, Flag(LIMITS, "NAME", "local, elastic, slurm or ray", everyday=False)] = Field(
        default="local",
        description="What starts the ranks on --nodes: elastic, slurm or ray (docs/nodes.md). Default: all on this "
        "machine.",
    )
    nodes: Annotated[str | None, _read_by(parse_layout), Flag(LIMITS, "NxR", everyday=False)] = Field(
        default=None, description="With --launcher: N nodes with R ranks each, 2x8."
    )
    max_trials: Annotated[Count, Flag(LIMITS, "N", COUNT, int, everyday=False)] = Field(
        default=None,
        description="Try at most this number of configurations, the baseline among them. Runs for pairs and the claim "
        "do not count.",
    )
    max_device_hours: Annotated[
        Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None,
        Flag(LIMITS, "X", "a number above 0", float, everyday=False),
    ] = Field(
        default=None,
        description="End the search after so many hours of the GPUs (on CPU: machines) that its planners hold "
        "together. Without --budget it is the budget.",
    )
    sampler: Annotated[
        SamplerName | Any,
        PlainValidator(_check_sampler),
        Flag(
            LIMITS,
            "NAME",
            everyday=False,
            in_python="Also a sampler object of Optuna, whose points are moved to the nearest legal candidate.",
        ),
    ] = Field(default="autoplan", description="How the next trial is chosen: autoplan, or tpe or random of Optuna.")
    seed: Annotated[
        Annotated[int, Field(strict=True, ge=0, lt=2**32)],
        Flag(WORKLOAD, "N", "a whole number from 0 to 4294967295", int, everyday=False),
    ] = Field(default=0, description="Seed of the weights, the batches and the search. Default: 0.")
    store: Annotated[str | Path | None, PlainValidator(_check_path), Flag(RECORD, "DIR", everyday=False)] = Field(
        default=None,
        description="Folder for the records of searches; each search has a folder of its own in it. Default: a folder "
        "in the user's state folder.",
    )
    storage: Annotated[str | None, PlainValidator(_check_storage), Flag(RECORD, "URL", everyday=False)] = Field(
        default=None,
        description="Keep the record in a PostgreSQL database, postgresql://host/database, which several planners "
        "share (docs/postgresql.md). The password comes from PGPASSWORD or a service file.",
    )
    fresh: Annotated[Switch, Flag(RECORD, rule=YES_OR_NO, kind=bool, everyday=False)] = Field(
        default=False, description="Start this search from zero. Its earlier record is moved aside, not deleted."
    )
    wait: Annotated[Switch, Flag(RECORD, rule=YES_OR_NO, kind=bool, everyday=False)] = Field(
        default=False,
        description="Wait while another search uses the device; the wait costs no budget. Default: an error (exit "
        "code 4).",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, given: Any, make: ValidatorFunctionWrapHandler) -> SearchOptions:
        try:
            options: SearchOptions = make(given)
        except ValidationError as error:
            _refuse(error, given)
        if options.min_throughput is not None and options.objective != "memory":
            raise UsageError(
                f"--min-throughput is {options.min_throughput}, and the objective is {options.objective}",
                hint="It goes with --objective memory.",
            )
        if (options.launcher == "local") != (options.nodes is None):
            given_one = "--launcher" if options.nodes is None else "--nodes"
            raise UsageError(
                f"{given_one} was given alone", hint="Give both, for example --launcher slurm --nodes 2x8."
            )
        if options.parts > 1:
            _refuse_side_by_side(options)
        most = options.layout[0] * options.layout[1]
        if options.nodes is not None and options.nproc is not None and options.nproc > most:
            raise UsageError(f"--nproc is {options.nproc}, and --nodes {options.nodes} have {most} ranks")
        if options.numerics == "kept":
            refuse_lossy(options.fix, options.bound)
        if "micro_batch" in options.fix:
            # The workload has to know: one with BatchNorm refuses a micro-batch that the user did not choose.
            settings = dict(options.spec.options) | {"fixed_micro_batch": options.fix["micro_batch"]}
            object.__setattr__(options, "spec", options.spec.model_copy(update={"options": settings}))
        return options

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """How a person gives each option, by its name."""
        found = {
            name: next((part for part in field.metadata if isinstance(part, Flag)), None)
            for name, field in cls.model_fields.items()
        }
        return {name: flag for name, flag in found.items() if flag is not None}

    @property
    def layout(self) -> tuple[int, int]:
        """Nodes, and ranks on each; (1, 1) where no nodes were given."""
        return parse_layout(self.nodes or "1x1")

    @property
    def parts(self) -> int:
        """Into how many parts the machine is divided for looks; 1: it is not."""
        return self.side_by_side or 1

    @property
    def wanted(self) -> Objective:
        """The objective of the search."""
        return Objective(name=self.objective, min_throughput=self.min_throughput, price_per_hour=self.price_per_hour)

    @property
    def budget_s(self) -> float | None:
        """The budget in seconds; None: none was given."""
        return None if self.budget is None else parse_duration_s(self.budget)

    def memory_limit_bytes(self, total_bytes: float | None) -> int | None:
        """The limit in bytes; None: none was given.

        Args:
            total_bytes: All the memory of the device, which a share is of; None: not known.

        Raises:
            UsageError: it is more than the device has; or a share was given, and the memory is not known.
        """
        limit = None if self.memory_limit is None else parse_memory_bytes(self.memory_limit)
        if not isinstance(limit, float):
            if limit is not None and total_bytes is not None and limit > total_bytes:
                raise UsageError(
                    f"--memory-limit is {self.memory_limit}, and the device has {format_bytes(total_bytes)}",
                    hint="Give less, or a share of it: --memory-limit 80%.",
                )
            return limit
        if total_bytes is None:
            raise UsageError(
                f"--memory-limit is {self.memory_limit!r}, and the memory of the device is not known",
                hint="Give the limit as a size, for example --memory-limit 8GiB.",
            )
        return int(limit * total_bytes)

    def allows(self, config: TrainingConfig) -> bool:
        """Whether a configuration keeps what the user fixed and bounded; the baseline need not."""
        return all(getattr(config, knob) == value for knob, value in self.fix.items()) and all(
            bound.allows(getattr(config, knob)) for knob, bound in self.bound.items()
        )


def _refuse_side_by_side(options: SearchOptions) -> None:
    """UsageError for what does not go with several looks at once, and why."""
    reasons = {
        "--storage": (options.storage is not None, "planners that share a study have one piece of work each"),
        "--launcher": (options.launcher != "local", "it is for the GPUs or the cores of one machine"),
        "--sampler": (options.sampler != "autoplan", "that draws one look after the other"),
        "--objective memory": (options.objective == "memory", "its floor compares looks with runs that were alone"),
    }
    for name, (given, why) in reasons.items():
        if given:
            raise UsageError(f"--side-by-side is {options.side_by_side}, with {name}: {why}", hint="Leave one out.")


def _refuse(error: ValidationError, given: Any) -> NoReturn:
    """The first thing that is wrong, as an error of ours; what is no option at all as Python says it."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    flag = SearchOptions.flags().get(name)
    if flag is None:
        raise TypeError(f"SearchOptions: {name}: {first['msg']}") from None
    raise UsageError(f"{flag_name(name)} is {given[name]!r}", hint=f"It is {flag.rule}.") from None


class SearchKeywords(TypedDict, total=False):
    """The options as keywords of `autoplan.search`, for type checkers. tests/api/test_api.py compares the two lists."""

    budget: str | float | None
    fix: Mapping[str, Any] | None
    bound: Mapping[str, Any] | None
    baseline: Mapping[str, Any] | Literal["plain"] | None
    device: DeviceName | None
    loader: Any
    out: str | Path | None
    objective: ObjectiveName
    min_throughput: float | None
    price_per_hour: float | None
    numerics: Numerics
    memory_limit: str | int | None
    nproc: int | None
    side_by_side: int | None
    launcher: LauncherName
    nodes: str | None
    max_trials: int | None
    max_device_hours: float | None
    sampler: SamplerName | optuna.samplers.BaseSampler
    seed: int
    store: str | Path | None
    storage: str | None
    fresh: bool
    wait: bool


class BudgetState(Record):
    """The time of a search: its budget, and what is spent of it."""

    budget_s: float
    spent_s: float = Field(description="over all runs of this search")
    trials_done: int
    max_trials: int | None
    gain: float | None = Field(
        default=None, description="the speed of the best so far over the baseline's, as if the cores had kept theirs"
    )

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return max(0.0, self.budget_s - self.spent_s)


class Candidate(Record):
    """One legal configuration with what the cost model says of it."""

    config: TrainingConfig
    prediction: Prediction


class SearchObserver:
    """Its methods are called with what the search does, in the search's thread; each does nothing unless overridden."""

    def on_budget(self, budget: BudgetState) -> None:
        """The clock of the search begins, or goes on where an earlier run ended."""

    def on_phase(self, name: str, detail: str = "") -> None:
        """A phase begins: probe, inspect, trace, space, baseline, hand setting, pair,
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
        self, number: int, purpose: Purpose, config: TrainingConfig, prediction: Prediction | None, budget: BudgetState
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
    own_setting: TrainingConfig | None = Field(default=None, description="the setting that the training has, if known")
    best: Trial | None = Field(default=None, description="the look at what leads, verified or not")
    trials: tuple[Trial, ...] = ()
    ledger: tuple[WorkLine, ...] = Field(default=(), description="where the time went, piece by piece")
    attempts: tuple[Attempt, ...] = Field(default=(), description="runs that something outside ended; none counts")
    left_out: tuple[LeftOutFamily, ...] = ()
    candidates: tuple[Candidate, ...] = Field(default=(), description="dry run: the space, fastest prediction first")
    from_record: bool = Field(default=False, description="a finished search answered without running anything")
    resumed_trials: int = 0
    budget_s: float = 0.0
    device_hours: float | None = Field(
        default=None, description="the budget in device-hours, where --max-device-hours allow no more"
    )
    spent_s: float = 0.0
    unit: str = Field(default="tokens", description="what throughput counts")
    study: str = ""
    store: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 plan found or dry run; 3 nothing feasible; 4 it did not run; 5 budget ended; 130 interrupted."""
        return EXIT_CODES[self.status]

"""The checks of a search's options: each takes a name and what was given, and gives the value that the search uses."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.space.bounds import Bound, parse_bound
from autoplan.strategies.config import LOSSY
from autoplan.strategies.knob_input import check_knob
from autoplan.strategies.rounding_knobs import NEEDS_TORCHAO, TORCHAO_INSTALL
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from autoplan.units import parse_duration_s, parse_memory_bytes

DeviceName = Literal["cuda", "cpu"]
Numerics = Literal["kept", "lossy"]
SamplerName = Literal["autoplan", "tpe", "random", "ours"]


def flag(name: str) -> str:
    """An option as the command line has it."""
    return "--" + name.replace("_", "-")


def refuse_short_trials(value: object) -> None:
    """UsageError where the option of earlier versions is given, whatever its value."""
    if value is not None:
        raise UsageError("--short-trials was taken away: leave it out, and every trial runs the whole model")


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


def _check_objective(name: str, value: Any) -> Any:
    if value not in ("throughput", "memory", "cost"):
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is throughput, memory or cost.")
    return value


def _check_positive(name: str, value: Any) -> Any:
    most = 1.0 if name == "min_throughput" else math.inf
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or value == math.inf
    ):
        what = "a share of the best throughput, above 0 and at most 1" if most == 1.0 else "a number above 0"
        raise UsageError(f"{flag(name)} is {value!r}", hint=f"It is {what}.")
    return value


def _check_loader(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, LoaderSpec):
        raise UsageError(
            f"{flag(name)} is {value!r}", hint="A dataset or a DataLoader becomes a LoaderSpec in autoplan.search()."
        )
    return value


def _check_numerics(name: str, value: Any) -> Any:
    if value not in get_args(Numerics):
        raise UsageError(f"{flag(name)} is {value!r}", hint="It is kept or lossy.")
    return value


def refuse_lossy(fix: Mapping[str, Any], bound: Mapping[str, Bound]) -> None:
    """ConfigError for a knob that is fixed or bounded to lossy values; it says too what these need installed."""
    for knob, lossy in LOSSY.items():
        fixed = f"{knob}={fix[knob]}" if fix.get(knob) in lossy else None
        values = bound[knob].values if knob in bound else None
        asked = fixed or (f"{knob} in {', '.join(map(str, values))}" if values and set(values) & set(lossy) else None)
        if asked is not None:
            wanted = {fix[knob]} if fixed else set(values or ())
            missing = wanted & set(NEEDS_TORCHAO.get(knob, ())) and importlib.util.find_spec("torchao") is None
            install = f" Besides, it needs torchao, which is not installed here: {TORCHAO_INSTALL}." if missing else ""
            raise ConfigError(
                f"{asked} loses bits at each step, and --numerics is kept: a lossy choice is tried by your word alone",
                hint=f"Add --numerics lossy. The plan then names what its parity check cannot show.{install}",
            )


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
    "recheck": _check_switch,
    "objective": _check_objective,
    "min_throughput": _check_positive,
    "price_per_hour": _check_positive,
    "numerics": _check_numerics,
    "loader": _check_loader,
    "dry_run": _check_switch,
    "seed": _check_seed,
}

"""Every error that a user of autoplan can meet, and the exit code that goes with each.

    AutoplanError                 1   our bug, unless a subclass says otherwise
    ├── UsageError                2   the command, an option or an input is wrong
    │   ├── WorkloadError         2   the model, its batch function or its loss is not usable
    │   ├── ConfigError           2   a knob, its value or a combination is not legal
    │   ├── PlanError             2   a plan file cannot be read or does not match
    │   ├── StoreError            2   the store is not writable, full or damaged
    │   └── MissingExtraError     2   an optional dependency is not installed
    ├── NoFeasiblePlanError       3   no configuration fits or runs
    ├── DeviceError               4   the device is missing, unusable or busy
    │   ├── StoreBusyError        4   another search owns the store
    │   ├── DeviceBusyError       4   another search measures on the device
    │   └── DidNotRunError        4   something outside ended it each time; nothing is known of it
    ├── BudgetEndedError          5   the budget ended before a verified plan
    ├── ExportError               6   an export failed its own check
    └── InterruptedSearchError  130   Ctrl-C; the state is saved

The text of an error says what was given, which rule it broke and, in the hint, what to do next. What a
trial does wrong is not an error of ours: it is an outcome (`autoplan.planner.records.trials`).

Texts name options as the command line does (`--max-trials 20`). In Python an error reads as keyword arguments
(`max_trials=20`): `message`, `hint` and `str(error)` are in that form, `flag_message` and `flag_hint` in the other.
"""

from __future__ import annotations

import functools
import re

_SAME_NAME = (
    *("budget", "max_trials", "max_device_hours", "fix", "bound", "device", "memory_limit", "nproc", "sampler", "out"),
    *("store", "fresh", "dry_run", "seed", "global_batch", "max_grad_norm", "cluster", "tokens", "wait", "loader"),
    *("numerics", "objective", "min_throughput", "price_per_hour", "storage", "launcher", "nodes", "side_by_side"),
    "baseline",
)
"""Keyword arguments whose option has the same name, with dashes."""

KEYWORDS = {
    **{name.replace("_", "-"): name for name in _SAME_NAME},
    "seq-len": "sequence_length",
    "model": "workload",
}
"""The keyword argument of each option that a text of the library names; other options stay as they are."""

_COMMAND = r"(?:autoplan \w+|python -m [\w.]+|torchrun)(?: --[\w-]+(?:[ =](?![-(])[^\s,;:)]*[^\s,;:).])?)+"
_VALUE = (
    r"'[^']*'|[\w./-]+\.py:\w+|\w+=[^\s;)]*[^\s;:),.]|\d+(?:\.\d+)?[\w%]*|"
    r"gpt2\b|cuda\b|cpu\b|lossy\b|memory\b|plain\b|DIR\b|N\b"
)
_OPTION = re.compile(rf"(?P<command>{_COMMAND})|--(?P<flag>{'|'.join(KEYWORDS)})(?![\w-])(?:[ =](?P<value>{_VALUE}))?")


def as_keywords(text: str) -> str:
    """A text that names options of the command line, with keyword arguments of the Python call in their place.

    `--nproc is 0` becomes `nproc is 0`, `--budget 10m` becomes `budget="10m"`, `--fix precision=bf16` becomes
    `fix={"precision": "bf16"}`. A whole command (`autoplan search --nproc 2`) stays as it is.
    """

    def keyword(found: re.Match[str]) -> str:
        if found["command"]:
            return found[0]
        name, value = KEYWORDS[found["flag"]], found["value"]
        if value is None:
            return name
        if name in ("fix", "bound") or (name == "baseline" and "=" in value):
            knob, _, setting = value.partition("=")
            bare = setting.isdecimal() or setting.isupper()
            return f"{name}={{{_quoted(knob)}: {setting if bare else _quoted(setting)}}}"
        return f"{name}={value if value.isdecimal() or value.isupper() else _quoted(value)}"

    return _OPTION.sub(keyword, text)


def _quoted(text: str) -> str:
    return text if text.startswith("'") else f'"{text}"'


class AutoplanError(Exception):
    """Root of all errors of autoplan.

    Args:
        message: What was given and which rule it broke.
        hint: What to do next; shown on a line of its own.

    Attributes:
        message, hint: With options as keyword arguments of Python.
        flag_message, flag_hint: With options as flags of the command line.
        code: A word for programs, the same in every version.
        exit_code: Of the command that ends with it.
    """

    code: str = "internal"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.flag_message = message
        self.flag_hint = hint
        self.message = as_keywords(message)
        self.hint = None if hint is None else as_keywords(hint)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), hint=self.flag_hint), (self.flag_message,)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class UsageError(AutoplanError):
    """The command, an option or an input is wrong."""

    code = "usage"
    exit_code = 2


class WorkloadError(UsageError):
    """The model, its batch function, its loss or its optimizer cannot be used."""

    code = "workload"


class ConfigError(UsageError):
    """A knob, its value or a combination of values is not legal."""

    code = "config"


class PlanError(UsageError):
    """A plan file cannot be read, or does not match where it is applied."""

    code = "plan"


class StoreError(UsageError):
    """The store cannot be written, is full or is damaged."""

    code = "store"


class MissingExtraError(UsageError):
    """An optional dependency is not installed."""

    code = "missing_extra"


class NoFeasiblePlanError(AutoplanError):
    """No configuration fits the limits, or none ran."""

    code = "no_feasible_plan"
    exit_code = 3


class DeviceError(AutoplanError):
    """The device is missing, unusable or busy."""

    code = "device"
    exit_code = 4


class StoreBusyError(DeviceError):
    """Another search owns the store."""

    code = "store_busy"


class DidNotRunError(DeviceError):
    """Something outside ended each run of what is needed: nothing is known of it, and the same call tries it again."""

    code = "did_not_run"


class DeviceBusyError(DeviceError):
    """Another search measures on the device."""

    code = "device_busy"


class BudgetEndedError(AutoplanError):
    """The budget ended before a verified plan."""

    code = "budget_ended"
    exit_code = 5


class ExportError(AutoplanError):
    """An export failed its own check."""

    code = "export"
    exit_code = 6


class InterruptedSearchError(AutoplanError):
    """The user interrupted the search; its state is saved."""

    code = "interrupted"
    exit_code = 130

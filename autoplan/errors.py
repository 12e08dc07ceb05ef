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
    │   └── StoreBusyError        4   another search owns the store
    ├── BudgetEndedError          5   the budget ended before a verified plan
    ├── ExportError               6   an export failed its own check
    └── InterruptedSearchError  130   Ctrl-C; the state is saved

The text of an error says what was given, which rule it broke and, in the hint, what to do next. What a
trial does wrong is not an error of ours: it is an outcome (`autoplan.planner.records`).
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Root of all errors of autoplan.

    Args:
        message: What was given and which rule it broke.
        hint: What to do next; shown on a line of its own.
    """

    code: str = "internal"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


def _rebuild(kind: type[AutoplanError], message: str, hint: str | None) -> AutoplanError:
    return kind(message, hint=hint)


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

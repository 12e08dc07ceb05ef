"""What can go wrong with the processes themselves; a failing rank is not an error here but a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError

if TYPE_CHECKING:
    from autoplan.processes.records import ProcessReport


class ZygoteError(AutoplanError):
    """The helper process that starts the ranks could not be started or used."""

    code = "zygote"


class TaskFailedError(AutoplanError):
    """A task whose result is needed did not finish; `report` says how it ended."""

    code = "task_failed"

    def __init__(self, message: str, *, hint: str | None = None, report: ProcessReport | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.message, self.hint, self.report))


def _rebuild(message: str, hint: str | None, report: ProcessReport | None) -> TaskFailedError:
    return TaskFailedError(message, hint=hint, report=report)


class StopTask(Exception):
    """Raised by a caller's `on_progress` to end the task: `Zygote.run` then returns a report, `CANCELLED`."""

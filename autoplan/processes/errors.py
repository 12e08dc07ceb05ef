"""What can go wrong with the processes themselves, and how a caller ends a task.

A rank that fails is not an error here: the report says so. `TaskFailedError` (report.py) is for callers that need the
result of a task.
"""

from __future__ import annotations

from autoplan.errors import DeviceError


class ZygoteError(DeviceError):
    """The helper process that starts the ranks could not be started or used.

    `transient`: the machine had no process or memory to give, or the helper was killed; another try may do.
    """

    code = "zygote"

    def __init__(self, message: str, *, hint: str | None = None, transient: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient


class StopTask(Exception):
    """Raised by a caller's `on_progress` to end the task: `Zygote.run` then returns a report, `CANCELLED`."""

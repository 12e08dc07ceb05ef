"""What can go wrong with the processes themselves; a failing rank is not an error here but a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError

if TYPE_CHECKING:
    pass


class ZygoteError(AutoplanError):
    """The helper process that starts the ranks could not be started or used."""

    code = "zygote"


class StopTask(Exception):
    """Raised by a caller's `on_progress` to end the task: `Zygote.run` then returns a report, `CANCELLED`."""

"""The only place that starts, watches and ends processes.

    with Zygote() as zygote:
        report = zygote.run(Task(target=work, args=(3,), ranks=2, deadlines_s={"*": 60.0}))

A `Zygote` has torch and the model library imported and forks the ranks of one `Task` after another; whatever the
ranks do, `run` returns a `ProcessReport`, and nothing that they started is left. Linux only.
"""

from autoplan.processes.client import Zygote, sweep_abandoned
from autoplan.processes.context import RankContext
from autoplan.processes.errors import StopTask, ZygoteError
from autoplan.processes.owner import ProcessIdentity, is_alive
from autoplan.processes.records import Ended, ErrorReport, ProcessReport, Progress, RankReport, Task, TaskFailedError

__all__ = [
    "Ended",
    "ErrorReport",
    "ProcessIdentity",
    "ProcessReport",
    "Progress",
    "RankContext",
    "RankReport",
    "StopTask",
    "Task",
    "TaskFailedError",
    "Zygote",
    "ZygoteError",
    "is_alive",
    "sweep_abandoned",
]

"""The only place that starts, watches and ends processes. Linux only.

    with Zygote() as zygote:
        report = zygote.run(Task(target=work, args=(3,), ranks=2, deadlines_s={"*": 60.0}))

In: a `Task`. Out: a `ProcessReport`. A `Zygote` is a process that has imported torch and the model library; it forks
the ranks of one task after another. `run` always returns a report, and leaves no process that the ranks started.

    task.py           Task: what goes in; Progress: how far it is
    report.py         ProcessReport: what comes back, rank by rank; ZygoteError; StopTask, which ends a task
    client.py         Zygote: the planner's side
    cause.py          what ended a task, in words where a limit did; `run_again` for one that something outside ended
    guard.py          the zygote's parent, for the case that planner and zygote are killed at once
    zygote.py         the zygote's own process: imports once, then forks
    supervisor.py     runs one task inside the zygote: starts and ends the ranks, watches them and their memory
    rank.py           what a rank does before and after its target
    context.py        RankContext: the first argument of every target
    files.py          the files of a task: heartbeats, results, output
    wire.py           messages between the planner and the zygote
    owner.py          ProcessIdentity; folders and processes that name their owner, and what dead owners left
    launch.py         several ranks of a program with torch elastic, and nothing of it left behind
    linux.py          Linux calls that Python does not wrap, readings from /proc
"""

from autoplan.processes.cause import (
    Cause,
    cause_of,
    is_out_of_memory,
    killed_for_memory,
    limit_hit,
    machine_trouble,
    raised_from_outside,
    run_again,
)
from autoplan.processes.client import Zygote
from autoplan.processes.context import RankContext
from autoplan.processes.owner import ProcessIdentity, folder_prefix, is_alive
from autoplan.processes.report import (
    Ended,
    ErrorReport,
    ProcessReport,
    RankReport,
    StopTask,
    TaskFailedError,
    ZygoteError,
)
from autoplan.processes.task import Progress, Task

__all__ = [
    "Cause",
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
    "cause_of",
    "folder_prefix",
    "is_alive",
    "is_out_of_memory",
    "killed_for_memory",
    "limit_hit",
    "machine_trouble",
    "raised_from_outside",
    "run_again",
]

"""Records of earlier versions: verdicts in them that something outside caused, which no longer count.

Earlier versions took a trial whose process was killed from outside for one that crashed, and a parity check that was
killed for one that failed.
"""

from __future__ import annotations

import re

from autoplan.planner.records import Attempt, Outcome, Parity, Trial

_OUTSIDE_DETAILS = frozenset({"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "zygote"})
_NO_CHECK = re.compile(r"did not finish: (rank \d+ )?(killed by signal (1|2|3|9|15)\b|zygote lost)")


def ended_from_outside(trial: Trial) -> bool:
    """Whether a trial of an earlier version, which has no cause, was ended by something outside."""
    return trial.cause is None and trial.outcome is Outcome.CRASHED and trial.detail in _OUTSIDE_DETAILS


def as_attempt(trial: Trial) -> Attempt:
    """Such a trial as what it is: a run that does not count."""
    return Attempt(
        part=trial.purpose,
        number=trial.number,
        config=trial.config,
        reason=trial.reason or trial.detail or trial.outcome.value,
        phase=trial.phase,
        exit_status=trial.exit_status,
        seconds_spent=trial.seconds_spent,
        started=trial.started,
    )


def check_did_not_run(parity: Parity) -> bool:
    """Whether a failed check of an earlier version made no comparison, because something outside ended it."""
    return not parity.passed and not parity.checks and _NO_CHECK.search(parity.note) is not None

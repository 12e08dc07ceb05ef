"""One workload of the zoo, end to end, in a process of its own: a search, parity, the plan loaded and applied.

    python -m tests.zoo.one NAME BUDGET_S FOLDER [TRIALS]

Writes FOLDER/NAME.json, an Ending; `tests.zoo.run` starts it and reads that.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.planner.search.options import SearchObserver
from tests.zoo.catalogue import BY_NAME, Entry

APPLIED_STEPS = 2
BEFORE_THE_TRACE = ("options", "probe", "inspect")


@dataclass(kw_only=True)
class Ending:
    """How the search of one workload ended.

    Attributes:
        name: Of the catalogue.
        ended: "plan", "refused" (before anything was traced, and saying what it has to), "failed" or "skipped".
        stage: The phase of the search that was the last; "apply" once there is a plan.
        error: The error's class and its message; empty with a plan.
        hint: What the error says to do next.
        raised: Where an error that is not autoplan's own was raised.
        config: The plan's.
        speedup: Of the plan over the baseline, the median.
        seconds: In all.
        stage_s: Seconds by stage.
        notes: What the search said.
        trials: Purpose, outcome, knobs and reason of each trial.
        left_out: The families that were never tried, and by which limit.
        parity: What the check of the plan's configuration said.
        losses: Of the steps applied from the loaded plan.
    """

    name: str
    ended: str = "failed"
    stage: str = "options"
    error: str = ""
    hint: str = ""
    raised: str = ""
    config: str = ""
    speedup: float | None = None
    seconds: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    @property
    def as_expected(self) -> bool:
        """Whether it ended as the catalogue says."""
        wanted = "plan" if BY_NAME[self.name].expected == "plans" else "refused"
        return self.ended in (wanted, "skipped")

    @property
    def in_words(self) -> str:
        """For the table."""
        return f"failed in {self.stage}" if self.ended == "failed" else self.ended


class Watcher(SearchObserver):
    """Keeps the stage that a search is in, the seconds of each, its notes and trials.

    Args:
        ending: Is filled.
        changed: Is called at each new stage, so that a killed search leaves what it had.
    """

    def __init__(self, ending: Ending, changed: Callable[[Ending], None]) -> None:
        self.ending = ending
        self.changed = changed
        self.since = time.monotonic()

    def enter(self, stage: str) -> None:
        """A stage begins; the one before it ends."""
        now = time.monotonic()
        spent = self.ending.stage_s
        spent[self.ending.stage] = round(spent.get(self.ending.stage, 0.0) + now - self.since, 2)
        self.since = now
        self.ending.stage = stage
        self.changed(self.ending)

    def on_phase(self, name: str, detail: str = "") -> None:
        if name != self.ending.stage:
            self.enter(name)

    def on_note(self, text: str) -> None:
        self.ending.notes.append(text)

    def on_space(self, candidates: int, left_out: Any) -> None:
        self.ending.left_out = {family.family: family.limit for family in left_out}

    def on_trial_finished(self, trial: Any, best: Any, budget: Any) -> None:
        words = f"{trial.purpose}: {trial.outcome.value}: {trial.config.describe()}"
        lines = f"\n{trial.last_lines.strip()}" if trial.last_lines else ""
        self.ending.trials.append(words + (f": {trial.reason}{lines}" if trial.reason else ""))


def search_and_apply(
    entry: Entry, budget_s: float, folder: Path, changed: Callable[[Ending], None], max_trials: int | None = None
) -> Ending:
    """A search, then steps by the plan as loaded from its file. Never raises.

    Args:
        entry: The workload.
        budget_s: Of the search.
        folder: For the store and the plan.
        changed: Is called at each new stage.
        max_trials: At most so many; None: what the budget allows.
    """
    import autoplan

    ending = Ending(name=entry.name)
    watcher = Watcher(ending, changed)
    started = time.monotonic()
    path = folder / f"{entry.name}.plan.json"
    try:
        plan = autoplan.search(
            entry.reference,
            budget=budget_s,
            max_trials=max_trials,
            fix=dict(entry.fix),
            device="cpu",
            store=folder / f"{entry.name}.store",
            out=path,
            observer=watcher,
        )
        ending.config, ending.speedup = plan.config.describe(), plan.speedup.median
        ending.parity = plan.parity.model_dump()
        watcher.enter("apply")
        ending.losses = apply_plan(path)
        if not all(map(math.isfinite, ending.losses)):
            raise ArithmeticError(f"the applied steps gave the losses {ending.losses}")
        ending.ended = "plan"
    except Exception as error:  # whatever a search raises is the row of the table
        _describe(error, ending)
    watcher.enter(ending.stage)
    ending.seconds = round(time.monotonic() - started, 1)
    return ending


def apply_plan(path: Path) -> list[float]:
    """The losses of a few steps, by the plan in a file on the workload that it names."""
    import autoplan

    run = autoplan.load_plan(path).prepare()
    batches = (run.workload.make_batch(run.workload.global_batch, index) for index in range(APPLIED_STEPS))
    return [float(run.step(run.local_share(batch)).loss) for batch in batches]


def _describe(error: Exception, ending: Ending) -> None:
    from autoplan.errors import AutoplanError, UsageError

    own = isinstance(error, AutoplanError)
    ending.error = f"{type(error).__name__}: {error.message if own else error}"
    ending.hint = (error.hint or "") if own else ""
    ending.raised = "" if own else traceback.format_exc(limit=-6)
    said = BY_NAME[ending.name].says
    if isinstance(error, UsageError) and ending.stage in BEFORE_THE_TRACE and said and said in str(error):
        ending.ended = "refused"


def write(ending: Ending, folder: Path) -> None:
    """Writes an ending to FOLDER/NAME.json, whole or not at all."""
    temporary = folder / f"{ending.name}.json.tmp"
    temporary.write_text(json.dumps(dataclasses.asdict(ending), indent=1))
    temporary.replace(folder / f"{ending.name}.json")


def read(name: str, folder: Path) -> Ending:
    """The ending of a workload, as far as it was written."""
    try:
        return Ending(**json.loads((folder / f"{name}.json").read_text()))
    except FileNotFoundError:
        return Ending(name=name, error="the process ended before its search began")


def main() -> None:
    """Runs the one that the command line names."""
    name, budget, folder, *trials = sys.argv[1:]
    into, most = Path(folder), int(trials[0]) if trials else None
    write(search_and_apply(BY_NAME[name], float(budget), into, lambda ending: write(ending, into), most), into)


if __name__ == "__main__":
    main()

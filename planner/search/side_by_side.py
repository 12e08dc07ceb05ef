"""Looks on several parts of this machine at once, under one load (docs/search.md, "Several looks at once").

In: pieces of work, and orders for their trials. Out: trials that have ended, marked as beside others (`Trial.beside`).
While a look runs each other part has another look, or the baseline again, which does not count. All else runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoplan.planner.records.trials import Trial
from autoplan.planner.search.next_work import Work
from autoplan.planner.trials.measure import ToBeat
from autoplan.planner.trials.parts import Parts
from autoplan.planner.trials.runner import TrialOrder
from autoplan.processes import ProcessReport, Progress
from autoplan.strategies.config import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A look that runs on a part (its number); `began_s` of the budget was spent before it."""

    part: int
    work: Work
    began_s: float
    order: TrialOrder


@dataclass(kw_only=True)
class SideBySide:
    """The parts of a machine in one run of a search, and the looks on them."""

    parts: Parts
    on_gpus: bool  # a part is a GPU: what needs several runs alone; on a CPU a part is all that a trial ever has
    on_progress: Callable[[Progress], None]  # is told how far the look is that runs longest
    on_attempt: Callable[[TrialOrder, ProcessReport], None]  # is told of each run that something outside ended
    left_s: Callable[[], float]  # seconds left for running a trial again
    begun: dict[int, Begun] = field(default_factory=dict)  # the looks by their part, the oldest first

    @property
    def numbers(self) -> list[int]:
        """Of the trials that run."""
        return [one.order.number for one in self.begun.values()]

    @property
    def keys(self) -> list[str]:
        """Of the pieces of work that run."""
        return [key for one in self.begun.values() if (key := one.work.key) is not None]

    @property
    def full(self) -> bool:
        """Whether each part has a look."""
        return len(self.begun) == len(self.parts)

    def running(self, spent_s: float) -> list[Work]:
        """What is left of the looks that run, when so many seconds are spent."""
        begun = [(one.work, spent_s - one.began_s) for one in self.begun.values()]
        return [replace(work, cost_s=max(0.0, work.cost_s - ran_s)) for work, ran_s in begun]

    def fits_a_part(self, config: TrainingConfig | None) -> bool:
        """Whether a configuration runs on one part."""
        return config is not None and not (self.on_gpus and config.world_size > 1)

    def slower(self, to_beat: ToBeat | None) -> ToBeat | None:
        """The step time that a look has to beat, whatever its load is.

        A part has at least its share of what the parts share, so that a look takes at most so many times as long as
        alone; and the leader's look may have had next to no load.
        """
        if to_beat is None:
            return None
        return to_beat.model_copy(update={"slack": math.log(len(self.parts))})

    def begin(self, work: Work, order: TrialOrder, spent_s: float) -> None:
        """Starts a look on a part that is free."""
        part = self.parts.free[0]
        self.parts.begin(part, order, self.left_s)
        self.begun[part] = Begun(part=part, work=work, began_s=spent_s, order=order)
        if not self.full:
            self.parts.sit(self.parts.free[0])  # the next decision is no load to the looks

    def wait(self, plain: TrainingConfig | None) -> tuple[Begun, Trial]:
        """Waits until a look has ended; meanwhile all parts are busy.

        Args:
            plain: The baseline, for parts without a look; None, or one that takes several parts: the oldest look.
        """
        if self.parts.free:
            oldest = next(iter(self.begun.values()))
            config = plain if plain is not None and self.fits_a_part(plain) else oldest.order.config
            self.parts.fill(config)
        ended = self.parts.wait(on_progress=self._on_progress, on_attempt=self.on_attempt)
        self.parts.sit(ended.part)  # what is decided now is no load to the others
        return self.begun.pop(ended.part), self._marked(ended.trial)

    def run_with_copies(self, order: TrialOrder) -> Trial:
        """Runs a trial on the first part, and copies of it on all others, which do not count."""
        self.parts.begin(0, order, self.left_s)
        self.parts.fill(order.config)
        trial = self.parts.wait(
            on_progress=lambda part, progress: self.on_progress(progress), on_attempt=self.on_attempt
        ).trial
        self.rest()
        return self._marked(trial)

    def rest(self) -> None:
        """Leaves all parts without work, for a piece that runs alone."""
        self.parts.empty()
        self.parts.sit(0)

    def close(self) -> list[tuple[Begun, Trial]]:
        """Ends everything; returns the looks that had come to their end."""
        ended = self.parts.close()
        return [(self.begun[one.part], self._marked(one.trial)) for one in ended if one.part in self.begun]

    def _on_progress(self, part: int, progress: Progress) -> None:
        if part == next(iter(self.begun), None):
            self.on_progress(progress)

    def _marked(self, trial: Trial) -> Trial:
        return trial.model_copy(update={"beside": len(self.parts) - 1})

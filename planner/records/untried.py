"""The configurations that a search did not try: a record that goes into the plan, and its words."""

from __future__ import annotations

from pydantic import Field

from autoplan.planner.records.trials import Interval
from autoplan.record import Record
from autoplan.strategies.config import TrainingConfig
from autoplan.units import format_number, format_seconds


class Untried(Record):
    """A configuration without a verdict: what a longer search tries next, as far as that is known; a prediction."""

    config: TrainingConfig
    candidates: int = Field(description="configurations that were never begun and could run")
    begun: bool = Field(default=False, description="this one was begun, and the budget's end stopped it")
    speed_ratio: Interval = Field(description="predicted tokens/s over the plan's; low and high bound 90 %")
    probability: float = Field(description="that it runs, fits and is faster than the plan")
    trial_s: float = Field(description="expected seconds of a trial of it")
    tried_next: bool | None = Field(
        default=None,
        description="by a longer search; False: none of the untried could still win, so it tries none of them; None: "
        "not known (another sampler draws, or an earlier version), and most is expected of this one",
    )
    per_rank: bool = Field(default=False, description="the speeds are tokens/s of a rank: cost is looked for")

    def describe(self, reference: str) -> str:
        """A sentence: what was not tried, and what it may bring.

        Args:
            reference: The configuration that its speed is compared with, in the possessive form: `the plan's`.
        """
        many = {0: "every configuration was tried", 1: "one configuration was not tried"}.get(
            self.candidates, f"{self.candidates:,} configurations were not tried"
        )
        config, ratio = self.config.describe(), self.speed_ratio
        config += ", which the end of the budget stopped," if self.begun else ""
        which = {
            True: f"a longer search tries {config} next",
            False: f"none of them could still win, and a longer search tries none; the nearest is {config}",
            None: f"most is expected of {config}",
        }[self.tried_next]
        speed, better = ("speed per rank", "cheaper") if self.per_rank else ("speed", "faster")
        probability = "over 99%" if self.probability > 0.99 else f"{self.probability:.0%}"  # no prediction is certain
        low, high = (f"{x:.3g}" if x < 100 else format_number(x) for x in (ratio.low, ratio.high))
        return (
            f"{many}; {which}: predicted {low} to {high} times {reference} {speed}, {better} with a "
            f"probability of {probability}; a trial of it takes about {format_seconds(self.trial_s)}"
        )

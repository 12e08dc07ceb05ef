"""The staircase: from the baseline to a plan one technique at a time, and each technique left out of the plan.

In: two configurations, and trials. Out: which configurations show what each technique gives, in which order they
follow each other, and how they compare. Nothing is run (climb.py does that). The same trials always give the same
answer.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from autoplan.planner.records.plan import Environment
from autoplan.planner.records.trials import ClaimRounds, Interval, Outcome, Trial
from autoplan.planner.search.claim import compare
from autoplan.planner.search.selection import CandidateRuns
from autoplan.planner.trials.measure import Spread, core_spread, invert
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record
from autoplan.strategies.config import KNOBS, PLAIN, TrainingConfig, knobs
from autoplan.strategies.techniques.rules import incompatible

OF_SEARCH = 1_000_000
"""Rounds of the search have numbers from here on: its claim's, then from twice this its pairs'."""

Names = frozenset[str]
"""Knobs that have the plan's values; the others have those of the start."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The knobs that differ between two configurations, and which of them can change without the others.

    Attributes:
        start, end: The configurations.
        global_batch: Samples per optimizer step.
    """

    start: TrainingConfig
    end: TrainingConfig
    global_batch: int

    @cached_property
    def knobs(self) -> tuple[str, ...]:
        """The knobs that differ, in the order of the fields."""
        return tuple(knob for knob in KNOBS if getattr(self.start, knob) != getattr(self.end, knob))

    @cached_property
    def all(self) -> Names:
        """The same as a set: the end."""
        return frozenset(self.knobs)

    def config(self, names: Iterable[str]) -> TrainingConfig:
        """The start with these knobs as the end has them."""
        return self.start.model_copy(update={name: getattr(self.end, name) for name in names})

    def names(self, config: TrainingConfig) -> Names | None:
        """The knobs that a configuration has of the end; None: it is none between start and end."""
        found = frozenset(knob for knob in self.knobs if getattr(config, knob) == getattr(self.end, knob))
        return found if self.config(found) == config else None

    def label(self, names: Iterable[str]) -> tuple[str, ...]:
        """`precision=bf16` for each of these knobs."""
        chosen = set(names)
        return tuple(f"{knob}={getattr(self.end, knob)}" for knob in self.knobs if knob in chosen)

    def is_legal(self, names: Names) -> bool:
        """Whether a run can have these knobs without the others, and each of them has an effect.

        It says nothing of memory. The values themselves are legal: the search offered them.
        """
        if names in (frozenset(), self.all):
            return True
        config = self.config(names)
        if self.global_batch % (config.micro_batch * config.dp) or incompatible(config, self.global_batch) is not None:
            return False
        needs = ((name, need) for name in KNOBS for need in knobs()[name].needs)
        return all(
            need.is_met(getattr(config, need.knob)) or getattr(config, name) == getattr(PLAIN, name)
            for name, need in needs
        )

    def with_needed(self, wanted: Names, have: Names = frozenset()) -> Names:
        """The fewest knobs that can be added to those that are there, the wanted ones among them."""
        return self._fewest(wanted, self.all - have, lambda names: self.is_legal(have | names))

    def with_dependent(self, wanted: Names) -> Names:
        """The fewest knobs that can be taken from the end, the wanted ones among them."""
        return self._fewest(wanted, self.all, lambda names: self.is_legal(self.all - names))

    def _fewest(self, wanted: Names, every: Names, is_right: Callable[[Names], bool]) -> Names:
        rest = [knob for knob in self.knobs if knob in every - wanted]
        more = itertools.chain.from_iterable(itertools.combinations(rest, size) for size in range(len(rest) + 1))
        sets = (wanted | frozenset(names) for names in more)
        return next(filter(is_right, sets))  # all of them together are the start or the end, which are legal

    def additions(self, have: Names) -> list[Names]:
        """The next steps: sets of knobs that can be added to those that are there, none of them within another."""
        found = _once(self.with_needed(frozenset({knob}), have) for knob in self.knobs if knob not in have)
        return [one for one in found if not any(other < one for other in found)]

    @cached_property
    def alone(self) -> list[Names]:
        """Each knob with what it needs: added to the start alone."""
        return _once(self.with_needed(frozenset({knob})) for knob in self.knobs)

    @cached_property
    def left_out(self) -> list[Names]:
        """Each knob with what depends on it: left out of the end."""
        return _once(self.with_dependent(frozenset({knob})) for knob in self.knobs)

    def looks(self) -> list[Names]:
        """The sets whose step times decide the order, each once."""
        return _once([frozenset(), self.all, *self.alone, *(self.all - names for names in self.left_out)])

    def order(self, step_s: Mapping[Names, float]) -> list[Names]:
        """The steps, at each the one that is expected to gain the most.

        Args:
            step_s: Seconds of a step of some sets, as looks measured them; infinity for one that does not run.

        Of a set that nobody measured the gain lies between what the step gives to the start and to the end, in
        proportion to the steps that come before it: a model of first-order interactions.
        """
        have, steps = frozenset[str](), list[Names]()
        while have != self.all:
            best = max(self.additions(have), key=lambda added: self._gain(added, have, step_s))
            steps.append(best)
            have |= best
        return steps

    def _gain(self, added: Names, have: Names, step_s: Mapping[Names, float]) -> float:
        """The natural logarithm of the speed that a step is expected to give; 0 where nothing is known."""

        def between(less: Names, more: Names) -> float | None:
            before, after = step_s.get(less), step_s.get(more)
            if before is None or after is None or math.isinf(before):
                return None
            return -math.inf if math.isinf(after) else math.log(before / after)

        known = between(have, have | added)
        if known is not None:
            return known
        first, last = self.with_needed(added), self.with_dependent(added)
        alone, at_end = between(first - added, first), between(self.all - last, (self.all - last) | added)
        share = len(have) / max(1, len(self.all) - len(added))
        seen = [
            (g, weight) for g, weight in ((alone, 1 - share), (at_end, share)) if g is not None and math.isfinite(g)
        ]
        if len(seen) == 2:
            return sum(gain * weight for gain, weight in seen)
        return seen[0][0] if seen else 0.0


def _once(sets: Iterable[Names]) -> list[Names]:
    return list(dict.fromkeys(sets))


def is_noise(gain: Interval | None) -> bool:
    """Whether an interval of a ratio does not say which of two is faster."""
    return gain is not None and gain.low <= 1.0 <= gain.high


def merge_steps(
    count: int, ran: Callable[[int], bool], gain: Callable[[int, int], Interval | None]
) -> list[tuple[int, int]]:
    """The steps to draw, each from one place of the staircase to a later one.

    Args:
        count: Of all steps; the places are 0 (the start) to count (the end).
        ran: Whether the configuration at a place ran; a step over one that did not is drawn with the next.
        gain: The speed at a place over that at another; steps in a row within noise are drawn as one.
    """
    places = [place for place in range(count + 1) if place in (0, count) or ran(place)]
    pairs = list(itertools.pairwise(places))
    drawn: list[tuple[int, int]] = []
    for noise, group in itertools.groupby(pairs, key=lambda pair: is_noise(gain(*pair))):
        several = list(group)
        drawn += [(several[0][0], several[-1][1])] if noise else several
    return drawn


class Effect(Record):
    """Some knobs, and what they give in one place of the staircase."""

    changes: tuple[str, ...] = Field(description="`precision=bf16`; several where none is legal or told apart alone")
    config: TrainingConfig = Field(description="with them; of a technique that is left out, without them")
    gain: Interval | None = Field(
        description="its speed over that of the step before, of the start, or of the plan; None: not measured"
    )
    so_far: Interval | None = Field(default=None, description="of a step: its speed over that of the start")
    peak_memory_bytes: int | None = None
    rounds: int = Field(default=0, description="rounds of runs side by side behind the gain")
    why_not: str | None = Field(default=None, description="why there is no gain to show, or it is uncertain")


class Staircase(Record):
    """The gain of each technique of a plan: the trials that were made for it, and their figures."""

    schema_version: int = 1
    created: str
    study: str = Field(description="of the search that found the plan")
    workload: str
    hardware: str
    device: str
    machine: HardwareProfile = Field(description="where it was begun; nothing is measured elsewhere")
    environment: Environment = Field(description="the same of its packages and variables")
    global_batch: int
    start: TrainingConfig = Field(description="the baseline of the plan, unless another one was named")
    own_setting: TrainingConfig | None = Field(
        default=None, description="that the training had before; None: not known"
    )
    plan: TrainingConfig
    budget_s: float
    spent_s: float = 0.0
    order: tuple[tuple[str, ...], ...] = Field(
        default=(), description="the knobs of each step; empty before the looks that decide it"
    )
    trials: tuple[Trial, ...] = Field(
        default=(), description=f"looks, and runs of rounds; rounds from {OF_SEARCH} on are those of the search"
    )
    ended: str | None = Field(default=None, description="why it measured no more; None: it was interrupted")
    seal: str = Field(default="", description="a digest that shows an accidental edit; it is no signature")

    def show(self) -> None:
        """Prints the staircase as `autoplan explain --staircase` does."""
        report = importlib.import_module("autoplan.report.staircase")  # above this package, and found by name
        report.show_staircase(importlib.import_module("autoplan.report.screen").make_console(sys.stdout), self)

    def __repr__(self) -> str:
        return f"<staircase of {self.workload}: {len(self.order)} steps; staircase.show() has the rest>"

    @cached_property
    def between(self) -> Changes:
        """The knobs that differ between start and plan."""
        return Changes(start=self.start, end=self.plan, global_batch=self.global_batch)

    @property
    def path(self) -> tuple[TrainingConfig, ...]:
        """The configurations from the start to the plan."""
        have, found = frozenset[str](), [self.start]
        for names in self.order:
            have |= frozenset(names)
            found.append(self.between.config(have))
        return tuple(found)

    def rounds_of(self, config: TrainingConfig) -> dict[int, Trial]:
        """The good runs of a configuration side by side with others, by the number of their round."""
        runs = (one for one in self.trials if one.config == config and one.purpose == "claim" and is_good(one))
        return {run.round: run for run in runs if run.round is not None}

    def failure(self, config: TrainingConfig) -> str | None:
        """Why a configuration does not run; None: it ran, or nobody tried it."""
        failed = (t for t in self.trials if t.config == config and not is_good(t) and not t.budget_ended)
        return next((f"{t.outcome.value}: {t.reason}" for t in failed), None)

    def peak_memory_bytes(self, config: TrainingConfig) -> int | None:
        """The highest peak of all good runs of a configuration."""
        return max((t.peak_memory_bytes or 0 for t in self.trials if t.config == config and is_good(t)), default=None)

    def gain(self, config: TrainingConfig, reference: TrainingConfig) -> tuple[Interval | None, int, str | None]:
        """(the speed over that of another configuration, rounds, why that is uncertain), as a claim has it.

        The spread between runs is that of all other configurations, in the rounds that were made here.
        """
        mine, other = self.rounds_of(config), self.rounds_of(reference)
        shared = sorted(mine.keys() & other.keys())
        if not shared:
            failed = self.failure(config) or self.failure(reference)
            return None, 0, failed or "not measured: no time was left"
        spread = Spread.of(
            (
                [
                    run.step_time_s.median
                    for number, run in self.rounds_of(one).items()
                    if number < OF_SEARCH and run.step_time_s is not None and not run.disturbed
                ]
                for one in {trial.config for trial in self.trials} - {config, reference}
            ),
            core_spread(trial.window for trial in self.trials),
        )
        candidate, against = (
            CandidateRuns(config=one, first=runs[shared[0]], claim_runs=tuple(runs[number] for number in shared))
            for one, runs in ((config, mine), (reference, other))
        )
        rounds = ClaimRounds(
            number=1, config=config, reference=reference, first_round=0, rounds=len(shared), budget_s=self.budget_s
        )
        found = compare(candidate, against, spread, chosen_from=1, claim=rounds)
        why = found.claim.why_not
        return found.speedup, found.claim.rounds, why if why and why.startswith("disturbed") else None

    def steps(self) -> list[Effect]:
        """The staircase, step by step; those in a row that are within noise, or over what does not run, as one."""
        path = self.path
        drawn = merge_steps(
            len(self.order),
            lambda place: self.failure(path[place]) is None,
            lambda before, after: self.gain(path[after], path[before])[0],
        )
        return [
            self._effect(itertools.chain(*self.order[before:after]), path[after], path[before], so_far=True)
            for before, after in drawn
        ]

    def alone(self) -> list[Effect]:
        """Each technique, with what it needs, added to the start alone."""
        return [self._effect(names, self.between.config(names), self.start) for names in self.between.alone]

    def left_out(self) -> list[Effect]:
        """The plan without each technique, and without what depends on it: its speed over the plan's."""
        found = self.between
        return [self._effect(names, found.config(found.all - names), self.plan) for names in found.left_out]

    def _effect(
        self, names: Iterable[str], config: TrainingConfig, reference: TrainingConfig, *, so_far: bool = False
    ) -> Effect:
        gain, rounds, why_not = self.gain(config, reference)
        return Effect(
            changes=self.between.label(names),
            config=config,
            gain=gain,
            so_far=self.gain(config, self.start)[0] if so_far else None,
            peak_memory_bytes=self.peak_memory_bytes(config),
            rounds=rounds,
            why_not=why_not,
        )


def is_good(trial: Trial) -> bool:
    """Whether a trial ran to its end and timed a step."""
    return trial.outcome is Outcome.OK and trial.step_time_s is not None


def interactions(steps: Sequence[Effect], alone: Sequence[Effect], left_out: Sequence[Effect]) -> list[str]:
    """Sentences on techniques whose gain depends on others: where the intervals of two gains have nothing in common.

    Each is compared, alone, with its step in the staircase; then with what the plan loses without it.
    """
    said, first = [], {effect.changes: effect.gain for effect in alone}
    last = {effect.changes: effect.gain for effect in left_out}
    for place, step in enumerate(steps):
        own, without = first.get(step.changes), last.get(step.changes)
        at_end = None if without is None else invert(without, 1.0)
        before = ", ".join(name for other in steps[:place] for name in other.changes)
        for gain, where in ((step.gain, f"after {before}"), (at_end, "with the rest of the plan")):
            if own is not None and gain is not None and (gain.low > own.high or gain.high < own.low):
                said.append(f"{' '.join(step.changes)}: alone {own.median:.2f} times, {where} {gain.median:.2f}")
                break
    return said

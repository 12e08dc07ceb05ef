"""How many trials the cost model saves a search: tables of recorded trials, replayed by the search's own samplers.

    python -m benchmarks.trials_saved [--markdown] [folder]

benchmarks/search_tables.py records tables: candidates of a real space that were run for real, all of them twice over,
so that the difference of the two rounds is the noise floor. The tables in results/trials_saved are of an earlier form
of it: they are bounded to a few knobs, and few of their candidates compile.

Replaying trains nothing: a sampler of a search chooses among exactly those candidates, and each of its trials is
answered with what was recorded of that configuration. It starts as a search does, with a plain run (a smaller one
where that is out of memory), and every start and round is used in turn. Counted are the trials until one was within the
tolerance of the best recorded, and until the search ends by itself. A trial that loses is cut short in a real search
and ran its whole time here, so the seconds are upper bounds. With a memory limit, a recorded peak above it counts as
out of memory. benchmarks/search_replay.py counts device seconds and regret over the same replays.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna

from autoplan.planner.cost.traced.estimator import CostTable, Estimator
from autoplan.planner.records import Outcome, Trial
from autoplan.planner.search.candidate_model import Assessment, CandidateModel
from autoplan.planner.search.option_checks import SamplerName
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.space.prune import keep_what_may_win
from autoplan.planner.store.optuna_study import SearchStudy, choices_of, make_distributions
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.strategies.config import TrainingConfig
from benchmarks.replay_samplers import sampler_of
from benchmarks.trials_saved_record import LIMIT_BYTES, Recorded, read

RESULTS = Path(__file__).parent / "results" / "trials_saved"
TOLERANCE = 0.02
FLAT_FACTOR = 3.0
"""Over two small records of 26 candidates 3 and 4 always came to the best, after 6 to 8 trials, and ended the search
after 9 to 21. With 2 one of the two records ended 36 % off it, with 1.3 both (24 and 147 %)."""


class FlatEstimator(Estimator):
    """No cost model: every configuration is expected to be like the mean of the trials, within a factor of three.

    The factor is that of a 90 % interval. What the trials show of each other's neighbours is left to the surrogate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[float, float]] = []

    def observe(self, trial: Trial) -> None:
        """Keeps the logarithms of the time and the peak of what ran."""
        if trial.step_time_s is not None and trial.peak_memory_bytes:
            self.seen.append((math.log(trial.step_time_s.median), math.log(trial.peak_memory_bytes)))

    def table(self, configs: Sequence[TrainingConfig]) -> CostTable:
        """The same for each."""
        seconds, peak = np.exp(np.mean(self.seen or [(0.0, math.log(2**30))], axis=0))
        ones = np.ones(len(configs))
        return replace(
            super().table(configs),
            step_time_s=ones * seconds,
            step_time_low_s=ones * seconds / FLAT_FACTOR,
            step_time_high_s=ones * seconds * FLAT_FACTOR,
            peak_memory_bytes=ones * peak,
            peak_memory_low_bytes=ones * peak / FLAT_FACTOR,
            peak_memory_high_bytes=ones * peak * FLAT_FACTOR,
        )


Model = Literal["search", "untimed", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchMethod:
    """One way to search.

    Attributes:
        name: In the table.
        sampler: Its name.
        model: The cost model as a search has it; the same without the operations' times, by rates alone; none.
        drops: Whether what the model calls too big is dropped before the first trial.
    """

    name: str
    sampler: SamplerName | Literal["gp"]
    model: Model = "search"
    drops: bool = True


WAYS = (
    SearchMethod(name="ours", sampler="autoplan"),
    SearchMethod(name="ours, operations not timed", sampler="autoplan", model="untimed"),
    SearchMethod(name="ours, no cost model", sampler="autoplan", model="none", drops=False),
    SearchMethod(name="tpe", sampler="tpe"),
    SearchMethod(name="random", sampler="random"),
    SearchMethod(name="random, nothing dropped", sampler="random", drops=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How one replay went. Trials and seconds until the target is reached (None: it was not), and until the end.

    `regret`: how much slower than the best recorded the best of all its trials is.
    """

    to_target: int | None
    seconds_to_target: float | None
    trials: int
    seconds: float
    regret: float


def make_estimator(recorded: Recorded, model: Model, limit_bytes: int) -> Estimator:
    """The cost model of a way to search, before its first trial."""
    profile = without_times(recorded.profile) if model == "untimed" else recorded.profile
    kind = FlatEstimator if model == "none" else Estimator
    return kind(
        profile,
        recorded.hardware,
        device="cpu",
        global_batch=recorded.global_batch,
        memory_limit_bytes=limit_bytes,
    )


def without_times(profile: ModelProfile) -> ModelProfile:
    """The profile as if no operation had been timed."""
    variants = {
        text: variant.model_copy(
            update={"groups": tuple(group.model_copy(update={"measured_s": None}) for group in variant.groups)}
        )
        for text, variant in profile.variants.items()
    }
    return profile.model_copy(update={"variants": variants})


def answer(trial: Trial, number: int, limit_bytes: int) -> Trial:
    """How a search would have seen the trial end: the recorded trial, or that its peak is above the limit."""
    peak = trial.peak_memory_bytes or 0
    if trial.outcome is not Outcome.OK or peak <= limit_bytes:
        return trial.model_copy(update={"number": number})
    capped = trial.peak_memory.model_copy(update={"resident_bytes": limit_bytes})
    over = {"outcome": Outcome.OUT_OF_MEMORY, "detail": "host", "step_time_s": None, "peak_memory": capped}
    return trial.model_copy(update=over | {"number": number})


class ListedCandidates(CandidateModel):
    """For samplers that ask of the candidates only which are left: what is expected of each is not worked out again."""

    _first: Assessment | None = None

    def assess(self) -> Assessment:
        """As it was at first, less what was tried since."""
        if self._first is None:
            self._first = super().assess()
        tried = {trial.config for trial in self.trials}
        return replace(self._first, untried=np.array([config not in tried for config in self.candidates]))


def walk(
    recorded: Recorded,
    way: SearchMethod,
    number: int,
    *,
    limit_bytes: int = LIMIT_BYTES,
    left_s: Callable[[], float] = lambda: math.inf,
) -> Iterator[tuple[Trial, Trial]]:
    """One search over what was recorded, trial by trial: as the search saw it end, and as it was recorded.

    `number` says the seed, the plain run it starts with and the round it sees. It ends where the sampler would end it,
    which is told how many seconds are left.
    """
    plain = recorded.plain
    trials = {trial.config: trial for trial in recorded.rounds[number // max(1, len(plain)) % 2]}
    estimator = make_estimator(recorded, way.model, limit_bytes)
    candidates = kept(recorded, estimator, limit_bytes) if way.drops else recorded.candidates
    cost = TrialCost(
        candidates,
        global_batch=recorded.global_batch,
        num_blocks=recorded.profile.num_blocks,
        device="cpu",
    )
    kind = CandidateModel if way.sampler == "autoplan" else ListedCandidates
    model = kind(candidates, estimator, cost, memory_limit_bytes=limit_bytes)
    spaces = make_distributions(choices_of((*candidates, *plain)))
    sampler = sampler_of(way.sampler, model, spaces, number)
    study = SearchStudy(None, spaces, (), sampler)
    starts = plain[number % len(plain) :] if plain else []
    if way.drops:  # as planner/search/stages.py: not above what is predicted to fit, but for the smallest
        starts = [c for c in starts if estimator.estimate([c])[0].verdict == "fits"] or starts[-1:]
    while True:
        sampler.time_left_s = left_s()
        if starts and model.best_trial() is None:
            asked = study.ask(len(model.trials), starts.pop(0))
        elif sampler.reason_to_stop() is None:
            asked = study.ask(len(model.trials))
        else:
            return
        trial = trials[TrainingConfig.model_validate(asked.params)]
        seen = answer(trial, len(model.trials), limit_bytes)
        model.observe(seen)
        study.tell(asked, seen)
        yield seen, trial


def replay(
    recorded: Recorded, way: SearchMethod, number: int, *, limit_bytes: int = LIMIT_BYTES, to_end: bool = True
) -> Replay:
    """One search over what was recorded (`walk`); without `to_end` it ends when the target is reached."""
    seconds = np.where(recorded.peaks <= limit_bytes, recorded.seconds, math.inf)
    truth = dict(zip(recorded.candidates, seconds.tolist(), strict=True))
    goal = min(truth.values()) * (1 + tolerance(recorded))
    reached: tuple[int, float] | None = None
    spent = 0.0
    tried: list[float] = []
    for _, trial in walk(recorded, way, number, limit_bytes=limit_bytes):
        spent += trial.seconds_spent
        tried.append(truth[trial.config])
        if reached is None and tried[-1] <= goal:
            reached = len(tried), spent
            if not to_end:
                break
    return Replay(
        to_target=reached[0] if reached else None,
        seconds_to_target=reached[1] if reached else None,
        trials=len(tried),
        seconds=spent,
        regret=min(tried) / min(truth.values()) - 1,
    )


def kept(recorded: Recorded, estimator: Estimator, limit_bytes: int) -> list[TrainingConfig]:
    """The candidates that a search keeps under this memory limit, before its first trial."""
    configs = recorded.candidates
    places, _ = keep_what_may_win(configs, estimator.table(configs), limit_bytes, "cpu")
    return [configs[place] for place in places]


def tolerance(recorded: Recorded) -> float:
    """How near to the best is near enough: 2 %, or the noise floor of the record."""
    return max(TOLERANCE, recorded.noise)


def replays(recorded: Recorded, way: SearchMethod, draws: int, limit_bytes: int = LIMIT_BYTES) -> list[Replay]:
    """As many as there are draws; our own sampler draws nothing, so its starts and rounds are all there is.

    The others have no stop rule but that nothing is left, so they end at the target.
    """
    ours = way.sampler == "autoplan"
    count = min(draws, 2 * len(recorded.plain)) if ours else draws
    return [replay(recorded, way, number, limit_bytes=limit_bytes, to_end=ours) for number in range(count)]


# Tables.


def limits(recorded: Recorded) -> list[int]:
    """Three memory limits: the measured peaks' quarter, half and three quarters."""
    return [int(limit) for limit in np.quantile(recorded.peaks, [0.25, 0.5, 0.75])]


def middle(values: Sequence[float | None]) -> str:
    """Median and range; what is None is above all others."""
    numbers = [math.inf if value is None else value for value in values]
    marks = np.quantile(numbers, [0, 0.5, 1], method="lower")
    low, half, high = (f"{value:.0f}" if value < math.inf else "-" for value in marks)
    return f"{half} ({low} to {high})"


def show(folder: Path, *, draws: int, markdown: bool) -> None:
    """Prints both tables of each workload."""

    def line(cells: Sequence[str], *, head: bool = False) -> None:
        print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells), flush=True)
        if head and markdown:
            print("|" + "---|" * len(cells))

    found = read(folder)
    if not found:
        print(f"nothing is recorded in {folder}: python -m benchmarks.search_tables records tables")
    for recorded in found:
        near = tolerance(recorded)
        print(f"\n{about(recorded)}\n")
        head = ["search", "memory limit", "candidates", "found", f"trials to within {near:.1%}", "seconds until then"]
        line([*head, "trials until it ends", "seconds", "regret then"], head=True)
        for limit in (LIMIT_BYTES, limits(recorded)[1]):
            for way in WAYS:
                if limit < LIMIT_BYTES or way.name != "random, nothing dropped":
                    line(_row(recorded, way, limit, draws))
        print()
        head = ["memory limit", "dropped", "of these over", "fits: ran", "over", "too close: ran", "over"]
        line([*head, "does not fit: ran", "over"], head=True)
        for limit in limits(recorded):
            line(_confusion(recorded, limit))


def about(recorded: Recorded) -> str:
    """A paragraph on what was recorded."""
    best, near = recorded.seconds.min(), tolerance(recorded)
    compiled = sum(config.compile != "off" for config in recorded.candidates)
    within = f" within {' '.join(recorded.bounds)}" if recorded.bounds else ""
    return (
        f"{recorded.name}: {len(recorded.candidates)} candidates ({compiled} compiled) of {recorded.legal}{within}; "
        f"the two rounds are {recorded.noise:.1%} apart (median; more than 25 %: "
        f"{np.sum(recorded.apart > 0.25)} of {len(recorded.apart)}); the best takes {best:.3f} s, "
        f"{np.sum(recorded.seconds <= best * (1 + near))} are within {near:.1%} of it"
    )


def _row(recorded: Recorded, way: SearchMethod, limit: int, draws: int) -> list[str]:
    done = replays(recorded, way, draws, limit)
    estimator = make_estimator(recorded, way.model, limit)
    count = len(kept(recorded, estimator, limit) if way.drops else recorded.candidates)
    found = sum(one.to_target is not None for one in done)
    cells = [way.name, "none" if limit == LIMIT_BYTES else f"{limit >> 20} MiB", str(count), f"{found} of {len(done)}"]
    cells += [middle([one.to_target for one in done]), middle([one.seconds_to_target for one in done])]
    if way.sampler != "autoplan":
        return [*cells, f"{count} (all)", "-", "-"]
    worst = max(one.regret for one in done)
    return [*cells, middle([one.trials for one in done]), middle([one.seconds for one in done]), f"at most {worst:.1%}"]


def _confusion(recorded: Recorded, limit: int) -> list[str]:
    """What the model of a search says of each candidate before its first trial, beside the measured peak."""
    estimator = make_estimator(recorded, "search", limit)
    verdicts = [prediction.verdict for prediction in estimator.estimate(recorded.candidates)]
    over = recorded.peaks > limit
    counts = Counter(zip(verdicts, over.tolist(), strict=True))
    stays = set(kept(recorded, estimator, limit))
    dropped = [config not in stays for config in recorded.candidates]
    cells = [f"{limit >> 20} MiB", str(sum(dropped)), str(int(np.sum(over & dropped)))]
    for verdict in ("fits", "too_close", "does_not_fit"):
        cells += [str(counts[verdict, False]), str(counts[verdict, True])]
    return cells


def main() -> None:
    """Replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--draws", type=int, default=20, help="replays of each sampler that draws")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    show(options.folder, draws=options.draws, markdown=options.markdown)


if __name__ == "__main__":
    main()

"""Short trials: of the model cut to a few blocks, where they let a search measure more configurations in its time.

In: a `Session` after the baseline and the hand settings. Out: short trials in its store, which the choice of the next
whole trials takes into account. Nothing else does: finalists, parity, claim and plan are of whole runs.

A short trial is a trial like any other (same processes, same `prepare`, same timing), of a model with `DEPTH` blocks in
each stack. Its time box is cut like its step. What ran whole already runs short first: it says how cut and whole step
times go together here (extrapolation.py). As soon as they do not, short trials end and none of them counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.records import Outcome, ShortTrial, Trial
from autoplan.planner.search.candidate_model import Assessment
from autoplan.planner.search.rounds import repeat_if_due
from autoplan.planner.search.sampler import AutoplanSampler
from autoplan.planner.search.session import Session
from autoplan.planner.search.surrogate import Array
from autoplan.planner.trials.runner import TrialOrder
from autoplan.strategies.config import TrainingConfig

DEPTH = 2
"""Blocks that are left of each stack: the fewest of which one follows another."""

LEAST_BLOCKS = 6
"""Of a stack; of fewer, little is cut."""

PAYS = 0.5
"""A configuration runs short where that takes at most this share of the seconds of its whole trial."""

WORTH = 1.5
"""Short trials are made where they are at least so many times as many as the whole ones that the same time has room
for, with what runs both ways and the whole trials afterwards counted in."""

ANCHORS = 2
"""Configurations that ran whole and run short before the first candidate does: the baseline and the fastest of the
others. The first sets the level of the extrapolation, the second checks it. Whatever runs whole later is one more."""

MOST_WHOLE_FIRST = 3
"""Whole trials that are made first where the baseline alone ran: some end early, and then say too little."""

WHOLE_AFTER = 2
"""Whole trials of the best that time is kept for."""

LOOKED_AT = 10
"""Of the candidates with the best chance: by their costs it is decided whether short trials are worth it."""

LEAST_BOX_S = 0.5
"""Of a short trial's warm-up and measuring."""

SURELY_SLOWER = 1.1
"""A short trial ends early where its step takes so many times what the best one's would, cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The model at DEPTH blocks, as the cost model knows it."""

    whole: Estimator
    cut: Estimator

    @property
    def blocks(self) -> int:
        """Of each stack of the whole model."""
        return self.whole.profile.num_blocks

    def share(self, configs: tuple[TrainingConfig, ...]) -> Array:
        """The step time of the cut model over the whole one's, as it is predicted now."""
        return np.asarray(self.cut.table(configs).step_time_s / self.whole.table(configs).step_time_s)

    def ratios(self, config: TrainingConfig) -> tuple[float, float]:
        """The whole model's time over the cut one's as it is predicted now: of the micro-steps, of the optimizer step.

        An optimizer step that takes no time has the micro-steps' ratio.
        """
        whole, cut = (one.micro_steps_and_optimizer([config]) for one in (self.whole, self.cut))
        micro, optimizer = (
            float(of_whole[0] / max(of_cut[0], 1e-12)) for of_whole, of_cut in zip(whole, cut, strict=True)
        )
        return micro, optimizer or micro


def find_cut(session: Session) -> Cut | None:
    """The cut model; None where short trials are off, or the workload has none."""
    options, context = session.options, session.context
    blocks = context.estimator.profile.num_blocks
    possible = (
        options.short_trials == "auto"
        and context.device == "cpu"  # on a GPU a trial takes seconds, and nothing has shown that it extrapolates so
        and options.wanted.name == "throughput"
        and options.max_trials is None  # then it is their number that ends the search, and not the time
        and isinstance(session.sampler, AutoplanSampler)  # others draw from a study, which has whole trials alone
        and context.facts.step_s is None  # of a step function no part is known
        and not context.spec.taken_from  # the loss of a training as it stands may hold the whole model
        and context.facts.num_stacks == 1  # of an encoder and a decoder, no measurement says that cuts go together
        and blocks >= LEAST_BLOCKS  # 0 where the blocks differ
    )
    return Cut(whole=context.estimator, cut=context.estimator.at_depth(DEPTH)) if possible else None


def run_short_trials(session: Session, run_whole: Callable[[], bool]) -> None:
    """Runs short trials while they are worth it and agree with whole ones.

    Args:
        session: The search.
        run_whole: Runs one more whole trial of the search; returns whether there was one to run.
    """
    cut = find_cut(session)
    if cut is None or not session.short_trials_agree or not _is_worth_it(session, cut):
        return
    session.observer.on_phase("short", f"{DEPTH} of {cut.blocks} blocks")
    if not _run_both_ways(session, cut, run_whole):
        return
    while session.short_trials_agree:
        repeat_if_due(session)
        config = _next(session, cut)
        if config is None or run_short(session, cut, config) is None:
            return


# Whether, and which.


def _is_worth_it(session: Session, cut: Cut) -> bool:
    """Whether the time left has room for WORTH times as many short trials as whole ones, and not for all whole ones."""
    found = _exploring(session, cut)
    if found is None:
        return False
    explore, hopeful = found
    whole_s, left_s = session.model.assess().cost_s, session.search_left_s
    gain = np.where(hopeful, _sampler(session).gain(explore), -1.0)
    top = np.argsort(-gain, kind="stable")[: min(LOOKED_AT, int(hopeful.sum()))]
    if not len(top) or hopeful.sum() * float(np.median(whole_s[top])) <= left_s:
        return False
    kept_s = WHOLE_AFTER * float(np.median(whole_s[top]))
    both_ways_s = sum(_short_s(session, cut, trial) for trial in _anchors(session))
    count = (left_s - kept_s - both_ways_s) / float(np.median(explore.cost_s[top]))
    return count >= WORTH * left_s / float(np.median(whole_s[top]))


def _exploring(session: Session, cut: Cut) -> tuple[Assessment, NDArray[np.bool_]] | None:
    """What is known, as the choice of the next short trial sees it, and which can still win; None: nothing ran whole.

    Its untried are those of which neither a whole nor a short trial was made and a short one pays; its costs are of
    short trials; what is to be beaten is the best step time, measured or extrapolated.
    """
    model, found = session.model, session.extrapolation
    now = model.assess()
    if now.best_log_time is None:
        return None
    shorts = session.store.short_trials
    seen = {short.trial.config for short in shorts}
    short_s = session.trial_cost.short_s(np.exp(now.posterior.log_time), cut.share(model.candidates), DEPTH)
    free = np.array([config not in seen and config.world_size == 1 for config in model.candidates])
    times = [] if found is None else [found.log_time(s) for s in shorts if s.trial.outcome is Outcome.OK]
    best = min([now.best_log_time, *(time for time in times if time is not None)])
    explore = replace(
        now, untried=now.untried & free & (short_s <= PAYS * now.cost_s), cost_s=short_s, best_log_time=best
    )
    return explore, _sampler(session).hopeful(explore)


def _sampler(session: Session) -> AutoplanSampler:
    assert isinstance(session.sampler, AutoplanSampler), "find_cut asked for it"
    return session.sampler


def _next(session: Session, cut: Cut) -> TrainingConfig | None:
    """The next configuration to run short; None: none can win, or what is left is kept for whole trials."""
    found = _exploring(session, cut)
    if found is None:
        return None
    explore, hopeful = found
    leader = int(np.argmin(np.where(explore.posterior.fits > 0.5, explore.posterior.log_time, np.inf)))
    kept_s = WHOLE_AFTER * float(session.model.assess().cost_s[leader])
    affordable = hopeful & (explore.cost_s <= session.search_left_s - kept_s)
    return _sampler(session).best_of(explore, affordable)


# What runs both ways.


def _anchors(session: Session) -> list[Trial]:
    """Good whole trials on one rank that are to run short too: the baseline, then the fastest."""
    seen = {short.trial.config for short in session.store.short_trials}
    good = {
        trial.config: trial
        for trial in reversed(session.store.trials)
        if trial.outcome is Outcome.OK and trial.step_time_s and not trial.is_repeat and trial.config.world_size == 1
    }
    missing = ANCHORS - (0 if session.extrapolation is None else session.extrapolation.pairs)
    left = [trial for config, trial in good.items() if config not in seen]
    left.sort(key=lambda trial: (trial.purpose != "baseline", trial.step_time_s.median if trial.step_time_s else 0.0))
    return left[: max(0, missing)]


def _short_s(session: Session, cut: Cut, trial: Trial) -> float:
    """Expected seconds of a short trial of what ran whole."""
    share = float(cut.share((trial.config,))[0])
    fixed_s = min(session.trial_cost.fixed_s, trial.seconds_spent)
    return fixed_s + share * (trial.seconds_spent - fixed_s)


def _run_both_ways(session: Session, cut: Cut, run_whole: Callable[[], bool]) -> bool:
    """Runs short what ran whole; returns whether enough did, and the two agree."""
    for _ in range(1 + MOST_WHOLE_FIRST):
        for trial in _anchors(session):
            if run_short(session, cut, trial.config) is None or not session.short_trials_agree:
                return False
        found = session.extrapolation
        if found is not None and found.pairs >= ANCHORS:
            return True
        if not run_whole():
            return False
    return False


def run_short(session: Session, cut: Cut, config: TrainingConfig) -> ShortTrial | None:
    """Runs one short trial and writes it to disk before anything else happens; None: something outside ended it."""
    number, share = session.store.next_number, float(cut.share((config,))[0])
    expected_s = session.model.cost_s(config)
    session.observer.on_trial_started(number, "short", config, None, session.budget())
    budget_s, own_s = session.hard_deadline_s(session.parity_reserve_s), 3 * expected_s
    order = TrialOrder(
        number=number,
        purpose="short",
        config=config,
        prediction=None,
        time_box_s=max(LEAST_BOX_S, share * session.time_box_s),
        deadline_s=max(5.0, min(budget_s, own_s)),
        deadline_of_budget=budget_s < own_s,
        best_high_s=_to_beat_s(session, config, share),
        remeasure=session.remeasure,
        depth=DEPTH,
    )
    trial = session.runner.run(
        order,
        on_progress=session.on_progress,
        on_attempt=lambda report: session.add_attempt("short", report, number=number, config=config),
        left_s=lambda: session.hard_deadline_s(0.0),
    )
    if trial.did_not_run:
        session.store.tick(force=True)
        session.note(f"no further short trials: {trial.reason}")
        return None
    micro, optimizer = cut.ratios(config)
    short = ShortTrial(trial=trial, depth=DEPTH, blocks=cut.blocks, micro_ratio=micro, optimizer_ratio=optimizer)
    session.store.add_short_trial(short)
    session.store.tick(force=True)
    session.use_short_trials()
    found = session.extrapolation
    log_time = None if found is None else found.log_time(short)
    session.observer.on_short_trial(short, None if log_time is None else math.exp(log_time), session.budget())
    return short


def _to_beat_s(session: Session, config: TrainingConfig, share: float) -> float | None:
    """A step of the cut model that is longer than this is of a configuration that cannot win; None: not for anchors."""
    best, found = session.best, session.extrapolation
    ran = any(trial.config == config for trial in session.store.trials)
    if ran or best is None or best.step_time_s is None or found is None:
        return None
    return SURELY_SLOWER * best.step_time_s.high * share * math.exp(-found.level(config))

"""The stages of a search, in order: baseline, manual setting, trials, finalists, parity check.

In: a `Session`. Out: trials and parity verdicts in its store; at the end the verified winner.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from autoplan.errors import DidNotRunError, WorkloadError
from autoplan.planner.records import Outcome, Parity, Purpose, Trial
from autoplan.planner.search import parity_time
from autoplan.planner.search.claim import faster_reference
from autoplan.planner.search.compile_ahead import CompileAhead
from autoplan.planner.search.objective import order as ordered
from autoplan.planner.search.objective import to_beat
from autoplan.planner.search.parity_time import first_eager
from autoplan.planner.search.rounds import compared_with, eligible, repeat_if_due
from autoplan.planner.search.selection import CandidateRuns
from autoplan.planner.search.session import BudgetOver, Session
from autoplan.planner.search.trial_cost import SLOW_MODE_SHARE
from autoplan.planner.trials.failures import WORKLOAD
from autoplan.planner.trials.request import VERY_EXPENSIVE_S
from autoplan.processes import TaskFailedError
from autoplan.strategies.config import SLOW_COMPILE_MODES, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

MAX_HALVINGS = 4

BASELINE_RESERVE_SHARE = 0.3
"""Of the time that is left, what the baseline leaves for the parity check and the rest."""

BASELINE_DONE_SHARE = 0.5
"""The share of a budget by which the baseline should be measured: a budget that ended before it is scaled by this."""

MOST_LOST_IN_A_ROW = 2
"""After this many trials, one after the other, that something outside ended each time, the search ends."""

# Baseline.


def run_baseline(session: Session) -> Trial | None:
    """Measures the plain fp32 run, with smaller micro-batches if it runs out of memory. None: it does not run.

    Raises:
        WorkloadError: the workload itself cannot be used.
        DidNotRunError: something outside ended it each time.
        BudgetOver: the budget ended before it was measured.
    """
    if session.baseline is not None:
        return session.baseline
    moved = needed_offload(session)
    plain = "the plain fp32 run" + ("" if moved == "none" else f" with offload={moved}, without which nothing fits")
    session.observer.on_phase("baseline", plain)
    for config in plain_configs(session):
        deadline_s = session.hard_deadline_s(BASELINE_RESERVE_SHARE * session.left_s)
        if _has_verdict(session, "baseline", config, deadline_s):
            continue
        if deadline_s <= 0:
            raise _no_time_for_baseline(session, config)
        trial = session.measure("baseline", config, deadline_s=deadline_s, deadline_of_budget=True)
        if trial.outcome is Outcome.OK:
            return trial
        if trial.did_not_run:
            raise DidNotRunError(f"the plain fp32 run, with which all others are compared: {trial.reason}")
        if trial.outcome is Outcome.CRASHED and trial.detail == WORKLOAD:
            raise WorkloadError(
                trial.reason or "the workload cannot be used", hint="Repair the workload, then search again."
            )
        if trial.outcome not in (Outcome.OUT_OF_MEMORY, Outcome.TIMEOUT):
            break
    last = next(trial for trial in reversed(session.store.trials) if trial.purpose == "baseline")
    if last.budget_ended:
        raise _no_time_for_baseline(session, last.config)
    session.note(f"the plain baseline does not run here ({last.outcome.value}: {last.reason})")
    return None


def _no_time_for_baseline(session: Session, config: TrainingConfig) -> BudgetOver:
    needed_s = (session.store.spent_s + session.model.cost_s(config)) / BASELINE_DONE_SHARE
    return BudgetOver("the baseline", needed_s=needed_s)


def _has_verdict(session: Session, purpose: Purpose, config: TrainingConfig, deadline_s: float) -> bool:
    """Whether such a trial was made, which would not end otherwise now: the budget ended it, and there is more time."""
    made = [trial for trial in session.store.trials if trial.purpose == purpose and trial.config == config]
    return any(not trial.budget_ended or trial.seconds_spent >= deadline_s for trial in made)


def plain_configs(session: Session) -> list[TrainingConfig]:
    """The plain run at the largest power-of-two micro-batch that should fit and is cheap, then at smaller ones."""
    sizes = [size for size in session.context.space.values["micro_batch"] if isinstance(size, int)]
    if len(sizes) > 1:
        sizes = [size for size in sizes if size & (size - 1) == 0] or sizes
    offload = needed_offload(session)
    configs = [TrainingConfig(micro_batch=size, offload=offload) for size in sorted(sizes, reverse=True)]
    limit = session.context.memory_limit_bytes
    chosen: list[TrainingConfig] = []
    for config in configs:
        prediction = session.predict(config)
        micro_step_s = prediction.step_time_s / config.accumulation(session.context.spec.global_batch)
        cheap = micro_step_s <= VERY_EXPENSIVE_S
        if chosen or config is configs[-1] or (cheap and prediction.peak_memory_high_bytes <= limit):
            chosen.append(config)
    return chosen[: MAX_HALVINGS + 1]


def needed_offload(session: Session) -> Any:
    """What the plain run keeps on the host: nothing, or where nothing fits so, what takes least on one device."""
    candidates = session.context.candidates
    values = {config.offload for config in candidates if config.world_size == 1}
    if not values or "none" in {config.offload for config in candidates}:
        return "none"
    size = min(config.micro_batch for config in candidates)
    plain = {value: TrainingConfig.model_validate({"micro_batch": size, "offload": value}) for value in values}
    return min(sorted(values), key=lambda value: session.predict(plain[value]).peak_memory_bytes)


# The setting that a careful person would choose without a search.


def run_manual_setting(session: Session) -> None:
    """Measures the hand setting, with smaller micro-batches if it runs out of memory.

    On CUDA: bf16, fused optimizer, sdpa, compile. On CPU: fp32 and bf16, not compiled; the faster of them counts
    (`Session.hand`). Both at the largest power-of-two micro-batch that fits.
    """
    for precision in ("bf16",) if session.context.device == "cuda" else ("fp32", "bf16"):
        _run_manual_setting(session, precision)


def _run_manual_setting(session: Session, precision: str) -> None:
    configs = manual_settings(session, precision)
    tried = {trial.config: trial for trial in session.store.trials if trial.purpose in ("baseline", "reference")}
    deadline_s = session.hard_deadline_s(session.parity_reserve_s)
    for config in configs:
        trial = tried.get(config)
        if trial is None or not _has_verdict(session, trial.purpose, config, deadline_s):
            most = session.options.max_trials
            if most and session.trials_done >= most:
                return
            needed_s = session.model.cost_s(config)
            if needed_s > session.search_left_s:
                session.note(
                    f"the hand setting {config.describe()} was not measured: it takes about {needed_s:.0f} s, which a "
                    "larger --budget has"
                )
                return
            trial = session.measure("reference", config, deadline_s=deadline_s, deadline_of_budget=True)
        if trial.outcome is not Outcome.OUT_OF_MEMORY:
            return


def manual_settings(session: Session, precision: str) -> list[TrainingConfig]:
    """The manual setting at the largest power-of-two micro-batch that should fit, then at smaller ones.

    It keeps what the user fixed. None if the precision is not among the values here.
    """
    values = session.context.space.values
    if precision not in values["precision"]:
        return []

    def pick(knob: str, *wanted: object) -> object:
        return next((value for value in wanted if value in values[knob]), values[knob][0])

    knobs: dict[str, object] = {"precision": precision}
    if session.context.device == "cuda":
        knobs |= {
            "optimizer_step": pick("optimizer_step", "fused"),
            "attention": pick("attention", "sdpa", "own"),
            "compile": pick("compile", "model", "block"),
        }
    powers = [size for size in values["micro_batch"] if isinstance(size, int) and size & (size - 1) == 0]
    sizes = sorted(powers or values["micro_batch"], reverse=True)  # none is a power of two where the user fixed it
    configs = []
    for size in sizes:
        config = TrainingConfig.model_validate(knobs | {"micro_batch": size} | dict(session.options.fix))
        if incompatible(config, session.context.spec.global_batch) is not None:
            continue  # with what the user fixed: too few micro-batches for the stages of a pipeline
        if session.predict(config).peak_memory_bytes <= session.context.memory_limit_bytes or size == sizes[-1]:
            configs.append(config)
    return list(dict.fromkeys(configs))[: MAX_HALVINGS + 1]


# The trials.


def run_trials(session: Session) -> str:
    """Runs trials until no candidate can win, or the time or the number of trials is used up; returns which of them."""
    ahead = CompileAhead(session)
    session.observer.on_phase("search", f"{len(session.context.candidates)} candidates")
    ended_by = None
    while ended_by is None:
        ended_by = _run_next(session, ahead)
    session.ended_by = ended_by
    ahead.say()
    return ended_by


def _run_next(session: Session, ahead: CompileAhead) -> Literal["time", "max_trials", "nothing_left"] | None:
    """Compiles ahead or runs the next trial of the search; where there is none to run, returns why."""
    most = session.options.max_trials
    if most is not None and session.trials_done >= most:
        return "max_trials"
    if session.search_left_s <= 0:
        return "time"
    repeat_if_due(session)
    session.sampler.time_left_s, session.sampler.deadline_s = session.search_left_s, session.trial_deadlines()
    stop = session.sampler.reason_to_stop()
    if stop is not None:
        session.note(stop.text)
        return "time" if stop.out_of_time else "nothing_left"
    if ahead.run_if_due():
        return None
    asked = session.study.ask(session.store.next_number)
    config = TrainingConfig.model_validate(asked.params)
    expected_s, budget_s = session.model.cost_s(config), session.trial_deadlines()(config)
    most_s = 5 * expected_s + min(60.0, 0.1 * session.budget_s)
    if config.compile_mode in SLOW_COMPILE_MODES:
        most_s = min(most_s, SLOW_MODE_SHARE * session.budget_s)
    trial = session.measure(
        "search",
        config,
        deadline_s=min(budget_s, most_s),
        deadline_of_budget=budget_s < most_s,
        to_beat=to_beat(session.objective, session.best, config, session.run_spread, session.trials_done),
        asked=asked,
    )
    if session.lost_in_a_row >= MOST_LOST_IN_A_ROW:
        raise DidNotRunError(f"{MOST_LOST_IN_A_ROW} trials, one after the other; the last: {trial.reason}")
    return None


# Parity.


def find_verified(session: Session, tried: int = 3) -> tuple[CandidateRuns, Parity] | None:
    """The best configuration that passes the parity check, and the verdict; None if none of those checked does.

    Checked are the `tried` fastest, and after them the fastest one of each precision that was not among them: where
    bf16 fails, the fastest in fp32 may well pass. After a check that did not end in its time, only configurations that
    compile nothing are checked.

    Raises:
        BudgetOver: the budget ended before a check did.
    """
    order = ordered(session.objective, eligible(session), session.run_spread)
    chosen = order[:tried]
    for candidate in order[tried:]:
        if candidate.config.precision not in {one.config.precision for one in chosen}:
            chosen.append(candidate)
    eager = first_eager(order)
    if eager is not None and first_eager(chosen) is None:
        chosen.append(eager)
    late: BudgetOver | None = None
    for number, candidate in enumerate(chosen):
        compiles = candidate.config.compile != "off"
        parity = session.store.parity_of(candidate.config)
        if parity is None and late is not None and compiles:
            continue
        if parity is None:
            try:
                parity = _check(session, candidate.config, first_eager(chosen[number + 1 :]) if compiles else None)
            except BudgetOver as over:
                late = late or over
                session.note(f"{over} did not end in its time; there is no verdict on it")
                continue
        if parity is None:
            continue
        if parity.passed:
            return candidate, parity
        why = "; ".join(parity.failures) or parity.note  # a check of an earlier version has the note alone
        what = "fails parity" if parity.finished else "its parity check did not come to its end"
        session.note(f"{candidate.config.describe()} was the fastest left, but {what}: {why}")
    if late is not None:
        raise late
    return None


def fall_back(session: Session, verified: tuple[CandidateRuns, Parity]) -> tuple[CandidateRuns, Parity]:
    """What becomes the plan after the rounds of the claim: the winner, or what they show to be faster than it.

    A run that looked fast in its trial may be slow beside the baseline. Then the plan is the baseline, or the hand
    setting, whichever was faster, once it passed the parity check. Where memory or cost is looked for, the winner
    stays: it may be slower than the baseline.
    """
    if session.objective.name != "throughput":
        return verified
    by_config = {runs.config: runs for runs in eligible(session)}
    winner = by_config.get(verified[0].config, verified[0])
    others = [by_config[config] for config in compared_with(session, winner.config) if config in by_config]
    faster = faster_reference(winner, others, session.run_spread)
    if faster is None:
        return verified
    what = f"{winner.config.describe()} was the fastest before the last rounds, and slower than "
    what += f"{faster.config.describe()} in them"
    parity = session.store.parity_of(faster.config)
    try:
        parity = parity or _check(session, faster.config, None)
    except BudgetOver:
        parity = None
    if parity is None or not parity.passed:
        why = "did not end in its time" if parity is None else f"says: {'; '.join(parity.failures) or parity.note}"
        session.note(f"{what}; it is the plan all the same, since the parity check of the other {why}")
        return verified
    session.note(f"{what}: the plan is the latter")
    session.chosen_in_rounds = 1 + len(others)
    return faster, parity


def _check(session: Session, config: TrainingConfig, fallback: CandidateRuns | None) -> Parity | None:
    """The verdict on a configuration, put on disk; None where something outside ended the check each time.

    Args:
        session: The search.
        config: What is checked.
        fallback: What is checked next if this one does not end in its time; None: nothing.

    Raises:
        BudgetOver: the check did not end in its time, which says nothing about the configuration.
        DidNotRunError: the plain reference did not run, without which nothing can be checked.
    """
    from autoplan.planner.parity.compare import CandidateDidNotRunError, run_parity, where_ended
    from autoplan.planner.parity.step_losses import run_step_parity

    session.observer.on_phase("parity", config.describe())
    trials, cost = session.trial_cost, session.parity_cost
    deadline_s = parity_time.deadline_s(
        session.left_s,
        session.budget_s,
        expected_s=parity_time.least_check_s(trials, cost, config),
        fallback_s=0.0 if fallback is None else parity_time.check_s(trials, cost, fallback.config),
        has_fallback=fallback is not None,
    )
    if deadline_s <= 1.0:
        raise BudgetOver("the parity check")
    number = len(list((session.store.folder / "trials").glob("parity*")))
    directory: Path = session.store.folder / "trials" / f"parity{number:02d}"
    directory.mkdir(parents=True, exist_ok=True)
    opaque = session.context.facts.step_s is not None
    kept = session.store.folder / "parity"
    others: dict[str, Any] = {}
    if not opaque:
        own_shapes = trials.is_warm(config) and parity_time.takes_own_shapes(trials, cost, config)
        others = {"cache_dir": kept, "ranks": config.world_size, "own_shapes": own_shapes}
    check: Callable[..., Parity] = run_step_parity if opaque else run_parity
    try:
        parity = check(
            session.zygote,
            session.context.spec,
            config,
            device=session.context.device,
            directory=directory,
            deadline_s=deadline_s,
            memory_limit_bytes=session.context.host_limit_bytes,
            on_attempt=lambda report: session.add_attempt("parity", report, config=config),
            **others,
        )
    except TaskFailedError as error:  # out of time, which says nothing about the configuration
        raise BudgetOver(f"the parity check of {config.describe()} ({where_ended(error.report)})") from error
    except CandidateDidNotRunError as error:
        session.did_not_run.append(f"parity check of {config.describe()}: {error.message}")
        session.note(
            f"{config.describe()} was the fastest left; it was not checked and is not the plan: {error.message}. "
            "The same search, called again, checks it"
        )
        return None
    finally:
        if session.left_s < 0:
            session.note(f"the parity check of {config.describe()} ended {-session.left_s:.1f} s past the budget")
    session.store.add_parity(config, parity)
    return parity

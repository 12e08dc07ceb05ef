"""The stages of a search in order: baseline, the careful hand setting, trials, finalists, parity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from autoplan.errors import AutoplanError, WorkloadError
from autoplan.planner.records import Outcome, Parity, Trial
from autoplan.planner.search.sampler import NoCandidateError
from autoplan.planner.search.selection import CandidateRuns, contenders, enter, rank
from autoplan.planner.search.session import MAX_ROUNDS, BudgetOver, Session
from autoplan.planner.trials.failures import WORKLOAD
from autoplan.processes import TaskFailedError
from autoplan.strategies.config import TrainingConfig

CHEAP_MICRO_STEP_SHARE = 0.25
"""The baseline's micro-step should take less than this share of a trial's time box: it is run half a dozen times."""

MAX_HALVINGS = 4

# Baseline.


def run_baseline(session: Session) -> Trial | None:
    """Measures the plain fp32 run; with smaller micro-batches where it runs out of memory. None: it does not run.

    Raises:
        WorkloadError: the workload itself cannot be used.
        BudgetOver: the budget ended before it was measured.
    """
    if session.baseline is not None:
        return session.baseline
    session.observer.on_phase("baseline", "the plain fp32 run")
    failed = {trial.config for trial in session.store.trials if trial.purpose == "baseline"}
    for config in plain_configs(session):
        if config in failed:
            continue
        deadline_s = session.hard_deadline_s(0.3 * session.budget_s)
        if deadline_s <= 0:
            raise BudgetOver("the baseline")
        trial = session.measure("baseline", config, deadline_s=deadline_s)
        if trial.outcome is Outcome.OK:
            return trial
        if trial.outcome is Outcome.CRASHED and trial.detail == WORKLOAD:
            raise WorkloadError(trial.reason or "the workload cannot be used", hint="Mend the workload, then search.")
        if trial.outcome not in (Outcome.OUT_OF_MEMORY, Outcome.TIMEOUT):
            break
    last = next(trial for trial in reversed(session.store.trials) if trial.purpose == "baseline")
    session.note(f"the plain baseline does not run here ({last.outcome.value}: {last.reason})")
    return None


def plain_configs(session: Session) -> list[TrainingConfig]:
    """The plain run at the largest power-of-two micro-batch that should fit and is cheap, then at smaller ones."""
    sizes = [size for size in session.context.space.values["micro_batch"] if isinstance(size, int)]
    if len(sizes) > 1:
        sizes = [size for size in sizes if size & (size - 1) == 0] or sizes
    configs = [TrainingConfig(micro_batch=size) for size in sorted(sizes, reverse=True)]
    limit = session.context.memory_limit_bytes
    chosen: list[TrainingConfig] = []
    for config in configs:
        prediction = session.predict(config)
        micro_step_s = prediction.step_time_s / config.accumulation(session.context.spec.global_batch)
        cheap = micro_step_s <= CHEAP_MICRO_STEP_SHARE * session.time_box_s
        if chosen or config is configs[-1] or (cheap and prediction.peak_memory_high_bytes <= limit):
            chosen.append(config)
    return chosen[: MAX_HALVINGS + 1]


# The careful hand setting, on CUDA.


def run_hand_setting(session: Session) -> Trial | None:
    """Measures what a careful person sets: bf16, fused optimizer, sdpa, compile, the largest 2^n micro-batch."""
    if session.context.device != "cuda":
        return None
    done = [trial for trial in session.store.trials if trial.purpose == "reference"]
    good = next((trial for trial in done if trial.outcome is Outcome.OK), None)
    if good is not None:
        return good
    tried = {trial.config for trial in done}
    for config in hand_settings(session):
        if config in tried:
            continue
        if session.picker.cost_s(config) > session.search_left_s:
            return None
        trial = session.measure("reference", config, deadline_s=session.hard_deadline_s(session.parity_reserve_s))
        if trial.outcome is Outcome.OK:
            return trial
        if trial.outcome is not Outcome.OUT_OF_MEMORY:
            return None
    return None


def hand_settings(session: Session) -> list[TrainingConfig]:
    """The hand setting at the largest power-of-two micro-batch that should fit, then at smaller ones."""
    values = session.context.space.values

    def pick(knob: str, *wanted: object) -> object:
        return next((value for value in wanted if value in values[knob]), values[knob][0])

    sizes = [size for size in values["micro_batch"] if isinstance(size, int) and size & (size - 1) == 0]
    configs = []
    for size in sorted(sizes or values["micro_batch"], reverse=True):
        config = TrainingConfig.model_validate(
            {
                "micro_batch": size,
                "precision": pick("precision", "bf16"),
                "optimizer_step": pick("optimizer_step", "fused"),
                "attention": pick("attention", "sdpa", "own"),
                "compile": pick("compile", "model", "block"),
            }
        )
        if session.predict(config).peak_memory_bytes <= session.context.memory_limit_bytes or size == min(sizes):
            configs.append(config)
    return configs[: MAX_HALVINGS + 1]


# The trials.


def run_trials(session: Session) -> str:
    """Runs trials until nothing can win any more, or the time or the number of trials is used up; says which."""
    session.ended_by = _run_trials(session)
    return session.ended_by


def _run_trials(session: Session) -> Literal["time", "max_trials", "nothing_left"]:
    session.observer.on_phase("search", f"{len(session.context.candidates)} candidates")
    while True:
        most = session.options.max_trials
        if most is not None and session.trials_done >= most:
            return "max_trials"
        if session.search_left_s <= 0:
            return "time"
        session.picker.time_left_s = session.search_left_s
        try:
            config = session.picker.pick()
        except NoCandidateError as end:
            session.note(str(end))
            return "time" if end.out_of_time else "nothing_left"
        best = session.best
        expected_s = session.picker.cost_s(config)
        reserve_s = session.parity_reserve_s + 0.5 * session.finalist_reserve_s
        session.measure(
            "search",
            config,
            deadline_s=min(session.hard_deadline_s(reserve_s), 5 * expected_s + min(60.0, 0.1 * session.budget_s)),
            best_high_s=best.step_time_s.high if best is not None and best.step_time_s is not None else None,
        )


# The finalists.


def run_finalists(session: Session) -> None:
    """Measures the top few and the baseline again, interleaved, in fresh processes, in the rounds that time allows."""
    field = contenders(eligible(session))
    if not field:
        return
    session.observer.on_phase("finalists", f"{len(field)} configuration(s) against the baseline")
    while True:
        field = contenders_now(session, field)
        if not field:
            return
        line_up = _line_up(session, field)
        rounds_done = min(len(entry.finalist_runs) for entry in line_up)
        if rounds_done >= MAX_ROUNDS:
            return
        todo = [entry for entry in line_up if len(entry.finalist_runs) == rounds_done]
        while len(field) > 1 and not _affordable(session, todo):
            dearest = max(field, key=repeat_cost_s)  # they are about equally fast: what is left is better known
            field.remove(dearest)
            todo = [entry for entry in todo if entry.config != dearest.config]
        if not _affordable(session, todo):
            session.note(
                f"the finalists were measured in {rounds_done} round(s); the budget had no room for another"
                if rounds_done
                else "the budget had no room to measure the finalists again: the plan stands on single trials"
            )
            return
        for entry in todo:
            deadline_s = session.hard_deadline_s(session.parity_reserve_s)
            session.measure("finalist", entry.config, deadline_s=deadline_s, method=entry.first.method)


def eligible(session: Session) -> list[CandidateRuns]:
    """What may be the plan, fastest first: all that ran and keeps what the user fixed."""
    return [entry for entry in enter(session.store.trials) if session.options.allows(entry.config)]


def contenders_now(session: Session, field: Sequence[CandidateRuns]) -> list[CandidateRuns]:
    """The field with its runs up to now; those that failed in a round are out."""
    entries = {entry.config: entry for entry in enter(session.store.trials)}
    return [entries[entry.config] for entry in field if entry.config in entries]


def _line_up(session: Session, field: Sequence[CandidateRuns]) -> list[CandidateRuns]:
    """The field and the baseline, each once."""
    base = session.baseline
    line_up = {entry.config: entry for entry in field}
    if base is not None:
        for entry in enter(session.store.trials):
            if entry.config == base.config:
                line_up.setdefault(entry.config, entry)
    return list(line_up.values())


def _affordable(session: Session, entries: Sequence[CandidateRuns]) -> bool:
    return sum(map(repeat_cost_s, entries)) <= session.left_s - session.parity_reserve_s


def repeat_cost_s(entry: CandidateRuns) -> float:
    """Expected seconds of measuring a configuration again: compiling is quicker with a warm cache (half is assumed)."""
    return entry.first.seconds_spent - 0.5 * entry.first.phase_seconds.get("compile", 0.0)


# Parity.


def find_verified(session: Session, tried: int = 3) -> tuple[CandidateRuns, Parity] | None:
    """The best configuration that still trains the same thing; None if none of the first few does.

    Raises:
        BudgetOver: the budget ended before the check.
    """
    order = rank(eligible(session))
    for entry in order[:tried]:
        parity = session.store.parity_of(entry.config)
        if parity is None:
            parity = _check(session, entry.config)
        if parity.passed:
            return entry, parity
        why = "; ".join(parity.failures) or parity.note  # a check of an earlier version has the note alone
        session.note(f"{entry.config.describe()} was the fastest left, but fails parity: {why}")
    return None


def _check(session: Session, config: TrainingConfig) -> Parity:
    from autoplan.planner.parity.compare import run_parity

    session.observer.on_phase("parity", config.describe())
    deadline_s = session.hard_deadline_s(0.0)
    if deadline_s <= 1.0:
        raise BudgetOver("the parity check")
    number = len(list((session.store.folder / "trials").glob("parity*")))
    directory: Path = session.store.folder / "trials" / f"parity{number:02d}"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        parity = run_parity(
            session.zygote,
            session.context.spec,
            config,
            device=session.context.device,
            directory=directory,
            deadline_s=deadline_s,
            cache_dir=session.store.folder / "parity",
            ranks=config.world_size,
        )
    except TaskFailedError as error:  # out of time: that says nothing about the configuration
        raise BudgetOver(f"the parity check of {config.describe()} ({error.message})") from error
    except AutoplanError as error:
        parity = Parity(
            passed=False,
            tolerance=0.0,
            worst_gradient_difference=1.0,
            worst_update_difference=1.0,
            worst_group="the check itself",
            loss_difference=1.0,
            global_batch=session.context.spec.global_batch,
            sequence_length=session.context.spec.sequence_length,
            changes_numerics=config.precision != "fp32",
            note=f"The check did not run to its end: {error.message}",
        )
    session.store.add_parity(config, parity)
    return parity

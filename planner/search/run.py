"""run_search: from a workload to a verified plan."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from autoplan.errors import PlanError, UsageError
from autoplan.planner.plan import Plan
from autoplan.planner.search.options import (
    DEFAULT_BUDGET_S,
    BudgetState,
    Candidate,
    SearchObserver,
    SearchOptions,
    SearchResult,
    Status,
)
from autoplan.planner.search.plan_maker import make_plan
from autoplan.planner.search.sampler import Picker
from autoplan.planner.search.selection import best_trial
from autoplan.planner.search.session import BudgetOver, Session, time_box_s
from autoplan.planner.search.setup import PRELOAD, SearchContext, pick_device, prepare_search
from autoplan.planner.search.stages import find_verified, run_baseline, run_finalists, run_hand_setting, run_trials
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.space.bounds import Bound
from autoplan.planner.store.journal import write_atomically
from autoplan.planner.store.optuna_study import SearchStudy
from autoplan.planner.store.store import Store, default_folder, study_identity
from autoplan.planner.trials.runner import TrialRunner
from autoplan.processes import Zygote
from autoplan.strategies.config import micro_batches
from autoplan.units import format_bytes

__all__ = [
    "Bound",
    "BudgetState",
    "Candidate",
    "SearchObserver",
    "SearchOptions",
    "SearchResult",
    "run_search",
]

PLAN_FILE, HARDWARE_FILE, BEST_FILE = "plan.json", "hardware.json", "best.json"


def run_search(options: SearchOptions, *, observer: SearchObserver | None = None) -> SearchResult:
    """Searches, or goes on with a search that was begun, or answers from the record of one that has finished.

    Args:
        options: What is asked for.
        observer: Is told what happens.

    Returns:
        How it ended; also without a plan (`status`, `reason`, `hint`), and after Ctrl-C.

    Raises:
        AutoplanError: the input, the device or the store cannot be used.
    """
    observer = observer or SearchObserver()
    _check(options)
    if options.dry_run:
        return _dry_run(options, observer)
    from autoplan.probes.run import read_host_profile

    profile = read_host_profile()
    identity = study_identity(
        options.spec,
        profile.fingerprint,
        device=pick_device(profile, options.device),
        fixed=options.fixed,
        bounds=options.bounds,
        nproc=options.nproc,
        memory_limit_bytes=options.memory_limit_bytes,
    )
    folder = options.store if options.store is not None else default_folder(identity)
    with Store(folder, identity, summary=_summary(options), fresh=options.fresh) as store:
        if store.renamed_to is not None:
            observer.on_note(f"the earlier search was kept as {store.renamed_to}")
        budget_s = options.budget_s or store.budget_s or DEFAULT_BUDGET_S
        store.set_budget(budget_s)
        if store.finished is not None and not _goes_on(store, options):
            return _from_record(store, options, observer, budget_s)
        return _search(options, observer, store, budget_s)


def _check(options: SearchOptions) -> None:
    if options.budget_s is not None and not options.budget_s > 0:
        raise UsageError(
            f"the budget is {options.budget_s:g} s; it is the time the search may take", hint="For example --budget 10m"
        )
    if options.max_trials is not None and options.max_trials < 1:
        raise UsageError(
            f"--max-trials is {options.max_trials}; the baseline alone is one trial", hint="For example --max-trials 20"
        )
    if options.nproc < 1:
        raise UsageError(f"--nproc is {options.nproc}; it is the number of ranks", hint="For example --nproc 2")
    if options.memory_limit_bytes is not None and options.memory_limit_bytes < 1:
        raise UsageError(
            f"the memory limit is {options.memory_limit_bytes} bytes", hint="For example --memory-limit 8GiB"
        )


def _summary(options: SearchOptions) -> dict[str, Any]:
    spec = options.spec
    return {
        "model": spec.name,
        "sequence_length": None if "sequence_length" in spec.open_fields else spec.sequence_length,
        "global_batch": None if "global_batch" in spec.open_fields else spec.global_batch,
        "device": options.device or "auto",
        "fixed": dict(options.fixed),
        "bounds": {knob: bound.describe() for knob, bound in options.bounds.items()},
        "nproc": options.nproc,
        "memory_limit_bytes": options.memory_limit_bytes,
    }


# Without running anything.


def _dry_run(options: SearchOptions, observer: SearchObserver) -> SearchResult:
    """The space with predicted memory and time."""
    began = time.monotonic()
    with Zygote(preload=PRELOAD) as zygote:
        context = prepare_search(options, zygote, observer)
    candidates = [
        Candidate(config=config, prediction=prediction)
        for config, prediction in zip(context.candidates, context.estimator.estimate(context.candidates), strict=True)
    ]
    candidates.sort(key=lambda candidate: candidate.prediction.step_time_s if candidate.prediction else 0.0)
    return SearchResult(
        status="dry_run", candidates=tuple(candidates), left_out=context.left_out, spent_s=time.monotonic() - began
    )


def _goes_on(store: Store, options: SearchOptions) -> bool:
    """Whether a finished search has more to do: it ended by a number of trials that is larger now."""
    ended_by = (store.finished or {}).get("ended_by")
    done = sum(trial.purpose != "finalist" for trial in store.trials)
    return ended_by == "max_trials" and (options.max_trials is None or options.max_trials > done)


def _from_record(store: Store, options: SearchOptions, observer: SearchObserver, budget_s: float) -> SearchResult:
    """The answer of a search that has finished."""
    finished = store.finished or {}
    for trial in store.trials:
        observer.on_trial_finished(trial, best_trial(store.trials), _budget_of(store, options, budget_s))
    plan, path = None, None
    if finished["status"] == "plan_found":
        try:
            plan = Plan.load(store.folder / PLAN_FILE)
        except PlanError:
            return _search(options, observer, store, budget_s)  # the file is gone: made again from the record
        path = str(plan.save(options.out)) if options.out is not None else str(store.folder / PLAN_FILE)
    text = (
        f"this search finished before; this is its answer, from {len(store.trials)} recorded trial(s). "
        "A larger --budget extends it, --fresh starts over."
    )
    observer.on_note(text)
    return _result(
        finished["status"],
        store,
        budget_s,
        reason=finished.get("reason"),
        hint=finished.get("hint"),
        plan=plan,
        plan_path=path,
        left_out=plan.left_out if plan is not None else (),
        from_record=True,
        notes=(text,),
    )


def _budget_of(store: Store, options: SearchOptions, budget_s: float) -> BudgetState:
    done = sum(trial.purpose != "finalist" for trial in store.trials)
    return BudgetState(
        budget_s=budget_s, spent_s=store.spent_s, reserved_s=0.0, trials_done=done, max_trials=options.max_trials
    )


# The search itself.


def _search(options: SearchOptions, observer: SearchObserver, store: Store, budget_s: float) -> SearchResult:
    context: SearchContext | None = None
    session: Session | None = None
    try:
        with Zygote(preload=PRELOAD) as zygote:
            context = prepare_search(options, zygote, observer, saved=store.folder / HARDWARE_FILE)
            if not context.candidates:
                return _nothing_fits(store, context, budget_s)
            session = _open_session(options, observer, store, zygote, context, budget_s)
            return _run_stages(session)
    except BudgetOver as over:
        return _finish(
            session, store, context, budget_s, "budget_ended", f"the budget ended before {over}", _more(budget_s)
        )
    except KeyboardInterrupt:
        best = best_trial(store.trials)
        reason = "interrupted; every finished trial is on disk" + (
            f". Best so far: {best.config.describe()}" if best is not None else ""
        )
        return _result(
            "interrupted",
            store,
            budget_s,
            reason=reason,
            hint="The same command goes on from here.",
            left_out=context.left_out if context is not None else (),
            notes=tuple(session.notes) if session is not None else (),
        )


def _open_session(
    options: SearchOptions,
    observer: SearchObserver,
    store: Store,
    zygote: Zygote,
    context: SearchContext,
    budget_s: float,
) -> Session:
    """Takes in what earlier runs left: their trials calibrate the cost model and are not repeated."""
    cost = TrialCost(
        context.candidates,
        global_batch=context.spec.global_batch,
        num_blocks=context.facts.num_blocks,
        device=context.device,
        time_box_s=time_box_s(budget_s),
    )
    picker = Picker(
        context.candidates,
        context.estimator,
        cost,
        memory_limit_bytes=context.memory_limit_bytes,
        device=context.device,
        kind=options.sampler,
        seed=options.seed,
        allows=options.allows,
    )
    values = dict(context.space.values) | {"micro_batch": tuple(micro_batches(context.spec.global_batch))}
    study = SearchStudy(store.folder / "study.sqlite3", values, store.trials)
    runner = TrialRunner(
        zygote,
        context.spec,
        device=context.device,
        memory_limit_bytes=context.memory_limit_bytes,
        host_limit_bytes=context.host_limit_bytes,
        directory=store.folder / "trials",
        seed=options.seed,
    )
    session = Session(
        options=options,
        observer=observer,
        store=store,
        zygote=zygote,
        context=context,
        budget_s=budget_s,
        picker=picker,
        study=study,
        runner=runner,
    )
    for note in study.notes:
        session.note(note)
    for trial in store.trials:
        if trial.purpose != "finalist":
            picker.told(trial)
        observer.on_trial_finished(trial, session.best, session.budget())
    if store.trials:
        session.note(f"resumed: {len(store.trials)} finished trial(s) of an earlier run are not repeated")
    return session


def _run_stages(session: Session) -> SearchResult:
    store, context, budget_s = session.store, session.context, session.budget_s
    baseline = run_baseline(session)
    run_hand_setting(session)
    ended_by = run_trials(session)
    if session.best is None:
        return _nothing_ran(session, ended_by)
    run_finalists(session)
    verified = find_verified(session)
    if verified is None:
        best = session.best
        reason = f"no configuration passed the parity check; the fastest was {best.config.describe() if best else '-'}"
        hint = "Its record says which gradients differ. A larger --budget tries more, --fix precision=fp32 is safest."
        return _finish(session, store, context, budget_s, "no_feasible_plan", reason, hint, ended_by=ended_by)
    if baseline is None:
        reason = "the plain fp32 run does not run here, so that nothing can be compared with it"
        hint = "See its reason in the trials; a smaller --global-batch or --seq-len, or a larger --memory-limit."
        return _finish(session, store, context, budget_s, "no_feasible_plan", reason, hint, ended_by=ended_by)
    session.observer.on_phase("plan", verified[0].config.describe())
    plan = make_plan(session, *verified, baseline)
    path = plan.save(store.folder / PLAN_FILE)
    if session.options.out is not None:
        path = plan.save(session.options.out)
    store.finish("plan_found", ended_by=ended_by)
    return _result(
        "plan_found",
        store,
        budget_s,
        plan=plan,
        plan_path=str(path),
        left_out=context.left_out,
        notes=tuple(session.notes),
    )


def _nothing_fits(store: Store, context: SearchContext, budget_s: float) -> SearchResult:
    """No candidate is predicted to fit: say by how much, and what would have to change."""
    candidates = context.space.candidates
    table = context.estimator.table(candidates)
    ranks = np.array([config.world_size if context.device == "cpu" else 1 for config in candidates])
    least = int(np.argmin(table.peak_memory_bytes * ranks))
    peak, high = (float(c[least] * ranks[least]) for c in (table.peak_memory_bytes, table.peak_memory_high_bytes))
    reason = (
        f"nothing fits: the smallest of {len(candidates):,} configurations, {candidates[least].describe()}, is "
        f"predicted to take {format_bytes(peak)}; a trial may take {format_bytes(context.memory_limit_bytes)}"
    )
    shorter = "shorten --seq-len, " if context.spec.sequence_length else ""
    hint = (
        f"Raise --memory-limit to {math.ceil(high / 2**20)}MiB if the machine has it, "
        f"or {shorter}take a smaller model or more devices."
    )
    return _finish(None, store, context, budget_s, "no_feasible_plan", reason, hint)


def _nothing_ran(session: Session, ended_by: str) -> SearchResult:
    """Trials were made, and none of them was good."""
    kinds: dict[str, int] = {}
    for trial in session.store.trials:
        kinds[trial.outcome.value] = kinds.get(trial.outcome.value, 0) + 1
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no trial could be made"
    last = next((t for t in reversed(session.store.trials) if t.reason), None)
    reason = f"no configuration ran: {told}" + (f". The last: {last.reason}" if last is not None else "")
    if ended_by == "time":
        return _finish(
            session,
            session.store,
            session.context,
            session.budget_s,
            "budget_ended",
            reason,
            _more(session.budget_s),
            ended_by=ended_by,
        )
    hint = "autoplan's record has the last lines of each trial. If all fail alike, the workload itself is broken."
    return _finish(
        session, session.store, session.context, session.budget_s, "no_feasible_plan", reason, hint, ended_by=ended_by
    )


def _more(budget_s: float) -> str:
    return (
        f"Give it more time, for example --budget {max(1, round(2 * budget_s / 60))}m; what finished is not repeated."
    )


def _finish(
    session: Session | None,
    store: Store,
    context: SearchContext | None,
    budget_s: float,
    status: Status,
    reason: str,
    hint: str,
    *,
    ended_by: str = "time",
) -> SearchResult:
    store.finish(status, reason=reason, hint=hint, ended_by=ended_by)
    return _result(
        status,
        store,
        budget_s,
        reason=reason,
        hint=hint,
        left_out=context.left_out if context is not None else (),
        notes=tuple(session.notes) if session is not None else (),
    )


def _result(status: Status, store: Store, budget_s: float, **facts: Any) -> SearchResult:
    trials = store.trials
    baseline = next((t for t in trials if t.purpose == "baseline" and t.outcome.value == "ok"), None)
    best = best_trial(trial for trial in trials if not trial.loss_differs)
    if status in ("budget_ended", "interrupted") and best is not None:
        write_atomically(store.folder / BEST_FILE, best.model_dump_json(indent=2) + "\n")
    return SearchResult(
        status=status,
        baseline=baseline,
        best=best,
        trials=trials,
        resumed_trials=sum(trial.resumed for trial in trials),
        budget_s=budget_s,
        spent_s=store.spent_s,
        study=store.identity,
        store=str(store.folder),
        **facts,
    )

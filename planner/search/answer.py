"""How a search ends: the result that is handed back, and what the record keeps of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import PlanError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search.candidate_model import find_untried
from autoplan.planner.search.device_hours import HOUR_S, alone_s
from autoplan.planner.search.objective import best_trial
from autoplan.planner.search.options import BudgetState, SearchObserver, SearchOptions, SearchResult, Status
from autoplan.planner.search.plan_maker import UNCHECKED, make_plan
from autoplan.planner.search.references import what_would_fit
from autoplan.planner.search.selection import is_late, without_void
from autoplan.planner.search.session import Session, budget_of, failed_parity
from autoplan.planner.search.setup import SearchContext
from autoplan.planner.space.prune import HOST_LIMIT
from autoplan.planner.store.store import PLAN_FILE, Store
from autoplan.planner.trials.runner import make_attempt
from autoplan.processes import ProcessReport
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_bytes

ENDED = {
    "interrupted": "the search was interrupted",
    "budget_ended": "the time of the search ended",
    "did_not_run": "something outside ended what the search needed",
}


@dataclass(kw_only=True)
class SearchRun:
    """One call of a search, and what is known of it by now: enough to say at any moment how it ended."""

    options: SearchOptions
    observer: SearchObserver
    store: Store
    budget_s: float  # over all runs of the search
    devices: int = 1  # that this planner holds
    context: SearchContext | None = None  # None until the machine and the workload are known
    session: Session | None = None  # None until trials can run
    finished_before: Mapping[str, Any] | None = None  # the end that the record had as this run began

    def finish(self, status: Status, reason: str, hint: str, *, ended_by: str = "time") -> SearchResult:
        """Ends the search without a plan: the record keeps it, so that the same call is answered from there.

        Where something did not run, the record keeps no end, and the same call tries it again. A plan that the search
        found before stays its answer where the time is over, and where no trial could be made this time.
        """
        before = _stored_plan(self) if self.store.plan_was_found else None
        if before is not None and self.session is None and status != "budget_ended":
            return _earlier_plan(self, before, reason)
        if not self.did_not_run:
            self.store.finish(status, reason=reason, hint=hint, ended_by=ended_by)
        if before is not None and status == "budget_ended":
            return _earlier_plan(self, before, reason)
        return self.result(status, reason=reason, hint=hint)

    def result(self, status: Status, **facts: Any) -> SearchResult:
        """The result, with the trials of the store; `facts` are further fields of it."""
        trials, spec = self.store.trials, self.workload
        shown = None if self.session is None else self.session.shown_best
        best = shown or _best_recorded(self, facts.get("plan"))
        if facts.get("plan") is not None:
            drop_unverified(self)
        elif (path := keep_unverified(self, ENDED.get(status, "the search ended"))) is not None:
            facts |= {"unverified_path": path, "reason": f"{facts.get('reason')}. The best so far is in {path}"}
        facts.setdefault("left_out", () if self.context is None else self.context.left_out)
        facts.setdefault("notes", () if self.session is None else tuple(self.session.notes))
        good = (trial for trial in without_void(trials) if trial.purpose == "baseline" and trial.outcome is Outcome.OK)
        return SearchResult(
            status=status,
            baseline=next(good, None) if self.session is None else self.session.baseline,
            own_setting=spec.own_setting,
            best=best,
            trials=trials,
            ledger=self.store.ledger,
            attempts=self.store.attempts,
            resumed_trials=sum(trial.resumed for trial in trials),
            budget_s=self.budget_s,
            device_hours=self.device_hours,
            spent_s=self.store.spent_s,
            unit=spec.unit,
            study=self.store.identity,
            store=str(self.store.folder),
            **facts,
        )

    def ended_elsewhere(self) -> bool:
        """Whether another planner has ended the study since this one began to search."""
        return self.store.shared and self.store.finished is not None and self.store.finished != self.finished_before

    @property
    def device_hours(self) -> float | None:
        """The budget in device-hours, where --max-device-hours allow no more: then more time is more of these."""
        return None if self.budget_s < alone_s(self.options, self.devices) else self.budget_s * self.devices / HOUR_S

    @property
    def workload(self) -> WorkloadSpec:
        """The workload as this run read it, else as the plan in the record has it, else as the options say."""
        if self.context is not None:
            return self.context.spec
        for path in (self.store.folder / PLAN_FILE, self.store.folder / _beside(PLAN_FILE)):
            try:
                return Plan.load(path).workload
            except PlanError:
                pass  # there is none
        return self.options.spec

    def add_attempt(self, part: str, report: ProcessReport) -> None:
        """Keeps a run of the inspection or the trace that something outside ended."""
        attempt = make_attempt(part, report)
        self.store.add(attempt)
        self.observer.on_note(f"something outside ended {attempt.describe()}")

    @property
    def did_not_run(self) -> list[str]:
        """A sentence for each piece of work that something outside ended each time."""
        return [] if self.session is None else self.session.did_not_run

    def budget(self) -> BudgetState:
        """How much of the budget is used, for the observer."""
        return budget_of(self.options, self.store, self.budget_s)


# The best so far, as a plan that nobody verified.


def _best_recorded(run: SearchRun, plan: Plan | None) -> Trial | None:
    """The look at what is the plan; else the best of the record that may be it."""
    trials = run.store.trials
    own = best_trial(trial for trial in trials if plan is not None and trial.config == plan.config)
    kept = (trial for trial in trials if not trial.loss_differs and run.options.allows(trial.config))
    return own or best_trial((t for t in kept if not failed_parity(run.store, t.config)), run.options.wanted)


def keep_unverified(run: SearchRun, ended: str) -> str | None:
    """Writes it to the store and beside --out, and returns where; never where the search found a verified plan.

    What goes wrong is a note: no end of a search becomes another one by it.
    """
    kept, path, session = run.store.folder / _beside(PLAN_FILE), None, run.session
    try:
        if run.store.plan_was_found:
            return None
        plan = None if session is None else _best_so_far(session, f"{ended} before it had verified a plan")
        if plan is not None:
            path = plan.save(kept, private=True)
        elif session is not None and session.baseline is not None:
            drop_unverified(run)  # it failed its parity check since
            kept.unlink(missing_ok=True)  # also what cannot be read
        elif kept.exists():
            plan, path = Plan.load(kept), kept
        if plan is not None and run.options.out is not None:
            path = plan.save(_beside(run.options.out))
    except Exception as error:
        run.observer.on_note(f"the best so far could not be written as a plan: {error}")
    return None if path is None else str(path)


def drop_unverified(run: SearchRun) -> None:
    """Removes what an earlier run of the search left: there is a verified plan now, or it failed its check."""
    paths = [run.store.folder / PLAN_FILE, *([] if run.options.out is None else [run.options.out])]
    for path in map(_beside, paths):
        try:
            if (plan := Plan.load(path)).unverified is not None and plan.study == run.store.identity:
                path.unlink()
        except (PlanError, OSError):
            pass  # there is none, or it is somebody else's


def _beside(path: str | Path) -> Path:
    """`mine.unverified.json` of `mine.json`."""
    path = Path(path)
    return path.with_name(f"{path.stem}.unverified{path.suffix}")


def _best_so_far(session: Session, why: str) -> Plan | None:
    """The plan of the fastest that may still pass its proof; None: nothing may, or the baseline has not run."""
    plain, runs = session.baseline, [one for one in session.may_be_plan if not one.first.loss_differs]
    if plain is None or not runs:
        return None
    leader = session.ranked(runs)[0]
    parity = session.known_parity(leader.config) or UNCHECKED
    return make_plan(session, leader, parity, plain, unverified=why)


# Each end by its name.


def finished_before(run: SearchRun) -> SearchResult | None:
    """The answer of a search that has finished; None where it goes on, or where its plan has to be made again.

    A finished search goes on where it ended by a number of trials that is larger now.
    """
    finished = run.store.finished
    if finished is None:
        return None
    most = run.options.max_trials
    if finished.get("ended_by") == "max_trials" and (most is None or most > run.budget().trials_done):
        run.store.open_again()
        return None
    plan = None
    if finished["status"] == "plan_found":
        plan = _stored_plan(run)
        if plan is None or _lacks_loader(run, plan):
            return None  # the record makes it again; its loader is to be measured
    run.budget_s = run.store.finished_budget_s  # a smaller one that is given now has no part in it
    budget, best = run.budget(), _best_recorded(run, plan)
    run.observer.on_workload(run.workload)
    for trial in run.store.trials:
        run.observer.on_trial_finished(trial, best, budget)
    text = (
        f"this search finished before; this is its answer, from {len(run.store.trials)} recorded trial(s). "
        "A larger --budget extends it, --fresh starts over."
    )
    run.observer.on_note(text)
    return _from_record(run, plan, left_out=() if plan is None else plan.left_out, notes=(text,))


def finished_elsewhere(run: SearchRun) -> SearchResult:
    """The answer of a study that another planner ended while this one worked on it."""
    assert run.store.finished is not None and run.session is not None
    run.session.note("another planner of this study ended it; this is its answer")
    return _from_record(run, _stored_plan(run) if run.store.finished["status"] == "plan_found" else None)


def _from_record(run: SearchRun, plan: Plan | None, **facts: Any) -> SearchResult:
    """The end that the record has, with its plan where it has one."""
    finished = run.store.finished or {}
    place = None if plan is None else _place(run, plan)
    said = {name: finished.get(name) for name in ("reason", "hint")}
    return run.result(finished["status"], **said, plan=plan, plan_path=place, from_record=True, **facts)


def _stored_plan(run: SearchRun) -> Plan | None:
    """The plan that the search found before; None: its file is gone, or is not what was found."""
    try:
        plan = Plan.load(run.store.folder / PLAN_FILE)
    except PlanError:
        return None
    return None if plan.edited else plan


def _lacks_loader(run: SearchRun, plan: Plan) -> bool:
    """Whether a loader was given that the plan has not measured."""
    wanted = run.options.loader
    return wanted is not None and (plan.loading is None or plan.loading.identity != wanted.identity)


def _place(run: SearchRun, plan: Plan) -> str:
    """Where a plan of the record is; it is written where the options say."""
    return str(run.store.folder / PLAN_FILE if run.options.out is None else plan.save(run.options.out))


def _earlier_plan(run: SearchRun, plan: Plan, why: str) -> SearchResult:
    """The plan that the search found before, where the time was over before it was made again."""
    text = f"{why}. The plan is the one that this search found before"
    loader = run.options.loader
    if loader is not None and _lacks_loader(run, plan):
        text += f"; the loader ({loader.reference}) was not measured"
        loading = Loading(source=loader.reference, identity=loader.identity, setting=None, problem=why)
        plan = plan.model_copy(update={"loading": loading})
    run.observer.on_note(text)
    return run.result(
        "plan_found", plan=plan, plan_path=_place(run, plan), left_out=plan.left_out, from_record=True, notes=(text,)
    )


def plan_found(run: SearchRun, plan: Plan, ended_by: str) -> SearchResult:
    """A verified plan: written to the store, and where the options say."""
    return run.result("plan_found", plan=plan, plan_path=keep_plan(run, plan, ended_by))


def keep_plan(run: SearchRun, plan: Plan, ended_by: str) -> str:
    """Writes a verified plan, and that the search found it; returns where it is."""
    plan.save(run.store.folder / PLAN_FILE, private=True)
    path = _place(run, plan)
    run.store.share_plan()
    if not run.did_not_run:
        run.store.finish("plan_found", ended_by=ended_by)
    return path


def did_not_run(run: SearchRun, what: str) -> SearchResult:
    """Something outside ended each run of what the search needs: no end of the search, and no verdict on anything."""
    return run.result(
        "did_not_run",
        reason=f"{what}. Nothing is known of what did not run",
        hint="Find out what ends processes here (another user, a memory watchdog, a full /dev/shm or disk, a limit of "
        "the batch system). The same command tries it again; what finished is not repeated.",
    )


def interrupted(run: SearchRun) -> SearchResult:
    """Ctrl-C: nothing is closed, so that the same call goes on."""
    reason = "every finished trial is on disk"
    if run.store.plan_was_found:
        reason += f"; the plan that was found is {run.store.folder / PLAN_FILE}"
    return run.result("interrupted", reason=reason, hint="The same command goes on from here.")


def budget_ended(run: SearchRun, before: str, *, needed_s: float | None = None) -> SearchResult:
    """The time is over before there is a verified plan; `before` is a sentence that says so.

    The hint names a budget, twice the one that ended, or `needed_s` where that is more; and what is tried next, once
    something was measured.
    """
    more_s = max(2 * run.budget_s, needed_s or 0.0)
    more = f"--budget {max(1, math.ceil(more_s / 60))}m"
    if run.device_hours is not None:
        more = f"--max-device-hours {more_s * run.devices / HOUR_S:g}"
    hint = f"Give it more time, for example {more}; what finished is not repeated."
    best = None if run.session is None else run.session.shown_best
    if run.session is not None and best is not None and best.step_time_s is not None:
        drawn = run.session.sampler is not None
        best_s = best.step_time_s.median / run.session.model.pace_of(best)
        untried = find_untried(run.session.model, best.config, best_s, drawn=drawn)
        hint += "" if untried is None else " So far, " + untried.describe("the best trial's") + "."
    return run.finish("budget_ended", before, hint)


def nothing_fits(run: SearchRun, context: SearchContext) -> SearchResult:
    """No candidate is predicted to fit: by how much, and what would have to change."""
    on_host = [found for found in context.left_out if found.limit.startswith(HOST_LIMIT)]
    too_much = "".join(f"; {found.family} needs more than {found.limit}: {found.by}" for found in on_host)
    candidates = context.space.candidates
    table = context.estimator.outlook(candidates)
    ranks = candidates.world_size if context.device == "cpu" else np.ones(len(candidates))
    least = int(np.argmin(table.peak_memory_bytes * ranks))
    peak, high = (float(c[least] * ranks[least]) for c in (table.peak_memory_bytes, table.peak_memory_high_bytes))
    reason = (
        f"nothing fits: the smallest of {len(candidates):,} configurations, {candidates[least].describe()}, is "
        f"predicted to take {format_bytes(peak)}; a trial may take {format_bytes(context.memory_limit_bytes)}{too_much}"
    )
    hint = f"Raise --memory-limit to {math.ceil(high / 2**20)}MiB if the machine has it. {what_would_fit(context)}"
    if on_host:
        hint += (
            " What is offloaded lies in the host's memory: a machine with more of it, or fewer ranks on one machine."
        )
    return run.finish("no_feasible_plan", reason, hint)


def nothing_ran(run: SearchRun, ended_by: str) -> SearchResult:
    """The baseline does not keep what was fixed or bounded, and no trial that does was good."""
    if run.did_not_run:
        return did_not_run(run, f"no configuration ran: {run.did_not_run[-1]}")
    failed = [trial for trial in run.store.trials if trial.outcome is not Outcome.OK]
    alone = "before a trial that keeps what was fixed or bounded: the baseline alone ran"
    if ended_by == "max_trials":
        return run.finish(
            "no_feasible_plan", f"the trials ended {alone}", "Raise --max-trials by 2 or more.", ended_by=ended_by
        )
    kinds = Counter(trial.outcome.value for trial in run.store.trials)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    reason = f"no configuration ran: {counts}" + (f". The last: {failed[-1].reason}" if failed else "")
    if ended_by == "time":
        return budget_ended(run, reason if failed else f"the time ended {alone}")
    hint = "autoplan's record has the last lines of each trial. If all fail alike, the workload itself is broken."
    return run.finish("no_feasible_plan", reason, hint, ended_by=ended_by)


def nothing_verified(run: SearchRun, ended_by: str) -> SearchResult:
    """Trials ran, and no configuration passed the parity check, or none was left to be checked."""
    if run.did_not_run:
        return did_not_run(run, f"no configuration was verified: {run.did_not_run[-1]}")
    best = best_trial(trial for trial in run.store.trials if run.options.allows(trial.config))
    parities = [parity for trial in run.store.trials if (parity := run.store.parity_of(trial.config)) is not None]
    passed = any(parity.passed for parity in parities)
    again = [trial for trial in run.store.trials if trial.purpose in ("finalist", "claim")]
    failed = [trial for trial in again if trial.outcome is not Outcome.OK and not is_late(trial)]
    if failed and (passed or not parities):
        what = "every configuration that passed the parity check failed when it ran again"
        last = failed[-1]
        return run.finish(
            "no_feasible_plan",
            f"{what if passed else 'no configuration ran a second time, so none was checked'}; the last: "
            f"{last.config.describe()}: {last.outcome.value}: {last.reason}",
            "A configuration that runs once and then fails is not safe to train with. `autoplan search --fresh` "
            "measures all of them again.",
            ended_by=ended_by,
        )
    if parities and not any(parity.finished for parity in parities):
        reason = f"no parity check came to its end, so nothing was verified: {parities[-1].note}"
        hint = (
            "The text says what ended it. Where that was the memory limit, search again with a larger --memory-limit."
        )
        return run.finish("no_feasible_plan", reason, hint, ended_by=ended_by)
    if not parities and run.session is not None and run.session.hung:
        reason = "no parity check came to its end, so nothing was verified; the notes say in which phase each stayed"
        hint = "A check makes a few steps of the plain training too: see whether these end by themselves."
        return run.finish("no_feasible_plan", reason, hint, ended_by=ended_by)
    reason = f"no configuration passed the parity check; the fastest was {best.config.describe() if best else '-'}"
    hint = _after_failed_checks(run)
    return run.finish("no_feasible_plan", reason, hint, ended_by=ended_by)


def _after_failed_checks(run: SearchRun) -> str:
    """The advice if every check failed: it depends on whether fp32 failed too, and on what differed."""
    checked = [(trial.config, run.store.parity_of(trial.config)) for trial in run.store.trials]
    failed = [(config, parity) for config, parity in checked if parity is not None and parity.failures]
    plain = [(config, parity) for config, parity in failed if config.precision == "fp32"]
    if not failed:
        return "Its record says what differs."
    config, parity = (plain or failed)[0]
    said = f"Of {config.describe()}: {parity.failures[0]}. "
    if not plain:
        return said + "Only fewer bits were checked: --fix precision=fp32 keeps the numbers."
    return said + (
        "That is fp32, so either the training goes by its micro-batches (buffers that a forward changes, a loss over a "
        "batch): --fix micro_batch=N keeps the one that it has. Or its steps grow rounding errors too fast to be "
        "checked: a smaller learning rate, or a warm-up, shows which."
    )

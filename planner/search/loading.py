"""The loader of the training, measured beside the step of the plan that was found.

In: a `Session` with a verified winner, and `SearchOptions.loader`. Out: a `Loading` for the plan. The dataset runs in
ranks of the plan, under the limits that all user code has, and its workers end with them.
"""

from __future__ import annotations

from pathlib import Path

from autoplan.planner.records.loading import LoaderTrial, Loading
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.selection import CandidateRuns
from autoplan.planner.search.session import Session
from autoplan.planner.trials.runner import PHASE_DEADLINES_S
from autoplan.processes import Ended, ProcessReport, Task, limit_hit, run_again
from autoplan.strategies.workloads.loading.settings import LoaderSpec

SHARE, LEAST_S, MOST_S = 0.08, 6.0, 60.0
"""Of the budget, for the loader where one was given: a share of it, within these seconds."""

MEASURING_SHARE = 0.6
"""Of that time, for the settings; the rest is for building the run."""

SLOW_DATA = 0.05
"""A share of waiting from which a note says so."""


def loading_s(loader: LoaderSpec | None, budget_s: float) -> float:
    """Seconds of a budget that are kept for the loader; 0 where none was given."""
    return 0.0 if loader is None else min(max(SHARE * budget_s, LEAST_S), MOST_S)


def measure_loading(session: Session, winner: CandidateRuns) -> Loading | None:
    """Measures the loader beside the winner's step; None where none was given.

    What goes wrong is in the `Loading`: a plan is a plan without its loader's setting.
    """
    loader = session.options.loader
    if loader is None:
        return None
    from autoplan.planner.trials.loading import LoadingAnswer, LoadingRequest, best_trial

    session.observer.on_phase("loader", loader.reference)
    reserve_s = loading_s(loader, session.budget_s + session.loading_s)
    time_s = MEASURING_SHARE * reserve_s
    request = LoadingRequest(
        spec=session.context.spec,
        config=winner.config,
        device=session.context.device,
        loader=loader,
        step_s=winner.step_time.median,
        time_s=time_s,
        cores=session.context.hardware.host.cores_usable or 1,
    )
    number = len(list((session.store.folder / "trials").glob("loader*")))
    directory: Path = session.store.folder / "trials" / f"loader{number:02d}"
    directory.mkdir(parents=True, exist_ok=True)
    task = Task(
        target="autoplan.planner.trials.loading:run_loading",
        args=(request,),
        ranks=winner.config.world_size,
        directory=directory,
        deadlines_s=PHASE_DEADLINES_S,
        total_deadline_s=2 * reserve_s + winner.first.seconds_spent,
        memory_limit_bytes=session.context.host_limit_bytes,
    )
    with session.entry(Work(kind="loader", config=winner.config, cost_s=time_s, why="a step may wait for its data")):
        runs = run_again(
            session.zygote,
            task,
            on_progress=session.on_progress,
            on_attempt=lambda report: session.add_attempt("loader", report, config=winner.config),
            left_s=lambda: reserve_s,
        )
    session.store.tick(force=True)
    report = runs.report
    result = report.ranks[0].result if report.ranks else None
    answer = LoadingAnswer() if result is None else LoadingAnswer.model_validate(result)
    problem = None if report.ended is Ended.FINISHED else _why_ended(report, loader)
    best = best_trial(answer.tried)
    if best is None:
        failed = [trial.problem for trial in answer.tried if trial.problem is not None]
        problem = problem or (failed[0] if failed else "no batch was made in the time for it")
    found = Loading(
        source=loader.reference,
        identity=loader.identity,
        setting=None if best is None else best.setting,
        waiting_share=None if best is None else best.waiting_share,
        samples_per_s=None if best is None else best.samples_per_s,
        own_samples_per_s=answer.own_samples_per_s,
        batches=answer.batches,
        tried=answer.tried,
        notes=(*answer.notes, *_notes(answer.tried, best)),
        problem=problem,
        seconds_spent=report.seconds,
    )
    for text in (*found.notes, *([] if problem is None else [f"the loader: {problem}"])):
        session.observer.on_note(text)
    return found


def _why_ended(report: ProcessReport, loader: LoaderSpec) -> str:
    hit = limit_hit(report, f"measuring the loader ({loader.reference})", {"measure": "the dataset"})
    if hit is not None:
        return hit.text
    failure = report.first_failure
    if failure is not None and failure.error is not None:
        return " ".join(failure.error.message.split())[:500]
    return report.describe()


def _notes(tried: tuple[LoaderTrial, ...], best: LoaderTrial | None) -> list[str]:
    """Sentences on what failed with workers and not without them, and on data that is too slow."""
    notes = [
        f"the loader fails with {trial.setting.describe()}: {trial.problem}"
        for trial in tried
        if trial.problem is not None and best is not None
    ]
    if best is not None and best.waiting_share is not None and best.waiting_share >= SLOW_DATA:
        notes.append(
            f"data loading holds the training up: with {best.setting.describe()}, the best of {len(tried)} settings, "
            f"the step still waits {best.waiting_share:.0%} of the time"
        )
    return notes

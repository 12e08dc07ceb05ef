"""run_search: from a workload to a verified plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import BudgetEndedError, DidNotRunError, NoFeasiblePlanError
from autoplan.planner.records.trials import WorkLine
from autoplan.planner.records.trust import remember_code
from autoplan.planner.search import answer
from autoplan.planner.search.answer import SearchRun
from autoplan.planner.search.claim import is_no_gain
from autoplan.planner.search.device_hours import budget_s as budget_of
from autoplan.planner.search.device_hours import describe_limit, devices_held
from autoplan.planner.search.inspection import Means, longest_inspection_s
from autoplan.planner.search.loading import loading_s, measure_loading
from autoplan.planner.search.next_work import ALONE, next_work
from autoplan.planner.search.nodes import make_launcher, with_engine
from autoplan.planner.search.options import DEFAULT_BUDGET_S, Candidate, SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.plan_maker import make_plan
from autoplan.planner.search.selection import CandidateRuns
from autoplan.planner.search.session import BudgetOver, Session, make_model
from autoplan.planner.search.setup import SearchContext, Target, begin_search, find_target, prepare_search, trace_more
from autoplan.planner.search.side_by_side import SideBySide
from autoplan.planner.search.state import find_leader, plain_needs_s, read_state
from autoplan.planner.search.work import await_look, do, drawn, keep_ended, take_turn
from autoplan.planner.store.journal import LeaseLostError, check_out
from autoplan.planner.store.locks import DeviceLock, device_names
from autoplan.planner.store.store import Store, study_folder, study_identity
from autoplan.planner.trials.parts import Part, Parts, on_part, split
from autoplan.planner.trials.runner import TrialRunner
from autoplan.processes import Zygote
from autoplan.processes.nodes import Nodes

if TYPE_CHECKING:
    from autoplan.probes.profile import HardwareProfile
    from autoplan.processes.nodes import Engine

HARDWARE_FILE = "hardware.json"


def run_search(options: SearchOptions, *, observer: SearchObserver | None = None) -> SearchResult:
    """Searches, or goes on with a search that was begun, or answers from the record of one that has finished.

    Args:
        options: What is asked for.
        observer: Its methods are called with what happens.

    Returns:
        How it ended; also without a plan (`status`, `reason`, `hint`), and after Ctrl-C.

    Raises:
        AutoplanError: the input, the device or the store cannot be used.
    """
    said = observer or SearchObserver()
    return with_engine(
        options, lambda engine: _run(options, said, engine), lambda result: result.exit_code, said.on_note
    )


def _run(options: SearchOptions, observer: SearchObserver, engine: Engine | Nodes | None) -> SearchResult:
    """The search in its store, with its devices locked."""
    from autoplan.probes.run import read_host_profile

    if options.out is not None and not options.dry_run:
        check_out(Path(options.out))
    profile = read_host_profile()
    target = find_target(options, profile)
    outside = isinstance(engine, Nodes)  # SLURM gives the nodes to this search alone
    devices = () if outside else device_names(profile, target.device, target.nproc)
    parts = split(options.side_by_side, profile, target.device, target.nproc)
    with on_part(parts):
        profile = read_host_profile() if parts else profile  # of a part, where it is a part of a CPU
        if options.dry_run:
            with DeviceLock(devices, wait=options.wait, on_wait=observer.on_note):
                return _dry_run(options, observer, make_launcher(options, profile, engine, observer.on_note))
        with _open_store(options, profile, target, devices) as store:
            if store.renamed_to is not None:
                observer.on_note(f"the earlier search was kept as {store.renamed_to}")
            held = devices_held(options, target.device, target.nproc)
            budget_s = budget_of(options, store.budget_s, held)
            store.set_budget(budget_s)
            remember_code(options.spec, store.identity)
            run = SearchRun(options=options, observer=observer, store=store, budget_s=budget_s, devices=held)
            before = answer.finished_before(run)
            if before is not None:
                return before
            run.finished_before = store.finished
            try:
                with DeviceLock(devices, wait=options.wait, on_wait=observer.on_note):
                    store.start_clock()
                    observer.on_budget(run.budget())
                    launcher = make_launcher(options, profile, engine, observer.on_note)
                    return _to_its_end(run, lambda: _search(run, launcher, parts))
            except KeyboardInterrupt:
                return answer.interrupted(run)  # while it waited


def _open_store(options: SearchOptions, profile: HardwareProfile, target: Target, devices: Sequence[str]) -> Store:
    """The store of the study that the options and the machine name."""
    wanted = options.wanted
    aim = {"name": wanted.name, "floor": wanted.floor if wanted.name == "memory" else None}  # a price changes no trial
    identity = study_identity(
        options.spec,
        profile.fingerprint if devices and options.storage is None else profile.kind,
        device=target.device,
        fix=options.fix,
        bound=options.bound,
        nproc=target.nproc,
        nodes=options.nodes,
        memory_limit_bytes=target.given_limit_bytes,
        objective=None if wanted.name == "throughput" else aim,
        numerics=options.numerics,
        side_by_side=options.parts,
        baseline=_baseline_of(options),
    )
    return Store(
        study_folder(None if options.store is None else Path(options.store), identity),
        identity,
        summary=_summary(options, target, profile.fingerprint),
        fresh=options.fresh,
        wait=options.wait,
        storage=options.storage,
    )


def _baseline_of(options: SearchOptions) -> dict[str, Any] | None:
    """The part of the baseline that makes another study: what is said, and the setting that objects were read with.

    That of a file is read when the search begins; another one is measured in the same study, the plain run in its own.
    """
    said, own = options.baseline, options.spec.own_setting
    if said == "plain" and options.spec.kind == "function":
        return {"plain": True}
    if said == "plain" or (said is None and own is None):
        return None
    return ({} if own is None else own.knobs_off_default()) | dict(said or {})


def _summary(options: SearchOptions, target: Target, fingerprint: str) -> dict[str, Any]:
    """A summary of the study, for people; the record keeps it under these names."""
    spec = options.spec
    return {
        "model": spec.name,
        "sequence_length": None if "sequence_length" in spec.open_fields else spec.sequence_length,
        "global_batch": None if "global_batch" in spec.open_fields else spec.global_batch,
        "device": options.device or "auto",
        "fixed": dict(options.fix),
        "bounds": {knob: allowed.describe() for knob, allowed in options.bound.items()},
        "nproc": target.nproc,
        "memory_limit_bytes": target.given_limit_bytes,
        **({} if options.numerics == "kept" else {"numerics": options.numerics}),
        **({} if options.baseline is None else {"baseline": options.baseline}),
        "workload_digest": spec.identity,
        "hardware_digest": fingerprint,
    }


def _dry_run(options: SearchOptions, observer: SearchObserver, launcher: Zygote) -> SearchResult:
    """The space with predicted memory and time; runs no trial."""
    began = time.monotonic()
    with launcher as zygote:
        context = prepare_search(
            Means(options=options, zygote=zygote, observer=observer, budget_s=options.budget_s or DEFAULT_BUDGET_S)
        )
    predicted = zip(context.candidates, context.estimator.estimate(context.candidates), strict=True)
    candidates = [Candidate(config=config, prediction=prediction) for config, prediction in predicted]
    candidates.sort(key=lambda candidate: candidate.prediction.step_time_s)
    return SearchResult(
        status="dry_run", candidates=tuple(candidates), left_out=context.left_out, spent_s=time.monotonic() - began
    )


def _search(run: SearchRun, launcher: Zygote, parts: Sequence[Part]) -> SearchResult:
    """The search itself, from the setup to its end."""
    store, imports_s = run.store, run.store.spent_s

    def wrote(kind: str, began_s: float, why: str) -> None:
        seconds = store.spent_s - began_s
        store.add(WorkLine(kind=kind, began_s=began_s, seconds=seconds, devices=run.devices, why=why))

    with launcher as zygote:
        wrote("imports", imports_s, "each trial is forked from a process that has them")
        began_s = store.spent_s
        means = Means(
            options=run.options,
            zygote=zygote,
            observer=run.observer,
            saved=store.folder / HARDWARE_FILE,
            budget_s=run.budget_s,
            left_s=lambda: _left_s(run),
            on_attempt=run.add_attempt,
        )
        context = begin_search(means)
        if not context.candidates:
            context = trace_more(context)  # rough predictions alone rule nothing out
        wrote("setup", began_s, "what the baseline needs")
        run.context = context
        if not context.candidates:
            return answer.nothing_fits(run, context)
        zygote.await_nodes()
        run.session = _open_session(run, context, zygote)
        with _side_by_side(run.session, parts):
            return _find(run, run.session)


@contextmanager
def _side_by_side(session: Session, parts: Sequence[Part]) -> Iterator[None]:
    """The parts of the machine, each with a zygote; the looks on them end with it."""
    if not parts:
        yield
        return
    on_gpus, runner = parts[0].gpu is not None, session.runner
    preload = session.zygote.preloaded  # what the inspection has found too
    own = [Zygote(preload=preload, env={"CUDA_VISIBLE_DEVICES": part.gpu} if part.gpu else {}) for part in parts]
    zygotes = own if on_gpus else [session.zygote, *own[1:]]  # the search's own one is on the first part of a CPU
    host_limit = runner.host_limit_bytes // (len(parts) if on_gpus else 1)
    runners, idle = (
        [runner.elsewhere(zygote, folder, host_limit_bytes=host_limit) for zygote in zygotes]
        for folder in (runner.directory, runner.directory / "beside")
    )
    session.note(_about(parts))
    with Parts(parts, runners, idle, own) as running:
        session.side = SideBySide(
            parts=running,
            on_gpus=on_gpus,
            on_progress=session.on_progress,
            on_attempt=lambda order, report: session.add_attempt(
                order.purpose, report, number=order.number, config=order.config
            ),
            left_s=lambda: session.hard_deadline_s(0.0),
        )
        try:
            yield
        finally:
            keep_ended(session, session.side)
            session.side = None


def _about(parts: Sequence[Part]) -> str:
    """What a plan says of how its looks were made."""
    if parts[0].gpu is not None:
        return f"looks at one GPU ran side by side on {len(parts)} GPUs, pairs and the claim alone"
    cores = len(parts[0].cores)
    return (
        f"looks ran side by side on {len(parts)} parts of the CPU, pairs and the claim alone; each trial had {cores} "
        f"core(s), so this is a plan for a training with {cores} core(s)"
    )


def _to_its_end(run: SearchRun, search: Callable[[], SearchResult]) -> SearchResult:
    """The result of a search, also if an error or Ctrl-C ends it."""
    try:
        return search()
    except BudgetOver as over:
        return answer.budget_ended(run, f"the budget ended before {over}", needed_s=over.needed_s)
    except BudgetEndedError as ended:
        return run.finish("budget_ended", ended.flag_message, ended.flag_hint or "")
    except NoFeasiblePlanError as nothing:
        return run.finish("no_feasible_plan", nothing.flag_message, nothing.flag_hint or "")
    except DidNotRunError as error:
        return answer.did_not_run(run, error.message)
    except KeyboardInterrupt:
        return answer.interrupted(run)


def _left_s(run: SearchRun) -> float:
    """Seconds for the setup. To make a plan of what the record has proved has an allowance beside the budget."""
    left_s, store = run.budget_s - run.store.spent_s, run.store
    has_plan = store.plan_was_found or any(parity.passed for parity in store.parities.values())
    return max(left_s, longest_inspection_s(run.budget_s)) if run.session is None and has_plan else left_s


def _open_session(run: SearchRun, context: SearchContext, zygote: Zygote) -> Session:
    """Takes in what earlier runs left: their trials calibrate the cost model and are not repeated."""
    options, store = run.options, run.store
    kept_s = loading_s(options.loader, run.budget_s)
    model = make_model(options, context, store, run.budget_s - kept_s)
    sampler = None
    if options.sampler != "autoplan":
        from autoplan.planner.search.sampler import make_sampler

        sampler = make_sampler(options.sampler, model, seed=options.seed)
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
        observer=run.observer,
        store=store,
        zygote=zygote,
        context=context,
        budget_s=run.budget_s - kept_s,
        loading_s=kept_s,
        model=model,
        sampler=sampler,
        runner=runner,
        devices=run.devices,
    )
    for trial in store.trials:
        run.observer.on_trial_finished(trial, session.shown_best, session.budget())
    if options.nodes is not None:
        nodes, ranks = options.layout
        session.note(
            f"searched over {nodes} nodes like this one, with up to {ranks} rank(s) on each ({options.launcher})"
        )
    if options.max_device_hours is not None:
        session.note(describe_limit(options, run.devices))
    if store.trials:
        session.note(f"resumed: {len(store.trials)} finished trial(s) of an earlier run are not repeated")
    return session


def _find(run: SearchRun, session: Session) -> SearchResult:
    """Piece after piece, as `next_work` names them, and the end that they come to."""
    waits_for = ""
    while True:
        if session.side is not None and session.side.full:
            await_look(session, session.side)
            continue
        session.take_in_others()
        if run.ended_elsewhere():
            return answer.finished_elsewhere(run)
        work = drawn(session, next_work(read_state(session), session.left_s, session.context.nproc))
        session.ended_by = work.ended_by
        if take_turn(session, work):
            continue
        if work.key is not None and not session.store.claim(work.key, alone=work.kind in ALONE):
            waits_for = session.wait_for_others(waits_for)
            continue
        if work.kind == "end":
            break
        session.observer.on_work(work, session.shown_best, session.budget())
        try:
            do(session, work)
        except LeaseLostError as lost:
            session.note(f"{lost.flag_message}. The database had not heard of this planner for too long")
        if work.kind != "claim":  # its rounds are one planner's
            session.store.release()
    if not session.plain_is_known:
        needed_s = session.store.spent_s + plain_needs_s(session)
        return answer.budget_ended(run, f"the budget is too small: {work.why}", needed_s=needed_s)
    return _conclude(run, session)


def _next_best(session: Session, leader: CandidateRuns) -> CandidateRuns | None:
    """The plan if the leader shows no gain: another configuration whose earlier claim holds, else the baseline."""
    plain: CandidateRuns | None = None
    for runs in session.eligible:
        if runs.config == session.plain_config:
            plain = runs
        elif runs.config != leader.config and any(claim.config == runs.config for claim in session.store.claims):
            found = session.comparison(runs)
            if found is not None and found.claim.claimed:
                return runs
    return plain


def _checked(session: Session) -> CandidateRuns | None:
    """The best configuration that passed its parity check; None: the baseline is better than each of them."""
    for runs in session.ranked(session.eligible):
        if runs.config == session.plain_config:
            return None
        if session.store.parity_of(runs.config) is not None:  # what failed is not among them
            return runs
    return None


def _conclude(run: SearchRun, session: Session) -> SearchResult:
    """From what was measured to the plan: the leader if it is proved, else the best that is, else the baseline."""
    if hanging := session.model.hanging:
        session.note(
            f"{len(hanging)} configuration(s) with a number of threads of their own ran only beside other work, which "
            "decides what number is good: they are not the plan. If that work stays, choose one by --fix threads=N"
        )
    leader, plain = find_leader(session), session.baseline
    if session.best is None:
        return answer.nothing_ran(run, session.ended_by)
    cut_short = session.unchecked - session.hung and not run.did_not_run
    if leader is None and cut_short:
        return answer.budget_ended(run, "the budget ended before the parity check of the fastest")
    if leader is None:
        return answer.nothing_verified(run, session.ended_by)
    assert plain is not None, "what led was compared with it"
    if session.known_parity(leader.config) is None and (checked := _checked(session)) is not None:
        session.note(f"{leader.config.describe()} was the fastest, and the time ended before its parity check")
        leader = checked
    against = session.comparison(leader)  # None: the baseline has failed in a round of the claim
    fallback = _next_best(session, leader)
    beaten = ""
    if against is not None and is_no_gain(against) and session.objective.name == "throughput" and fallback is not None:
        ratio, how = against.speedup, "side by side" if against.candidate.counted else "compared"
        base = session.run_words(plain.config)
        kept = f"{fallback.config.describe()}, whose gain an earlier claim shows"
        stays = base if fallback.config == plain.config else kept
        showed = f"it ran at {ratio.median:.3g} times its speed ({ratio.low:.3g} to {ratio.high:.3g})"
        if (against.claim.why_not or "").startswith("disturbed"):
            showed = "it showed no gain, and other work disturbed it"
        beaten = f"{leader.config.describe()} led the search; {how} with {base} {showed}: the plan is {stays}"
        leader = fallback
    parity = session.known_parity(leader.config)
    if parity is None or (leader.config == plain.config and cut_short):
        return answer.budget_ended(run, "the budget ended before the parity check of the fastest")
    if beaten:
        session.note(beaten)
    if session.options.loader is not None and not session.store.shared:  # what ends it meanwhile takes no plan away
        answer.keep_plan(run, make_plan(session, leader, parity, plain), session.ended_by)
    loading = measure_loading(session, leader)
    session.observer.on_phase("plan", leader.config.describe())
    return answer.plan_found(run, make_plan(session, leader, parity, plain, loading), session.ended_by)

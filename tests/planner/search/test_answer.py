"""What a search that found a plan before answers, when it is called again with another budget or loader."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.planner.plan.plan import Plan
from autoplan.planner.search.answer import PLAN_FILE, SearchRun, _after_failed_checks, finished_before, nothing_ran
from autoplan.planner.search.inspection import longest_inspection_s
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.run import _left_s
from autoplan.planner.store.store import Store
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSpec
from tests.planner.search.stand_in import verdict
from tests.recorded import make_plan, make_trial

LOADER = LoaderSpec(kind="function", reference="train.py:rows", identity="rows")


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "s", "0" * 16, summary={}) as opened:
        opened.set_budget(600.0)
        make_plan().save(opened.folder / PLAN_FILE, private=True)
        opened.finish("plan_found", ended_by="time")
        yield opened


def run_of(store: Store, budget_s: float, **options: Any) -> SearchRun:
    store.set_budget(budget_s)
    given = SearchOptions(spec=make_plan().workload, budget=budget_s, **options)
    return SearchRun(options=given, observer=SearchObserver(), store=store, budget_s=budget_s)


def test_a_smaller_budget_is_answered_from_the_record(store: Store):
    found = finished_before(run_of(store, 300.0))
    assert found is not None
    assert found.from_record and found.plan is not None
    assert found.budget_s == 600.0, "what the search had; with 300 s it would have less than nothing left"
    assert finished_before(run_of(store, 601.0)) is None


def test_a_search_that_ended_by_its_number_of_trials_goes_on_within_the_budget_that_is_given(store: Store):
    store.finish("plan_found", ended_by="max_trials")
    assert finished_before(run_of(store, 300.0)) is None
    store.finish("plan_found", ended_by="time")
    assert finished_before(run_of(store, 300.0)) is not None
    assert finished_before(run_of(store, 400.0)) is None


def test_a_plan_that_cannot_be_made_again_in_time_stays_and_names_the_loader_that_was_not_measured(
    store: Store, tmp_path: Path
):
    run = run_of(store, 600.0, loader=LOADER, out=tmp_path / "plan.json")
    assert finished_before(run) is None, "its loader is to be measured"
    ended = run.finish("budget_ended", "the inspection took longer than 8 s", "Give it more time.")
    assert (ended.status, ended.exit_code) == ("plan_found", 0)
    assert "the loader (train.py:rows) was not measured" in ended.notes[0]
    out = Plan.load(tmp_path / "plan.json")
    assert out.config == make_plan().config and not out.edited
    assert out.loading is not None and out.loading.setting is None
    assert out.loading.problem == "the inspection took longer than 8 s"
    kept = finished_before(run_of(store, 600.0))
    assert kept is not None and kept.plan is not None
    assert kept.plan.loading == make_plan().loading, "the record's own plan is as it was found"
    assert finished_before(run) is None, "the same call measures the loader"


def test_more_budget_that_ends_before_a_plan_leaves_the_earlier_one(store: Store):
    run = run_of(store, 700.0)
    assert finished_before(run) is None
    ended = run.finish("budget_ended", "the budget ended before the baseline", "Give it more time.")
    assert ended.status == "plan_found" and ended.plan is not None
    assert finished_before(run_of(store, 700.0)) is not None
    (store.folder / PLAN_FILE).unlink()
    assert run.finish("budget_ended", "slow", "Give it more time.").status == "budget_ended"
    assert store.finished is not None and store.finished["status"] == "plan_found"


def test_what_the_record_has_proved_is_made_a_plan_though_the_time_is_over(tmp_path: Path):
    """A search that was killed in its last round, or in the loader, needs its setup once more."""
    with Store(tmp_path / "s", "0" * 16, summary={}) as store:
        run = run_of(store, 600.0)
        assert _left_s(run) == pytest.approx(600.0, abs=5.0)
        store._spent_before_s = 601.0
        assert _left_s(run) < 0.0
        store.add_parity(TrainingConfig(micro_batch=2), verdict(True))
        assert _left_s(run) == longest_inspection_s(600.0) > 5.0


def test_a_run_that_could_make_no_trial_leaves_the_earlier_plan(store: Store, tmp_path: Path):
    run = run_of(store, 600.0, loader=LOADER, out=tmp_path / "plan.json")
    assert finished_before(run) is None, "its loader is to be measured"
    ended = run.finish("no_feasible_plan", "the inspection needs more than 1 GiB", "Raise --memory-limit.")
    assert (ended.status, ended.exit_code) == ("plan_found", 0)
    assert ended.notes[0].startswith("the inspection needs more than 1 GiB. The plan is the one")
    assert Plan.load(tmp_path / "plan.json").config == make_plan().config
    kept = finished_before(run_of(store, 600.0))
    assert kept is not None and kept.status == "plan_found", "the record still ends with its plan"


def test_a_time_that_had_room_for_the_baseline_alone_is_not_told_as_a_failure(tmp_path: Path):
    with Store(tmp_path / "s", "0" * 16, summary={}) as store:
        run = run_of(store, 60.0)
        store.add(make_trial(0, make_plan().config, 1.0, purpose="baseline"))
        ended = nothing_ran(run, "time")
    assert ended.status == "budget_ended" and "the baseline alone ran" in (ended.reason or "")
    assert "--budget 2m" in (ended.hint or "")


@pytest.mark.parametrize(
    ("precisions", "names", "advice"),
    [
        (("bf16", "fp32"), "micro_batch=4. *buffers: codes.embed differs", "--fix micro_batch=N"),
        (("bf16",), "precision=bf16. *buffers: codes.embed differs", "--fix precision=fp32"),
        ((), "Its record says", "what differs"),
    ],
)
def test_the_advice_after_failed_checks_goes_by_what_failed(
    precisions: tuple[Any, ...], names: str, advice: str
) -> None:
    trials = [SimpleNamespace(config=TrainingConfig(micro_batch=4, precision=one)) for one in precisions]
    failed = SimpleNamespace(failures=("buffers: codes.embed differs by 0.1 (at most 0.001 passes)",))
    run: Any = SimpleNamespace(store=SimpleNamespace(trials=trials, parity_of=lambda config: failed))
    said = _after_failed_checks(run)
    assert advice in said
    assert all(part in said for part in names.split(". *"))

"""--max-device-hours ends a search: the devices that it holds times its time, over all planners."""

from __future__ import annotations

import math

import pytest

from autoplan.planner.records.trials import WorkLine
from autoplan.planner.search import answer
from autoplan.planner.search.device_hours import HOUR_S, alone_s, budget_s, devices_held, used_s
from autoplan.planner.search.options import SearchOptions
from autoplan.strategies.workloads.sources import make_spec
from tests.planner.search.stand_in import ClockedStore, Searches, World, searches

__all__ = ["searches"]

SPEC = make_spec(model="gpt2")


def test_the_devices_of_a_search_are_its_gpus_or_its_machines() -> None:
    alone = SearchOptions(spec=SPEC)
    nodes = SearchOptions(spec=SPEC, launcher="slurm", nodes="4x8")
    assert devices_held(alone, "cuda", 8) == 8
    assert devices_held(alone, "cpu", 8) == 1
    assert devices_held(nodes, "cuda", 32) == 32
    assert devices_held(nodes, "cpu", 32) == 4


@pytest.mark.parametrize(
    ("budget", "hours", "stored_s", "seconds"),
    [
        ("10m", None, 300.0, 600.0),
        (None, None, 300.0, 300.0),
        (None, None, None, 600.0),
        ("10m", 0.5, None, 225.0),
        ("3m", 0.5, None, 180.0),
        (None, 2.0, 225.0, 900.0),  # more hours alone extend a search
    ],
)
def test_they_are_a_budget(budget: str | None, hours: float | None, stored_s: float | None, seconds: float) -> None:
    assert budget_s(SearchOptions(spec=SPEC, budget=budget, max_device_hours=hours), stored_s, 8) == seconds


def test_the_work_of_all_planners_counts() -> None:
    lines = [WorkLine(kind="look", began_s=0.0, seconds=10.0, devices=devices) for devices in (8, 4)]
    assert used_s(lines) == 120.0
    assert alone_s(SearchOptions(spec=SPEC), 8) == math.inf


def test_a_search_ends_by_them_and_its_plan_says_so(searches: Searches) -> None:
    free = searches.search(World(), budget=1000.0)
    assert free.result.plan is not None
    limit_s = 0.85 * free.session.store.spent_s
    limited = Searches(searches.folder.parent / "limited", searches.monkeypatch)
    found = limited.search(World(), budget=1000.0, max_device_hours=limit_s / HOUR_S)
    plan = found.result.plan
    assert plan is not None and plan.claim is not None and plan.claim.claimed, found.result.reason
    assert found.session.ended_by == "time"
    assert 0.3 * limit_s < used_s(plan.ledger) <= 1.05 * limit_s
    assert found.result.device_hours is not None and free.result.device_hours is None, "more time is more of them"
    assert any("device-hours" in note and "took" in note for note in plan.notes), plan.notes
    assert any("max-device-hours is" in note for note in plan.notes), plan.notes


def test_the_hint_of_a_budget_that_ended_is_in_device_hours_and_holds_what_is_needed(searches: Searches) -> None:
    run = searches.open(World(), budget=40.0, max_device_hours=0.01)
    with run.store:
        ended = answer.budget_ended(run, "the budget is too small", needed_s=360.0)
    assert "--max-device-hours 0.1;" in (ended.hint or "")


def test_what_another_planner_took_is_not_there_any_more(searches: Searches) -> None:
    """Its line of the ledger comes with the record; the search still ends with a plan, of less work."""
    run = searches.open(World(), budget=1000.0, max_device_hours=0.1)
    session = run.session
    assert session is not None
    with run.store:
        before = session.left_s
        run.store.add(WorkLine(kind="look", began_s=0.0, seconds=50.0, devices=3))
        assert session.left_s == pytest.approx(before - 150.0)
        assert before == pytest.approx(360.0)


def test_what_another_planner_works_on_counts_before_it_has_ended(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = searches.open(World(), budget=1000.0, max_device_hours=0.1)
    session = run.session
    assert session is not None
    elsewhere = {"parity x": False}
    monkeypatch.setattr(ClockedStore, "shared", True)
    monkeypatch.setattr(ClockedStore, "refresh", lambda store: ())
    monkeypatch.setattr(ClockedStore, "others", lambda store: elsewhere)
    with run.store:
        session.take_in_others()
        before = session.device_left_s
        run.store.moved_s += 20.0
        session.take_in_others()
        assert session.device_left_s == pytest.approx(before - 20.0)
        elsewhere.clear()
        session.take_in_others()
        assert session.device_left_s == pytest.approx(before), "its line of the ledger has it then"

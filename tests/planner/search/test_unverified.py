"""The best so far as a plan, of a search that ends before its proof: when it is written, where, and when it goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import StoreError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.search import answer
from autoplan.planner.search.answer import PLAN_FILE, SearchRun, keep_unverified
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.plan_maker import UNCHECKED
from autoplan.planner.store.store import Store
from autoplan.strategies.config import TrainingConfig
from tests.planner.search.stand_in import Observer
from tests.recorded import make_plan

STUDY = "0" * 16
FILE = "plan.unverified.json"


class Leading:
    """What is read of a session: who leads, what may be the plan."""

    def __init__(self, leader: str) -> None:
        self.config = TrainingConfig(micro_batch=4, precision=leader)
        self.plain_config = TrainingConfig(micro_batch=2)
        self.leader, self.did_not_run, self.notes, self.baseline, self.shown_best = self, [], [], None, None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "s", STUDY, summary={}) as opened:
        opened.set_budget(600.0)
        yield opened


@pytest.fixture
def run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchRun:
    """Of a search in which a configuration leads that nobody checked."""

    def best(session: Leading, why: str) -> Plan:
        return make_plan(session.config, study=STUDY, parity=UNCHECKED, unverified=why)

    monkeypatch.setattr(answer, "_best_so_far", best)
    options = SearchOptions(spec=make_plan().workload, budget=600.0, out=tmp_path / "mine.json")
    session: Any = Leading("bf16")
    return SearchRun(
        options=options,
        observer=Observer(),
        store=store,
        budget_s=600.0,
        session=session,
    )


def test_an_interrupted_search_leaves_it_in_the_store_and_beside_the_plan_that_was_asked_for(
    run: SearchRun, tmp_path: Path
) -> None:
    ended = answer.interrupted(run)
    assert (ended.status, ended.exit_code, ended.plan) == ("interrupted", 130, None)
    assert ended.unverified_path == str(tmp_path / "mine.unverified.json")
    assert ended.unverified_path in (ended.reason or "")
    for path in (run.store.folder / FILE, tmp_path / "mine.unverified.json"):
        plan = Plan.load(path)
        assert plan.unverified == "the search was interrupted before it had verified a plan" and not plan.edited
        assert not plan.parity.passed
    assert not (tmp_path / "mine.json").exists() and not (run.store.folder / PLAN_FILE).exists()


def test_a_budget_that_ended_leaves_it_and_the_answer_from_the_record_names_it(run: SearchRun, tmp_path: Path) -> None:
    ended = run.finish("budget_ended", "the budget ended before the parity check", "Give it more time.")
    assert (ended.exit_code, ended.unverified_path) == (5, str(tmp_path / "mine.unverified.json"))
    (tmp_path / "mine.unverified.json").unlink()
    run.session = None  # a later call, which runs nothing
    again = answer.finished_before(run)
    assert again is not None and again.exit_code == 5
    assert again.unverified_path == ended.unverified_path and Plan.load(again.unverified_path).unverified


def test_a_search_that_found_a_plan_before_leaves_none(run: SearchRun, tmp_path: Path) -> None:
    make_plan(study=STUDY).save(run.store.folder / PLAN_FILE)
    before = (run.store.folder / PLAN_FILE).read_text()
    run.store.finish("plan_found", ended_by="time")
    run.store.set_budget(1200.0)
    assert answer.interrupted(run).unverified_path is None
    assert (run.store.folder / PLAN_FILE).read_text() == before
    assert not (run.store.folder / FILE).exists() and not (tmp_path / "mine.unverified.json").exists()


def test_a_verified_plan_takes_its_place(run: SearchRun, tmp_path: Path) -> None:
    answer.interrupted(run)
    found = answer.plan_found(run, make_plan(study=STUDY), "time")
    assert found.exit_code == 0 and found.unverified_path is None and Plan.load(tmp_path / "mine.json").parity.passed
    assert not (run.store.folder / FILE).exists() and not (tmp_path / "mine.unverified.json").exists()


def test_the_unverified_plan_of_another_search_is_left_alone(run: SearchRun, tmp_path: Path) -> None:
    other = make_plan(study="1" * 16, parity=UNCHECKED, unverified="ended").save(tmp_path / "mine.unverified.json")
    answer.plan_found(run, make_plan(study=STUDY), "time")
    assert Plan.load(other).unverified == "ended"


@pytest.mark.parametrize("baseline", [True, False])
def test_one_that_failed_its_check_since_is_removed(
    run: SearchRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, baseline: bool
) -> None:
    """Before the baseline of this run nothing is known of it: then it stays the best so far."""
    keep_unverified(run, "the search was interrupted")
    monkeypatch.setattr(answer, "_best_so_far", lambda session, why: None)
    monkeypatch.setattr(run.session, "baseline", make_plan().baseline if baseline else None)
    beside = tmp_path / "mine.unverified.json"
    assert answer.interrupted(run).unverified_path == (None if baseline else str(beside))
    assert (run.store.folder / FILE).exists() == beside.exists() == (not baseline)


def test_a_place_that_cannot_be_written_is_a_note_and_no_other_end(run: SearchRun, tmp_path: Path) -> None:
    (tmp_path / "mine.unverified.json" / "x").mkdir(parents=True)
    ended = answer.interrupted(run)
    assert ended.exit_code == 130 and ended.unverified_path == str(run.store.folder / FILE)
    assert any("could not be written" in note for note in run.observer.notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left")])
def test_a_broken_disk_does_not_change_the_exit_code(
    run: SearchRun, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Plan, "save", save)
    assert (answer.interrupted(run).exit_code, answer.interrupted(run).unverified_path) == (130, None)
    assert run.finish("budget_ended", "the budget ended", "Give it more time.").exit_code == 5

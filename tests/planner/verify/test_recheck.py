"""A finished search that is called again with recheck: one short trial of its plan, and a verdict."""

from pathlib import Path
from typing import Any

import pytest

from autoplan import api
from autoplan.planner.records.trials import Interval, Recheck
from autoplan.planner.search.options import SearchOptions, SearchResult
from autoplan.planner.verify.measure import make_order, with_recheck
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan, make_trial

WORKLOADS = Path(__file__).parents[1] / "data" / "faulty.py"


def test_a_new_plan_is_not_checked_again() -> None:
    options = SearchOptions(spec=make_plan().workload, recheck=True)
    new = SearchResult(status="plan_found", plan=make_plan())
    said: list[str] = []
    assert with_recheck(options, new, on_note=said.append) is new
    assert "had not finished before" in said[0]
    nothing = SearchResult(status="no_feasible_plan", from_record=True)
    assert with_recheck(options, nothing, on_note=said.append) is nothing


def test_the_exit_code_is_that_of_the_verdict_and_the_text_says_what_to_do() -> None:
    slower = Recheck(
        verdict="slower",
        text="it is slower here: 50% of the plan's speed (45% to 55%)",
        speed_ratio=Interval(median=0.5, low=0.45, high=0.55, samples=1),
        spread="1.2% between runs, measured over 4 repeats",
        causes=("the GPU was throttled",),
        trial=make_trial(0, make_plan().config, 5.0),
        exit_code=3,
    )
    assert "likely cause: the GPU was throttled; --fresh searches again" in slower.describe()
    assert SearchResult(status="plan_found", plan=make_plan(), recheck=slower).exit_code == 3


def test_its_trial_is_as_long_as_those_of_the_search_and_has_time_for_a_cold_compilation() -> None:
    plan = make_plan()
    assert plan.config.compile != "off"
    cold = make_trial(1, plan.config, 2.5, seconds_spent=90.0, phase_seconds={"compile": 80.0})
    cached = ("compile cache: 8 hit(s), 0 miss(es)",)
    warm = make_trial(4, plan.config, 2.5, seconds_spent=12.0, purpose="claim", round=0, warnings=cached)
    measured = plan.measurement.model_copy(update={"trials": (4,)})
    plan = plan.model_copy(update={"measurement": measured, "evidence": (plan.baseline, cold, warm)})
    result = SearchResult(status="plan_found", plan=plan, budget_s=60.0, from_record=True)
    order = make_order(result, plan)
    assert order.deadline_s == 4 * 90.0
    assert (order.method, order.config) == ("whole_steps", plan.config)
    never_cold = plan.model_copy(update={"evidence": (plan.baseline, warm)})  # it was compiled ahead of its trial
    assert make_order(result, never_cold).deadline_s > 1000.0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_searches")
def test_a_finished_search_runs_its_plan_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given: dict[str, Any] = {"spec": make_spec(model=f"{WORKLOADS}:make_sound"), "budget": 60.0, "device": "cpu"}
    given |= {"store": tmp_path, "max_trials": 2, "fix": {"compile": "off"}}
    first = api.run(SearchOptions(**given, recheck=True), quiet=True)
    assert first.status == "plan_found", first.reason
    assert first.recheck is None
    again = api.run(SearchOptions(**given, recheck=True), quiet=True)
    assert again.recheck is not None
    assert again.from_record
    assert again.plan == first.plan
    assert again.recheck.trial.config == again.plan.config
    assert again.recheck.verdict in ("holds", "faster", "slower")
    assert again.recheck.speed_ratio is not None
    assert len(again.trials) == len(first.trials)  # it is no trial of the search
    # A plan that claims more than this machine does is slower here.
    measured = again.plan.measurement
    rate = measured.tokens_per_s
    times = {name: getattr(rate, name) * 20 for name in ("median", "low", "high")}
    claimed = measured.model_copy(update={"tokens_per_s": rate.model_copy(update=times)})
    false = again.model_copy(update={"plan": again.plan.model_copy(update={"measurement": claimed}), "recheck": None})
    found = with_recheck(SearchOptions(**given), false).recheck
    assert found is not None
    assert found.verdict == "slower"
    assert found.causes
    assert found.exit_code in (3, 4)

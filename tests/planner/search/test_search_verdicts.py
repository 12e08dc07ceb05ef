"""What something outside ends is no verdict, in any part of a search. Every kill is a real one, in the workload."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan import api
from autoplan.errors import AutoplanError, DidNotRunError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan_file import with_shown_texts
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search import session as search_session
from autoplan.planner.search import state as search_state
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.run import run_search
from autoplan.processes import Zygote, cause, linux
from autoplan.strategies.workloads.sources import make_spec
from tests.time_box import set_time_box

WORKLOAD = Path(__file__).parents[1] / "data" / "injected.py"
FIXED = {"precision": "fp32", "compile": "off", "threads": 1, "checkpointing": "none", "optimizer_step": "fused"}
"""The baseline has no fused step: the plan is another configuration, and there is something to claim."""
PARTS = ("inspect", "trace", "baseline", "search", "parity", "claim")

pytestmark = pytest.mark.usefixtures("probed_machine")


class Injector(SearchObserver):
    """Plants faults by part of the search, and tells the workload which part runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        folder.mkdir()
        self.plant({})

    def plant(self, faults: dict[str, tuple[str, int]]) -> None:
        (self.folder / "plan.json").write_text(json.dumps(faults))
        for path in self.folder.glob("*.[0-9]*"):
            path.unlink()

    def done(self) -> Counter[str]:
        return Counter(path.name.partition(".")[0] for path in self.folder.glob("*.[0-9]*"))

    def on_phase(self, name: str, detail: str = "") -> None:
        (self.folder / "part").write_text(name)

    def on_work(self, work: Work, best: Trial | None, budget: Any) -> None:
        if work.kind == "look":
            (self.folder / "part").write_text("search")

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    monkeypatch.setenv("FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"])  # the machine's profile is there
    monkeypatch.setattr(cause, "PAUSE_S", 0.1)
    yield Injector(tmp_path / "faults")
    marked = linux.environments("FAULTS")
    assert [pid for pid, folder in marked.items() if folder == str(tmp_path / "faults")] == [], "somebody is left"


def options(folder: Path, **changed: Any) -> SearchOptions:
    values: dict[str, Any] = {"budget": 60.0, "device": "cpu", "max_trials": 2, "fix": FIXED}
    values["spec"] = make_spec(model=f"{WORKLOAD}:make")
    return SearchOptions(store=folder, **(values | changed))


def search(folder: Path, injector: Injector, **changed: Any) -> SearchResult:
    return run_search(options(folder, **changed), observer=injector)


def record(result: SearchResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.store) / "record.jsonl").read_text().splitlines()]


def forget_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of another test does not answer."""
    from autoplan.planner.trace import trace

    monkeypatch.setattr(trace, "_read_cache", lambda path: None)


@pytest.mark.slow
def test_one_kill_in_every_part_changes_nothing(
    tmp_path: Path, injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_trace(monkeypatch)
    set_time_box(monkeypatch.setattr)
    kinds = ("kill", "kill", "kill_zygote", "segv", "terminate", "kill")
    names = ["inspect", "trace", "baseline", "search", "parity", "claim"]
    injector.plant({part: (kind, 1) for part, kind in zip(names, kinds, strict=True)})
    result = search(tmp_path / "s", injector, budget=180.0, max_trials=3)
    assert result.status == "plan_found", result.reason
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a call of the library installs no handlers"
    assert injector.done() == Counter(dict.fromkeys(names, 1))
    assert [attempt.part for attempt in result.attempts] == names
    assert all(trial.outcome in (Outcome.OK, Outcome.PRUNED) for trial in result.trials)
    plan = result.plan
    assert plan is not None and plan.parity.passed and plan.attempts == result.attempts
    for name in names:
        assert any(name in note and "does not count" in note for note in plan.notes), name
    assert [line["attempt"]["part"] for line in record(result) if line["kind"] == "attempt"] == names
    again = search(tmp_path / "s", injector, budget=180.0, max_trials=3)
    assert again.from_record and again.plan == plan and again.attempts == result.attempts


@pytest.mark.exhaustive
def test_a_baseline_that_is_killed_each_time_did_not_run_and_is_tried_again(tmp_path: Path, injector: Injector) -> None:
    injector.plant({"baseline": ("kill", 99)})
    result = search(tmp_path / "s", injector)
    assert (result.status, result.exit_code, result.trials) == ("did_not_run", 4, ())
    assert injector.done()["baseline"] == 3 == len(result.attempts)
    assert "did not run" in (result.reason or "") and "signal 9" in (result.reason or "")
    assert {line["kind"] for line in record(result)} == {"study", "budget", "work", "attempt"}
    with pytest.raises(DidNotRunError, match="same command tries it again"):
        api.search(str(f"{WORKLOAD}:make"), **_arguments(tmp_path / "s"), observer=injector)
    injector.plant({})
    found = search(tmp_path / "s", injector)
    assert found.status == "plan_found" and not found.from_record and len(found.attempts) == 6


def _arguments(store: Path) -> dict[str, Any]:
    return {"store": store, "budget": 60.0, "device": "cpu", "max_trials": 2, "fix": FIXED}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kill", "kill_zygote", "full"])
def test_a_check_that_is_killed_each_time_is_no_failed_check(tmp_path: Path, injector: Injector, kind: str) -> None:
    injector.plant({"parity": (kind, 99)})
    result = search(tmp_path / "s", injector)
    assert (result.status, result.exit_code) == ("did_not_run", 4), result.reason
    assert not [line for line in record(result) if line["kind"] in ("parity", "finished")]
    injector.plant({})
    found = search(tmp_path / "s", injector)
    assert found.plan is not None and found.plan.parity.passed
    trials = [trial.number for trial in found.trials if trial.purpose != "claim"]
    assert trials == [trial.number for trial in result.trials], "only the check was made again"


def all_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """How near the runs lie is the machine's doing."""
    monkeypatch.setattr(
        search_session,
        "contenders",
        lambda objective, candidates, leader, spread: [one for one in candidates if one.config != leader.config],
    )
    monkeypatch.setattr(search_state, "pair_gain", lambda *runs, ratio_sd: 1.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kill", "kill_zygote"])
def test_a_pair_that_is_killed_is_no_lost_pair(
    tmp_path: Path, injector: Injector, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    all_are_near(monkeypatch)
    injector.plant({"pair": (kind, 99)})
    result = search(tmp_path / "s", injector, max_trials=3)
    assert result.status == "plan_found", result.reason
    assert not [trial for trial in result.trials if trial.purpose == "finalist"]
    assert len([attempt for attempt in result.attempts if attempt.part == "finalist"]) == 3
    injector.plant({})
    found = search(tmp_path / "s", injector, max_trials=3, budget=120.0)
    assert not found.from_record and [trial for trial in found.trials if trial.purpose == "finalist"]


@pytest.mark.exhaustive
def test_trials_that_are_all_killed_end_the_search(tmp_path: Path, injector: Injector) -> None:
    injector.plant({"search": ("kill", 99)})
    result = search(tmp_path / "s", injector, max_trials=6)
    assert (result.status, result.exit_code) == ("did_not_run", 4)
    assert injector.done()["search"] == 6, "two configurations, three runs each"
    injector.plant({})
    assert search(tmp_path / "s", injector, max_trials=6).status == "plan_found"


# Texts.


@pytest.mark.exhaustive
def test_names_with_anything_in_them(tmp_path: Path, injector: Injector) -> None:
    """Of the workload, its modules and files, and the folders that a search is given."""
    store, out = tmp_path / os.fsdecode(b"store \xff \x1b"), tmp_path / os.fsdecode(b"plan \xfe\n.json")
    result = search(store, injector, spec=make_spec(model=f"{WORKLOAD}:make_odd"), out=out)
    assert result.status == "plan_found", result.reason
    assert result.plan is not None and result.plan.parity.passed
    read = Plan.load(out)  # its texts are fit for a terminal; nothing else differs
    found, written = (plan.model_dump(mode="json", exclude={"seal"}) for plan in (result.plan, read))
    assert written == with_shown_texts(found)
    assert result.model_dump_json().encode() and "\\udc80" in result.plan.workload.name
    again = search(store, injector, spec=make_spec(model=f"{WORKLOAD}:make_odd"), out=out)
    assert again.from_record and again.plan == read


# What may happen in each part of a search.

TRANSIENT = ("kill", "kill_zygote", "full")
LASTING = ("segv", "raise", "surrogate", "exit", "exit_0", "hang", "memory", "nan", "daemon")


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [*TRANSIENT, *LASTING])
def test_every_fault_in_every_part(
    tmp_path: Path, injector: Injector, monkeypatch: pytest.MonkeyPatch, part: str, kind: str
) -> None:
    """A fault at any time is an end with a reason or an error of autoplan, and the study goes on without it."""
    forget_trace(monkeypatch)
    injector.plant({part: (kind, 99)})
    limits: dict[str, Any] = {"budget": 45.0, "memory_limit": 1 << 30, "max_trials": 4}
    try:
        result = search(tmp_path / "s", injector, **limits)
    except AutoplanError as error:
        assert error.exit_code != 1 and str(error).encode(), "a text that can be written"
        assert kind not in TRANSIENT or isinstance(error, DidNotRunError)
    else:
        assert result.status != "plan_found" or result.plan is not None
        assert result.model_dump_json()
        # without a trace the predictions are rough, and a plan is none the less one
        ended = all(line["kind"] != "finished" for line in record(result)) or part == "trace"
        assert ended or kind not in ("kill", "kill_zygote", "full")
    assert injector.done()[part] > 0, "the fault was never met"
    injector.plant({})
    fresh = kind not in TRANSIENT  # what the workload itself does is a verdict
    found = search(tmp_path / "s", injector, fresh=fresh, **(limits | {"budget": 90.0}))
    assert found.status == "plan_found", found.reason
    assert isinstance(found.plan, Plan) and found.plan.parity.passed


@pytest.mark.exhaustive
def test_every_fault_in_an_export(tmp_path: Path, injector: Injector, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.planner.export import pytorch as pytorch_script
    from autoplan.planner.export import user_code
    from autoplan.planner.export.run import export_plan

    monkeypatch.setattr(user_code, "Zygote", Zygote)  # which tests share otherwise
    plan = search(tmp_path / "s", injector).plan
    assert plan is not None
    injector.on_phase("export")
    for kind in ("kill", "terminate", "segv", "raise", "surrogate", "exit", "exit_0"):
        injector.plant({"export": (kind, 1)})
        pytorch_script._summarize_model.cache_clear()
        with pytest.raises(AutoplanError) as caught:
            export_plan(plan, "pytorch", tmp_path / "train.py")
        assert caught.value.exit_code != 1 and str(caught.value).encode()
        assert injector.done() == {"export": 1} and not (tmp_path / "train.py").exists()
        assert export_plan(plan, "pytorch", tmp_path / f"{kind}.py").paths[0].exists()

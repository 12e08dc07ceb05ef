"""Whole searches of a tiny workload on the CPU: found, answered from the record, killed and gone on with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trials import Outcome
from autoplan.planner.search.options import SearchOptions, SearchResult
from autoplan.planner.search.run import run_search
from autoplan.strategies.workloads.sources import make_spec
from tests.planner.search.stand_in import Observer

WORKLOADS = Path(__file__).parents[1] / "data" / "faulty.py"
ONE_FAMILY = {"precision": "fp32", "compile": "off", "threads": 1, "checkpointing": "none", "optimizer_step": "own"}
FUSED = {"optimizer_step": "fused", "compile": "off"}
"""The baseline has no fused step: the plan is another configuration, and its gain is measured by rounds of a claim."""

pytestmark = pytest.mark.usefixtures("quick_searches")


def search(folder: Path, workload: str = "make_sound", **options: Any) -> SearchResult:
    spec = make_spec(model=f"{WORKLOADS}:{workload}")
    values: dict[str, Any] = {"spec": spec, "budget": 60.0, "device": "cpu", "store": folder, "max_trials": 4}
    return run_search(SearchOptions(**(values | options)))


@pytest.mark.slow
def test_a_search_finds_a_verified_plan_and_answers_again_from_its_record(tmp_path: Path):
    observer = Observer()
    spec = make_spec(model=f"{WORKLOADS}:make_sound")
    options = SearchOptions(
        spec=spec, budget=120.0, device="cpu", store=tmp_path / "s", out=tmp_path / "plan.json", max_trials=3, fix=FUSED
    )
    result = run_search(options, observer=observer)
    assert result.status == "plan_found", result.reason
    assert result.exit_code == 0
    assert observer.kinds[0] == "baseline" and set(observer.kinds[-2:]) == {"claim"}
    assert {"look", "parity"} < set(observer.kinds)
    assert [line.kind for line in result.ledger] == ["imports", "setup", *observer.kinds]
    assert sum(line.seconds for line in result.ledger) <= result.spent_s
    order = [phase for phase in dict.fromkeys(observer.phases) if phase not in ("hand setting", "pair")]
    assert order[-4:] == ["baseline", "parity", "claim", "plan"] and "trace" in order
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == result.plan
    assert plan.parity.passed
    assert plan.baseline.config.knobs_off_default().keys() == {"micro_batch"}
    assert plan.config.optimizer_step == "fused", "what was fixed is kept, also where the baseline was faster"
    assert plan.accumulation * plan.config.micro_batch == 384
    assert result.spent_s <= 1.1 * 120.0
    assert {trial.purpose for trial in result.trials} >= {"baseline", "search", "claim"}
    assert plan.claim is not None
    assert plan.claim.claimed == (plan.speedup.low > 1.0)
    claims = {trial.number for trial in result.trials if trial.purpose == "claim"}
    assert set(plan.claim.trials) <= claims and set(plan.measurement.trials) <= claims
    assert plan.measurement.step_time_s.low <= plan.measurement.step_time_s.median
    assert {choice.knob for choice in plan.choices} >= {"micro_batch", "optimizer_step"}
    again = run_search(options)
    assert again.from_record
    assert again.plan == plan
    assert again.trials == tuple(trial.model_copy(update={"resumed": True}) for trial in result.trials)

    assert Path(result.store) == tmp_path / "s" / result.study
    (Path(result.store) / "plan.json").unlink()
    rebuilt = run_search(options)
    assert rebuilt.plan is not None
    assert rebuilt.plan.config == plan.config
    assert len(rebuilt.trials) == len(result.trials)  # nothing was measured again


@pytest.mark.exhaustive  # three minutes
def test_the_search_goes_on_past_every_fault(tmp_path: Path):
    result = search(
        tmp_path / "s",
        "make",
        fix=ONE_FAMILY | {"allocator": "own"},
        sampler="random",
        max_trials=None,
        memory_limit=1 << 30,
        budget=300.0,
    )
    assert result.status == "plan_found", result.reason
    tried = [trial for trial in result.trials if trial.purpose in ("search", "reference")]
    outcomes = {trial.config.micro_batch: trial.outcome for trial in tried}
    expected = {
        3: Outcome.OUT_OF_MEMORY,
        4: Outcome.UNSUPPORTED,
        8: Outcome.TIMEOUT,
        12: Outcome.CRASHED,
        16: Outcome.CRASHED,
        24: Outcome.CRASHED,
        32: Outcome.NONFINITE,
        48: Outcome.OUT_OF_MEMORY,
        64: Outcome.CRASHED,
        96: Outcome.CRASHED,
        384: Outcome.CRASHED,
    }
    assert {size: outcomes.get(size) for size in expected} == expected
    killed = [
        attempt.config.micro_batch for attempt in result.attempts if attempt.config and "signal 9" in attempt.reason
    ]
    assert killed == [192, 192, 192] and 192 not in outcomes, "a SIGKILL that nobody here sent is no verdict"
    assert all(trial.reason for trial in result.trials if trial.outcome is not Outcome.OK)
    assert result.plan is not None
    assert result.plan.config.micro_batch in (1, 2, 6, 128)


PLANNER = """
import sys
from pathlib import Path
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.run import run_search
from autoplan.strategies.workloads.sources import make_spec
from tests.time_box import set_time_box

class Printer(SearchObserver):
    def on_phase(self, name, detail=""):
        print("stage", name, flush=True)
    def on_work(self, work, best, budget):
        print("work", work.kind, flush=True)
    def on_trial_started(self, number, purpose, *rest):
        print("started", number, purpose, flush=True)
    def on_progress(self, phase, facts, budget):
        print("phase", phase, flush=True)
    def on_trial_finished(self, trial, best, budget):
        print("finished", trial.number, "resumed" if trial.resumed else "now", flush=True)

set_time_box()
spec = make_spec(model=sys.argv[1])
fixed = {"precision": "fp32", "threads": 1, "optimizer_step": "fused", "compile": sys.argv[3]}
options = SearchOptions(
    spec=spec, budget=120.0, device="cpu", store=Path(sys.argv[2]), max_trials=int(sys.argv[4]), fix=fixed
)
result = run_search(options, observer=Printer())
print("ended", result.status, result.exit_code, flush=True)
sys.exit(result.exit_code)
"""


def start_planner(folder: Path, *, compile: str = "off", max_trials: int = 3) -> "subprocess.Popen[str]":
    workload = f"{WORKLOADS}:make_slow"
    command = [sys.executable, "-c", PLANNER, workload, str(folder), compile, str(max_trials)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def read_until(process: "subprocess.Popen[str]", *words: str) -> None:
    """Reads the planner's lines until one has all these words; it must come."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if all(word in line.split() for word in words):
            return
    pytest.fail(f"the planner ended without {words}; its lines: {seen}")


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The finished trials on disk, of the one study in the store."""
    paths = list(folder.glob("*/record.jsonl"))
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()] if paths else []
    return [line["trial"] for line in lines if line["kind"] == "trial"]


@pytest.mark.slow
def test_a_search_killed_in_its_claim_goes_on_and_repeats_no_finished_trial(tmp_path: Path):
    """What was on disk stays as it is. Killed elsewhere: test_extended_search.py, benchmarks/soak.py."""
    folder = tmp_path / "s"
    planner = start_planner(folder)
    read_until(planner, "started", "claim")
    kill(planner)
    kept = recorded(folder)
    assert [trial["number"] for trial in kept] == list(range(len(kept)))
    fixed = FUSED | {"precision": "fp32", "threads": 1}
    result = search(folder, "make_slow", fix=fixed, max_trials=3, budget=180.0)
    assert result.status == "plan_found", result.reason
    assert recorded(folder)[: len(kept)] == kept, "the record lost or changed a trial"
    assert all(trial.resumed for trial in result.trials[: len(kept)])
    looks = [trial for trial in result.trials if not trial.is_repeat]
    assert len(looks) == 3
    quiet = [trial.config for trial in looks if not trial.disturbed]  # one that was disturbed is made again
    assert len(quiet) == len(set(quiet)), "a finished trial was repeated"


@pytest.mark.exhaustive
def test_a_search_killed_while_it_compiles_goes_on(tmp_path: Path):
    folder = tmp_path / "s"
    planner = start_planner(folder, compile="model", max_trials=2)
    read_until(planner, "phase", "compile")
    kill(planner)
    kept = recorded(folder)
    assert [trial["purpose"] for trial in kept] == ["baseline"]
    planner = start_planner(folder, compile="model", max_trials=2)
    read_until(planner, "finished", "1", "now")
    kill(planner)
    after = recorded(folder)
    assert after[:1] == kept
    assert after[1]["config"]["compile"] == "model"
    assert after[1]["outcome"] == "ok", after[1]["reason"]

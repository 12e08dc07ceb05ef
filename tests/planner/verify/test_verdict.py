"""What a verification says: verdicts and causes from records, and one real verification."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autoplan
from autoplan.cli.verify import _document
from autoplan.planner.parity import check as parity_check
from autoplan.planner.parity import compare
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import find_differences, read_environment
from autoplan.planner.records.plan import Environment
from autoplan.planner.records.trials import Claim, Interval, Outcome, Trial, Window
from autoplan.planner.search.nodes import options_for
from autoplan.planner.verify import measure
from autoplan.planner.verify.verdict import judge
from autoplan.probes.nvml import SLOWDOWNS
from autoplan.processes import Ended, TaskFailedError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_hardware, make_plan, make_trial, named

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 8 * 2**30
THROTTLED = min(SLOWDOWNS)


def with_spread(sd: float, repeats: int = 12) -> Plan:
    claim = Claim(claimed=True, rounds=3, spread=sd, spread_repeats=repeats)
    return make_plan().model_copy(update={"claim": claim, "environment": read_environment()})


def trial_at(plan: Plan, share: float, **given: Any) -> Trial:
    """A trial of the plan's configuration at a share of its speed."""
    rate = plan.measurement.tokens_per_s.median * share
    narrow = Interval(median=rate, low=rate * 0.999, high=rate * 1.001, samples=30)
    return make_trial(0, plan.config, 2.5 / share, **given).model_copy(update={"tokens_per_s": narrow})


def verdict(plan: Plan, trial: Trial, **parity: Any):
    here = make_hardware()
    return judge(plan, plan.parity.model_copy(update=parity), trial, find_differences(plan, here), LIMIT)


@pytest.mark.parametrize(
    ("share", "sd", "wanted", "code"),
    [
        (1.0, 0.01, "holds", 0),
        (0.90, 0.01, "slower", 3),
        (1.12, 0.01, "faster", 0),
        (0.90, 0.05, "holds", 0),  # runs differ by as much
        (0.98, 0.0001, "holds", 0),  # less than runs on two days
    ],
)
def test_speed_is_told_apart_from_noise(share: float, sd: float, wanted: str, code: int) -> None:
    plan = with_spread(sd)
    found = verdict(plan, trial_at(plan, share))
    assert (found.verdict, found.exit_code) == (wanted, code), found.text
    assert found.speed_ratio is not None and found.speed_ratio.median == pytest.approx(share)
    assert "12 repeats" in found.spread


def test_a_spread_that_was_never_measured_claims_less() -> None:
    plan = make_plan()
    assert plan.claim is None
    assert verdict(plan, trial_at(plan, 0.9)).verdict == "holds"
    assert verdict(plan, trial_at(plan, 0.7)).verdict == "slower"


def test_where_nothing_differs_no_cause_is_made_up() -> None:
    plan = with_spread(0.01)
    (cause,) = verdict(plan, trial_at(plan, 0.8)).causes
    assert cause.kind == "unknown"


@pytest.mark.parametrize(
    ("window", "kind", "words", "code"),
    [
        ({"disturbed": "other work took 41% of the CPU time"}, "others", "41%", 4),
        ({"gpu_others_share": 0.12}, "others", "12% of the GPU", 4),
        ({"others_cpu_share": 0.6}, "others", "60% of the cores", 4),
        ({"others_cpu_share": 0.1, "gpu_others_share": 0.01}, "unknown", "nothing", 3),
        ({"clock_events": (THROTTLED,)}, "clocks", THROTTLED, 4),
        ({"throttled_s": 30.0}, "quota", "0.5 s a second", 4),
        ({"sm_clock_hz": 1.2e9}, "clocks", "1200 MHz, and 1900 MHz", 4),
        ({"core_s": 1.5e-3}, "clocks", "1.50 ms, and 1.20 ms there", 4),
        ({"core_s": 1.25e-3}, "unknown", "nothing", 3),
        ({"clock_events": ("sw_power_cap",)}, "unknown", "nothing", 3),
    ],
)
def test_what_was_seen_is_the_cause(window: dict[str, Any], kind: str, words: str, code: int) -> None:
    plan = with_spread(0.01)
    then = Window(seconds=60.0, sm_clock_hz=1.9e9, core_s=1.2e-3)
    evidence = [
        trial.model_copy(update={"window": then}) if trial.number in plan.measurement.trials else trial
        for trial in plan.evidence
    ]
    plan = plan.model_copy(update={"evidence": tuple(evidence)})
    found = verdict(plan, trial_at(plan, 0.7, window=Window(seconds=60.0, **window)))
    assert found.verdict == "slower" and found.exit_code == code
    assert found.causes[0].kind == kind and words in found.causes[0].text


def test_other_versions_hardware_and_variables_are_named() -> None:
    plan = with_spread(0.01)
    here = make_hardware(cores=1)
    environment = Environment(
        autoplan=plan.environment.autoplan,
        torch="2.99.0",
        python=plan.environment.python,
        transformers=plan.environment.transformers,
        platform="Linux",
        variables={"OMP_NUM_THREADS": "1"},
    )
    plan = plan.model_copy(update={"environment": plan.environment.model_copy(update={"variables": {}})})
    differences = find_differences(plan, here, environment)
    assert [difference.kind for difference in differences] == ["hardware", "versions", "environment"]
    found = judge(plan, plan.parity, trial_at(plan, 0.5), differences, LIMIT)
    threads = plan.model_copy(update={"config": TrainingConfig(micro_batch=4, threads=1)})
    assert [difference.kind for difference in find_differences(threads, here, environment)] == ["hardware", "versions"]
    assert "cores usable 1 here, 2 then" in found.causes[0].text and "2.99.0" in found.causes[1].text


@pytest.mark.parametrize(
    ("outcome", "wanted", "code"),
    [
        (Outcome.OUT_OF_MEMORY, "does_not_fit", 3),
        (Outcome.CRASHED, "does_not_run", 3),
        (Outcome.TIMEOUT, "does_not_run", 3),
        (Outcome.INTERRUPTED, "did_not_run", 4),
    ],
)
def test_what_does_not_run(outcome: Outcome, wanted: str, code: int) -> None:
    plan = make_plan()
    found = verdict(plan, make_trial(0, plan.config, None, outcome=outcome, reason="a reason"))
    assert (found.verdict, found.exit_code, found.speed_ratio) == (wanted, code, None)
    assert "a reason" in found.text


def test_what_an_allocator_barely_held_was_timed_and_is_no_success() -> None:
    plan = make_plan()
    full = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "9 GiB over the limit"}
    found = verdict(plan, trial_at(plan, 1.0).model_copy(update=full))
    assert found.trial.tokens_per_s is not None and found.exit_code == 3
    assert _document(plan, found, None)["status"] == "failed"
    assert _document(plan, verdict(plan, trial_at(plan, 1.0)), None)["status"] == "verified"


def test_parity_comes_before_speed() -> None:
    plan = with_spread(0.01)
    assert verdict(plan, trial_at(plan, 1.5), passed=False).verdict == "trains_otherwise"
    assert verdict(plan, trial_at(plan, 1.5), passed=False, finished=False).verdict == "not_checked"


@pytest.fixture
def runner_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Plan], None]:
    """Puts a runner in the place of the real one, whose only trial is at the plan's own speed."""

    def put(plan: Plan) -> None:
        trial = trial_at(plan, 1.0)
        runner = SimpleNamespace(zygote=None, device="cpu", directory=tmp_path / "trials", host_limit_bytes=LIMIT)
        runner.memory_limit_bytes, runner.run = LIMIT, lambda order, on_progress: trial
        monkeypatch.setattr(measure, "open_runner", lambda *given, **named: contextlib.nullcontext(runner))

    return put


def test_a_step_function_is_checked_by_its_losses_and_any_other_plan_as_its_search_did(
    runner_of: Callable[[Plan], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, called = with_spread(0.01), []

    def check(name: str) -> Callable[..., Any]:
        return lambda *given, **named: called.append((name, getattr(given[1], "rung", None))) or plan.parity

    monkeypatch.setattr(compare, "run_parity", check("whole"))
    monkeypatch.setattr(parity_check, "run_step_parity", check("losses"))
    step = plan.workload.model_copy(update={"taken_from": autoplan.from_step(lambda: float).taken_from})
    tight = plan.baseline.model_copy(update={"config": TrainingConfig(micro_batch=2, checkpointing="full")})
    own = plan.workload.model_copy(update={"own_setting": tight.config})
    changes = ({}, {"workload": step}, {"baseline": tight}, {"baseline": tight, "workload": own})
    for one in (plan.model_copy(update=change) for change in changes):
        runner_of(one)
        assert measure.verify_plan(one, 1.0, options_for(one)).verdict == "holds"
    assert called == [("whole", "plain"), ("losses", None), ("whole", "checkpointing"), ("whole", "plain")]


def test_the_users_own_setting_is_not_checked(
    runner_of: Callable[[Plan], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = with_spread(0.01)
    own = plan.workload.model_copy(update={"own_setting": plan.config})
    plan = plan.model_copy(update={"workload": own})
    failed = plan.parity.model_copy(update={"passed": False})
    monkeypatch.setattr(compare, "run_parity", lambda *given, **named: failed)
    runner_of(plan)
    found = measure.verify_plan(plan, 1.0, options_for(plan))
    assert (found.verdict, found.exit_code) == ("holds", 0)
    assert found.parity.note == "the plan is your setting, the training as it was: nothing was checked"


def test_a_parity_check_that_runs_into_its_time_limit_leaves_the_plan_unchecked(
    runner_of: Callable[[Plan], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = with_spread(0.01)
    report: Any = SimpleNamespace(describe=lambda: "the deadline passed", ended=Ended.CANCELLED, phase="")
    report.first_failure = None

    def late(*given: Any, **named: Any) -> Any:
        raise TaskFailedError(report)

    monkeypatch.setattr(compare, "run_parity", late)
    runner_of(plan)
    found = measure.verify_plan(plan, 1.0, options_for(plan))
    assert (found.verdict, found.exit_code) == ("not_checked", 3) and "the deadline passed" in found.text
    assert found.trial.outcome is Outcome.OK


@pytest.mark.slow
@pytest.mark.usefixtures("quick_searches")
def test_a_plan_is_verified_here_and_under_a_limit() -> None:
    spec = make_spec(model=f"{ROOT / 'examples' / 'image_classifier.py'}:tiny_classifier", global_batch=16)
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec)
    with pytest.raises(autoplan.PlanError, match="code that would run"):
        autoplan.verify(plan, budget="2s")
    found = autoplan.verify(plan, budget="2s", workload=named(plan))
    assert found.parity.passed and found.trial.outcome is Outcome.OK
    assert found.verdict in ("faster", "slower", "holds")  # the plan's figures are made up
    found = autoplan.verify(plan, budget="2s", workload=named(plan), memory_limit="32MiB")
    assert found.verdict == "does_not_fit" and found.exit_code == 3 and found.memory_limit_bytes == 32 << 20


def test_the_version_of_a_package_counts_for_a_plan_that_runs_on_it() -> None:
    in_8_bits, layers = ["torchao none here, 0.17.0 then"], ["liger-kernel none here, 0.8.0 then"]
    cases: Any = ({}, []), ({"fp8": "rowwise"}, in_8_bits), ({"optimizer_state": "8bit"}, in_8_bits)
    for knobs, wanted in (*cases, ({"kernels": "liger"}, layers)):
        config = TrainingConfig.model_validate({"micro_batch": 1, "precision": "bf16"} | knobs)
        plan = make_plan(config)
        then = read_environment({}).model_copy(update={"torchao": "0.17.0", "liger_kernel": "0.8.0"})
        plan = plan.model_copy(update={"environment": then})
        now = then.model_copy(update={"torchao": None, "liger_kernel": None})
        texts = [found.text for found in find_differences(plan, plan.hardware, now)]
        assert texts == wanted

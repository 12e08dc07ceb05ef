"""User code outside trials meets the limits of trials: memory, time, and the end of everything that it started."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.errors import BudgetEndedError, ExportError, NoFeasiblePlanError
from autoplan.planner.export import user_code
from autoplan.planner.export.pytorch import summarize_model
from autoplan.planner.export.run import export_plan
from autoplan.planner.export.user_code import LIMITS, ExportLimits, make_limits
from autoplan.planner.parity.check import check_parity
from autoplan.planner.parity.compare import where_ended
from autoplan.planner.search import inspection
from autoplan.planner.search.inspection import Means, inspect
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.preload import PRELOAD
from autoplan.planner.search.run import run_search
from autoplan.planner.trace import trace
from autoplan.planner.trace.trace import TraceLimits, trace_profile
from autoplan.probes.collectives import probe_collectives
from autoplan.probes.run import read_host_profile
from autoplan.processes import TaskFailedError, Zygote
from autoplan.report.facts import parity_words
from autoplan.strategies.analysis.facts import WorkloadFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests.cases import some
from tests.planner.search.stand_in import Observer
from tests.processes.helpers import survivors

WORKLOADS = Path(__file__).parents[1] / "data" / "unbounded.py"
LIMIT_BYTES = 640 << 20
TOKEN = uuid.uuid4().hex


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a greedy function writes how many bytes it has."""
    return tmp_path_factory.mktemp("rss") / "resident"


@pytest.fixture(scope="module")
def zygote(resident: Path) -> Iterator[Zygote]:
    with Zygote(preload=PRELOAD, env={"PROCESS_TEST_TOKEN": TOKEN, "RSS_FILE": str(resident)}) as zygote:
        yield zygote


def spec_of(workload: str) -> WorkloadSpec:
    return make_spec(model=f"{WORKLOADS}:{workload}")


def look_at(zygote: Zygote, workload: str, left_s: float = 60.0) -> tuple[WorkloadFacts, list[str]]:
    listener = Observer()
    options = SearchOptions(spec=spec_of(workload))
    means = Means(options=options, zygote=zygote, observer=listener, budget_s=600.0, left_s=lambda: left_s)
    facts = inspect(means, read_host_profile(), "cpu", 2, LIMIT_BYTES)
    return facts, listener.notes


@pytest.fixture
def alive_before(zygote: Zygote) -> set[int]:
    """The zygote, and what else it needs all the time."""
    return survivors(TOKEN)


def test_a_loss_that_takes_too_much_memory_is_left_to_trials_and_parity(zygote: Zygote, resident: Path):
    facts, notes = look_at(zygote, "greedy_loss")
    assert int(resident.read_text()) < 1.6 * LIMIT_BYTES, "it would go on to 2.4 times the limit"
    assert facts.knob("micro_batch").values, "the facts without the loss are there"
    assert len(notes) == 1
    assert "loss(model, batch) of two samples; the limit is 0.62 GiB" in notes[0]
    assert "left to the parity check" in notes[0]
    assert look_at(zygote, "sound")[1] == []


@pytest.mark.parametrize(
    ("workload", "used"), [("greedy_model", "used 0."), ("one_large_tensor", "asked for more host memory")]
)
def test_a_model_that_takes_too_much_memory_is_ended_at_the_limit(zygote: Zygote, workload: str, used: str):
    with pytest.raises(NoFeasiblePlanError) as caught:
        look_at(zygote, workload)
    assert used in caught.value.message
    assert "in build_model()" in caught.value.message
    assert "the limit is 0.62 GiB" in caught.value.message
    assert "--memory-limit 1280MiB" in str(caught.value.flag_hint)


def test_a_full_device_is_not_the_hosts_memory(zygote: Zygote):
    with pytest.raises(NoFeasiblePlanError) as caught:
        look_at(zygote, "full_device")
    assert "ran out of the device's memory in build_model()" in caught.value.message
    assert "host" not in caught.value.message
    assert "nvidia-smi" in str(caught.value.hint) and "--memory-limit" not in str(caught.value.hint)


def test_a_function_that_hangs_is_ended_within_the_budget_and_named(
    zygote: Zygote, alive_before: set[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "LEAST_DEADLINE_S", 1.0)
    with pytest.raises(BudgetEndedError) as caught:
        look_at(zygote, "hanging_load", left_s=2.0)
    assert "was ended after 2 s in the workload's own function or file (unbounded.py, line " in caught.value.message
    assert "in wait_for_ever)" in caught.value.message
    assert "--budget" in str(caught.value.flag_hint)
    assert survivors(TOKEN) == alive_before, "its child, in a session of its own, ends with it"


@pytest.mark.usefixtures("quick_searches")
def test_a_search_whose_function_hangs_ends_with_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspection, "LEAST_DEADLINE_S", 1.0)
    options = SearchOptions(spec=spec_of("hanging_data"), budget=2.0, device="cpu", store=tmp_path)
    result = run_search(options)
    assert (result.status, result.exit_code) == ("budget_ended", 5)
    assert "in make_batch(2, 0) (unbounded.py, line " in str(result.reason)
    assert "larger --budget" in str(result.hint)
    assert run_search(options).from_record


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_a_search_whose_check_meets_the_memory_limit_says_so(tmp_path: Path):
    options = SearchOptions(
        spec=spec_of("greedy_check"),
        budget=60.0,
        memory_limit="700MiB",
        max_trials=2,
        fix={"precision": "fp32", "compile": "off", "threads": 1},
        device="cpu",
        store=tmp_path,
    )
    result = run_search(options)
    assert result.status == "no_feasible_plan"
    assert "no parity check came to its end" in str(result.reason)
    assert "the limit is 0.68 GiB" in str(result.reason)
    assert "larger --memory-limit" in str(result.hint)
    assert any("its parity check did not come to its end" in note for note in result.notes)


def test_timing_data_that_never_comes_does_not_lose_the_trace(
    zygote: Zygote, alive_before: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(trace, "INPUT_LEAST_S", 1.0)
    limits = TraceLimits(time_limit_s=4.0, timing_budget_s=0.0, memory_limit_bytes=LIMIT_BYTES)
    profile = trace_profile(
        spec_of("hanging_later_data"), device="cpu", zygote=zygote, cache_dir=tmp_path, limits=limits
    )
    assert profile.variants and profile.input_s_per_sample is None
    assert "data loading is not estimated: timing the data was ended after 1 s in make_batch" in profile.notes[-1]
    assert not list(tmp_path.iterdir()), "another try may time the data: this profile is not cached"
    assert survivors(TOKEN) == alive_before


def test_the_parity_check_keeps_the_memory_limit(zygote: Zygote, tmp_path: Path):
    verdict = check_parity(
        zygote,
        spec_of("greedy_loss"),
        TrainingConfig(micro_batch=2),
        plain=None,
        device="cpu",
        directory=tmp_path,
        deadline_s=60.0,
        memory_limit_bytes=LIMIT_BYTES,
    )
    assert not verdict.passed and not verdict.finished
    assert parity_words(verdict).startswith("NOT FINISHED; the plain reference used 0.")
    assert "the limit is 0.62 GiB. Raise the limit, for example --memory-limit 1280MiB" in verdict.note


def test_a_parity_check_that_hangs_says_where(zygote: Zygote, tmp_path: Path):
    with pytest.raises(TaskFailedError) as caught:
        check_parity(
            zygote,
            spec_of("hanging_later_data"),
            TrainingConfig(micro_batch=2),
            plain=None,
            device="cpu",
            directory=tmp_path,
            deadline_s=2.5,
        )
    text = where_ended(caught.value.report)
    assert text.startswith("it was ended after 2 s in the steps of training (unbounded.py, line ")


def test_collectives_keep_the_memory_limit(zygote: Zygote):
    readings, notes = probe_collectives(zygote, device="cpu", ranks=2, budget_s=3.0, memory_limit_bytes=20 << 20)
    assert readings == ()
    assert "collectives could not be measured: used" in notes[0] and "the limit is 0.02 GiB" in notes[0]


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export's zygote of its own, as a user has it: tests share one."""
    monkeypatch.setattr(user_code, "Zygote", Zygote)


@pytest.mark.usefixtures("own_process")
def test_an_export_ends_what_the_model_started(monkeypatch: pytest.MonkeyPatch):
    token = uuid.uuid4().hex
    monkeypatch.setenv("PROCESS_TEST_TOKEN", token)
    assert summarize_model(spec_of("model_with_a_child")).has_blocks is False
    assert survivors(token) == set()


EXPORTS = [
    ("hanging_model", ExportLimits(time_s=3.0), "was ended after 3 s in build_model() (unbounded.py, line "),
    ("greedy_model", ExportLimits(memory_bytes=LIMIT_BYTES), "in build_model(); the limit is 0.62 GiB"),
]


@pytest.mark.parametrize(("workload", "limits", "words"), some(EXPORTS, EXPORTS[:1]))
@pytest.mark.usefixtures("own_process")
def test_an_export_keeps_its_limits(monkeypatch: pytest.MonkeyPatch, workload: str, limits: ExportLimits, words: str):
    token = uuid.uuid4().hex
    monkeypatch.setenv("PROCESS_TEST_TOKEN", token)
    before = LIMITS.set(limits)
    try:
        with pytest.raises(ExportError) as caught:
            summarize_model(spec_of(workload))
    finally:
        LIMITS.reset(before)
    assert words in caught.value.message
    assert "Nothing was written" in str(caught.value.hint)
    assert survivors(token) == set()


def test_the_limits_of_an_export_are_options_of_it():
    assert make_limits(None, None) == ExportLimits(time_s=300.0)
    assert make_limits("90s", "2GiB") == ExportLimits(time_s=90.0, memory_bytes=2 << 30)
    half = make_limits(None, "50%").memory_bytes
    total = read_host_profile().host.memory_total_bytes.value
    assert half is not None and total is not None and abs(half - total / 2) <= 1
    assert {"budget", "memory_limit"} <= set(export_plan.__kwdefaults__ or ())

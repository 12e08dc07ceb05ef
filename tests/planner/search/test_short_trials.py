"""Short trials in whole searches of a tiny deep model: made, used for the choice alone, dropped where they disagree."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.errors import UsageError
from autoplan.planner.records import Outcome, ShortTrial
from autoplan.planner.search import extrapolation, short_trials
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.run import run_search
from autoplan.planner.search.sampler import make_sampler
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.processes import Zygote
from autoplan.report import facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.planner.search.test_search_sampler import CANDIDATES, SPACES

DEEP = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 12,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KEPT = {"compile": "off", "attention": "own", "checkpointing": "none", "precision": "fp32", "allocator": "own"}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too: whether short trials are worth it, and how many, depends on how long trials take."""
    monkeypatch.setattr(short_trials, "_is_worth_it", lambda session, cut: True)
    monkeypatch.setattr(short_trials, "PAYS", 10.0)
    monkeypatch.setattr(short_trials, "WHOLE_AFTER", 0)


class Listener(SearchObserver):
    def __init__(self) -> None:
        self.short: list[tuple[ShortTrial, float | None]] = []
        self.notes: list[str] = []

    def on_short_trial(self, short: ShortTrial, step_time_s: float | None, budget: Any) -> None:
        self.short.append((short, step_time_s))

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def search(folder: Path, listener: Listener, **options: Any) -> SearchResult:
    path = folder / "deep" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(DEEP))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=8)
    values: dict[str, Any] = {
        "budget": 150.0,
        "short_trials": "auto",
        "device": "cpu",
        "store": folder / "s",
        "fix": KEPT,
    }
    return run_search(SearchOptions(spec=spec, **(values | options)), observer=listener)


def lines(result: SearchResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.store) / "record.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine", "always_worth_it")
def test_they_serve_the_choice_and_no_figure_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extrapolation, "LIMIT_SDS", 1e3)  # they agree, however busy the machine is
    listener = Listener()
    result = search(tmp_path, listener)
    assert result.status == "plan_found", result.reason
    plan, shorts = result.plan, result.short_trials
    assert plan is not None and shorts is not None and plan.short_trials == shorts
    assert shorts.why_not is None and len(shorts.checks) >= 1
    assert len(shorts.trials) > short_trials.ANCHORS, "candidates ran short too"
    assert {(short.depth, short.blocks) for short in shorts.trials} == {(2, 12)}
    assert all(min(short.micro_ratio, short.optimizer_ratio) > 1.5 for short in shorts.trials), (
        "of 12 blocks 10 are gone"
    )
    ok = [short for short in shorts.trials if short.trial.outcome.value == "ok"]
    whole = {trial.config: trial for trial in result.trials}
    for short in ok:
        if short.trial.config in whole and (step := whole[short.trial.config].step_time_s) is not None:
            assert short.trial.step_time_s is not None and short.trial.step_time_s.median < step.median

    assert "short" not in {trial.purpose for trial in (*result.trials, *plan.evidence)}
    assert plan.config in whole and set(plan.measurement.trials) <= {trial.number for trial in result.trials}
    numbers = [trial.number for trial in (*result.trials, *(short.trial for short in shorts.trials))]
    assert len(set(numbers)) == len(numbers)
    assert [short for short, _ in listener.short] == list(shorts.trials)
    assert all(seconds is not None for short, seconds in listener.short if short in ok)
    assert facts.short_trials_words(plan) == f"{shorts.describe()}; for the choice of whole trials alone"
    assert [line["kind"] for line in lines(result)].count("short_trial") == len(shorts.trials)

    again = search(tmp_path, Listener())
    assert again.from_record and again.plan == plan
    more = search(tmp_path, Listener(), budget=190.0)  # goes on, and repeats no short trial of the first run
    assert more.short_trials is not None and more.short_trials.trials[0].trial.resumed
    configs = [short.trial.config for short in more.short_trials.trials]
    assert len(set(configs)) == len(configs) >= len(shorts.trials)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine", "always_worth_it")
def test_they_end_and_count_no_more_where_they_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extrapolation, "LIMIT_SDS", 1e-6)  # no two runs agree so well
    monkeypatch.setattr(extrapolation, "LEVEL_SD", 1e6)
    listener = Listener()
    result = search(tmp_path, listener, budget=120.0)
    assert result.status == "plan_found", result.reason
    assert result.short_trials is not None and result.short_trials.why_not is not None
    assert len(result.short_trials.trials) == short_trials.ANCHORS, "none after the first check"
    assert [text for text in listener.notes if text.startswith("short trials have no further part")]
    assert "not used: extrapolated and whole step times differ" in result.short_trials.describe()
    searched = [trial for trial in result.trials if trial.purpose == "search"]
    assert searched, "the search went on with whole trials"


def a_session(**changes: Any) -> Any:
    """What `find_cut` reads of a search on a CPU that short trials are for."""
    values = {"taken_from": "", "step_s": None, "device": "cpu", "num_blocks": 12, "num_stacks": 1} | changes
    options = SearchOptions(
        spec=make_spec(model="gpt2"),
        short_trials=values.pop("short_trials", "auto"),
        **{name: values.pop(name) for name in ("objective", "max_trials") if name in values},
    )
    sampler = make_sampler(values.get("sampler", "autoplan"), CandidateModel(CANDIDATES), SPACES, seed=0)
    estimator = SimpleNamespace(
        profile=SimpleNamespace(num_blocks=values["num_blocks"]), at_depth=lambda depth: ("cut", depth)
    )
    context = SimpleNamespace(
        estimator=estimator,
        device=values["device"],
        facts=SimpleNamespace(step_s=values["step_s"], num_stacks=values["num_stacks"]),
        spec=SimpleNamespace(taken_from=values["taken_from"]),
    )
    return SimpleNamespace(options=options, sampler=sampler, context=context)


def test_there_are_some_only_where_the_model_can_be_cut_and_nothing_else_decides():
    cut = short_trials.find_cut(a_session())
    assert cut is not None and cut.cut == ("cut", 2) and cut.blocks == 12
    for change in (
        {"short_trials": "off"},
        {"objective": "memory"},
        {"max_trials": 5},
        {"sampler": "random"},
        {"device": "cuda"},
        {"step_s": 1.0},
        {"taken_from": "Trainer"},
        {"num_stacks": 2},
        {"num_blocks": 0},
        {"num_blocks": 5},
    ):
        assert short_trials.find_cut(a_session(**change)) is None, change


def test_the_option_has_two_values():
    with pytest.raises(UsageError, match="short_trials is 'yes'"):
        SearchOptions(spec=make_spec(model="gpt2"), short_trials="yes")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trial_of_a_cut_model_is_a_trial_like_any_other(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEP))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=8)
    with Zygote(preload=preload_for(spec)) as zygote:
        runner = TrialRunner(
            zygote,
            spec,
            device="cpu",
            memory_limit_bytes=4 << 30,
            host_limit_bytes=4 << 30,
            directory=tmp_path / "trials",
        )
        config = TrainingConfig(micro_batch=4, checkpointing="every_2")
        whole, cut = (
            runner.run(
                TrialOrder(
                    number=number,
                    purpose="short" if depth else "search",
                    config=config,
                    prediction=None,
                    time_box_s=1.0,
                    deadline_s=120.0,
                    remeasure=0.0,
                    depth=depth,
                )
            )
            for number, depth in enumerate((None, 2))
        )
    for trial in (whole, cut):
        assert trial.outcome is Outcome.OK and trial.items_per_step == 8 * 32 and trial.first_losses
        assert trial.step_time_s is not None and "optimizer_step" in trial.parts_s
    assert cut.purpose == "short"
    assert min(cut.parts_s.values()) < min(whole.parts_s.values())
    assert cut.peak_memory_bytes is not None and whole.peak_memory_bytes is not None
    assert cut.peak_memory_bytes < whole.peak_memory_bytes

"""Short trials in whole searches of a tiny deep model: made, used for the choice alone, dropped where they disagree."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records import ShortTrial, Trial
from autoplan.planner.search import extrapolation, short_trials
from autoplan.planner.search.options import SearchObserver, SearchOptions, SearchResult
from autoplan.planner.search.run import run_search
from autoplan.report import facts
from autoplan.strategies.workloads.sources import make_spec

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
    """On a busy machine too: whether short trials are worth it depends on how long trials take."""
    monkeypatch.setattr(short_trials, "_is_worth_it", lambda session, cut: True)
    monkeypatch.setattr(short_trials, "PAYS", 10.0)


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
    values: dict[str, Any] = {"budget": 75.0, "device": "cpu", "store": folder / "s", "fix": KEPT}
    return run_search(SearchOptions(spec=spec, **(values | options)), observer=listener)


def lines(result: SearchResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.store) / "record.jsonl").read_text().splitlines()]


@pytest.mark.slow
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
    more = search(tmp_path, Listener(), budget=110.0)  # goes on, and repeats no short trial of the first run
    assert more.short_trials is not None and more.short_trials.trials[0].trial.resumed
    configs = [short.trial.config for short in more.short_trials.trials]
    assert len(set(configs)) == len(configs) >= len(shorts.trials)


@pytest.mark.slow
@pytest.mark.usefixtures("probed_machine", "always_worth_it")
def test_they_end_and_count_no_more_where_they_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extrapolation, "LIMIT_SDS", 1e-6)  # no two runs agree so well
    monkeypatch.setattr(extrapolation, "LEVEL_SD", 1e6)
    listener = Listener()
    result = search(tmp_path, listener, budget=60.0)
    assert result.status == "plan_found", result.reason
    assert result.short_trials is not None and result.short_trials.why_not is not None
    assert len(result.short_trials.trials) == short_trials.ANCHORS, "none after the first check"
    assert [text for text in listener.notes if text.startswith("short trials have no further part")]
    assert "not used: extrapolated and whole step times differ" in result.short_trials.describe()
    searched = [trial for trial in result.trials if trial.purpose == "search"]
    assert searched, "the search went on with whole trials"


@pytest.mark.slow
@pytest.mark.usefixtures("probed_machine", "always_worth_it")
@pytest.mark.parametrize(
    "options", [{"short_trials": "off"}, {"objective": "memory"}, {"sampler": "random"}], ids=lambda o: next(iter(o))
)
def test_there_are_none_where_they_are_off_or_not_for_this_search(tmp_path: Path, options: dict[str, Any]):
    result = search(tmp_path, Listener(), budget=30.0, **options)
    assert result.short_trials is None and result.trials
    assert isinstance(result.trials[0], Trial)

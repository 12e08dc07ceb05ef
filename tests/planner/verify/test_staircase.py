"""The staircase: its order, what comes together, what is drawn as one, its file; and small ones that are measured."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import read_environment
from autoplan.planner.records.trials import Interval, Outcome, PeakMemory, Window
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.verify import climb
from autoplan.planner.verify.climb import ALL_MEASURED, BUDGET_ENDED, ROUNDS, Climb, begin, beside, load_staircase
from autoplan.planner.verify.stairs import OF_SEARCH, Changes, Effect, Staircase, interactions, is_good, merge_steps
from autoplan.processes import Ended
from autoplan.report.html import render_page
from autoplan.report.staircase import headline, part_rows, remarks, sign, step_rows, title
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible
from tests.recorded import make_hardware, make_plan, make_trial

ROOT = Path(__file__).resolve().parents[3]
FAULTY = Path(__file__).parents[1] / "data" / "faulty.py"

ENDS = [
    {"micro_batch": 4, "precision": "bf16", "compile": "block", "attention": "sdpa", "checkpointing": "every_2"},
    {"precision": "bf16", "fp8": "rowwise", "compile": "model", "compile_mode": "max-autotune", "loss": "fused"},
    {"precision": "bf16", "attention": "sdpa_flash", "parameters": "bf16", "checkpointing": "full", "threads": 2},
    {"micro_batch": 2, "dp_replicate": 2, "optimizer_step": "fused"},
    {"dp_shard": 4, "reshard_after_forward": False, "micro_batch": 2, "gradient_sync": "every"},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "pp_microbatches": 4},
]


def changes(end: dict[str, Any], start: TrainingConfig = PLAIN) -> Changes:
    return Changes(start=start, end=TrainingConfig.model_validate({"micro_batch": 1} | end), global_batch=16)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: next(iter(end)))
@pytest.mark.parametrize("seed", range(6))
def test_every_configuration_on_the_way_is_legal_and_each_knob_is_in_one_step(end: dict[str, Any], seed: int) -> None:
    between = changes(end)
    draw = random.Random(seed)
    sets = [frozenset(some) for n in range(3) for some in itertools.combinations(between.knobs, n)]
    known = {names: draw.uniform(0.1, 1.0) for names in sets if draw.random() < 0.7}
    steps = between.order(known)
    assert sorted(itertools.chain(*steps)) == sorted(between.knobs)
    places = list(itertools.accumulate(steps, frozenset.union, initial=frozenset[str]()))
    for names in (*places, *between.alone, *(between.all - names for names in between.left_out)):
        config = between.config(names)
        assert config.accumulation(16) and incompatible(config, 16) is None, config.describe()
        assert between.names(config) == names
    assert places[-1] == between.all and between.config(places[-1]) == between.end
    for sets_of in (between.alone, between.left_out):
        assert frozenset().union(*sets_of) == between.all


def test_what_needs_another_comes_with_it_and_leaves_with_it() -> None:
    between = changes(ENDS[1])
    assert frozenset({"fp8", "precision"}) in between.alone and frozenset({"precision"}) in between.alone
    assert frozenset({"fp8", "precision"}) in between.left_out and frozenset({"precision"}) not in between.left_out
    steps = between.order({frozenset(): 1.0, frozenset({"fp8", "precision"}): 0.1})
    assert steps.index(frozenset({"precision"})) < steps.index(frozenset({"fp8"}))
    pipeline = changes(ENDS[5])
    assert pipeline.additions(frozenset()) == [frozenset({"pp", "pp_microbatches"})], "a pipeline has micro-batches"
    batch = changes({"micro_batch": 8, "dp_replicate": 2}, TrainingConfig(micro_batch=16))
    assert frozenset({"micro_batch", "dp_replicate"}) in batch.alone, "16 x 2 is more than the global batch"


def test_the_largest_gain_comes_first_and_what_does_not_run_last() -> None:
    between = changes({"precision": "bf16", "attention": "sdpa", "loss": "fused"})
    one = {name: frozenset({name}) for name in between.knobs}
    known = {frozenset[str](): 1.0, one["precision"]: 0.5, one["attention"]: 0.8, one["loss"]: math.inf}
    assert between.order(known) == [one["precision"], one["attention"], one["loss"]]
    assert between.order({}) == [one[name] for name in between.knobs], "nothing is known: the order of the fields"
    # Alone, attention is the better second step; beside bf16 the loss is, which was measured.
    known |= {one["loss"]: 0.99, one["precision"] | one["loss"]: 0.1, one["precision"] | one["attention"]: 0.45}
    assert between.order(known)[1] == one["loss"]
    # Nobody measured the pairs: what the end loses without a technique counts too.
    last = {between.all: 0.1, between.all - one["loss"]: 0.9, between.all - one["attention"]: 0.11}
    looks = {frozenset[str](): 1.0, one["precision"]: 0.5, one["attention"]: 0.9, one["loss"]: 0.95}
    assert between.order(looks | last)[1] == one["loss"]


def ratio(median: float, half: float = 0.02) -> Interval:
    return Interval(median=median, low=median * (1 - half), high=median * (1 + half), samples=3)


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_drawn_once_and_none_within_noise_beside_another(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    speed = [math.exp(draw.choice([0.0, 0.0, 0.4, -0.3])) for _ in range(count)]
    runs = [draw.random() < 0.8 for _ in range(count + 1)]

    def gain(before: int, after: int) -> Interval:
        return ratio(math.prod(speed[before:after]))

    drawn = merge_steps(count, lambda place: runs[place], gain)
    assert drawn[0][0] == 0 and drawn[-1][1] == count
    assert all(one[1] == other[0] for one, other in itertools.pairwise(drawn))
    assert all(runs[place] for place, _ in drawn[1:]), "no step begins where nothing ran"
    # The pieces of two drawn steps in a row are not both within noise: they would be one.
    places = [place for place in range(count + 1) if place in (0, count) or runs[place]]
    noisy = [(a, b) for a, b in itertools.pairwise(places) if gain(a, b).low <= 1 <= gain(a, b).high]
    for (a, b), (c, d) in itertools.pairwise(noisy):
        if b == c:
            assert any(start <= a and d <= end for start, end in drawn)


def test_steps_within_noise_are_one_and_others_are_not() -> None:
    gains = {(0, 1): 2.0, (1, 2): 1.01, (2, 3): 0.99, (3, 4): 1.3, (1, 3): 1.0}
    assert merge_steps(4, lambda place: True, lambda a, b: ratio(gains[a, b])) == [(0, 1), (1, 3), (3, 4)]
    gains = {(0, 2): 2.0, (2, 3): 1.2}
    assert merge_steps(3, lambda place: place != 1, lambda a, b: ratio(gains[a, b])) == [(0, 2), (2, 3)]


def test_an_interaction_is_said_where_intervals_have_nothing_in_common() -> None:
    def effect(name: str, median: float) -> Effect:
        return Effect(changes=(name,), config=PLAIN, gain=ratio(median))

    steps = [effect("attention=eager", 1.5), effect("precision=bf16", 1.9), effect("loss=fused", 1.05)]
    alone = [effect("attention=eager", 1.5), effect("precision=bf16", 1.1), effect("loss=fused", 1.04)]
    without = [effect("attention=eager", 0.4), effect("precision=bf16", 0.53), effect("loss=fused", 0.96)]
    assert interactions(steps, alone, without) == [
        "attention=eager: alone 1.50 times, with the rest of the plan 2.50",
        "precision=bf16: alone 1.10 times, after attention=eager 1.90",
    ]


# A staircase over runs that are drawn.


class DrawnRuns:
    """A runner whose step times are a product over knobs, with noise; some do not run, some are disturbed."""

    def __init__(self, factors: dict[str, float], *, seed: int = 0, noise: float = 0.005) -> None:
        self.factors, self.noise, self.draw, self.orders = factors, noise, random.Random(seed), []
        self.fails: TrainingConfig | None = None
        self.disturbs: set[int] = set()
        self.stops_at: int | None = None
        self.drift: float | None = None  # of the machine between rounds, in slices; None: one after the other
        self.ended, self.settled = Ended.FINISHED, True
        self.takes_s = 0.0  # of a round that fails in slices

    def may_slice(self, runs: Any) -> bool:
        return self.drift is not None

    def run_round(self, orders: Any, *, known: Any, left_s: Any) -> Any:
        assert not known or [order.config for order in orders] == [run.config for run in known]
        report = types.SimpleNamespace(ended=self.ended, describe=lambda: "killed by signal 9")
        if self.ended is not Ended.FINISHED:
            time.sleep(self.takes_s)
            return types.SimpleNamespace(trials=(), report=report, settled=self.settled)
        slow, made = math.exp(self.draw.gauss(0, self.drift or 0.0)), []
        for order in orders:
            trial = self.run(order)
            s = trial.step_time_s
            step = s.model_copy(update={name: slow * getattr(s, name) for name in ("median", "low", "high")})
            made.append(trial.model_copy(update={"step_time_s": step, "pauses": 8}))
        return types.SimpleNamespace(trials=tuple(made), report=report, settled=True)

    def run(self, order: Any, **given: Any) -> Any:
        if self.stops_at is not None and len(self.orders) >= self.stops_at:
            raise KeyboardInterrupt
        self.orders.append(order)
        if order.config == self.fails:
            return make_trial(order.number, order.config, None, outcome=Outcome.OUT_OF_MEMORY, reason="too large")
        chosen = order.config.knobs_off_default()
        step_s = math.prod(f for name, f in self.factors.items() if name in chosen) * math.exp(
            self.draw.gauss(0, self.noise)
        )
        window = None
        if order.round in self.disturbs:
            step_s, window = 9 * step_s, Window(seconds=1.0, disturbed="other work took the cores")
        memory = PeakMemory(resident_bytes=2**30 * (2 if "precision" in chosen else 3))
        given = {"purpose": order.purpose, "round": order.round, "window": window, "peak_memory": memory}
        return make_trial(order.number, order.config, step_s, **given)


FACTORS = {"precision": 0.5, "compile": 0.8, "loss": 1.001, "optimizer_step": 0.999, "checkpointing": 1.3}
END = TrainingConfig(
    micro_batch=2, precision="bf16", compile="block", loss="fused", optimizer_step="fused", checkpointing="full"
)


def climbed(runner: DrawnRuns, tmp_path: Path, budget_s: float = 1e6, found: Staircase | None = None) -> Staircase:
    plan = make_plan(END)
    found = found or begin(plan, make_hardware(cores=1), plan.baseline.config, budget_s)
    step: Any = Climb(found=found, runner=runner, place=tmp_path / "s.json", on_progress=lambda text: None)  # type: ignore[arg-type]
    try:
        step.run()
    except KeyboardInterrupt:
        pass
    return step.found


Measured = tuple[DrawnRuns, Staircase, Path]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Runs that are drawn, the staircase over them of which all is measured, and its file."""
    runner, folder = DrawnRuns(FACTORS, seed=1), tmp_path_factory.mktemp("measured")
    return runner, climbed(runner, folder), folder / "s.json"


def test_the_figures_are_those_of_the_runs(measured: Measured) -> None:
    runner, found, _ = measured
    assert found.ended == ALL_MEASURED
    steps = found.steps()
    assert [step.changes for step in steps] == [
        ("precision=bf16",),
        ("compile=block",),
        ("loss=fused", "optimizer_step=fused"),
        ("checkpointing=full",),
    ]
    assert [sign(step) for step in steps] == ["+", "+", "~", "-"]
    for step, wanted in zip(steps, (2.0, 1.25, 1.0, 1 / 1.3), strict=True):
        assert step.gain is not None and step.gain.low < wanted < step.gain.high and step.rounds == ROUNDS
        assert step.gain.high - step.gain.low < 0.05 * wanted
    assert [step.peak_memory_bytes for step in steps] == [2 << 30] * 4
    without = {effect.changes: effect.gain for effect in found.left_out()}
    assert without[("precision=bf16",)] is not None and without[("precision=bf16",)].median == pytest.approx(0.5, 0.02)
    assert not [text for text in remarks(found) if "together" in text], "factors have no interactions"
    rounds = [[order.config for order in runner.orders if order.round == number] for number in range(ROUNDS)]
    assert all(len(set(configs)) == len(configs) == len(rounds[0]) for configs in rounds)
    assert len({tuple(configs) for configs in rounds}) > 1, "the order is drawn anew"


def test_rounds_in_slices_show_steps_that_a_machine_which_changes_would_hide(tmp_path: Path) -> None:
    runner = DrawnRuns({"precision": 0.8, "compile": 0.9, "checkpointing": 1.15, "loss": 0.85}, seed=1)
    runner.drift = 0.3
    found = climbed(runner, tmp_path)
    assert found.ended == ALL_MEASURED and all(trial.pauses for trial in found.trials if trial.purpose == "claim")
    assert not any(trial.pauses for trial in found.trials if trial.purpose != "claim")
    assert "+" in {sign(step) for step in found.steps()} and "-" in {sign(step) for step in found.steps()}
    for step in found.steps():
        assert step.gain is not None and step.gain.high / step.gain.low < 1.2 and step.rounds == ROUNDS


@pytest.mark.parametrize("budget_s", [1e6, 1.0], ids=["too slow for its own deadline", "by the budget"])
def test_a_round_in_slices_that_fails_is_made_one_after_the_other_if_there_is_time(
    tmp_path: Path, budget_s: float
) -> None:
    runner = DrawnRuns(FACTORS)
    runner.drift, runner.ended, runner.takes_s = 0.0, Ended.DEADLINE, 1.0 if budget_s == 1.0 else 0.0
    found = climbed(runner, tmp_path, budget_s=budget_s)
    rounds = [trial for trial in found.trials if trial.purpose == "claim"]
    assert not any(trial.pauses for trial in rounds)
    assert (found.ended == ALL_MEASURED) == bool(rounds) == (budget_s > 1.0)


def test_rounds_in_slices_that_something_outside_ends_each_time_end_the_staircase(tmp_path: Path) -> None:
    runner = DrawnRuns(FACTORS)
    runner.drift, runner.ended, runner.settled = 0.0, Ended.RANK_FAILED, False
    with pytest.raises(autoplan.DidNotRunError, match="two runs.*signal 9"):
        climbed(runner, tmp_path)


def test_a_disturbed_round_is_void_and_made_again(tmp_path: Path) -> None:
    runner = DrawnRuns(FACTORS)
    runner.disturbs = {1}
    found = climbed(runner, tmp_path)
    assert all(step.rounds == ROUNDS for step in found.steps())
    assert max(order.round or 0 for order in runner.orders) == ROUNDS
    runner = DrawnRuns(FACTORS)
    runner.disturbs = set(range(99))
    found = climbed(runner, tmp_path)
    assert all("disturbed" in (step.why_not or "") for step in found.steps())
    assert all(sign(step) == "~" for step in found.steps()), "nothing is claimed of disturbed rounds"


def test_what_does_not_run_is_drawn_with_the_next_and_named(tmp_path: Path) -> None:
    runner = DrawnRuns(FACTORS | {"checkpointing": 0.9})
    runner.fails = TrainingConfig(micro_batch=2, precision="bf16")
    found = climbed(runner, tmp_path)
    assert sum(order.config == runner.fails for order in runner.orders) == 1, "it failed once; it is not run again"
    assert all(step.gain is not None for step in found.steps())
    assert any("alone: out_of_memory: too large" in text for text in remarks(found))
    runner.fails = END
    with pytest.raises(autoplan.NoFeasiblePlanError, match="the plan .* does not run here"):
        climbed(runner, tmp_path)


def test_it_goes_on_where_it_was_interrupted_and_with_a_larger_budget(tmp_path: Path) -> None:
    whole = climbed(DrawnRuns(FACTORS, noise=0.0), tmp_path)
    for stops_at in (0, 3, 14, 40):
        runner = DrawnRuns(FACTORS, noise=0.0)
        runner.stops_at = stops_at
        found = climbed(runner, tmp_path)
        assert len(found.trials) == stops_at and found.ended is None
        if stops_at:
            found = load_staircase(tmp_path / "s.json", make_plan(END))
        runner.stops_at = None
        assert climbed(runner, tmp_path, found=found).order == whole.order
        assert len(runner.orders) <= len(whole.trials) + len(whole.path) * 3, "no look is repeated"


def test_a_short_budget_goes_to_the_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(climb, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    runner = DrawnRuns(FACTORS)
    real = runner.run

    def run(order: Any, **given: Any) -> Any:
        now[0] += 12.0  # as make_trial says
        return real(order, **given)

    runner.run = run  # type: ignore[method-assign]
    found = climbed(runner, tmp_path, budget_s=12.0 * (11 + 2 * 6 + 4) / 0.9)
    assert found.ended == BUDGET_ENDED and found.spent_s <= found.budget_s
    assert all(step.gain is not None and step.rounds >= 2 for step in found.steps())
    assert any(effect.gain is None for effect in found.alone())
    assert "not measured" in str(part_rows(found))


def test_the_search_counts_where_it_ran_on_the_same_machine() -> None:
    plan = make_plan(END)
    pair = [make_trial(7 + n, c, 2.0, purpose="claim", round=0) for n, c in enumerate((END, plan.baseline.config))]
    plan = plan.model_copy(update={"evidence": (*plan.evidence, *pair)})
    assert begin(plan, make_hardware(cores=1), plan.baseline.config, 60.0).trials == ()
    same = plan.model_copy(update={"environment": read_environment()})
    found = begin(same, plan.hardware, plan.baseline.config, 60.0)
    assert {trial.config for trial in found.trials} == {END, plan.baseline.config}, "not those that are no step of it"
    assert [trial.round for trial in found.trials if trial.purpose == "claim"] == [OF_SEARCH, OF_SEARCH]
    gain, rounds, _ = found.gain(END, plan.baseline.config)
    assert gain is not None and rounds == 1


# The file, and what is shown.


def test_the_file_is_of_its_plan_and_an_edit_shows(measured: Measured, tmp_path: Path) -> None:
    plan = make_plan(END)
    _, found, kept = measured
    again = load_staircase(kept, plan)
    assert again.trials == found.trials and again.steps() == found.steps()
    with pytest.raises(autoplan.PlanError, match="of another plan"):
        load_staircase(kept, make_plan())
    with pytest.raises(autoplan.PlanError, match="begins at micro_batch=2"):
        load_staircase(kept, plan, TrainingConfig(micro_batch=1))
    document, path = json.loads(kept.read_text()), tmp_path / "s.json"
    path.write_text(json.dumps(document | {"spent_s": 1.5}))
    with pytest.raises(autoplan.PlanError, match="edited"):
        load_staircase(path, plan)
    path.write_text(json.dumps(document | {"trials": 3}))
    with pytest.raises(autoplan.PlanError, match="no staircase: trials"):
        load_staircase(path, plan)


def test_it_does_not_go_on_on_another_machine_or_with_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = make_plan(END), tmp_path / "s.json"
    begun = begin(plan, make_hardware(cores=1), plan.baseline.config, 60.0)
    opened = types.SimpleNamespace(times=0)

    def open_runner(*given: Any, **named: Any) -> Any:
        opened.times += 1
        raise autoplan.DeviceError("it would go on here")

    monkeypatch.setattr(climb, "open_runner", open_runner)
    older = begun.environment.model_copy(update={"torch": "2.1.0"})
    for found, cores, words in (
        (begun, 1, "it would go on here"),
        (begun, 2, "cores usable 2 here, 1 then"),
        (begun.model_copy(update={"environment": older}), 1, "2.1.0 then"),
    ):
        climb.save_staircase(found, path)
        monkeypatch.setattr(climb, "read_host_profile", functools.partial(make_hardware, cores=cores))
        with pytest.raises(autoplan.AutoplanError, match=words):
            autoplan.staircase(plan, keep=path)
    assert opened.times == 1


def test_without_a_step_it_ends_with_the_same_error_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = make_plan(END), tmp_path / "s.json"
    drawn = contextlib.nullcontext(DrawnRuns(FACTORS))
    monkeypatch.setattr(climb, "open_runner", lambda *given, **named: drawn)
    for keep, hint in ((path, "what was measured is kept"), (path, "what was measured is kept"), (None, "Nothing is")):
        with pytest.raises(autoplan.BudgetEndedError, match=hint):
            autoplan.staircase(plan, keep=keep, budget=0.001)
    assert load_staircase(path, plan).ended == BUDGET_ENDED


def test_the_tables_fit_80_columns_and_the_page_has_the_bars(measured: Measured, capsys: pytest.CaptureFixture) -> None:
    _, found, _ = measured
    found.show()
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.startswith("  ")]
    assert len(tables) > 10 and max(map(len, tables)) <= 80
    assert any(line.startswith("  ~ loss=fused") for line in tables)
    assert step_rows(found).rows[1][0] == "  micro_batch=2"
    page = render_page(make_plan(END), found)
    assert page.count('class="bar') > 5 and "Each technique alone, and the plan without it" in page
    assert "a step at a time" not in render_page(make_plan(END))


def test_it_begins_at_the_users_own_setting(measured: Measured) -> None:
    _, plain, _ = measured
    plan = make_plan(END)
    own = plan.baseline.config
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"own_setting": own})})
    assert begin(plan, make_hardware(), own, 60.0).own_setting == own == plain.start
    found = plain.model_copy(update={"own_setting": own})
    assert title(found) == "From your setting to the plan, a step at a time"
    assert "the speed of your setting in" in headline(found)
    assert step_rows(found).rows[0][0].strip() == "your setting"
    assert title(plain) == "From the plain run to the plan, a step at a time"
    with pytest.raises(autoplan.UsageError, match="the plan is your setting, so there is no step"):
        begin(plan.model_copy(update={"config": own}), make_hardware(), own, 60.0)


def test_a_plain_plan_has_no_step() -> None:
    plan = make_plan()
    with pytest.raises(autoplan.UsageError, match="no step"):
        begin(plan, make_hardware(), plan.config, 60.0)
    with pytest.raises(autoplan.ConfigError, match="does not divide"):
        begin(plan, make_hardware(), TrainingConfig(micro_batch=3), 60.0)


# Measured.


def found_plan(folder: Path) -> Path:
    """A plan of a tiny model that a search here found, with its first knobs fixed so that there are steps."""
    path = folder / "plan.json"
    fix = {"micro_batch": 64, "compile": "off", "optimizer_step": "foreach", "precision": "fp32"}
    spec = autoplan.make_spec(model=f"{FAULTY}:make_sound")
    options = SearchOptions(
        spec=spec, budget=60.0, max_trials=2, device="cpu", fix=fix, out=path, store=folder / "store"
    )
    result = autoplan.run_search(options)
    assert result.status == "plan_found", result.reason
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("quick_searches")
def test_a_staircase_is_interrupted_goes_on_and_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    path = found_plan(tmp_path)
    plan = Plan.load(path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.time_box", "explain", "--staircase", "--budget", "90s"]
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where a shell's `&` ignores it
    measuring = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=-1, preexec_fn=listens)
    deadline = time.monotonic() + 60
    while not beside(path).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    measuring.send_signal(signal.SIGINT)
    _, err = measuring.communicate(timeout=60)
    assert measuring.returncode == 130 and "goes on" in err, err
    kept = load_staircase(beside(path), plan)
    assert kept.trials and kept.ended is None

    told: list[str] = []
    found = autoplan.staircase(path, budget="90s", on_progress=told.append)
    assert found.trials[: len(kept.trials)] == kept.trials and found.ended is not None
    assert sorted(itertools.chain(*found.order)) == sorted(found.between.knobs) and found.order
    assert all(step.gain is not None for step in found.steps()) and any("round 2" in text for text in told)
    assert found.spent_s < 100 and found.peak_memory_bytes(plan.config)
    quiet = [trial for trial in plan.evidence if trial.purpose == "claim" and is_good(trial) and not trial.disturbed]
    of_search = [trial for trial in found.trials if OF_SEARCH <= (trial.round or 0) < 2 * OF_SEARCH]
    assert len(of_search) == len(quiet), "the search's own rounds count, the disturbed ones not"

    monkeypatch.setattr(climb, "open_runner", None)  # from here on nothing is run
    assert autoplan.staircase(path) == load_staircase(beside(path), plan) == autoplan.staircase(plan, keep=beside(path))
    unverified = plan.model_copy(update={"unverified": "the search ended before its proof"})
    with pytest.raises(autoplan.PlanError, match="proof"):
        autoplan.staircase(unverified)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("explain", "--staircase")
    assert "the plan without it" in shown.out, shown.err
    assert max(len(line) for line in shown.out.splitlines() if line.startswith("  ")) <= 80
    document = json.loads(cli("explain", "--staircase", "--json").out)["staircase"]
    assert document["steps"] and document["ended"] and "trials" not in document
    assert cli("report").code == 0 and "a step at a time" in (tmp_path / "report.html").read_text()

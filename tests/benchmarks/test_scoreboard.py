"""The scoreboard of searches: the draw of a table, its recorder and reader, and the arithmetic of the replays."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.errors import UsageError
from autoplan.planner.records.trials import Interval, Outcome, Trial, Window
from autoplan.planner.search.trial_cost import was_warm
from autoplan.planner.store.journal import RecordFile
from autoplan.planner.trials.measure import SLICED, ToBeat
from autoplan.planner.trials.runner import TrialOrder
from autoplan.processes import Ended
from autoplan.strategies.config import TrainingConfig
from benchmarks import false_wins, search_replay, search_tables
from benchmarks.recorded import EARLIER, LIMIT_BYTES, SETUP, TRIALS, Recorded, choose, is_plain, read, read_table
from benchmarks.replay import MemoryStore, TableRunner, answer, compile_s, ended_early, kept, make_estimator, replay
from benchmarks.search_plot import draw_curves, share_at
from benchmarks.search_replay import METHODS, Point

CONFIGS = [TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8)]
CONFIGS += [TrainingConfig(micro_batch=size, checkpointing="full") for size in (1, 2, 4, 8)]
SECONDS = (4.0, 2.0, 1.0, 1.2, 5.0, 3.0, 1.5, 2.0)
"""Step times of CONFIGS in both passes: the third is the best."""


@pytest.fixture(scope="module")
def image() -> Recorded:
    return next(one for one in read(EARLIER) if one.name == "image")


def trial_of(config: TrainingConfig, seconds: float, *, disturbed: str | None = None, spent: float = 10.0) -> Trial:
    return Trial(
        number=0,
        purpose="search",
        config=config,
        outcome=Outcome.OK,
        phase="done",
        step_time_s=Interval(median=seconds, low=seconds, high=seconds, samples=5),
        seconds_spent=spent,
        window=Window(seconds=1.0, disturbed=disturbed),
    )


@pytest.fixture
def known(image: Recorded) -> Recorded:
    """A table whose answer is known: eight candidates, each of 10 device seconds."""
    trials = [trial_of(config, seconds) for config, seconds in zip(CONFIGS, SECONDS, strict=True)]
    return replace(image, name="known", rounds=(trials, trials), planned=len(trials))


class Answers:
    """Stands where the trial runner does, and counts what it is asked; after `most` trials it is ended."""

    def __init__(self, most: int = 1000, disturbed: str | None = None) -> None:
        self.asked: list[TrainingConfig] = []
        self.most, self.disturbed = most, disturbed

    def run(self, order: Any) -> Trial:
        if len(self.asked) == self.most:
            raise KeyboardInterrupt
        self.asked.append(order.config)
        return trial_of(order.config, SECONDS[CONFIGS.index(order.config)], disturbed=self.disturbed)


def setup_of(image: Recorded) -> dict[str, Any]:
    return {
        "case": "vision",
        "ranks": 1,
        "seed": 0,
        "bounds": [],
        "processes": 3,
        "legal": 8,
        "global_batch": 16,
        "cpu": "some",
        "versions": {},
        "hardware": json.loads(image.hardware.model_dump_json()),
        "profile": json.loads(image.profile.model_dump_json(exclude_defaults=True)),
        "candidates": [config.model_dump(mode="json", exclude_defaults=True) for config in CONFIGS],
    }


@pytest.fixture
def table(image: Recorded, tmp_path: Path) -> Iterator[Path]:
    table = tmp_path / "table"
    table.mkdir()
    (table / SETUP).write_bytes(gzip.compress(json.dumps(setup_of(image)).encode()))
    yield table


def record(table: Path, runner: Answers, image: Recorded, **options: Any) -> int:
    file = RecordFile(table / TRIALS)
    try:
        return search_tables.record(runner, setup_of(image), file, **options)  # type: ignore[arg-type]
    finally:
        file.close()


def test_each_value_of_each_knob_is_drawn_even_the_rare_one():
    legal = [
        TrainingConfig(micro_batch=m, precision=p, checkpointing=c, allocator=a)  # type: ignore[arg-type]
        for m in (1, 2, 4, 8, 16, 32)
        for p in ("fp32", "bf16")
        for c in ("none", "selective", "every_2", "full")
        for a in ("own", "keep")
    ]
    legal.append(TrainingConfig(micro_batch=32, precision="bf16", compile="model"))
    drawn = choose(legal, 20, 1, seed=3)
    for knob in ("micro_batch", "precision", "checkpointing", "allocator", "compile"):
        assert {getattr(c, knob) for c in drawn} == {getattr(c, knob) for c in legal}, knob
    assert len(drawn) == len(set(drawn)) == 21
    assert set(filter(is_plain, legal)) <= set(drawn)
    assert drawn == choose(legal, 20, 1, seed=3) != choose(legal, 20, 1, seed=4)
    assert sum(config.compile != "off" for config in choose(legal, 20, 0)) == 1  # a value that must occur


def test_a_recording_that_was_ended_goes_on_and_repeats_nothing(table: Path, image: Recorded):
    first = Answers(most=5)
    with pytest.raises(KeyboardInterrupt):
        record(table, first, image)
    with (table / TRIALS).open("a") as file:
        file.write('{"pass":0,"candidate":7,"tri')  # as a kill in the middle of a write leaves it
    second = Answers()
    assert record(table, second, image) == 0
    asked = [*first.asked, *second.asked]
    assert len(first.asked) == 5 and len(asked) == 24
    passes = [asked[:8], asked[8:16], asked[16:]]
    assert all(sorted(map(str, one)) == sorted(map(str, CONFIGS)) for one in passes)
    assert passes[0] != passes[1] != passes[2]  # each pass has its own order
    found = read_table(table)
    assert found.finished and found.disturbed == 0 and len(found.rounds) == 3
    assert [SECONDS[CONFIGS.index(config)] for config in found.candidates] == pytest.approx(found.seconds.tolist())
    assert record(table, Answers(most=0), image) == 0


def test_what_was_disturbed_can_be_measured_again_and_the_last_line_counts(table: Path, image: Recorded):
    record(table, Answers(disturbed="another process took a core"), image)
    assert read_table(table).disturbed == 24
    assert record(table, Answers(most=0), image) == 0  # a disturbed trial is a trial
    again = Answers()
    record(table, again, image, again=True)
    assert len(again.asked) == 24 and read_table(table).disturbed == 0


def test_of_a_table_that_is_not_finished_what_ran_in_each_pass_is_read(table: Path, image: Recorded):
    with pytest.raises(KeyboardInterrupt):
        record(table, Answers(most=19), image)
    found = read_table(table)
    assert len(found.candidates) == 3 and not found.finished
    assert read(table.parent)[-1].candidates == found.candidates
    assert record(table, Answers(), image, limit_s=-1.0) == 5


def test_a_table_is_not_mixed_with_another(table: Path, image: Recorded):
    asked = {"case": "vision", "ranks": 1, "seed": 1, "bounds": [], "processes": 3}
    with pytest.raises(UsageError, match="was begun with seed 0, and now it is 1"):
        search_tables.open_setup(table, asked)
    with pytest.raises(UsageError, match="was begun with processes 3, and now it is 4"):
        search_tables.open_setup(table, asked | {"seed": 0, "processes": 4})
    with pytest.raises(UsageError, match="versions"):
        search_tables.open_setup(table, asked | {"seed": 0})
    assert search_tables.open_setup(table / "new", asked) is None


def test_a_table_without_plain_runs_prices_its_checks_too():
    known = read_table(search_tables.TABLES / "gpt-2")
    assert not known.plain
    assert 0.9 < search_replay.affordable_share(known, 60.0) <= 1.0


POINTS = [
    Point(trials=1, seconds=10.0, share=0.0),
    Point(trials=2, seconds=20.0, share=0.5),
    Point(trials=3, seconds=50.0, share=0.98),
]


def test_the_arithmetic_of_a_replay():
    assert search_replay.reached(POINTS, 0.95) == search_replay.reached(POINTS, 0.98) == POINTS[2]
    assert search_replay.reached(POINTS, 0.99) is None
    assert search_replay.regret_of([], 1.0) == search_replay.regret_of(POINTS[:1], 1.0) == math.inf
    assert search_replay.regret_of(POINTS[:2], 1.0) == pytest.approx(1.0)  # half as fast takes twice as long
    assert search_replay.regret_of(POINTS, 0.98) == pytest.approx(0.0)  # as good as what was affordable
    score = search_replay.score_of("x", [POINTS, POINTS, POINTS[:2]], [POINTS[:2]] * 3, 1.0)
    assert score.to_level == {0.95: (3, 50.0, 2), 0.98: (3, 50.0, 2), 0.99: (math.inf, math.inf, 0)}
    assert score.regrets == {50: pytest.approx(1.0), 90: pytest.approx(1.0)}
    assert search_replay.percentile([3.0, math.inf, 1.0, 2.0], 50) == 2.0
    assert search_replay.percentile([3.0, math.inf, 1.0, 2.0], 90) == math.inf


@pytest.mark.parametrize("method", ["ours", "tpe", "random"])
def test_every_method_finds_the_best_of_a_known_table(known: Recorded, method: str):
    points = search_replay.curve(known, METHODS[method], 1, 1000.0)
    assert points[0].trials == 1 and points[0].share == 1.0 / SECONDS[CONFIGS.index(TrainingConfig(micro_batch=8))]
    shares = [point.share for point in points]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)


def test_a_replay_has_the_pieces_of_a_live_search(known: Recorded):
    moments = list(replay(known, "autoplan", 0, budget_s=400.0))
    kinds = [moment.work.kind for moment in moments]
    assert kinds[0] == "baseline" and "look" in kinds and kinds[-1] == "claim" and kinds.count("claim") >= 2
    best = CONFIGS[2]
    assert moments[-1].leader == best
    checked = next(moment for moment in moments if moment.work.kind == "parity")
    assert checked.work.config == best
    claims = [trial for trial in moments[-1].trials if trial.purpose == "claim"]
    assert {trial.config for trial in claims} == {best, CONFIGS[3]}


def test_with_too_little_time_there_is_no_baseline_and_what_is_affordable_is_known(known: Recorded):
    assert list(replay(known, "autoplan", 0, budget_s=0.1)) == []
    plain = 1.0 / SECONDS[3]
    assert search_replay.affordable_share(known, 15.0) == plain  # the plain run alone
    assert search_replay.affordable_share(known, 1000.0) == 1.0


def test_a_table_judges_by_the_geometric_mean_of_its_processes(known: Recorded):
    first, second = list(known.rounds[0]), list(known.rounds[1])
    first[3] = trial_of(CONFIGS[3], 0.9)  # by chance faster than the best once: 0.9 for 1.2
    table = replace(known, rounds=(first, second))
    assert table.seconds[3] == pytest.approx(math.sqrt(0.9 * 1.2))


def test_what_is_dropped_by_predicted_memory_would_not_have_run(image: Recorded):
    peaks = dict(zip(image.candidates, image.peaks, strict=True))
    dropped = 0
    for limit in map(int, np.quantile(image.peaks, [0.25, 0.5, 0.75])):
        gone = set(image.candidates) - set(kept(image, make_estimator(image, limit), limit))
        assert all(peaks[config] > limit for config in gone)
        dropped += len(gone)
    assert dropped


def test_a_recorded_peak_above_the_limit_is_answered_as_out_of_memory(image: Recorded):
    trial = image.rounds[0][0]
    peak = trial.peak_memory_bytes
    assert peak is not None and answer(trial, 7, LIMIT_BYTES) == trial.model_copy(update={"number": 7})
    over = answer(trial, 7, peak - 1)
    assert (over.outcome, over.step_time_s, over.peak_memory_bytes) == (Outcome.OUT_OF_MEMORY, None, peak - 1)


def sampled(config: TrainingConfig, steps: Sequence[float], **others: Any) -> Trial:
    trial = trial_of(config, float(np.median(steps)), **others)
    return trial.model_copy(update={"samples_s": {"step": tuple(steps)}, "method": "whole_steps"})


def order_of(config: TrainingConfig, **others: Any) -> TrialOrder:
    return TrialOrder(number=5, purpose="finalist", config=config, prediction=None, deadline_s=99.0, **others)


def test_a_run_draws_a_process_and_then_its_steps(known: Recorded):
    """Processes around 1, 2 and 3 seconds: a run's steps are all of one of them, and runs differ in their steps."""
    rounds = tuple(
        [sampled(config, [middle - 0.1, middle - 0.05, middle, middle + 0.05, middle + 0.1]) for config in CONFIGS]
        for middle in (1.0, 2.0, 3.0)
    )
    table = replace(known, rounds=rounds)
    store = MemoryStore()
    runner = TableRunner(table, store, 0, LIMIT_BYTES)
    trials = [runner.run(order_of(CONFIGS[0], round=number)) for number in range(40)]
    medians = {trial.step_time_s.median for trial in trials if trial.step_time_s is not None}
    assert {round(median) for median in medians} == {1, 2, 3} and len(medians) > 6
    assert all(max(steps) - min(steps) <= 0.2001 for trial in trials for steps in trial.samples_s.values())
    assert store.spent_s == pytest.approx(400.0) and trials[3].round == 3 and trials[3].purpose == "finalist"
    assert np.allclose(table.seconds, 6 ** (1 / 3)) and table.noise > 0.3


def test_runs_of_a_round_in_slices_have_the_mean_of_all_processes(known: Recorded):
    rounds = tuple(
        [sampled(config, [0.99 * middle, middle, 1.01 * middle]) for config in CONFIGS] for middle in (1.0, 2.0, 4.0)
    )
    store = MemoryStore()
    runner = TableRunner(replace(known, rounds=rounds), store, 0, LIMIT_BYTES)
    orders = [order_of(CONFIGS[0], round=3), order_of(CONFIGS[1], round=3)]
    made = [runner.run_round(orders).trials for _ in range(40)]
    medians = [trial.step_time_s.median for pair in made for trial in pair if trial.step_time_s is not None]
    assert len(medians) == 80 and all(trial.pauses and trial.round == 3 for pair in made for trial in pair)
    assert np.mean(np.log(medians)) == pytest.approx(math.log(2.0), abs=0.02), "and not those of one process"
    assert 0.5 * SLICED.sd < np.std(np.log(medians)) < 2 * SLICED.sd
    assert store.spent_s == pytest.approx(800.0)
    late = [replace(order, deadline_s=5.0) for order in orders]
    ended = runner.run_round(late)
    assert not ended.trials and ended.report.ended is Ended.DEADLINE and store.spent_s == pytest.approx(810.0)
    two_ranks = made[0][0].model_copy(update={"config": CONFIGS[0].model_copy(update={"dp_replicate": 2})})
    assert runner.may_slice(made[0]) and not runner.may_slice([two_ranks])


def test_a_look_that_is_behind_ends_early_and_costs_less(known: Recorded):
    slow = sampled(CONFIGS[0], [3.0, 3.01, 2.99, 3.0, 3.02, 3.0]).model_copy(
        update={"phase_seconds": {"measure": 6.0}, "seconds_spent": 8.0}
    )
    leader = ToBeat(log_s=0.0, sd=0.01, level=0.05)
    found = ended_early(slow, leader)
    assert found.outcome is Outcome.PRUNED and found.step_time_s is None
    assert 1.0 < (found.at_least_s or 0.0) < 3.0 and found.seconds_spent < 8.0
    near = ended_early(slow, leader.model_copy(update={"log_s": math.log(2.95)}))
    assert near == slow
    old = trial_of(CONFIGS[0], 3.0)
    assert ended_early(old, leader) == old  # one step time alone says nothing of its steps


def test_a_graph_is_compiled_with_an_empty_cache_once(known: Recorded):
    config = TrainingConfig(micro_batch=8, compile="block")
    other = config.model_copy(update={"optimizer_step": "fused"})  # the same graph

    def compiled(which: TrainingConfig, seconds: float) -> Trial:
        phases = {"compile": seconds, "measure": 1.0}
        said = "compile cache: 0 hit(s), 9 miss(es)" if seconds > 10 else "compile cache: 9 hit(s), 0 miss(es)"
        trial = trial_of(which, 1.0, spent=4.0 + seconds)
        return trial.model_copy(update={"phase_seconds": phases, "warnings": (said,)})

    table = replace(known, rounds=([compiled(config, 30.0), compiled(other, 3.0)], [compiled(config, 3.0)] * 2))
    table = replace(table, rounds=(table.rounds[0], [compiled(config, 3.0), compiled(other, 2.0)]))
    runner = TableRunner(table, MemoryStore(), 0, LIMIT_BYTES)
    first, second, again = (runner.run(order_of(which)) for which in (other, config, other))
    assert [was_warm(trial) for trial in (first, second, again)] == [False, True, True]
    assert [compile_s(trial) for trial in (first, second, again)] == [30.0, 3.0, 2.0]
    assert [trial.seconds_spent for trial in (first, second, again)] == [34.0, 7.0, 6.0]


def test_what_is_printed_says_what_was_aimed_at(known: Recorded, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    scores = [search_replay.score(known, name, 1) for name in ("ours", "random")]
    said = "\n".join(search_replay.verdicts(known, scores))
    assert "regret, 50th percentile" in said
    assert (
        "all candidates take 80 device seconds (0 of them compiling), a tenth is 8, in which"
        in search_replay.passes(known)
    )
    assert "nothing yet" in search_replay.table(scores)  # a tenth is less than the plain run and a check take
    assert search_replay.show([tmp_path], ["ours"], 2, None) == 0


def test_false_claims_are_counted_with_an_exact_interval():
    line = {
        "case": "searches", "busy": False, "claimed": False, "why_not": None, "rounds": 2, "seconds": 9.0,
    }  # fmt: skip
    said = false_wins.table([line] * 60 + [line | {"case": "same"}] * 200)
    assert "| 60 x search of equal values | none | 0 | 0.0% (0.0% to 6.0%) |" in said
    assert "search of equal values: 0 of 60 claimed, aim 0; on one side at most 4.9%: met" in said
    assert "A against A, upper end 1.8%, aim 5%: met" in said


def test_the_drawing_is_a_file_of_its_own_with_a_line_for_each_method():
    import xml.etree.ElementTree as xml

    curve = [(1.0, 0.2), (4.0, 1.0)]
    assert [share_at(curve, at) for at in (0.5, 1.0, 3.9, 9.0)] == [0.0, 0.2, 0.2, 1.0]
    text = draw_curves("a & b", {"ours": [curve, curve], "random": [[(2.0, 0.1), (80.0, 0.9)]]})
    root = xml.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "ours", "random", "device seconds"} <= set(words)


@pytest.mark.exhaustive
def test_a_tiny_table_is_recorded_and_replayed(tmp_path: Path):
    """For real: two candidates, two processes each."""
    options = argparse.Namespace(
        case="vision", ranks=1, minutes=None, candidates=3, compiled=0, processes=2, seed=0, folder=tmp_path,
        bound=["micro_batch=32", "precision=fp32", "checkpointing=none", "compile=off", "allocator=own",
               "attention=own", "optimizer_step=own,fused"],
        again=False, fresh=False,
    )  # fmt: skip
    assert search_tables.run(options) == 0
    table = read_table(tmp_path / "vision-1")
    assert table.finished and len(table.rounds) == 2 and len(table.candidates) >= 2
    assert all(trial.samples_s for trials in table.rounds for trial in trials)
    assert [m.work.kind for m in replay(table, "autoplan", 0, budget_s=600.0)][0] == "baseline"


def test_the_command_refuses_counts_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["search_tables", "--case", "gpt", "--candidates", "4", "--compiled", "8"])
    with pytest.raises(SystemExit):
        search_tables.main()
    assert "--compiled is 8" in capsys.readouterr().err

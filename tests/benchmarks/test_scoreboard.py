"""The scoreboard of searches: the draw of a table, its recorder and reader, and the arithmetic of the replays."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import UsageError
from autoplan.planner.records import Interval, Outcome, Trial, Window
from autoplan.planner.store.journal import RecordFile
from autoplan.strategies.config import TrainingConfig
from benchmarks import search_replay, search_tables, trials_saved
from benchmarks.search_plot import draw_curves, share_at
from benchmarks.search_replay import METHODS, Point
from benchmarks.trials_saved_record import SETUP, TRIALS, Recorded, choose, is_plain, read, read_table

CONFIGS = [TrainingConfig(micro_batch=size) for size in (1, 2, 4, 8)]
CONFIGS += [TrainingConfig(micro_batch=size, checkpointing="full") for size in (1, 2, 4, 8)]
SECONDS = (4.0, 2.0, 1.0, 1.2, 5.0, 3.0, 1.5, 2.0)
"""Step times of CONFIGS in both passes: the third is the best."""


@pytest.fixture(scope="module")
def image() -> Recorded:
    return next(one for one in read(trials_saved.RESULTS) if one.name == "image")


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
    assert len(first.asked) == 5 and len(asked) == 16
    assert sorted(map(str, asked[:8])) == sorted(map(str, asked[8:])) == sorted(map(str, CONFIGS))
    assert asked[:8] != asked[8:]  # each pass has its own order
    found = read_table(table)
    assert found.finished and found.disturbed == 0
    assert [SECONDS[CONFIGS.index(config)] for config in found.candidates] == pytest.approx(found.seconds.tolist())
    assert record(table, Answers(most=0), image) == 0


def test_what_was_disturbed_can_be_measured_again_and_the_last_line_counts(table: Path, image: Recorded):
    record(table, Answers(disturbed="another process took a core"), image)
    assert read_table(table).disturbed == 16
    assert record(table, Answers(most=0), image) == 0  # a disturbed trial is a trial
    again = Answers()
    record(table, again, image, again=True)
    assert len(again.asked) == 16 and read_table(table).disturbed == 0


def test_of_a_table_that_is_not_finished_what_ran_twice_is_read(table: Path, image: Recorded):
    with pytest.raises(KeyboardInterrupt):
        record(table, Answers(most=11), image)
    found = read_table(table)
    assert len(found.candidates) == 3 and not found.finished
    assert read(table.parent)[-1].candidates == found.candidates
    assert record(table, Answers(), image, limit_s=-1.0) == 5


def test_a_table_is_not_mixed_with_another(table: Path, image: Recorded):
    asked = {"case": "vision", "ranks": 1, "seed": 1, "bounds": []}
    with pytest.raises(UsageError, match="was begun with seed 0, and now it is 1"):
        search_tables.open_setup(table, asked)
    with pytest.raises(UsageError, match="versions"):
        search_tables.open_setup(table, asked | {"seed": 0})
    assert search_tables.open_setup(table / "new", asked) is None


POINTS = [
    Point(trials=1, seconds=10.0, share=0.0),
    Point(trials=2, seconds=20.0, share=0.5),
    Point(trials=3, seconds=50.0, share=0.98),
]


def test_the_arithmetic_of_a_replay():
    assert search_replay.reached(POINTS, 0.95) == search_replay.reached(POINTS, 0.98) == POINTS[2]
    assert search_replay.reached(POINTS, 0.99) is None
    assert search_replay.regret_at(POINTS, 5.0) == search_replay.regret_at(POINTS, 19.9) == math.inf
    assert search_replay.regret_at(POINTS, 20.0) == pytest.approx(1.0)  # half as fast takes twice as long
    assert search_replay.regret_at(POINTS, 1e9) == pytest.approx(1 / 0.98 - 1)
    score = search_replay.score_of("x", [POINTS, POINTS, POINTS[:2]], 20.0)
    assert score.to_level == {0.95: (3, 50.0, 2), 0.98: (3, 50.0, 2), 0.99: (math.inf, math.inf, 0)}
    assert score.regrets == {50: pytest.approx(1.0), 90: pytest.approx(1.0)}
    assert search_replay.percentile([3.0, math.inf, 1.0, 2.0], 50) == 2.0
    assert search_replay.percentile([3.0, math.inf, 1.0, 2.0], 90) == math.inf


@pytest.mark.parametrize("method", ["ours", "tpe", "gp", "random"])
def test_every_method_finds_the_best_of_a_known_table(known: Recorded, method: str):
    points = search_replay.curve(known, METHODS[method], 1)
    assert [point.seconds for point in points] == [10.0 * point.trials for point in points]
    shares = [point.share for point in points]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert set(shares) <= {1.0 / seconds for seconds in SECONDS}
    first = 4  # number 1 begins with the second of the plain runs, the largest first
    assert shares[0] == 1.0 / SECONDS[CONFIGS.index(TrainingConfig(micro_batch=first))]


def test_chance_in_one_pass_is_a_regret_and_compiling_is_paid_for(known: Recorded):
    first, second = list(known.rounds[0]), list(known.rounds[1])
    first[3] = trial_of(CONFIGS[3], 0.9, spent=70.0)  # by chance faster than the best once: 0.9 for 1.2
    table = replace(known, rounds=(first, second))
    assert table.seconds[3] == pytest.approx(math.sqrt(0.9 * 1.2))
    assert search_replay.one_pass_regret(table) == pytest.approx(math.sqrt(0.9 * 1.2) - 1)
    points = search_replay.curve(table, METHODS["random"], 4)  # sees the second pass, and pays for the first
    paid = [b.seconds - a.seconds for a, b in zip(points, points[1:], strict=False)] + [points[0].seconds]
    assert sorted(set(paid)) == [10.0, 70.0]


def test_what_is_printed_says_what_was_aimed_at(known: Recorded, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    scores = [search_replay.score(known, METHODS[name], 3) for name in ("ours", "random")]
    said = "\n".join(search_replay.verdicts(known, scores))
    assert "regret, 50th percentile" in said and "less device time than random, aim 5: " in said
    assert "all candidates take 80 device seconds, a tenth is 8" in search_replay.passes(known)
    assert "nothing yet" in search_replay.table(scores)  # a tenth is less than the first trial takes
    assert search_replay.show([tmp_path], ["ours"], 2, None) == 0


def test_the_drawing_is_a_file_of_its_own_with_a_line_for_each_method():
    import xml.etree.ElementTree as xml

    curve = [(1.0, 0.2), (4.0, 1.0)]
    assert [share_at(curve, at) for at in (0.5, 1.0, 3.9, 9.0)] == [0.0, 0.2, 0.2, 1.0]
    text = draw_curves("a & b", {"ours": [curve, curve], "random": [[(2.0, 0.1), (80.0, 0.9)]]})
    root = xml.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "ours", "random", "device seconds"} <= set(words)


def test_the_command_refuses_counts_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["search_tables", "--case", "gpt", "--candidates", "4", "--compiled", "8"])
    with pytest.raises(SystemExit):
        search_tables.main()
    assert "--compiled is 8" in capsys.readouterr().err

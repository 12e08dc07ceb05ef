"""The benchmark of whole searches: its jobs, what it reads of a record, its shares and tables. No search runs here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import Interval, Outcome, Trial
from autoplan.strategies.config import TrainingConfig
from benchmarks import anytime, anytime_table, whole_search
from benchmarks.anytime import Bench, main_jobs, zoo_jobs
from benchmarks.whole_search import HERE, ROOT, Asked, RecordWatch, short, what_was_known
from tests.zoo.catalogue import BY_NAME

PLAIN, FAST, FASTEST = (TrainingConfig(micro_batch=size) for size in (1, 4, 8))
STEPS = {1: 4.0, 4: 2.0, 8: 1.9}


def trial_line(number: int, config: TrainingConfig, step_s: float | None, **changes: Any) -> dict[str, Any]:
    step = None if step_s is None else Interval(median=step_s, low=step_s, high=step_s, samples=5)
    trial = Trial(
        number=number,
        purpose="search",
        config=config,
        outcome=Outcome.OK if step_s else Outcome.OUT_OF_MEMORY,
        phase="done",
        step_time_s=step,
        seconds_spent=1.0,
    )
    return {"kind": "trial", "trial": json.loads(trial.model_copy(update=changes).model_dump_json())}


def search_line(who: str = "ours 1", form: str = "main", name: str = "gpt2", **changes: Any) -> dict[str, Any]:
    """A search that knew the plain run, then FAST, and then FASTEST, which is its plan."""
    curve = [
        {"seconds": seconds, "config": short(config), "step_s": STEPS[config.micro_batch] / 2}
        for seconds, config in ((60.0, PLAIN), (200.0, FAST), (400.0, FASTEST))
    ]
    line = {
        "kind": "search", "form": form, "name": name, "who": who, "budget": "10m", "seconds": 590.0, "load": "none",
        "status": "plan_found", "config": short(FASTEST), "plain": short(PLAIN), "workload": {"reference": "gpt2"},
        "device": "cpu", "speedup": [2.1, 2.0, 2.2], "claimed": True, "curve": curve, "ledger": [], "ranked": 9,
    }  # fmt: skip
    return line | changes


def round_line(*configs: TrainingConfig, form: str = "main", name: str = "gpt2", slow: float = 1.0) -> dict[str, Any]:
    runs = [{"config": short(c), "step_s": STEPS[c.micro_batch] * slow, "disturbed": None} for c in configs]
    return {"kind": "round", "form": form, "name": name, "round": 0, "runs": runs, "load": "load 0.1"}


def test_the_workloads_are_24_that_the_zoo_has_and_that_need_no_further_package():
    assert len(anytime.ZOO) == len(set(anytime.ZOO)) == 24
    assert set(anytime.BRIEF) < set(anytime.ZOO) and len(anytime.BRIEF) == 6
    entries = [BY_NAME[name] for name in anytime.ZOO]
    assert all(entry.expected == "plans" and not entry.needs for entry in entries)
    assert len({entry.kind for entry in entries}) >= 8


def test_one_of_the_runs_is_beside_a_busy_process_and_the_others_are_asked_for():
    jobs = main_jobs(5, ["40m", "tpe"])
    assert [job.asked.busy for job in jobs] == [False] * 4 + [True] + [False] * 2
    assert [job.asked.budget for job in jobs] == ["10m"] * 5 + ["40m", "10m"]
    assert jobs[-1].asked.arguments == ("--sampler", "tpe")
    both = zoo_jobs(["resnet"], Path("/tmp"))
    assert {job.who: job.asked.root for job in both} == {"ours": ROOT, "against": Path("/tmp").resolve()}
    assert all(job.asked.arguments == ("--fix", "micro_batch=4") for job in both)


def test_a_benchmark_that_was_ended_goes_on_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(anytime, "spec_of", lambda line: None)
    asked: list[Asked] = []
    numbers: list[int] = []

    def search(one: Asked) -> dict[str, Any]:
        asked.append(one)
        return {k: v for k, v in search_line().items() if k not in ("kind", "form", "name", "who")}

    def side_by_side(spec: Any, device: str, configs: Any, wanted: Any) -> Iterator[dict[str, Any]]:
        for number in wanted:
            numbers.append(number)
            yield {k: v for k, v in round_line(*configs).items() if k in ("runs", "load")} | {"round": number}

    for rounds in (1, 3):
        bench = Bench(tmp_path / "anytime.jsonl", search, side_by_side)
        for job in main_jobs(2, []):
            bench.run(job)
        bench.measure("main", "gpt2", rounds)
        bench.close()
    assert len(asked) == 2 and numbers == [0, 1, 2]


def test_the_moment_of_each_best_so_far_and_what_failed_parity_is_none():
    parity = {"kind": "parity", "config": short(FASTEST), "parity": {"passed": False}}
    work = {"kind": "look", "began_s": 1.0, "seconds": 2.0, "predicted_s": 2.5, "gain": 0.1}
    known = what_was_known(
        [
            (0.1, {"kind": "study"}),
            (10.0, trial_line(0, PLAIN, 4.0, purpose="baseline")),
            (20.0, trial_line(1, FASTEST, 1.9)),
            (20.1, {"kind": "work", "work": work | {"why": "", "over": ""}}),
            (30.0, trial_line(2, FAST, 2.0)),
            (40.0, parity),
            (50.0, trial_line(3, TrainingConfig(micro_batch=2), None)),
        ]
    )
    assert [(point["seconds"], point["config"]) for point in known["curve"]] == [
        (10.0, short(PLAIN)), (20.0, short(FASTEST)), (40.0, short(FAST)),
    ]  # fmt: skip
    assert known["ledger"] == [work] and known["ranked"] == 2


def test_a_record_is_read_while_it_grows_and_a_torn_line_is_waited_for(tmp_path: Path):
    folder = tmp_path / "autoplan" / "studies" / "one"
    folder.mkdir(parents=True)
    watch = RecordWatch(tmp_path, 0.0)
    with (folder / "record.jsonl").open("w") as file:
        file.write('{"kind":"study"}\n{"kind":')
        file.flush()
        watch._look()
        file.write('"budget"}\n')
    assert [line["kind"] for _, line in watch.stop()] == ["study", "budget"]


def test_shares_are_of_the_fastest_that_ran_side_by_side():
    lines = [search_line(), round_line(PLAIN, FAST, FASTEST), round_line(PLAIN, FAST, FASTEST, slow=3.0)]
    one = anytime_table.shares(lines)[0]
    assert one["plan"] == 1.0 and one["at_half"] == pytest.approx(0.95)
    assert [share for _, share in one["curve"]] == pytest.approx([1.9 / 4, 0.95, 1.0])
    assert "at least 0.95 at the end and 0.9 at 5 m: 1 of 1 runs" in anytime_table.main_table(lines)
    slower = search_line("ours 2", config=None, workload=None)  # its user is left with the plain run
    assert anytime_table.shares([*lines, slower])[1]["plan"] == pytest.approx(1.9 / 4)
    other = round_line(PLAIN, FASTEST)  # not all of them: it does not count
    assert anytime_table.shares([search_line(), other])[0]["plan"] is None
    assert "not measured" in anytime_table.main_table([search_line(), other])


def test_what_did_not_run_side_by_side_is_placed_by_its_own_search():
    curve = [{"seconds": 9.0, "config": {"micro_batch": 2}, "step_s": 3.8}, *search_line()["curve"]]
    lines = [search_line(curve=curve), round_line(PLAIN, FAST, FASTEST)]
    assert anytime_table.shares(lines)[0]["curve"][0] == (9.0, pytest.approx(0.95 / 3.8))
    drawn = anytime_table.drawing(lines)
    assert drawn.startswith("<svg") and ">ours</text>" in drawn


def test_the_zoo_counts_ratios_and_looks():
    lines = [
        search_line("ours", "zoo", "t5"),
        search_line("against", "zoo", "t5", config=short(FAST)),
        round_line(PLAIN, FAST, FASTEST, form="zoo", name="t5"),
        search_line("ours", "zoo", "lstm", config=short(PLAIN), ranked=3),
        search_line("against", "zoo", "lstm", config=None, workload=None),
        round_line(PLAIN, form="zoo", name="lstm"),
    ]
    rows = anytime_table.zoo_rows(lines)
    assert [row["over_plain"] for row in rows] == pytest.approx([4.0 / 1.9, 1.0])
    assert [row["over_other"] for row in rows] == pytest.approx([2.0 / 1.9, 1.0])
    said = anytime_table.zoo_table(lines)
    assert "geometric mean of 2: 1.026 (aim 1.15)" in said and "least of 2: 1.000" in said and "median: 6 (" in said


def test_the_time_goes_by_kind():
    ledger = [{"kind": kind, "seconds": 2.0} for kind in ("look", "look", "parity")]
    said = anytime_table.curve_table(search_line(ledger=ledger))
    assert "look 4 s; parity 2 s" in said and "| 400 | micro_batch=8 | 2.11 |" in said


def test_no_place_of_this_machine_is_in_a_line():
    workload = {"kind": "function", "reference": f"{ROOT}/x.py:f", "global_batch": 4}
    plan = {
        "config": short(PLAIN), "baseline": {"config": short(PLAIN)}, "workload": workload, "device": "cpu",
        "claim": None,
        "measurement": {"step_time_s": {"median": 1.0}}, "speedup": {"median": 1.0, "low": 1.0, "high": 1.0},
    }  # fmt: skip
    line = whole_search._ending(json.dumps({"status": "plan_found", "reason": None, "plan": plan}), "")
    assert line["workload"]["reference"] == f"{HERE}/x.py:f" and not line["claimed"]
    assert str(ROOT) not in json.dumps(line)
    assert whole_search._ending("", "one\nlast")["reason"] == "last"


def test_the_caches_of_a_search_are_new(tmp_path: Path):
    found = whole_search._environment(ROOT, tmp_path)
    names = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    assert all(found[name].startswith(f"{tmp_path}{os.sep}") for name in names)


def test_other_work_is_seen():
    with whole_search.busy_process(True):
        load = whole_search.Load()
        whole_search.time.sleep(1.0)
        share = re.search(r"others (\d+)%", load.describe())
    assert share is not None and int(share[1]) > 5 / (os.cpu_count() or 1)

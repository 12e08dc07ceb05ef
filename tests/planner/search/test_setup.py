"""The setup of a search in pieces: what is refused before anything is measured, and what later pieces change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import AutoplanError, ConfigError, WorkloadError
from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.search.inspection import Means
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.setup import (
    SearchContext,
    begin_search,
    probe_cost_s,
    probe_more,
    trace_cost_s,
    trace_more,
)
from autoplan.probes.merge import cache_path, load_cached, save_cached
from autoplan.probes.run import DEFAULT_BUDGET_S, read_host_profile, run_probes
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import load_workload, make_spec
from tests.planner.cost.test_one_core import machine, model_of_eight_blocks
from tests.planner.search.stand_in import Observer

MINE = """
import autoplan, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, rows):
        return rows + self.down(torch.relu(self.up(rows)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.pooler = nn.Linear(4, 4)  # no backward reaches it
    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows

def loss(model, batch):
    found = model(batch).square().sum(-1)
    return autoplan.LossSum(found.sum(), len(found))

def workload():
    return autoplan.Workload(
        name="mine", build_model=Model, loss=loss, global_batch=8,
        make_batch=lambda count, index: torch.randn(count, 16, generator=torch.Generator().manual_seed(index)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.fixture
def zygote(training_zygote: Zygote) -> Zygote:
    return training_zygote


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(folder: Path, old: str = "", new: str = "", **more: Any) -> SearchOptions:
    file = folder / "mine.py"
    file.write_text(MINE.replace(old, new))
    return SearchOptions(spec=make_spec(model=f"{file}:workload"), device="cpu", budget=60.0, **more)


@pytest.mark.parametrize(
    ("old", "new", "more", "kind", "text"),
    [
        ("found.sum(), len(found)", "found.mean(), 1", {}, WorkloadError, "that is a mean"),
        ("autoplan.LossSum(found.sum(), len(found))", "found.sum()", {}, WorkloadError, "LossSum"),
        ("", "", {"fix": {"micro_batch": 7}}, ConfigError, "micro_batch"),
        ("", "", {"fix": {"precision": "tf32"}}, ConfigError, "tf32"),
        ("", "", {"fix": {"dp_shard": 2}}, ConfigError, "dp_shard"),
        ("build_model=Model,", "build_model=dict,", {}, WorkloadError, "torch.nn.Module"),
    ],
)
def test_the_input_is_refused_before_anything_is_measured(
    zygote: Zygote, tmp_path: Path, old: str, new: str, more: dict[str, Any], kind: type[AutoplanError], text: str
) -> None:
    listener = Observer()
    with pytest.raises(kind) as caught:
        begin_search(Means(options=options(tmp_path, old, new, **more), zygote=zygote, observer=listener))
    assert text in caught.value.message
    assert set(listener.phases) <= {"inspect"}


def begin(zygote: Zygote, folder: Path, **more: Any) -> tuple[SearchContext, Observer]:
    listener = Observer()
    fixed = {"precision": "fp32"}  # what other precisions gain here goes by rates, which a busy machine blurs
    means = Means(options=options(folder, fix=fixed), zygote=zygote, observer=listener, budget_s=60.0, **more)
    return begin_search(means), listener


def test_later_pieces_know_more_of_the_same_space(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.probes.run.DEFAULT_BUDGET_S", 2.0)
    first, listener = begin(zygote, tmp_path, saved=tmp_path / "hardware.json")
    assert list(dict.fromkeys(listener.phases)) == ["inspect", "probe", "trace", "space"]
    assert first.spec.find_unused_parameters and load_workload(first.spec).find_unused_parameters
    selective = TrainingConfig(micro_batch=4, checkpointing="selective")
    checked = TrainingConfig(micro_batch=4, checkpointing="full")
    assert not first.rough(TrainingConfig(micro_batch=4)) and first.rough(selective) and first.rough(checked)
    assert first.profile.timing_s == 0 and trace_cost_s(first) > trace_cost_s(first, first.variants(selective)) > 0
    assert not first.probed and probe_cost_s(first) > 0

    some = trace_more(first, first.variants(selective))
    assert not some.rough(selective) and some.rough(checked)
    assert trace_cost_s(some, some.variants(selective)) == 0 and trace_more(some, some.variants(selective)) is some
    traced = some.profile.variants[some.variants(selective)[1].text()]
    assert any(group.measured_s for group in traced.groups)

    whole = trace_more(some)
    assert not whole.profile.rough_variants and trace_cost_s(whole) == 0
    again = whole.profile.variants[some.variants(selective)[1].text()]
    assert [group.measured_s for group in again.groups] == [group.measured_s for group in traced.groups]

    probed = probe_more(whole)
    assert probed.probed and probe_cost_s(probed) == 0 and probe_more(probed) is probed
    assert (tmp_path / "hardware.json").exists()
    for later in (some, whole, probed):
        assert later.space.values == first.space.values and list(later.space.candidates) == list(first.space.candidates)
        assert set(later.candidates) <= set(first.space.candidates)
        assert later.estimator is not first.estimator and not later.estimator.time_fit.rows
    resumed, listener = begin(zygote, tmp_path, saved=tmp_path / "hardware.json")
    assert resumed.hardware.probed_s == probed.hardware.probed_s
    assert not resumed.profile.rough_variants, "the cache has the traces of the earlier search"
    assert "probe" not in listener.phases


def test_rates_taken_under_load_are_bettered_once_the_load_is_over(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = run_probes(zygote, device="cpu", brief=True)
    load = {"disturbed": "other work took 40%", "others_cpu_share": 0.4}
    loaded = known.model_copy(update={**load, "probed_s": DEFAULT_BUDGET_S})
    path = cache_path(read_host_profile().fingerprint, "cpu")
    assert load_cached(path)[0] is not None
    save_cached(path, loaded)
    for busy in (True, False):
        monkeypatch.setattr("autoplan.probes.merge.is_busy", lambda host, busy=busy: busy)
        context, listener = begin(zygote, tmp_path)
        assert listener.notes.count("other work took 40%") == 1
        assert context.hardware.device("cpu").operations == known.device("cpu").operations, "they are used in any case"
        assert context.probed == busy and (probe_cost_s(context) > 0) != busy


def test_uncertain_rates_make_wider_intervals() -> None:
    def width(spread: float) -> float:
        hardware = machine()
        cpu = hardware.device("cpu")
        readings = tuple(
            reading.model_copy(update={"rate": reading.rate.model_copy(update={"spread": spread})})
            for reading in cpu.operations
        )
        hardware = hardware.model_copy(update={"devices": (cpu.model_copy(update={"operations": readings}),)})
        profile = model_of_eight_blocks()
        estimator = Estimator(profile, hardware, device="cpu", global_batch=8, memory_limit_bytes=None)
        (found,) = estimator.estimate([TrainingConfig(micro_batch=4, precision="bf16")])
        return found.step_time_high_s / found.step_time_low_s

    assert width(0.05) == width(0.25) < width(0.5) < width(1.0)

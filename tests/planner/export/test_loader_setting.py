"""Where the loader that a search measured goes: each target has its setting, or says that it does not."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from autoplan.errors import ExportError, PlanError
from autoplan.planner.export.run import TARGETS, export_plan, load_target
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import loader_values
from autoplan.planner.records.loading import Loading
from autoplan.report import facts
from autoplan.report.html import render_page
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.order import SampleOrder
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.loops.loader import resized
from tests.recorded import make_plan

SETTING = LoaderSetting(workers=3, prefetch_factor=5)
PLAIN = TrainingConfig(micro_batch=4)


def plan_with_loader(config: TrainingConfig = PLAIN, **given: Any) -> Plan:
    loading = Loading(source="Rows", identity="0" * 16, setting=SETTING, waiting_share=0.125, samples_per_s=800.0)
    return make_plan(config, loading=loading, **given).sealed()


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_has_the_setting_or_says_that_it_has_not(target: str, tmp_path: Path) -> None:
    device = "cuda" if target in ("megatron", "torchtitan") else "cpu"
    plan = plan_with_loader(device=device)
    try:
        exported = export_plan(plan, target, tmp_path / f"plan_there{load_target(target).suffix}")
    except ExportError as refused:
        assert target == "torchtitan"  # it has no GPT-2
        assert refused.hint
        return
    written = "".join(path.read_text() for path in exported.paths)
    said = [text for text in exported.not_carried if "loader's setting (3 workers, prefetch factor 5)" in text]
    forms = ('"num_workers": 3', "'num_workers': 3", '"dataloader_num_workers": 3', "num_workers: 3")
    assert any(form in written for form in forms) != bool(said)


def test_the_trainer_gets_all_of_it(tmp_path: Path) -> None:
    exported = export_plan(plan_with_loader(), "transformers", tmp_path / "plan.json")
    arguments = json.loads(exported.paths[0].read_text())
    assert {key: arguments[key] for key in arguments if key.startswith("dataloader_")} == {
        "dataloader_num_workers": 3,
        "dataloader_prefetch_factor": 5,
        "dataloader_pin_memory": False,
        "dataloader_persistent_workers": True,
        "dataloader_drop_last": True,
    }
    assert loader_values(LoaderSetting(workers=0)) == {
        "loader_workers": 0,
        "loader_pin_memory": False,
        "loader_prefetch_factor": None,
        "loader_persistent_workers": False,
    }
    assert loader_values(setting_of(make_plan())) == {}


def test_the_exported_script_makes_the_loader(tmp_path: Path) -> None:
    exported = export_plan(plan_with_loader(), "pytorch", tmp_path / "train.py")
    names = runpy.run_path(str(exported.paths[0]), run_name="script")
    loader = names["make_loader"](None, TensorDataset(torch.arange(40)))
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (3, 5, 16)
    assert "make_loader" not in export_plan(make_plan(PLAIN), "pytorch", tmp_path / "plain.py").paths[0].read_text()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def test_the_loader_of_the_script_has_the_order_of_plan_loader(tmp_path: Path) -> None:
    """Each epoch another one, whose samples ranks share; a stream has its own."""
    rows = TensorDataset(torch.arange(40))
    loading = Loading(source="Rows", identity="0" * 16, setting=LoaderSetting(workers=0), waiting_share=0.0)
    for ranks in (1, 2):
        plan = make_plan(TrainingConfig(micro_batch=4, dp_replicate=ranks), loading=loading)
        path = export_plan(plan, "pytorch", tmp_path / f"train{ranks}.py").paths[0]
        for rank in range(ranks):
            make_loader: Any = runpy.run_path(str(path), run_name="script")["make_loader"]
            make_loader.__globals__["data_position"] = lambda _, place=(rank, ranks): place
            loader = make_loader(SimpleNamespace(mesh=None), rows)
            order = SampleOrder(40, rank=rank, ranks=ranks, multiple_of=16)
            epochs = [[int(row) for (batch,) in loader for row in batch] for _ in range(2)]
            assert epochs == [list(order), list(order)] and epochs[0] != epochs[1]
            stream = make_loader(SimpleNamespace(mesh=None), Stream())
            assert next(iter(stream)).tolist() == list(range(16 // ranks))


def test_a_plan_makes_the_loader_of_a_rank() -> None:
    rows = TensorDataset(torch.arange(48))
    plan = plan_with_loader()
    loader = plan.loader(rows, shuffle=False)
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (3, 5, 16)
    assert [batch[0].tolist() for batch in make_plan(PLAIN).loader(rows, shuffle=False)][2] == list(range(32, 48))
    first = [batch[0].tolist() for batch in make_plan(PLAIN).loader(rows, seed=4)]
    assert [batch[0].tolist() for batch in make_plan(PLAIN).loader(rows, seed=4, start=16)] == first[1:]
    own = DataLoader(rows, batch_size=2, shuffle=False, collate_fn=len)
    assert list(make_plan(PLAIN).loader(own)) == [16, 16, 16]
    several = plan_with_loader(TrainingConfig(micro_batch=4, dp_replicate=2))
    with pytest.raises(PlanError, match="2 data-parallel ranks, and it is not known which"):
        several.loader(rows)


def test_a_sampler_that_is_split_otherwise_than_the_plan_is_refused() -> None:
    """The two ranks of a split model train on the same samples; a script under torchrun gave each its own half."""
    rows = TensorDataset(torch.arange(48))
    mine = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, 2, 1))
    for config in (TrainingConfig(micro_batch=4, tp=2), PLAIN):
        with pytest.raises(PlanError, match=r"\(DistributedSampler\) gives part 1 of 2 .* part 0 of 1 here"):
            make_plan(config).loader(mine)
    assert make_plan(PLAIN).loader(DataLoader(rows, sampler=DistributedSampler(rows, 1, 0))).batch_size == 16


def test_a_loops_own_loader_gets_the_setting() -> None:
    own = DataLoader(TensorDataset(torch.arange(48)), batch_size=2, num_workers=1, timeout=9)
    assert resized(own, 16).num_workers == 1
    there = resized(own, 16, SETTING)
    assert (there.num_workers, there.prefetch_factor, there.persistent_workers, there.timeout) == (3, 5, True, 9)
    alone = resized(own, 16, LoaderSetting(workers=0))
    assert (alone.num_workers, alone.prefetch_factor, alone.timeout) == (0, None, 0)


def test_a_plan_of_an_earlier_version_loads_and_a_new_one_shows_its_loader(tmp_path: Path) -> None:
    plan = plan_with_loader()
    path = plan.save(tmp_path / "plan.json")
    assert Plan.load(path).loading == plan.loading
    document = json.loads(path.read_text())
    del document["loading"]
    path.write_text(json.dumps(document))
    assert Plan.load(path).loading is None
    words = facts.loading_words(plan)
    assert words is not None
    assert "3 workers, prefetch factor 5 for Rows; the step waits for data 12.5% of the time (800 samples/s)" in words
    assert words in render_page(plan)
    assert facts.loading_words(make_plan()) is None

"""The loader of a training, measured beside the step: real workers, real steps, datasets that fail in real ways."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import autoplan
from autoplan.errors import WorkloadError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.loading import LoaderTrial
from autoplan.planner.search import inspection
from autoplan.planner.search import loading as search_loading
from autoplan.planner.search.inspection import check_loader
from autoplan.planner.trials.loading import (
    LoaderBatches,
    LoaderMeasurement,
    LoadingAnswer,
    LoadingError,
    LoadingRequest,
    best_trial,
)
from autoplan.processes import Ended, ProcessReport, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.loading.source import spec_of_object
from autoplan.strategies.workloads.objects import spec_from_objects

WIDTH = 16


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def zygote(training_zygote):
    return training_zygote


class Rows(Dataset[Any]):
    """Samples that take their time, as a disk does; `breaks` names one that fails, `in_workers` has all fail there."""

    def __init__(self, length: int = 256, *, sleep_s: float = 0.0, breaks: int = -1, in_workers: bool = False) -> None:
        self.length, self.sleep_s, self.breaks, self.in_workers = length, sleep_s, breaks, in_workers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sleep_s)
        if index == self.breaks or (self.in_workers and get_worker_info() is not None):
            raise OSError("the share is gone")
        row = torch.rand(WIDTH, generator=torch.Generator().manual_seed(index))
        return row, (row.sum() > WIDTH / 2).long()


class Changing(Rows):
    def __getitem__(self, index: int) -> Any:
        row, label = super().__getitem__(index)
        return {"x": row.repeat(1 + (index >= 32)), "y": label}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 2))


def make_batch(samples: int, index: int) -> Any:
    row = torch.rand(samples, WIDTH, generator=torch.Generator().manual_seed(index))
    return [row, (row.sum(1) > WIDTH / 2).long()]


def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
    rows, labels = batch
    total = nn.functional.cross_entropy(model(rows), labels, reduction="sum")
    return autoplan.LossSum(total, torch.tensor(len(labels)))


def make_workload() -> autoplan.Workload:
    return autoplan.Workload(
        name="rows",
        build_model=build_model,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=16,
    )


def measured(
    zygote: Zygote,
    dataset: Any,
    *,
    micro_batch: int = 16,
    step_s: float = 0.001,
    ranks: int = 1,
    time_s: float = 1.0,
    device: Literal["cuda", "cpu"] = "cpu",
) -> tuple[LoadingAnswer, ProcessReport]:
    request = LoadingRequest(
        spec=spec_from_objects(make_workload()),
        config=TrainingConfig(micro_batch=micro_batch, dp_replicate=ranks),
        device=device,
        loader=spec_of_object(dataset),
        step_s=step_s,
        time_s=time_s,
        cores=2,
    )
    task = Task(
        target="autoplan.planner.trials.loading:run_loading", args=(request,), ranks=ranks, total_deadline_s=60.0
    )
    report = zygote.run(task)
    result = report.ranks[0].result
    return LoadingAnswer() if result is None else LoadingAnswer.model_validate(result), report


@pytest.mark.timing
def test_workers_take_the_waiting_for_a_slow_disk(zygote: Zygote):
    answer, report = measured(zygote, Rows(sleep_s=0.002), time_s=4.0)
    assert report.ended is Ended.FINISHED, report.describe()
    assert report.swept == 0  # the workers have ended by themselves
    alone, *others = answer.tried
    assert alone.setting.workers == 0
    assert alone.waiting_share is not None
    assert alone.waiting_share > 0.8
    assert [trial.setting.workers for trial in others][:3] == [1, 2, 4]
    best = best_trial(answer.tried)
    assert best is not None
    assert best.setting.workers >= 2
    assert alone.samples_per_s is not None
    assert best.samples_per_s > 1.5 * alone.samples_per_s
    assert answer.batches == "dataset"
    assert answer.own_samples_per_s > best.samples_per_s


def test_data_at_hand_needs_no_worker_also_where_micro_steps_stand_for_a_long_step(zygote: Zygote):
    class AtHand(Rows):
        def __getitem__(self, index: int) -> Any:
            return ROW

    ROW = (torch.zeros(WIDTH), torch.tensor(1))
    answer, _ = measured(zygote, AtHand(), micro_batch=2, step_s=10.0)  # as if a step took 10 s
    assert answer.tried[0].steps >= 3
    assert answer.tried[0].waiting_share < 0.9


def test_two_ranks_load_their_own_shares(zygote: Zygote):
    answer, report = measured(zygote, Rows(), ranks=2, micro_batch=8)
    assert report.ended is Ended.FINISHED, report.describe()
    assert answer.tried[0].samples_per_s > 0


def test_what_fails_while_it_is_measured_is_named_with_its_index(zygote: Zygote):
    answer, report = measured(zygote, Rows(64, breaks=41))
    assert report.ended is Ended.FINISHED, report.describe()
    assert best_trial(answer.tried) is None
    assert all("OSError: the share is gone" in str(trial.problem) for trial in answer.tried)
    assert all("dataset[41]" in str(trial.problem) for trial in answer.tried)
    only_alone, _ = measured(zygote, Rows(64, in_workers=True))
    best = best_trial(only_alone.tried)
    assert best is not None
    assert best.setting.workers == 0
    assert [trial.samples_per_s is None for trial in only_alone.tried] == [False, *[True] * (len(only_alone.tried) - 1)]


@pytest.mark.parametrize("given, why", [(None, "one whole batch of 2 samples"), ([1, 2], "used up")])
def test_a_batch_that_is_nothing_ends_the_epoch_and_one_without_batches_is_named(given: Any, why: str):
    collated = iter([given])
    loader = DataLoader(range(2), batch_size=2, collate_fn=lambda samples: next(collated, None))
    batches = LoaderBatches(loader, samples=2)
    if given is not None:
        assert next(batches) == given
    with pytest.raises(LoadingError, match=why):
        next(batches)
    batches.close()


def test_batches_of_changing_shape_are_named(zygote: Zygote):
    answer, report = measured(zygote, DataLoader(Changing(64), batch_size=4, shuffle=False))
    assert report.ended is Ended.FINISHED, report.describe()
    (first,) = [note for note in answer.notes if "not made as make_batch's" in note]
    assert "the step ran on those of make_batch" in first
    assert answer.batches == "make_batch"
    assert [note for note in answer.notes if "change shape" in note] == [
        "the loader's batches change shape: one has x (16, 32), y (16,), the first one x (16, 16), y (16,); "
        "steps take as long as their batches are large"
    ]


def settings_measured(device: str, best: int) -> list[LoaderSetting]:
    """Those that are measured where so many workers are best, and further ahead is better still."""
    run: Any = SimpleNamespace(device=torch.device(device))
    ranks: Any = SimpleNamespace(world_size=1)
    nothing: Any = None
    request: Any = SimpleNamespace(cores=2)
    measurement = LoaderMeasurement(request=request, run=run, ranks=ranks, source=nothing)
    for setting in measurement.settings():
        rate = 90.0 if setting.workers == best else 50.0
        if setting.prefetch_factor == 4:
            rate = 100.0
        measurement.tried.append(LoaderTrial(setting=setting, samples_per_s=rate))
    return [trial.setting for trial in measurement.tried]


def test_further_ahead_is_measured_also_where_more_workers_gain_nothing():
    *numbers, further = settings_measured("cpu", best=1)
    assert [(one.workers, one.prefetch_factor) for one in numbers] == [(0, None), (1, 2), (2, 2), (4, 2)]
    assert further == numbers[1].model_copy(update={"prefetch_factor": 4})


@pytest.mark.parametrize("best", [0, 2])
def test_on_cuda_copies_out_of_memory_that_is_not_pinned_are_tried_too(best: int):
    *_, before, last = settings_measured("cuda", best)
    assert (last.workers, last.pin_memory) == (best, False)
    assert last.prefetch_factor == (4 if best else None), "what was best by then, without pinned memory"
    assert (before.workers, before.prefetch_factor) == ((2, 4) if best else (2, 2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_prefetch_and_pinned_memory_are_measured():
    with Zygote() as own:
        answer, report = measured(own, Rows(sleep_s=0.002), time_s=30.0, device="cuda")
    assert report.ended is Ended.FINISHED, report.describe()
    settings = [trial.setting for trial in answer.tried]
    assert {setting.pin_memory for setting in settings} == {True, False}
    assert 4 in {setting.prefetch_factor for setting in settings}


def test_a_search_refuses_a_dataset_that_cannot_be_loaded_before_its_first_trial(zygote: Zygote):
    means: Any = SimpleNamespace(zygote=zygote, time_s=60.0, on_attempt=lambda part, report: None)
    check_loader(means, spec_of_object(Rows(32)), 16, None)
    for dataset, says in (
        (Rows(8), "ends after 8 samples, and a step takes 16"),
        (Rows(32, breaks=31), r"OSError: the share is gone raised by dataset\[31\]"),
    ):
        with pytest.raises(WorkloadError, match=says) as refused:
            check_loader(means, spec_of_object(dataset), 16, None)
        assert refused.value.flag_hint


@pytest.mark.slow
@pytest.mark.usefixtures("quick_searches")
def test_a_search_says_which_loader_and_its_plan_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search_loading, "LEAST_S", 4.0)
    fix = {"compile": "off", "precision": "fp32", "threads": 1, "checkpointing": "none", "optimizer_step": "own"}
    given: dict[str, Any] = {"budget": "45s", "max_trials": 2, "device": "cpu", "store": tmp_path, "quiet": True}
    given["fix"] = fix
    plan = autoplan.search(make_workload(), loader=Rows(sleep_s=0.002), **given)
    found = plan.loading
    assert found is not None
    assert found.setting is not None
    assert found.source == "Rows"
    assert found.setting.workers > 0
    assert plan.ledger[0].kind == "imports" and plan.ledger[-1].kind == "loader"
    assert found.waiting_share == next(t.waiting_share for t in found.tried if t.setting == found.setting)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.loading == found
    loader = again.loader(Rows())
    assert (loader.num_workers, loader.batch_size) == (found.setting.workers, 16)
    run = again.prepare(build_model(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss)
    for batch in loader:
        run.step(batch)
    assert run.steps == 16
    # The same search with another dataset runs no trial again, and measures the other loader.
    trials = len(plan.evidence)
    other = autoplan.search(make_workload(), loader=Rows(128), **given)
    assert other.loading is not None
    assert other.loading.identity != found.identity
    assert len(other.evidence) == trials
    # So it does where the budget is spent, and the inspection takes longer than what is left in any case.
    (clock,) = tmp_path.glob("*/clock.json")
    clock.write_text('{"spent_s": 1000.0}')
    monkeypatch.setattr(inspection, "LEAST_DEADLINE_S", 0.01)
    third = autoplan.search(make_workload(), loader=Rows(96), **given)
    assert third.loading is not None
    assert third.loading.setting is not None
    assert len(third.evidence) == trials
    # An inspection that does not end in its time leaves the plan, and the same call tries it again.
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "INSPECT_DEADLINE_S", 0.01)
        patch.setattr(inspection, "INSPECT_SHARE", 0.0)
        kept = autoplan.search(make_workload(), loader=Rows(80), **given)
    assert kept.config == plan.config
    assert kept.loading is not None
    assert kept.loading.setting is None
    assert "inspection" in str(kept.loading.problem)
    assert autoplan.search(make_workload(), **given).config == plan.config
    fourth = autoplan.search(make_workload(), loader=Rows(80), **given)
    assert fourth.loading is not None
    assert fourth.loading.setting is not None

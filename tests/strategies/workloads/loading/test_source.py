"""Datasets and DataLoaders as people have them become loaders of a plan; what fails is named with its index."""

import functools
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from autoplan.errors import WorkloadError
from autoplan.planner.trials.loading import first_and_last
from autoplan.strategies.workloads.loading.order import SampleOrder
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.loading.source import (
    LoaderSource,
    make_loader,
    open_source,
    source_of,
    spec_of_object,
    spec_of_text,
)
from autoplan.strategies.workloads.loading.wrapped import Failure
from autoplan.strategies.workloads.randomness import seed_generators

ALONE = LoaderSetting(workers=0)


class Numbers(Dataset[Any]):
    def __init__(self, length: int, *, says: int | None = None, broken: int = -1) -> None:
        self.length, self.says, self.broken = length, says or length, broken

    def __len__(self) -> int:
        return self.says

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.length:
            raise IndexError(f"no row {index}")
        if index == self.broken:
            raise ValueError("a torn image")
        return torch.tensor([index])


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length))


def seen(loader: DataLoader[Any]) -> list[int]:
    return [int(number) for batch in loader for number in batch.flatten()]


def test_an_order_has_each_sample_once_and_the_same_ones_in_a_step_on_any_number_of_ranks():
    alone = list(SampleOrder(103, seed=3, multiple_of=8))
    assert len(alone) == 96
    assert len(set(alone)) == 96
    shares = [list(SampleOrder(103, seed=3, rank=rank, ranks=4, multiple_of=8)) for rank in range(4)]
    for step in range(12):
        together = {number for share in shares for number in share[2 * step : 2 * step + 2]}
        assert together == set(alone[8 * step : 8 * step + 8])


def test_an_order_goes_on_where_a_training_stopped_and_each_epoch_has_another():
    whole = SampleOrder(64, seed=1, multiple_of=8)
    first, second = list(whole), list(whole)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    resumed = SampleOrder(64, seed=1, start=5 * 8, multiple_of=8)
    assert len(resumed) == 24
    assert list(resumed) == first[40:]
    assert list(resumed) == second
    assert list(SampleOrder(64, seed=1, start=64 + 16, multiple_of=8)) == second[16:]
    assert list(SampleOrder(64, seed=1, start=64)) == second


@pytest.mark.parametrize(("given", "says"), [({"rank": 2, "ranks": 2}, "no such rank"), ({"start": -1}, "start is -1")])
def test_an_order_that_cannot_be_is_refused(given: dict[str, int], says: str):
    with pytest.raises(WorkloadError, match=says):
        SampleOrder(10, **given)
    with pytest.raises(WorkloadError, match="7 samples, and a step takes 8"):
        SampleOrder(7, multiple_of=8)


def test_a_loader_drops_the_last_smaller_batch_and_takes_what_a_dataloader_has():
    own = DataLoader(Numbers(21), batch_size=4, shuffle=False, collate_fn=lambda rows: torch.stack(rows) * 10)
    loader = make_loader(source_of(own), LoaderSetting(workers=2, prefetch_factor=3), batch_size=5)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert seen(loader) == [10 * number for number in range(20)]
    assert not source_of(DataLoader(Numbers(4), shuffle=False)).shuffled
    assert source_of(DataLoader(Numbers(4), shuffle=True)).shuffled
    every_second = DataLoader(Numbers(8), batch_size=2, sampler=[0, 2, 4, 6])
    assert seen(make_loader(source_of(every_second), ALONE, batch_size=2)) == [0, 2, 4, 6]
    assert seen(make_loader(source_of(every_second), ALONE, batch_size=1, rank=1, ranks=2)) == [2, 6]


class Drawn(Sampler[int]):
    """Draws its order from wherever people draw, a sample at a time, and has no length."""

    def __init__(self, samples: int, source: str) -> None:
        self.samples, self.source = samples, source
        self.generator = torch.Generator()

    def __iter__(self) -> Any:
        left = list(range(self.samples))
        while left:
            at = {
                "torch": lambda: int(torch.randint(len(left), ())),
                "random": lambda: random.randrange(len(left)),
                "numpy": lambda: np.random.randint(len(left)),
                "own": lambda: int(torch.randint(len(left), (), generator=self.generator)),
            }[self.source]()
            yield left.pop(at)


@pytest.mark.parametrize("source", ["torch", "random", "numpy", "own", "weighted", "batches"])
def test_ranks_that_are_seeded_apart_share_the_order_of_a_drawing_sampler(source: str):
    data = Numbers(26)

    def epochs(rank: int, ranks: int, **given: int) -> list[list[int]]:
        seed_generators(rank)
        if source == "weighted":
            sampler: Any = WeightedRandomSampler([1.0] * 26, 26, replacement=False)
        else:
            sampler = Drawn(26, "torch" if source == "batches" else source)
            sampler.generator.manual_seed(rank)
        own = DataLoader(data, batch_size=2, sampler=sampler)
        if source == "batches":
            own = DataLoader(data, batch_sampler=BatchesOf(sampler))
        loader = make_loader(source_of(own), ALONE, batch_size=8 // ranks, rank=rank, ranks=ranks, **given)
        before = torch.get_rng_state(), random.getstate()
        order = iter(loader.sampler)
        found = [next(order)]
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        return [found + list(order), seen(loader)]

    alone, two = epochs(0, 1), [epochs(rank, 2) for rank in range(2)]
    for epoch in range(2):
        assert len(set(alone[epoch])) == len(alone[epoch]) == 24
        assert [two[k % 2][epoch][k // 2] for k in range(24)] == alone[epoch]
    assert alone[0] != alone[1]
    assert epochs(1, 2, start=8)[0] == two[1][0][4:]
    assert epochs(1, 2, start=24 + 16)[0] == two[1][1][8:]
    assert epochs(0, 1, seed=1)[0] != alone[0]


class BatchesOf:
    """A batch sampler of one's own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(BatchSampler(self.sampler, 2, drop_last=False))


def test_start_passes_over_what_a_sampler_of_ones_own_gave():
    own = source_of(DataLoader(Numbers(12), batch_size=4, sampler=list(range(11, -1, -1))))
    loader = make_loader(own, ALONE, batch_size=4, start=8)
    assert [seen(loader), seen(loader)] == [[3, 2, 1, 0], list(range(11, -1, -1))]
    assert seen(make_loader(own, ALONE, batch_size=4, start=12))[0] == 11
    split = DistributedSampler(Numbers(16), 2, 1, shuffle=False)
    loader = make_loader(source_of(DataLoader(Numbers(16), sampler=split)), ALONE, batch_size=4, rank=1, ranks=2)
    loader.sampler.set_epoch(3)  # type: ignore[attr-defined]
    assert split.epoch == 3 and seen(loader) == [1, 3, 5, 7, 9, 11, 13, 15]
    own = source_of(DataLoader(Numbers(16), sampler=split))
    assert seen(make_loader(own, ALONE, batch_size=4, rank=1, ranks=2, start=8)) == [9, 11, 13, 15]
    with pytest.raises(WorkloadError, match="the sampler list gives 3 samples, and a step takes 4"):
        seen(make_loader(source_of(DataLoader(Numbers(9), sampler=[1, 2, 3])), ALONE, batch_size=4))


@pytest.mark.parametrize("sampler", [None, "of one's own"])
def test_a_pass_that_is_left_early_is_over(sampler: str | None):
    """Five epochs of `for _, batch in zip(range(2), loader)` would be the same two batches."""
    options: dict[str, Any] = {"shuffle": True} if sampler is None else {"sampler": Drawn(12, "torch")}
    source = source_of(DataLoader(Numbers(12), **options))
    loader, whole = (make_loader(source, ALONE, batch_size=2, seed=3) for _ in range(2))
    expected = [seen(whole) for _ in range(3)]
    begun = [[int(x) for batch in itertools.islice(loader, 2) for x in batch] for _ in range(2)]
    assert begun == [epoch[:4] for epoch in expected[:2]] and begun[0] != begun[1]
    assert seen(loader) == expected[2]
    assert isinstance(loader.sampler, SampleOrder) and loader.sampler.epoch == 3


def test_torchs_own_samplers_with_options_keep_them():
    data = Numbers(12)
    few = make_loader(
        source_of(DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=4))), ALONE, batch_size=2
    )
    assert len(seen(few)) == len(few) * 2 == 4
    twice = source_of(DataLoader(data, sampler=RandomSampler(data, replacement=True)))
    assert len(set(seen(make_loader(twice, ALONE, batch_size=12)))) < 12
    for part in (SequentialSampler(range(8)), RandomSampler(range(8))):
        assert set(seen(make_loader(source_of(DataLoader(data, sampler=part)), ALONE, batch_size=4))) == set(range(8))


class SplitStream(Stream):
    """A stream whose workers share it by an attribute that a worker_init_fn sets, as torch's documentation does."""

    start, step = 0, 1

    def __iter__(self) -> Any:
        return iter(torch.arange(self.start, self.length, self.step))


def split_stream(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start, info.dataset.step = number, info.num_workers


@pytest.mark.parametrize("workers", [0, 2])
def test_start_passes_over_what_a_stream_gave(workers: int):
    setting = LoaderSetting(workers=workers, prefetch_factor=2 if workers else None)
    source = LoaderSource(dataset=SplitStream(42), worker_init_fn=split_stream)

    def batches(loader: DataLoader[Any]) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    whole = batches(make_loader(source, setting, batch_size=4))
    assert len(whole) == 10
    for start, rest in ((12, whole[3:]), (16, whole[4:]), (40, whole), (56, whole[4:])):
        loader = make_loader(source, setting, batch_size=4, start=start)
        found = batches(loader)
        assert found == rest or (workers and start == 12 and sorted(found) == sorted(rest))  # turns begin anew
        assert batches(loader) == whole
    assert batches(make_loader(source, setting, batch_size=4, ranks=3, start=48)) == whole[4:]


def test_start_of_a_stream_that_cannot_be_is_refused():
    with pytest.raises(WorkloadError, match="start is -8"):
        make_loader(source_of(Stream(8)), ALONE, batch_size=4, start=-8)
    assert seen(make_loader(source_of(Stream(3)), ALONE, batch_size=4, start=8)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_and_plain_iterables_are_loaded(workers: int):
    class Rows:
        def __iter__(self) -> Any:
            return iter([torch.tensor([number]) for number in range(6)])

    setting = LoaderSetting(workers=workers, prefetch_factor=2 if workers else None)
    for dataset in (Stream(6), Rows()):
        numbers = seen(make_loader(source_of(dataset), setting, batch_size=3))
        assert set(numbers) == set(range(6))  # each worker goes over the whole stream, as torch has it


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_is_named_out_of_a_worker_too(workers: int):
    setting = LoaderSetting(workers=workers, prefetch_factor=2 if workers else None)
    source = LoaderSource(dataset=Numbers(12, broken=9), shuffled=False)
    *good, bad = list(itertools.islice(make_loader(source, setting, batch_size=4, named=True), 3))
    assert [batch.flatten().tolist() for batch in good] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert isinstance(bad, Failure)
    assert "ValueError: a torn image" in bad.text
    assert "dataset[9]" in bad.text
    assert "test_source.py, line" in bad.text


def test_a_collate_fn_that_fails_names_its_samples_and_the_odd_one():
    rows = [torch.zeros(3), torch.zeros(3), torch.zeros(4), torch.zeros(3)]
    (batch,) = make_loader(LoaderSource(dataset=rows, shuffled=False), ALONE, batch_size=4, named=True)
    assert isinstance(batch, Failure)
    assert "collate_fn of samples 0, 1, 2, 3; sample 2 has it (4,), sample 0 it (3,)" in batch.text


def test_a_worker_init_fn_reaches_the_dataset_through_its_worker():
    def set_up(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.says  # noqa: B018  # as people shard their data here

    own = DataLoader(Numbers(8), batch_size=2, worker_init_fn=set_up)
    loader = make_loader(source_of(own), LoaderSetting(workers=1, prefetch_factor=2), batch_size=4, named=True)
    assert len(list(loader)) == 2


def test_what_ends_early_or_is_too_small_is_said_before_anything_is_measured():
    early = first_and_last(LoaderSource(dataset=Numbers(10, says=12)), 4)
    assert early is not None
    assert "IndexError: no row 11" in early.text
    assert "the dataset ends early: its len() is 12" in early.text
    for source in (LoaderSource(dataset=Numbers(3)), LoaderSource(dataset=Stream(3))):
        small = first_and_last(source, 4)
        assert small is not None
        assert "ends after 3 samples, and a step takes 4" in small.text
    assert first_and_last(LoaderSource(dataset=Numbers(12)), 4) is None
    assert first_and_last(LoaderSource(dataset=Stream(12)), 4) is None


class Endless:
    """Has [] alone: a sampler says which indices there are."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise ValueError("a torn image")
        return torch.tensor([index])


def test_the_first_look_takes_the_indices_and_the_count_from_a_sampler_of_ones_own():
    few = Numbers(8)
    often = source_of(DataLoader(few, sampler=RandomSampler(few, replacement=True, num_samples=1000)))
    assert first_and_last(often, 16) is None
    assert first_and_last(source_of(DataLoader(Numbers(4, says=12), sampler=[0, 1, 2, 3])), 4) is None
    torn = first_and_last(source_of(DataLoader(Numbers(12, broken=7), sampler=[7, 0, 1, 2])), 4)
    assert torn is not None
    assert "dataset[7]" in torn.text
    with pytest.raises(WorkloadError, match="the sampler list gives 3 samples, and a step takes 4"):
        first_and_last(source_of(DataLoader(Numbers(12), sampler=[1, 2, 3])), 4)
    split = DistributedSampler(Numbers(16), 2, 1, shuffle=False)
    assert first_and_last(source_of(DataLoader(Numbers(16), sampler=split)), 16) is None


@pytest.mark.parametrize("sampler", [range(4, 12), SequentialSampler(range(8)), RandomSampler(range(8))])
def test_a_dataset_without_a_length_has_the_indices_of_its_sampler(sampler: Any):
    source = source_of(DataLoader(Endless(), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    assert first_and_last(source, 8) is None
    assert set(seen(make_loader(source, ALONE, batch_size=4))) == set(sampler)
    torn = first_and_last(source_of(DataLoader(Endless(), sampler=[12, 13, 14])), 2)  # type: ignore[arg-type]
    assert torn is not None
    assert "ValueError: a torn image" in torn.text and "dataset[13]" in torn.text
    with pytest.raises(WorkloadError, match="Endless does not say how many samples it has") as refused:
        first_and_last(LoaderSource(dataset=Endless()), 4)
    assert "sampler" in str(refused.value.hint)


def test_objects_travel_and_another_dataset_is_another_loader():
    data = TensorDataset(torch.arange(12.0))
    spec = spec_of_object(DataLoader(data, batch_size=3, shuffle=True))
    assert spec.reference == "TensorDataset"
    opened = open_source(spec)
    assert opened.shuffled
    assert len(opened.dataset) == 12
    assert "payload" not in spec.model_dump()
    assert spec_of_object(DataLoader(data, batch_size=4, shuffle=True)).identity == spec.identity
    assert spec_of_object(TensorDataset(torch.arange(13.0))).identity != spec.identity
    made = open_source(spec_of_object(functools.partial(Numbers, 7)))
    assert len(made.dataset) == 7


def test_what_is_no_dataset_or_does_not_travel_is_refused():
    class Locked(Numbers):
        def __init__(self) -> None:
            super().__init__(4)
            self.lock = threading.Lock()

    with pytest.raises(WorkloadError, match=r"Locked and its collate_fn cannot be sent") as refused:
        spec_of_object(Locked())
    assert "loader=make_dataset" in str(refused.value.hint)
    with pytest.raises(WorkloadError, match="the loader is int"):
        source_of(3)
    for dataset in (Numbers(4), Stream(4)):
        with pytest.raises(WorkloadError, match="batch_size=None"):
            source_of(DataLoader(dataset, batch_size=None))
    with pytest.raises(WorkloadError, match="the loader is 'train.bin'"):
        spec_of_text("train.bin")


def test_a_function_of_a_file_gives_the_dataset(tmp_path: Path):
    file = tmp_path / "rows.py"
    file.write_text("def make():\n    return [1, 2, 3]\n\ndef broken():\n    raise OSError('no such share')\n")
    assert open_source(spec_of_text(f"{file}:make")).dataset == [1, 2, 3]
    with pytest.raises(WorkloadError, match=r"OSError: no such share"):
        open_source(spec_of_text(f"{file}:broken"))
    with pytest.raises(WorkloadError, match="has no function 'mak'"):
        spec_of_text(f"{file}:mak")

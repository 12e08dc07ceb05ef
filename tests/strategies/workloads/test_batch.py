"""Batches in containers of every kind: their size, slices and moves."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import batch_size, move_batch, slice_batch


class Encoding(UserDict):
    """As a tokenizer's BatchEncoding: attributes beside keys."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass(frozen=True)
class Pair:
    ids: torch.Tensor
    inner: dict[str, torch.Tensor]
    names: tuple[str, ...] = ("a",)


class Named(NamedTuple):
    ids: torch.Tensor


@dataclasses.dataclass
class Odd(dict):  # type: ignore[type-arg]
    """A dict that is a dataclass too, as a ModelOutput of transformers is."""

    ids: torch.Tensor

    def __post_init__(self) -> None:
        self["ids"] = self.ids


@pytest.mark.parametrize(
    ("make", "ids"),
    [
        (lambda ids: Encoding(ids=ids), lambda batch: batch.ids),
        (lambda ids: Pair(ids, {"mask": ids + 1}), lambda batch: batch.inner["mask"] - 1),
        (lambda ids: OrderedDict(ids=ids), lambda batch: batch["ids"]),
        (Named, lambda batch: batch.ids),
        (lambda ids: [Encoding(ids=ids), "name"], lambda batch: batch[0]["ids"]),
        (Odd, lambda batch: batch.ids),
    ],
    ids=["mapping", "dataclass", "ordered", "named", "inside", "both"],
)
def test_every_container_is_sliced_and_moved(make, ids):
    whole = torch.arange(12).view(4, 3)
    part = slice_batch(make(whole), 1, 3)
    assert type(part) is type(make(whole))
    assert torch.equal(ids(part), whole[1:3])
    assert batch_size(make(whole)) == 4
    assert torch.equal(ids(move_batch(make(whole), torch.device("cpu"))), whole)


def test_texts_are_sliced_with_their_samples_and_other_lists_are_not():
    batch = {"ids": torch.arange(4), "captions": list("abcd"), "names": ["one", "two"], "size": [4, 4, 4, 4]}
    part = slice_batch(batch, 1, 3)
    assert part["captions"] == ["b", "c"]
    assert part["names"] == ["one", "two"] and part["size"] == [4, 4, 4, 4]


def test_other_layouts_are_told_what_makes_batches_of_them() -> None:
    with pytest.raises(WorkloadError, match=r"first dims \[8, 20\]") as caught:
        batch_size((torch.zeros(20, 8, 3), torch.zeros(8)))
    assert "SampleBatch(samples, collate" in str(caught.value.hint)
    with pytest.raises(WorkloadError, match="arrays of NumPy"):
        batch_size({"rows": torch.zeros(4).numpy()})


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_sliced_by_sample(layout: torch.layout) -> None:
    rows = [torch.full((size, 2), float(size)) for size in (3, 1, 4, 2)]
    batch = {"rows": torch.nested.nested_tensor(rows, layout=layout), "labels": torch.arange(4)}
    assert batch_size(batch) == 4
    part = slice_batch(batch, 1, 3)
    assert [tuple(row.shape) for row in part["rows"].unbind()] == [(1, 2), (4, 2)]

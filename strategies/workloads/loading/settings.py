"""The settings of a DataLoader, and where its dataset comes from. Data; loads no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from autoplan.record import Record


class LoaderSetting(Record):
    """How batches are made ready: by how many processes, how far ahead, and in which memory."""

    workers: int = Field(ge=0, le=4096, description="processes beside each rank; 0: the rank makes its batches itself")
    prefetch_factor: int | None = Field(
        default=None, ge=1, le=4096, description="batches that each worker makes ahead; None without workers"
    )
    pin_memory: bool = Field(default=False, description="batches are put into pinned host memory by a thread (CUDA)")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a torch DataLoader. Workers stay alive between epochs."""
        found: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.pin_memory}
        if self.workers:
            found |= {"prefetch_factor": self.prefetch_factor or 2, "persistent_workers": True}
        return found

    def describe(self) -> str:
        """`2 workers, prefetch factor 4, pinned memory`."""
        if not self.workers:
            text = "no workers: the training process makes its batches itself"
        else:
            text = (
                f"{self.workers} worker{'s' if self.workers > 1 else ''}, prefetch factor {self.prefetch_factor or 2}"
            )
        return text + (", pinned memory" if self.pin_memory else "")


class LoaderSpec(Record):
    """Where the dataset of a training comes from, for another process."""

    kind: Literal["object", "function"]
    reference: str = Field(description="the type of the object, or file.py:function")
    payload: str | None = Field(default=None, exclude=True, repr=False, description="a pickled object")
    arguments: tuple[str, ...] = Field(default=(), description="what sys.argv has after the file's name")
    identity: str = Field(description="a hash: another dataset has another one")

"""The batches of a loader that is measured: epoch after epoch, and how long they were waited for. Runs in a rank."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from autoplan.strategies.workloads.loading.named import Failure, NamedBatch


class LoadingError(Exception):
    """The dataset, its collate_fn or a worker failed; the text says on which sample."""


class Place(NamedTuple):
    """Which batch of one setting's loader: both from 0."""

    epoch: int
    batch: int

    def describe(self) -> str:
        """`batch 3`, or after the first epoch `batch 3 of epoch 1`."""
        return f"batch {self.batch}" + (f" of epoch {self.epoch}" if self.epoch else "")


class LoaderBatches:
    """The batches of a loader, epoch after epoch, and the seconds that were spent waiting for them.

    Args:
        loader: Made with `named=True`.
        on_batch: Is told of each batch, and which one it is.
        samples: Of a batch.
    """

    def __init__(self, loader: Any, *, on_batch: Callable[[NamedBatch, Place], None], samples: int) -> None:
        self.loader, self.on_batch, self.samples = loader, on_batch, samples
        self.waited_s = 0.0
        self._iterator: Any = iter(loader)
        self._epoch = self._of_epoch = 0

    def next(self) -> Any:
        """The next batch.

        Raises:
            LoadingError: it could not be made, and on which sample; or an epoch has no whole batch.
        """
        began = time.perf_counter()
        batch = next(self._iterator, None)
        if batch is None:
            if not self._of_epoch:
                raise LoadingError(f"the dataset ends before it has given one whole batch of {self.samples} samples")
            self._iterator, self._epoch, self._of_epoch = iter(self.loader), self._epoch + 1, 0
            batch = next(self._iterator, None)
            if batch is None:
                raise LoadingError("the dataset gives nothing when it is gone over again: it is used up")
        self.waited_s += time.perf_counter() - began
        if isinstance(batch, Failure):
            raise LoadingError(batch.text)
        self.on_batch(batch, Place(self._epoch, self._of_epoch))
        self._of_epoch += 1
        return batch.batch

    def close(self) -> None:
        """Ends the workers."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        self._iterator = None
        self.loader._iterator = None  # where workers stay between epochs
        if shutdown is not None:
            shutdown()


def is_of_loader(error: Exception) -> bool:
    """Whether the DataLoader or one of its workers raised it, not the step."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/utils/data" in frame.filename or "multiprocessing" in frame.filename for frame in frames)


def last_line(error: Exception) -> str:
    """What an exception says in its last line: that of a worker has the worker's whole traceback."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[-1].strip() if lines else "no text"
    return text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"

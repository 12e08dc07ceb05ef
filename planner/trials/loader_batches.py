"""The batches of a loader that is measured: epoch after epoch, and how long they were waited for. Runs in a rank."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from autoplan.strategies.workloads.loading.named import Failure


class LoadingError(Exception):
    """The dataset, its collate_fn or a worker failed; the text says on which sample."""


class LoaderBatches:
    """The batches of a loader, epoch after epoch, and the seconds that were spent waiting for them."""

    def __init__(self, loader: Any, *, on_batch: Callable[[Any], None], samples: int) -> None:
        self.loader, self.on_batch, self.samples = loader, on_batch, samples
        self.waited_s = 0.0
        self._iterator: Any = iter(loader)
        self._of_epoch = 0

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
            self._iterator, self._of_epoch = iter(self.loader), 0
            batch = next(self._iterator, None)
            if batch is None:
                raise LoadingError("the dataset gives nothing when it is gone over again: it is used up")
        self.waited_s += time.perf_counter() - began
        if isinstance(batch, Failure):
            raise LoadingError(batch.text)
        self._of_epoch += 1
        self.on_batch(batch)
        return batch

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

"""Errors of the user's own functions: what a function raised comes first, then which call it was and what it should do.

In: an exception, or a workload. Out: a `WorkloadError`, or the workload whose make_batch raises one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.function_file import is_own_file
from autoplan.strategies.workloads.workload import Workload

BATCH_RULE = (
    "make_batch(num_samples, index) returns exactly num_samples samples, on the CPU, for any index from 0 up: "
    "where the data ends, it begins again."
)


def user_error(error: BaseException, call: str, hint: str) -> WorkloadError:
    """The error of a function of the user's: its own first line, then our words, then its other lines.

    Args:
        error: What it raised.
        call: Which call it was: "make_batch(2, 0) of mine".
        hint: What the function is expected to do.
    """
    first, _, rest = str(error).strip().partition("\n")
    own = f"{type(error).__name__}: {first}" if first else type(error).__name__
    text = f"{own}\nraised by {call}{_place(error)}"
    return WorkloadError(f"{text}\n{rest}" if rest else text, hint=hint)


@contextlib.contextmanager
def users_call(call: str, hint: str) -> Iterator[None]:
    """Around a call of the user's own: what it raises becomes a `user_error`; a WorkloadError stays as it is."""
    try:
        yield
    except WorkloadError:
        raise
    except Exception as error:
        raise user_error(error, call, hint) from error


@contextlib.contextmanager
def failing_as(words: str, hint: str) -> Iterator[None]:
    """Around what may fail: what it raises is said after the words; a WorkloadError stays as it is."""
    try:
        yield
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(f"{words}: {type(error).__name__}: {error}", hint=hint) from error


def refuse_lazy(model: nn.Module, what: str) -> None:
    """Raises WorkloadError for a model whose parameters have no shapes before its first forward (nn.LazyLinear)."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise WorkloadError(
            f"{len(lazy)} tensors of {what} have no shape before its first forward: {lazy[0]}",
            hint="Run it once on a small batch before it is handed over: at the end of build_model, or before the "
            "search. Then make the optimizer.",
        )


def _place(error: BaseException) -> str:
    """Where in the user's own files it was raised: ", in mine.py, line 12"; empty where that is not known."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own_file(frame.filename) and Path(frame.filename).is_file():
            return f", in {Path(frame.filename).name}, line {frame.lineno}"
    return ""


def with_checked_batches(workload: Workload) -> Workload:
    """The workload with a make_batch whose errors name the call, and which gives as many samples as it was asked for.

    Args:
        workload: As the user's function or objects gave it.
    """
    make_batch, name = workload.make_batch, workload.name

    def checked(num_samples: int, index: int) -> Batch:
        call = f"make_batch({num_samples}, {index}) of {name}"
        with users_call(call, BATCH_RULE):
            batch = make_batch(num_samples, index)
        try:
            size = batch_size(batch)
        except WorkloadError as error:
            raise WorkloadError(f"{call}: {error.flag_message}", hint=error.flag_hint) from error
        if size != num_samples:
            raise WorkloadError(f"{call} gave {size} samples, not {num_samples}", hint=BATCH_RULE)
        return batch

    return dataclasses.replace(workload, make_batch=checked)

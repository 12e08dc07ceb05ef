"""The ids in a file of tokens, as a memory-mapped array. Loads no torch, so that a command line can look first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import WorkloadError


def dtype_of(path: Path, given: str | None) -> Any:
    """The dtype of a file's ids; None where the file says it.

    Raises:
        WorkloadError: it is none of token ids.
    """
    if given is None:
        return None if path.suffix == ".npy" else np.dtype(np.uint16)
    try:
        dtype = np.dtype(given)
    except TypeError:
        dtype = np.dtype(np.float32)  # no dtype of ids either
    if dtype.kind not in "iu":
        raise WorkloadError(
            f"dtype is {given!r}, which is none of token ids", hint='It is "uint16", "uint32", "int32" or "int64".'
        )
    return dtype


def map_ids(path: Path, dtype: Any) -> Any:
    """The file as an array.

    Raises:
        WorkloadError: it cannot be read, or is no array of ids.
    """
    hint = "A .bin file has the ids and nothing else; a .npy is written by numpy.save of a one-dim array of ids."
    try:
        size = path.stat().st_size
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        elif not size or size % dtype.itemsize:
            raise WorkloadError(
                f"{path} has {size:,} bytes, which is {'nothing' if not size else 'no multiple of'}"
                + (f" the {dtype.itemsize} bytes of a {dtype} id" if size else ""),
                hint="It was cut short, or has ids of another dtype: give that where the dataset is made, in a "
                "function for --loader file.py:make_dataset, for example TokenFile(path, length, dtype='uint32').",
            )
        else:
            array = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    except ValueError as error:
        raise WorkloadError(f"{path} is no array of numpy: {error}", hint=hint) from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        kind = f"a {array.ndim}-dim array of {array.dtype}" if isinstance(array, np.ndarray) else "an archive"
        raise WorkloadError(f"{path} is {kind}, not a one-dim array of token ids", hint=hint)
    if dtype is not None and array.dtype != dtype:
        raise WorkloadError(f"{path} has ids of {array.dtype}, and dtype is {dtype}", hint="Leave out dtype=.")
    return array


def check_windows(path: Path, num_tokens: int, sequence_length: int) -> None:
    """Refuses a file without one whole window.

    Raises:
        WorkloadError: it is too short.
    """
    if num_tokens < sequence_length + 1:
        raise WorkloadError(
            f"{path} has {num_tokens:,} tokens, and a window takes {sequence_length + 1:,} (a target for each input)",
            hint="Give a longer file, or a smaller sequence_length.",
        )

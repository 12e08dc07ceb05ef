"""A file of tokens as a dataset: memory-mapped, so that it takes no memory and opens at once, whatever its size.

In: a `.bin` file of token ids, as nanoGPT's prepare.py writes them, or a one-dim `.npy`. Out: windows of
`sequence_length` tokens, with targets shifted by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.loading.order import SampleOrder
from autoplan.strategies.workloads.loading.token_ids import check_windows, dtype_of, map_ids

Form = Literal["pairs", "transformers"]

CHECKED_AT_ONCE = 1 << 22
"""Tokens that `check` reads at a time."""


class TokenFile(Dataset[Any]):
    """Windows of a file of token ids, as a map-style dataset.

    Window i begins at token `i * stride` and takes one token more than `sequence_length`, so that each input has its
    target. A rest at the end of the file that fills no window is left out.

    Args:
        path: A `.bin` file of ids and nothing else, or a one-dim `.npy` of whole numbers.
        sequence_length: Tokens of a sample.
        dtype: Of the ids in a `.bin` file: "uint16" (as nanoGPT writes GPT-2's), "uint32", "int32" or "int64". None:
            as the `.npy` says; "uint16" for a `.bin`.
        stride: Tokens from one window to the next. None: `sequence_length`, so that windows don't overlap.
        vocab_size: If given, a sample with an id that is not below it is an error, which names the place.
        form: "pairs": a sample is `(inputs, targets)`, where `targets[k]` is the token after `inputs[k]`.
            "transformers": `{"input_ids": inputs, "labels": inputs}`, since those models shift the labels themselves.

    Raises:
        WorkloadError: there is no such file; its size is no multiple of the dtype's; it has not one whole window; or it
            is no array of token ids.
    """

    def __init__(
        self,
        path: str | Path,
        sequence_length: int,
        dtype: str | None = None,
        *,
        stride: int | None = None,
        vocab_size: int | None = None,
        form: Form = "pairs",
    ) -> None:
        for name, value in (("sequence_length", sequence_length), ("stride", stride), ("vocab_size", vocab_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise WorkloadError(f"{name} is {value!r}", hint="It is a whole number of at least 1.")
        if form not in ("pairs", "transformers"):
            raise WorkloadError(f"form is {form!r}", hint='It is "pairs" or "transformers".')
        self.path = Path(path).expanduser().resolve()
        self.sequence_length, self.stride = sequence_length, stride or sequence_length
        self.vocab_size, self.form = vocab_size, form
        self._dtype = dtype_of(self.path, dtype)
        self._tokens: Any = None
        self.num_tokens = len(self.tokens)
        check_windows(self.path, self.num_tokens, sequence_length)

    @property
    def tokens(self) -> Any:
        """All ids, as a memory-mapped array of numpy; each process maps the file for itself."""
        if self._tokens is None:
            self._tokens = map_ids(self.path, self._dtype)
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}  # a mapping that is pickled would carry the whole file

    def __len__(self) -> int:
        """Windows in the file."""
        return (self.num_tokens - self.sequence_length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {self.path}, which has {len(self)}")
        begin = (index % len(self)) * self.stride
        window = self.tokens[begin : begin + self.sequence_length + 1].astype(np.int64)
        if len(window) <= self.sequence_length:
            raise WorkloadError(f"{self.path} was cut short while it was read", hint="Write the file anew.")
        if self.vocab_size is not None:
            self._refuse_ids(window, begin)
        ids = torch.from_numpy(window)
        inputs, targets = ids[:-1], ids[1:]
        return (inputs, targets) if self.form == "pairs" else {"input_ids": inputs, "labels": inputs.clone()}

    def check(self) -> None:
        """Reads the whole file, and compares each id with `vocab_size`.

        Raises:
            WorkloadError: an id that is not below it, and where; or no vocab_size was given.
        """
        if self.vocab_size is None:
            raise WorkloadError("no vocab_size was given to check ids against", hint="TokenFile(..., vocab_size=50257)")
        for begin in range(0, self.num_tokens, CHECKED_AT_ONCE):
            self._refuse_ids(self.tokens[begin : begin + CHECKED_AT_ONCE], begin)

    def order(
        self, *, seed: int = 0, rank: int = 0, ranks: int = 1, start: int = 0, global_batch: int = 1
    ) -> SampleOrder:
        """The windows of one rank, shuffled: the sampler of a DataLoader.

        Args:
            seed: Each epoch has an order of its own, drawn from the seed and the epoch.
            rank, ranks: Which share, of how many.
            start: Windows, of all ranks together, that the training has seen: steps x global batch.
            global_batch: An epoch has whole global batches only.
        """
        return SampleOrder(len(self), seed=seed, rank=rank, ranks=ranks, start=start, multiple_of=global_batch)

    def _refuse_ids(self, ids: Any, begin: int) -> None:
        assert self.vocab_size is not None, "only where there is a vocabulary"
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(wrong):
            first = int(wrong[0])
            raise WorkloadError(
                f"{self.path} has the id {int(ids[first])} at token {begin + first:,}; the vocabulary has "
                f"{self.vocab_size:,} ids, from 0",
                hint=f"Is it of another tokenizer, or not {self._dtype} ids? Say dtype= where it is neither.",
            )

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.sequence_length}, {self._dtype!s}): {len(self):,} windows"

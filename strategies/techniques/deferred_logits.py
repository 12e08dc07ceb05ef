"""The fused loss of any loss function: the output head gives logits that are not computed until something needs them.

In: the user's own loss function, which runs as it is. Inside it the head returns a `DeferredLogits`. Slices, views and
casts of it stay deferred; so do a factor, a bias and a soft cap. F.cross_entropy of it is computed chunk by chunk
(loss_kernels.py), and so is log_softmax with a gather of one class per row (DPO and the like). Anything else gets the
real logits, computed then. So whatever the loss function does beside (masks, weights, a z-loss, a router's loss) is
done as before: the result is the same, and only what is saved differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.strategies.techniques.loss_kernels import Kernel, rows_cross_entropy
from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum

FUSED = "fused cross-entropy"


class DeferredLoss:
    """A workload's loss function, with the logits of its output head deferred.

    Args:
        loss: The workload's own.
        linear: The output head.
        kernel: Computes the summed cross-entropy.

    Attributes:
        watch: Set to a list, it gets FUSED for each cross-entropy without all logits, and the name of each operation
            that needed them all. None in training: a compiled graph would be made anew for each entry.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], LossSum], linear: nn.Linear, kernel: Kernel) -> None:
        self.loss = loss
        self.linear = linear
        self.kernel = kernel
        self.active = False
        self.watch: list[str] | None = None
        replaced: Any = linear
        replaced.forward = self._head

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        self.active = True
        try:
            return self.loss(model, batch)
        finally:
            self.active = False

    def _head(self, hidden: torch.Tensor) -> Any:
        """The head's forward: deferred inside the loss function, the usual one elsewhere (generation, evaluation)."""
        if not self.active or not torch.is_grad_enabled():
            return F.linear(hidden, *self.parameters())
        return DeferredLogits(self, hidden)

    def note(self, operation: str) -> None:
        """Keeps what was done with the logits, where somebody wants to know."""
        if self.watch is not None:
            self.watch.append(operation)

    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as plain tensors; over ranks that hold them whole, they are DTensors."""
        weight, bias = self.linear.weight, self.linear.bias
        return local_tensor(weight), None if bias is None else local_tensor(bias)


_CROSS_ENTROPY_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

_DEFERRED_FUNCTIONS: dict[Any, str] = {
    torch.tanh: "tanh",
    torch.log_softmax: "log_softmax",
    F.log_softmax: "log_softmax",
    torch.gather: "gather",
}
"""Functions of torch, and the method of DeferredLogits that does the same."""

_OTHER_OPERATORS = ("sub", "rsub", "neg", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "abs")


def _with_other_operators(kind: Any) -> Any:
    """Gives a class the operators that need the logits themselves."""

    def by_value(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self._full(name), f"__{name}__")(*args)

    for name in _OTHER_OPERATORS:
        setattr(kind, f"__{name}__", by_value(name))
    kind.__hash__ = object.__hash__
    return kind


@_with_other_operators
class DeferredLogits:
    """Logits of shape (..., vocabulary) as the hidden states (..., size) that they are computed from.

    Their value is after * tanh(before * (hidden weight^T + bias)), or without the tanh before * (...).

    Args:
        source: What computes them.
        hidden: The hidden states.
        bias: What is added to the head's own bias; None: nothing.
        before: A factor.
        after: A factor behind the tanh; None: there is no tanh.
        is_fp32: They were cast to fp32.
        classes_second: The vocabulary is dim 1 of three, as F.cross_entropy takes it.
        is_normalised: The log-probabilities are meant: log_softmax was applied.
    """

    def __init__(
        self,
        source: DeferredLoss,
        hidden: torch.Tensor,
        bias: torch.Tensor | None = None,
        before: float = 1.0,
        after: float | None = None,
        is_fp32: bool = False,
        classes_second: bool = False,
        is_normalised: bool = False,
    ) -> None:
        self._source = source
        self._hidden = hidden
        self._bias = bias
        self._before = before
        self._after = after
        self._is_fp32 = is_fp32
        self._classes_second = classes_second
        self._is_normalised = is_normalised

    def _changed(self, **changes: Any) -> DeferredLogits:
        options: dict[str, Any] = {
            "hidden": self._hidden,
            "bias": self._bias,
            "before": self._before,
            "after": self._after,
            "is_fp32": self._is_fp32,
            "classes_second": self._classes_second,
            "is_normalised": self._is_normalised,
        }
        options.update(changes)
        return DeferredLogits(self._source, **options)

    # What logits are asked for without their values.

    @property
    def shape(self) -> torch.Size:
        rows = self._hidden.shape[:-1]
        vocabulary = self._source.linear.weight.shape[0]
        return torch.Size((rows[0], vocabulary, *rows[1:]) if self._classes_second else (*rows, vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        if self._is_fp32:
            return torch.float32
        kind = self._hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    @property
    def requires_grad(self) -> bool:
        return True

    def dim(self) -> int:
        return self._hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    # What stays deferred.

    def float(self) -> DeferredLogits:
        return self._changed(is_fp32=True)

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        same = [value for value in (*args, *kwargs.values()) if value in (self.dtype, self.device, str(self.device))]
        if len(same) == len(args) + len(kwargs):
            return self
        if (args, kwargs) in (((torch.float32,), {}), ((), {"dtype": torch.float32})):
            return self.float()
        return self._full("to").to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if self._classes_second or not _keeps_last_dim(parts, self.ndim):
            return self._full("an index into the vocabulary")[index]
        return self._changed(hidden=self._hidden[index])

    def reshape(self, *shape: Any) -> Any:
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        vocabulary, rows = self.shape[-1], wanted[:-1]
        if wanted and wanted[-1] == -1 and -1 not in rows and math.prod(rows) * vocabulary == self.numel():
            wanted = (*rows, vocabulary)
        if self._classes_second or not wanted or wanted[-1] != vocabulary:
            return self._full("view").reshape(*shape)
        return self._changed(hidden=self._hidden.reshape(*rows, self._hidden.shape[-1]))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if self._classes_second or end == self.ndim - 1 > start:
            return self._full("flatten").flatten(start_dim, end_dim)
        return self._changed(hidden=self._hidden.flatten(start, end))

    def squeeze(self, dim: int) -> Any:
        if self._classes_second or dim % self.ndim == self.ndim - 1:
            return self._full("squeeze").squeeze(dim)
        return self._changed(hidden=self._hidden.squeeze(dim % self.ndim))

    def transpose(self, first: int, second: int) -> Any:
        if self.ndim == 3 and {first % 3, second % 3} == {1, 2}:
            return self._changed(classes_second=not self._classes_second)
        return self._full("transpose").transpose(first, second)

    def permute(self, *dims: Any) -> Any:
        order = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
        if self.ndim == 3 and tuple(dim % 3 for dim in order) == (0, 2, 1):
            return self.transpose(1, 2)
        return self._full("permute").permute(*dims)

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, int | float) or self._is_normalised:
            return self._full("mul") * factor
        if self._after is None:
            return self._changed(before=self._before * factor)
        return self._changed(after=self._after * factor)

    __rmul__ = mul = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        known = isinstance(divisor, int | float) and not self._is_normalised
        return self * (1 / divisor) if known else self._full("div") / divisor

    div = __truediv__

    def tanh(self) -> Any:
        known = self._after is None and not self._is_normalised
        return self._changed(after=1.0) if known else self._full("tanh").tanh()

    def __add__(self, other: Any) -> Any:
        vocabulary = self.shape[-1]
        is_bias = isinstance(other, torch.Tensor) and other.numel() == vocabulary == other.shape[-1]
        if not is_bias or self._is_normalised or self._classes_second or self._before != 1.0 or self._after is not None:
            return self._full("add") + other
        added = other.reshape(-1)
        return self._changed(bias=added if self._bias is None else self._bias + added)

    __radd__ = __add__

    # The cross-entropy.

    def cross_entropy(self, target: Any, arguments: dict[str, Any]) -> torch.Tensor:
        """F.cross_entropy(self, target, **arguments), or nll_loss, chunk by chunk where its formula allows it."""
        plain = all(arguments.get(name) is None for name in ("weight", "size_average", "reduce"))
        classes = isinstance(target, torch.Tensor) and not target.is_floating_point()
        if not plain or not classes or arguments.get("label_smoothing", 0.0):
            return F.cross_entropy(self._full("the options of its cross_entropy"), target, **arguments)
        ignored = arguments.get("ignore_index", IGNORE_INDEX)
        targets = target.reshape(-1)
        if ignored != IGNORE_INDEX:
            targets = torch.where(targets == ignored, IGNORE_INDEX, targets)
        reduction = arguments.get("reduction", "mean")
        if reduction == "none":
            return self._loss(rows_cross_entropy, targets).reshape(target.shape)
        total = self._loss(self._source.kernel, targets)
        return total if reduction == "sum" else total / (targets != IGNORE_INDEX).sum()

    def log_softmax(self, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        last = dim is not None and dim % self.ndim == self.ndim - 1
        if not last or args or kwargs.get("dtype") not in (None, torch.float32) or self._classes_second:
            return self._full("log_softmax").log_softmax(dim, *args, **kwargs)
        return self._changed(is_normalised=True)

    def gather(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        one_per_row = index.shape == (*self._hidden.shape[:-1], 1)
        if not self._is_normalised or not one_per_row or dim % self.ndim != self.ndim - 1:
            return self._full("gather").gather(dim, index)
        return -self._loss(rows_cross_entropy, index.reshape(-1)).reshape(index.shape)

    def _loss(self, kernel: Kernel, targets: torch.Tensor) -> torch.Tensor:
        """The cross-entropy by a kernel, with what was done to the logits taken into its arguments."""
        weight, bias = self._source.parameters()
        hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
        if self._bias is not None:
            bias = self._bias if bias is None else bias + self._bias
        if self._before != 1.0:
            hidden, bias = hidden * self._before, None if bias is None else bias * self._before
        options = {} if self._after is None else {"cap": self._after}
        self._source.note(FUSED)
        return kernel(hidden, weight, bias, targets, **options)

    # Everything else.

    def _full(self, operation: str) -> torch.Tensor:
        """The logits themselves, because an operation needs them."""
        self._source.note(operation)
        logits = F.linear(self._hidden, *self._source.parameters())
        if self._bias is not None:
            logits = logits + self._bias
        if self._before != 1.0:
            logits = logits * self._before
        if self._after is not None:
            logits = torch.tanh(logits) * self._after
        logits = logits.float() if self._is_fp32 else logits
        logits = logits.log_softmax(-1) if self._is_normalised else logits
        return logits.transpose(1, 2) if self._classes_second else logits

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._full(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        first = args[0] if args else given.get("input")
        if isinstance(first, DeferredLogits):
            if func is F.cross_entropy or (func is F.nll_loss and first._is_normalised):
                given.update(zip(("input", "target", *_CROSS_ENTROPY_OPTIONS), args, strict=False))
                given.pop("input")
                return first.cross_entropy(given.pop("target"), given)
            if func in _DEFERRED_FUNCTIONS:
                given.pop("input", None)
                given.pop("_stacklevel", None)
                return getattr(first, _DEFERRED_FUNCTIONS[func])(*args[1:], **given)
        name = getattr(func, "__name__", "an operation")
        args, given = pytree.tree_map_only(DeferredLogits, lambda found: found._full(name), (args, given))
        return func(*args, **given)


def _keeps_last_dim(parts: tuple[Any, ...], ndim: int) -> bool:
    """Whether an index leaves the last dim as it is."""
    whole = slice(None)
    if any(part is Ellipsis for part in parts):
        after = parts[[part is Ellipsis for part in parts].index(True) + 1 :]
        return not after or (isinstance(after[-1], slice) and after[-1] == whole)
    used = sum(_dims_of(part) for part in parts)
    last = parts[-1] if parts else whole
    return used < ndim or (used == ndim and isinstance(last, slice) and last == whole)


def _dims_of(part: Any) -> int:
    """How many dims one part of an index takes."""
    if part is None:
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool
    return part.ndim if is_mask else 1

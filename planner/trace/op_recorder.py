"""Records each operation of a running program: its sizes, FLOPs and bytes moved, and the bytes alive meanwhile.

In: a program that runs inside the dispatch mode `OpRecorder`. Out: a `Recording`.

The dispatch mode sees autograd, autocast, checkpointing and recomputation. It works on fake tensors too: a storage is
alive until its last reference goes, as in a real run. It does not see what no dispatch shows: workspaces inside one
operation, the allocator's rounding, and the memory of the process itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoplan.planner.trace.model_profile import IN_FUSED_LOSS, IN_RNN, Kind

aten = torch.ops.aten

# Operations that launch no kernel: they only make views, allocate, or read a property.
_WITHOUT_KERNEL = {
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._local_scalar_dense.default,
    aten.lift_fresh.default,
}
_ATTENTION_NAMES = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The shape, strides and type of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator overload and its arguments, with a TensorShape for each tensor: enough to run it again by itself."""

    function: Any
    arguments: Any
    options: Any


@dataclass(kw_only=True, slots=True)
class Operation:
    """One operation as it ran.

    `sizes` are m, n, k, batch of a matrix product; else zeros. `call` is how to run it again by itself; None for what
    cannot: it takes functions (FlexAttention, torch.cond), or sparse or nested tensors.
    """

    name: str
    kind: Kind
    phase: Literal["forward", "backward"]
    dtype: str
    flops: float
    bytes_moved: float
    output_bytes: float
    sizes: tuple[int, int, int, int]
    call: OpCall | None


@dataclass(kw_only=True, slots=True)
class Recording:
    """The record of one micro-step: its operations in order, and the peak of the live bytes in each of its parts.

    `peaks[part]` is (live bytes, live bytes without gradients). The parts of a micro-step, in order:

    - forward: up to the end of the last block's forward;
    - head: from there to the gradient of the last block's output;
    - backward: the backward of the last block;
    - middle: the backward of the blocks between;
    - tail: from the backward of the first block to the end.

    `unused_parameters`: the backward left a parameter that trains without a gradient.
    """

    operations: list[Operation] = field(default_factory=list)
    peaks: dict[str, tuple[float, float]] = field(default_factory=dict)
    saved_after_forward_bytes: float = 0.0
    block_saved_bytes: float = 0.0
    unused_parameters: bool = False


class OpRecorder(TorchDispatchMode):
    """The dispatch mode that fills a Recording. An operator that takes functions counts as one operation.

    Nothing compiles in it: the compiler would read this mode's own code, at the calls of torch.cond for instance.

    Attributes:
        recording: What was recorded so far.
        live_bytes: Bytes alive now.
        gradient_bytes: Those of them that are finished gradients.
        part: Of the micro-step, which runs now.
    """

    supports_higher_order_operators = True  # else torch raises an error for FlexAttention, torch.cond and the like

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.live_bytes = 0
        self.gradient_bytes = 0
        self.part = "forward"
        self._in_backward = False
        self._prefix = ""
        self._rnn_nodes: list[tuple[int, int]] = []  # ranges of sequence numbers of autograd's nodes
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._uncompiled = contextlib.ExitStack()

    def __enter__(self) -> OpRecorder:
        self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._uncompiled.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # guarding every dispatch against torch.compile costs a tenth of the trace; nothing compiles in it

    # Live bytes.

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts the storages of tensors as alive from now until they are freed, each storage once."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                continue
            key = storage._cdata
            if key in self._seen:
                continue
            size = storage.nbytes()
            self._seen[key] = weakref.ref(storage, functools.partial(self._freed, key, size))
            self.live_bytes += size

    def _freed(self, key: int, size: int, _: Any) -> None:
        if self._seen.pop(key, None) is not None:
            self.live_bytes -= size

    def update_peak(self) -> None:
        """Raises the peak of the current part to the bytes alive now, if these are more."""
        with_gradients, without = self.recording.peaks.get(self.part, (0.0, 0.0))
        now = float(self.live_bytes)
        self.recording.peaks[self.part] = (max(with_gradients, now), max(without, now - self.gradient_bytes))

    # Operations.

    def mark_fused_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose operations are recorded as those of the fused loss that lie between its products."""

        @functools.wraps(function)
        def marked(*args: Any) -> Any:
            self._prefix = IN_FUSED_LOSS
            try:
                return function(*args)
            finally:
                self._prefix = ""

        return marked

    def mark_rnns(self, model: nn.Module) -> None:
        """Hooks by which the operations of RNN, GRU and LSTM modules are recorded as such, in the backward too."""
        began: list[int] = []

        def enter(module: nn.Module, args: Any) -> None:
            self._prefix = IN_RNN
            began.append(torch._C._autograd._get_sequence_nr())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._prefix = ""
            self._rnn_nodes.append((began.pop(), torch._C._autograd._get_sequence_nr()))

        for module in model.modules():
            if isinstance(module, (nn.RNN, nn.GRU, nn.LSTM)):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def _is_of_rnn(self) -> bool:
        """Whether autograd runs the backward of what an RNN did."""
        node = torch._C._current_autograd_node() if self._in_backward and self._rnn_nodes else None
        return node is not None and any(low <= node._sequence_nr() < high for low, high in self._rnn_nodes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # more than half of all that is dispatched under fake tensors
            return args[0].device
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asking for a dtype or a layout
            return func(*args, **kwargs)
        if not self._in_backward and in_backward():
            self._in_backward = True
            self.recording.saved_after_forward_bytes = self.live_bytes
        out = func(*args, **kwargs)
        if _is_view(func):
            return out
        outputs = _tensors(out)
        allocated = [t for t in outputs if t.untyped_storage()._cdata not in self._seen]
        self.track(allocated)
        self.update_peak()
        if (allocated or _is_mutable(func)) and func not in _WITHOUT_KERNEL:
            self._record(func, args, kwargs, out, outputs, allocated)
        return out

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor], allocated: list[torch.Tensor]
    ) -> None:
        name = _name(func)
        if name.rstrip("_") in ("zero", "fill") and not outputs:
            return
        inputs = _tensors((args, kwargs))
        sizes = [t.numel() * t.element_size() for t in (*inputs, *outputs)]
        if name in ("embedding", "index_select", "gather"):  # reads only the rows that it takes, not the whole table
            sizes = 2 * sizes[len(inputs) :]
        elif name == "embedding_dense_backward":
            sizes.append(sizes[0])
        call = _call_of(func, args, kwargs)
        flops = 0.0
        kind: Kind = "memory"
        if call is not None and func._overloadpacket in flop_registry:
            flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
            kind = _kind_of(name)
        elif _is_attention(name):
            kind = "attention"
            flops = _attention_flops(name, inputs)
        self.recording.operations.append(
            Operation(
                name=(self._prefix or IN_RNN * self._is_of_rnn()) + name,
                kind=kind,
                phase="backward" if self._in_backward else "forward",
                dtype="float32" if kind == "memory" or not inputs else str(inputs[0].dtype).removeprefix("torch."),
                flops=flops,
                bytes_moved=float(sum(sizes)),
                output_bytes=float(sum(t.untyped_storage().nbytes() for t in allocated)),
                sizes=(0, 0, 0, 0) if call is None else _product_sizes(name, args),
                call=call,
            )
        )


@functools.cache
def _name(func: Any) -> str:
    return str(func.name() if _takes_functions(func) else func._schema.name).removeprefix("aten::")


@functools.cache
def _is_mutable(func: Any) -> bool:
    return _takes_functions(func) or bool(func._schema.is_mutable)  # what the functions do is not known


@functools.cache
def _is_view(func: Any) -> bool:
    return not _takes_functions(func) and bool(func.is_view)


def _takes_functions(func: Any) -> bool:
    return isinstance(func, HigherOrderOperator)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results; pytree's own walk takes three times as long.

    A sparse one has no memory of its own: the tensors of its indices and values are seen when they are made.
    """
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


class _WithoutSizesError(Exception):
    """An argument is a tensor whose sizes and strides are no plain numbers."""


def _call_of(func: Any, args: Any, kwargs: Any) -> OpCall | None:
    """How to run an operation again; None for what cannot run by itself."""
    try:
        return None if _takes_functions(func) else OpCall(func, _shapes(args), _shapes(kwargs))
    except _WithoutSizesError:
        return None


def _shapes(value: Any) -> Any:
    """Arguments with a TensorShape for each tensor.

    Raises:
        _WithoutSizesError: a tensor is sparse or nested, or a size is that of a nested one.
    """
    if isinstance(value, torch.SymInt):
        raise _WithoutSizesError
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            raise _WithoutSizesError
        return TensorShape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, dict):
        return {name: _shapes(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_shapes(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_attention(name: str) -> bool:
    return any(part in name for part in _ATTENTION_NAMES)


def _kind_of(name: str) -> Kind:
    if _is_attention(name):
        return "attention"
    return "convolution" if "conv" in name else "matmul"


def _product_sizes(name: str, args: Any) -> tuple[int, int, int, int]:
    """(m, n, k, batch) of a matrix product; zeros for other operations."""
    first = 1 if name in ("addmm", "baddbmm") else 0
    if name in ("mm", "_scaled_mm", "_int_mm", "addmm"):
        a, b = args[first : first + 2]
        return (a.shape[0], b.shape[1], a.shape[1], 1)
    if name in ("bmm", "baddbmm"):
        a, b = args[first : first + 2]
        return (a.shape[1], b.shape[2], a.shape[2], a.shape[0])
    return (0, 0, 0, 0)


def _attention_flops(name: str, inputs: list[torch.Tensor]) -> float:
    """FLOPs of attention: 4 b h s s' d in the forward, 2.5 times that in the backward.

    The first tensor of a backward is a gradient, except of FlexAttention's.

    Source: torch.utils.flop_counter, sdpa_flop_count and sdpa_backward_flop_count. They ignore a causal mask, and so
    does this function; the rates of the attention probe count FLOPs in the same way.
    """
    four_dims = [t for t in inputs if t.dim() == 4 and not t.is_nested]
    backward = "backward" in name
    if len(four_dims) < 3:
        return 0.0
    query, key = four_dims[1:3] if backward and "flex" not in name else four_dims[:2]
    b, h, s, d = query.shape
    return (10.0 if backward else 4.0) * b * h * s * key.shape[2] * d

"""Records what a program does, operation by operation: sizes, FLOPs, bytes moved, and the bytes alive at every moment.

It watches through a dispatch mode, so that autograd, autocast, checkpointing and their recomputation are all seen, and
works on fake tensors: a storage is alive until its last reference goes, as in a real run. What is left out is what no
dispatch shows: workspaces inside one operation, the allocator's rounding, the process itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoplan.planner.cost.profile import Kind

aten = torch.ops.aten

# operations that make no kernel: views, and what only asks or allocates
_FREE = {
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._local_scalar_dense.default,
    aten.lift_fresh.default,
}
_ATTENTION_WORDS = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor without its values, so that the operation can be run again on its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to run an operation again: the overload and its arguments, tensors as TensorShape."""

    function: Any
    arguments: Any
    options: Any


@dataclass(kw_only=True, slots=True)
class Operation:
    """One operation as it ran. Sizes m, n, k, batch are those of matrix products; zero elsewhere."""

    name: str
    kind: Kind
    phase: Literal["forward", "backward"]
    dtype: str
    flops: float
    bytes_moved: float
    output_bytes: float = 0.0
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    recipe: Recipe | None = None


@dataclass(kw_only=True, slots=True)
class Recording:
    """What one micro-step did: its operations in order, and the peaks of its parts in bytes.

    `peaks[part]` holds (alive, alive without gradients). Parts: forward; head, from the end of the last block to the
    gradient of its output; backward, that of the last block; middle; tail, from the backward of the first block on.
    """

    operations: list[Operation] = field(default_factory=list)
    peaks: dict[str, tuple[float, float]] = field(default_factory=dict)
    saved_after_forward: float = 0.0
    block_saved: list[float] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """The dispatch mode that fills a Recording."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.part = "forward"
        self.alive = 0
        self.gradient_bytes = 0
        self._in_backward = False
        self._seen: dict[int, weakref.ref[Any]] = {}

    # Bytes alive.

    def watch(self, tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> None:
        """Counts the storages of tensors as alive from now on, each once."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                continue
            key = storage._cdata
            if key in self._seen:
                continue
            size = storage.nbytes()
            self._seen[key] = weakref.ref(storage, self._forget(key, size))
            self.alive += size

    def _forget(self, key: int, size: int) -> Any:
        def forget(_: Any) -> None:
            if self._seen.pop(key, None) is not None:
                self.alive -= size

        return forget

    def note_peak(self) -> None:
        """Holds the bytes alive now against the peak of the current part."""
        alive, bare = self.recording.peaks.get(self.part, (0.0, 0.0))
        self.recording.peaks[self.part] = (max(alive, self.alive), max(bare, self.alive - self.gradient_bytes))

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asking for a device or a dtype
            return func(*args, **kwargs)
        if not self._in_backward and in_backward():
            self._in_backward = True
            self.recording.saved_after_forward = self.alive
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in self._seen]
        self.watch(fresh)
        self.note_peak()
        inplace = func._schema.is_mutable
        if (fresh or inplace) and func not in _FREE:
            self._record(func, args, kwargs, out, outputs, sum(t.untyped_storage().nbytes() for t in fresh))
        return out

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor], fresh_bytes: int
    ) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name.rstrip("_") in ("zero", "fill") and not outputs:
            return
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        moved = float(sum(t.numel() * t.element_size() for t in (*inputs, *outputs)))
        if name in ("embedding", "index_select", "gather"):  # reads the rows it takes, not the table
            moved = 2.0 * sum(t.numel() * t.element_size() for t in outputs)
        elif name in ("embedding_dense_backward",):
            moved += float(inputs[0].numel() * inputs[0].element_size())
        packet = func._overloadpacket
        flops = 0.0
        kind: Kind = "memory"
        sizes = (0, 0, 0, 0)
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            kind = _kind_of(name)
            sizes = _product_sizes(name, args)
        elif any(word in name for word in _ATTENTION_WORDS):
            kind = "attention"
            flops = _attention_flops(name, inputs)
        dtype = "float32" if kind == "memory" else str(inputs[0].dtype).removeprefix("torch.")
        phase: Literal["forward", "backward"] = "backward" if self._in_backward else "forward"
        self.recording.operations.append(
            Operation(
                name=name,
                kind=kind,
                phase=phase,
                dtype=dtype,
                flops=flops,
                bytes_moved=moved,
                output_bytes=float(fresh_bytes),
                sizes=sizes,
                recipe=Recipe(func, *pytree.tree_map(_shape_of, (args, kwargs))),
            )
        )


def _shape_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return TensorShape(tuple(value.shape), tuple(value.stride()), value.dtype)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _kind_of(name: str) -> Kind:
    if any(word in name for word in _ATTENTION_WORDS):
        return "attention"
    return "convolution" if "conv" in name else "matmul"


def _product_sizes(name: str, args: Any) -> tuple[int, int, int, int]:
    """(m, n, k, batch) of a matrix product; zeros for what has no such form."""
    if name in ("mm", "_scaled_mm", "_int_mm"):
        a, b = args[0], args[1]
        return (a.shape[0], b.shape[1], a.shape[1], 1)
    if name == "addmm":
        a, b = args[1], args[2]
        return (a.shape[0], b.shape[1], a.shape[1], 1)
    if name in ("bmm", "baddbmm"):
        a, b = (args[0], args[1]) if name == "bmm" else (args[1], args[2])
        return (a.shape[1], b.shape[2], a.shape[2], a.shape[0])
    return (0, 0, 0, 0)


def _attention_flops(name: str, inputs: list[torch.Tensor]) -> float:
    """Attention's products as torch's flop counter has them: 4 b h s s' d forward, 2.5 times that backward.

    Source: torch.utils.flop_counter, sdpa_flop_count and sdpa_backward_flop_count; they ignore a causal mask, and so
    does this: the probe's rates are brought to the same count.
    """
    four = [t for t in inputs if t.dim() == 4]
    backward = "backward" in name
    if len(four) < 3:
        return 0.0
    query, key = (four[1], four[2]) if backward else (four[0], four[1])
    b, h, s, d = query.shape
    return (10.0 if backward else 4.0) * b * h * s * key.shape[2] * d

"""Records what a program does, operation by operation: sizes, FLOPs, bytes moved, and the bytes alive at every moment.

It watches through a dispatch mode, so that autograd, autocast, checkpointing and their recomputation are all seen, and
works on fake tensors: a storage is alive until its last reference goes, as in a real run. What is left out is what no
dispatch shows: workspaces inside one operation, the allocator's rounding, the process itself.

One run can stand for several micro-batches: where the samples that run are a prime that divides no other size, what is
divisible by it grows with the samples, and all else does not (`Samples`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoplan.planner.trace.model_profile import Kind

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


_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class Samples:
    """The micro-batch that runs, and those whose figures are wanted.

    With `at == (run,)` a figure is what it is. Else `run` is a prime that divides no size but those that grow with the
    samples: a figure that it divides is taken to be proportional to them, any other to be fixed.
    """

    run: int
    at: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether what runs is what is wanted."""
        return self.at == (self.run,)

    def scaled(self, figure: float, samples: int) -> float:
        """A size, a count or FLOPs as they are at so many samples."""
        return figure * samples / self.run if not self.exact and figure % self.run == 0 else figure


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


@dataclass(frozen=True, slots=True)
class Call:
    """An operation's overload and arguments as they ran, and the micro-batch that is wanted."""

    function: Any
    arguments: Any
    options: Any
    batch: Samples
    samples: int

    def recipe(self) -> Recipe:
        """How to run it again at the micro-batch that is wanted."""
        return Recipe(self.function, self._brought(self.arguments), self._brought(self.options))

    def _brought(self, value: Any) -> Any:
        if self.batch.exact:
            return value
        if isinstance(value, TensorShape):
            return TensorShape(self._brought(value.shape), self._brought(value.stride), value.dtype)
        if isinstance(value, dict):
            return {name: self._brought(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [self._brought(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, int) and not isinstance(value, bool):
            return int(self.batch.scaled(value, self.samples))
        return value


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
    call: Call | None = None

    @property
    def figures(self) -> tuple[Any, ...]:
        """All but how it was called."""
        return (
            *(self.name, self.kind, self.phase, self.dtype),
            *(self.flops, self.bytes_moved, self.output_bytes, self.sizes),
        )

    @property
    def recipe(self) -> Recipe | None:
        """How to run it again; made when it is asked for, since few of the operations are."""
        return self.call.recipe() if self.call is not None else None


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

    def same_as(self, other: Recording) -> bool:
        """Whether two recordings are of the same operations on the same shapes, with the same bytes alive."""
        mine, theirs = ((r.peaks, r.saved_after_forward, r.block_saved) for r in (self, other))
        return mine == theirs and [(o.figures, o.recipe) for o in self.operations] == [
            (o.figures, o.recipe) for o in other.operations
        ]


class Recorder(TorchDispatchMode):
    """The dispatch mode that fills a Recording for each of the micro-batches that are wanted."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples
        self.recordings = tuple(Recording() for _ in samples.at)
        self.part = "forward"
        self.gradient_bytes = 0
        self._fixed = 0
        self._growing = 0  # at samples.run
        self._in_backward = False
        self._seen: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # guarding every dispatch against torch.compile costs a tenth of the trace; nothing compiles in it

    # Bytes alive.

    @property
    def alive(self) -> tuple[float, ...]:
        """Bytes alive now, at each of the micro-batches."""
        growing = self._growing / self.samples.run
        return tuple(self._fixed + growing * samples for samples in self.samples.at)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
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
            grows = not self.samples.exact and size % self.samples.run == 0
            self._seen[key] = weakref.ref(storage, self._forget(key, size, grows))
            self._count(size, grows)

    def _count(self, size: int, grows: bool) -> None:
        if grows:
            self._growing += size
        else:
            self._fixed += size

    def _forget(self, key: int, size: int, grows: bool) -> Any:
        def forget(_: Any) -> None:
            if self._seen.pop(key, None) is not None:
                self._count(-size, grows)

        return forget

    def note_peak(self) -> None:
        """Holds the bytes alive now against the peak of the current part."""
        for recording, now in zip(self.recordings, self.alive, strict=True):
            alive, bare = recording.peaks.get(self.part, (0.0, 0.0))
            recording.peaks[self.part] = (max(alive, now), max(bare, now - self.gradient_bytes))

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # more than half of all that is dispatched under fake tensors
            return args[0].device
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asking for a dtype or a layout
            return func(*args, **kwargs)
        if not self._in_backward and in_backward():
            self._in_backward = True
            for recording, now in zip(self.recordings, self.alive, strict=True):
                recording.saved_after_forward = now
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        outputs = _tensors(out)
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in self._seen]
        self.watch(fresh)
        self.note_peak()
        if (fresh or _is_mutable(func)) and func not in _FREE:
            self._record(func, args, kwargs, out, outputs, fresh)
        return out

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor], fresh: list[torch.Tensor]
    ) -> None:
        name = _name(func)
        if name.rstrip("_") in ("zero", "fill") and not outputs:
            return
        inputs = _tensors((args, kwargs))
        sizes = [t.numel() * t.element_size() for t in (*inputs, *outputs)]
        if name in ("embedding", "index_select", "gather"):  # reads the rows it takes, not the table
            sizes = 2 * sizes[len(inputs) :]
        elif name in ("embedding_dense_backward",):
            sizes.append(sizes[0])
        packet = func._overloadpacket
        flops = 0.0
        kind: Kind = "memory"
        product = (0, 0, 0, 0)
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            kind = _kind_of(name)
            product = _product_sizes(name, args)
        elif any(word in name for word in _ATTENTION_WORDS):
            kind = "attention"
            flops = _attention_flops(name, inputs)
        dtype = "float32" if kind == "memory" else str(inputs[0].dtype).removeprefix("torch.")
        phase: Literal["forward", "backward"] = "backward" if self._in_backward else "forward"
        recorded = _shapes(args), _shapes(kwargs)
        made = [t.untyped_storage().nbytes() for t in fresh]
        scaled = self.samples.scaled
        for recording, samples in zip(self.recordings, self.samples.at, strict=True):
            m, n, k, batch = (int(scaled(size, samples)) for size in product)
            recording.operations.append(
                Operation(
                    name=name,
                    kind=kind,
                    phase=phase,
                    dtype=dtype,
                    flops=scaled(flops, samples),
                    bytes_moved=float(sum(scaled(size, samples) for size in sizes)),
                    output_bytes=float(sum(scaled(size, samples) for size in made)),
                    sizes=(m, n, k, batch),
                    call=Call(func, *recorded, self.samples, samples),
                )
            )


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


@functools.cache
def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results; pytree's own walk takes three times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _shapes(value: Any) -> Any:
    """Arguments with a TensorShape for each tensor."""
    if isinstance(value, torch.Tensor):
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

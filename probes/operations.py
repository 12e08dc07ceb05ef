"""Operations that are timed: matrix products, attention, memory, and the way between the host and a GPU.

Products have shapes (m, n, k): `x[m, k]` times the transpose of `w[n, k]`, as nn.Linear has it, 2mnk flop forward.

- "matmul": the forward product with operands already in the dtype. Its best rate is the device's peak. In "float8" it
  is torch._scaled_mm of e4m3 operands with one scale each and a result in bfloat16, as fp8 training has it; on GPUs
  that have it, for sizes that are multiples of 16.
- "linear_train": forward and backward (6mnk flop) of a Linear with float32 weights, under autocast for
  bfloat16 and float16. This is what mixed-precision training runs. On a CPU without bfloat16 units it can be
  10 to 20 times slower than float32, with AMX several times faster: only a measurement shows which.
- "matmul_threads": (m, n, k, threads), float32 on CPU.

Attention has shapes (batch, heads, sequence, head size); causal, forward and backward. The work is counted as
6 b h s^2 d flop: two products of 2 b h s^2 d forward, twice that backward, and half of it all because of the causal
mask. What a kernel recomputes is not counted, so that the two kinds compare.

- "sdpa_train": `scaled_dot_product_attention` with the backend that torch picks.
- "eager_attention_train": softmax(q k^T / sqrt(d)) v, the s x s matrix written out.

Of memory, as in STREAM, bytes read and bytes written both count; buffers are larger than the caches.

- "copy": a -> b, 2 x 4 x n bytes. "add": c = a + s b, 3 x 4 x n bytes. float32, shape (n,).
- "first_touch": a new buffer is allocated and written once, so that every page of it faults; CPU only.
- "host_to_device_pinned", "host_to_device_pageable" and back: shape (bytes,); each byte counts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from autoplan.probes.timing import TORCH_DTYPES, Operation, filled

Shape = tuple[int, int, int]
AttentionShape = tuple[int, int, int, int]

# squares for the peak; then tall and thin ones as in training: (tokens, out, in) of small transformer blocks, a
# vocabulary head, a weight gradient (long k)
CPU_SHAPES: tuple[Shape, ...] = (
    (256, 256, 256),
    (64, 768, 768),
    (1024, 1024, 1024),
    (1024, 2304, 768),
    (1024, 768, 3072),
    (3072, 768, 1024),
    (128, 50257, 768),
    (2048, 2048, 2048),
)
CUDA_SHAPES: tuple[Shape, ...] = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (128, 4096, 4096),
    (2048, 2048, 2048),
    (8192, 768, 768),
    (8192, 2304, 768),
    (4096, 4096, 4096),
    (3072, 768, 16384),
    (8192, 4096, 4096),
    (8192, 50257, 768),
    (8192, 50304, 768),
    (4096, 14336, 4096),
    (8192, 8192, 8192),
)
CPU_TRAIN_SHAPES: tuple[Shape, ...] = ((512, 768, 768), (1024, 3072, 768))
CUDA_TRAIN_SHAPES: tuple[Shape, ...] = ((8192, 3072, 768), (8192, 4096, 4096))
THREAD_SHAPE: Shape = (1024, 1024, 1024)
# of the first second; three of them tell the terms of a product apart
CPU_BRIEF_SHAPES: tuple[Shape, ...] = ((256, 256, 256), (64, 768, 768), (512, 768, 768))
# 50,257 is not aligned: such a product may take seven times as long as one of 50,304; the last reaches the peak
CUDA_BRIEF_SHAPES: tuple[Shape, ...] = ((1024, 1024, 1024), (8192, 768, 768), (8192, 50257, 768), (4096, 4096, 4096))
CPU_BRIEF_TRAIN_SHAPE: Shape = (128, 768, 768)
# A dtype that trains a linear layer at less than this share of float32's rate is one that nobody trains in here.
LOSING_SHARE = 0.5
CPU_ATTENTION_SHAPES: tuple[AttentionShape, ...] = ((1, 12, 256, 64), (1, 12, 1024, 64))
CUDA_ATTENTION_SHAPES: tuple[AttentionShape, ...] = ((8, 12, 1024, 64), (1, 32, 4096, 128))

SMALLEST_BUFFER_BYTES = 128 << 20
LARGEST_BUFFER_BYTES = 256 << 20
FIRST_TOUCH_BYTES = 64 << 20
TRANSFER_SIZES_BYTES = (1 << 20, 256 << 20)


# Matrix products.


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The dtypes worth measuring on that kind of device; tf32 from compute capability 8.0 on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ("float32", "tf32", "bfloat16", "float16")
    return ("float32", "bfloat16", "float16")


def in_order(shapes: Sequence[Shape], device: torch.device) -> list[Shape]:
    """Shapes in the order in which they are measured.

    On a CPU the smallest come first: a dtype without units of its own shows there, and its large ones are left out. A
    GPU does the largest in milliseconds, and they alone show the peak; where the time ends, small ones are missing.
    """
    return sorted(shapes, key=math.prod, reverse=device.type == "cuda")


def matmul_operations(device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]) -> Iterator[Operation]:
    """The forward product `x @ w.T` for each dtype and shape; smallest first on a CPU, largest first on a GPU."""
    return (matmul(device, dtype, shape) for shape in in_order(shapes, device) for dtype in dtypes)


def float8_operations(device: torch.device, shapes: Sequence[Shape]) -> Iterator[Operation]:
    """The forward product in 8 bits for each shape that it takes; none where the device or torch has no such product.

    Compute capability 8.9 and above (Ada, Hopper): torch's own check of torch._scaled_mm.
    """
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch, "_scaled_mm"):
        return iter(())
    if torch.cuda.get_device_capability(device) < (8, 9):
        return iter(())
    return matmul_operations(device, ("float8",), [shape for shape in shapes if all(size % 16 == 0 for size in shape)])


def thread_operations(device: torch.device, counts: Sequence[int]) -> Iterator[Operation]:
    """The same float32 product with different numbers of threads (CPU)."""
    product = matmul(device, "float32", THREAD_SHAPE)
    for count in counts:
        yield dataclasses.replace(product, kind="matmul_threads", shape=(*THREAD_SHAPE, count), threads=count)


def matmul(device: torch.device, dtype: str, shape: Shape) -> Operation:
    """One forward product, float8 among the dtypes."""
    m, n, k = shape

    def build() -> Callable[[], object]:
        own = torch.bfloat16 if dtype == "float8" else TORCH_DTYPES[dtype]
        x, w = (filled((rows, k), own, device) for rows in (m, n))
        if dtype != "float8":
            return lambda: F.linear(x, w)
        x8, w8, one = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
        return lambda: torch._scaled_mm(x8, w8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Operation(
        kind="matmul",
        dtype=dtype,
        shape=shape,
        work=2.0 * m * n * k,
        unit="flop/s",
        # twice: the tensors are made in float32 first on a GPU
        memory_bytes=8 * (m * k + n * k + m * n),
        build=build,
    )


def linear_train_operations(
    device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]
) -> Iterator[Operation]:
    """Forward and backward of a Linear with float32 weights, under autocast where the dtype asks for it."""
    for m, n, k in in_order(shapes, device):
        for dtype in dtypes:
            yield Operation(
                kind="linear_train",
                dtype=dtype,
                shape=(m, n, k),
                work=6.0 * m * n * k,
                unit="flop/s",
                memory_bytes=8 * (m * n + 2 * m * k + 2 * n * k),
                build=partial(_linear_train, device, dtype, (m, n, k)),
            )


def _linear_train(device: torch.device, dtype: str, shape: Shape) -> Callable[[], object]:
    m, n, k = shape
    mixed = dtype in ("bfloat16", "float16")
    x, w = (filled((rows, k), torch.float32, device).requires_grad_() for rows in (m, n))
    gradient = filled((m, n), TORCH_DTYPES[dtype], device)

    def call() -> object:
        with torch.autocast(device.type, dtype=TORCH_DTYPES[dtype] if mixed else None, enabled=mixed):
            y = F.linear(x, w)
        return torch.autograd.grad(y, (x, w), gradient)

    return call


# Attention.


def attention_operations(
    device: torch.device, dtypes: Sequence[str], shapes: Sequence[AttentionShape]
) -> Iterator[Operation]:
    """Both kinds for each dtype and shape, smallest first."""
    for b, h, s, d in sorted(shapes, key=lambda shape: shape[2] * math.prod(shape)):
        for dtype in dtypes:
            for kind in ("sdpa_train", "eager_attention_train"):
                eager = kind == "eager_attention_train"
                yield Operation(
                    kind=kind,
                    dtype=dtype,
                    shape=(b, h, s, d),
                    work=6.0 * b * h * s * s * d,
                    unit="flop/s",
                    # scores, mask sum, softmax and their gradients, in float32 at worst
                    memory_bytes=4 * (8 * b * h * s * d + (6 * b * h * s * s if eager else 0)),
                    build=partial(_attention, device, dtype, (b, h, s, d), eager),
                )


def _attention(device: torch.device, dtype: str, shape: AttentionShape, eager: bool) -> Callable[[], object]:
    q, k, v = (filled(shape, TORCH_DTYPES[dtype], device).requires_grad_() for _ in range(3))
    gradient = filled(shape, TORCH_DTYPES[dtype], device)
    mask = torch.full((shape[2], shape[2]), float("-inf"), device=device).triu(1).to(TORCH_DTYPES[dtype])

    def call() -> object:
        if eager:
            out = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(shape[3]) + mask, dim=-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), gradient)

    return call


# Memory.


def bandwidth_operations(device: torch.device, *, cache_bytes: int | None) -> Iterator[Operation]:
    """Copy and add over buffers that do not stay in the cache.

    Args:
        device: The device to measure.
        cache_bytes: Its last-level cache. Buffers are four times as large, within 128 to 256 MiB each (a
            virtual machine often reports the cache of the whole host).
    """
    wanted = 4 * cache_bytes if cache_bytes else SMALLEST_BUFFER_BYTES
    count = min(max(wanted, SMALLEST_BUFFER_BYTES), LARGEST_BUFFER_BYTES) // 4

    def build_copy() -> Callable[[], object]:
        a, b = (filled((count,), torch.float32, device) for _ in range(2))
        return lambda: b.copy_(a)

    def build_add() -> Callable[[], object]:
        a, b, c = (filled((count,), torch.float32, device) for _ in range(3))
        return lambda: torch.add(a, b, alpha=0.5, out=c)

    if device.type == "cpu":
        # past 32 MiB glibc maps every allocation anew (mallopt(3), M_MMAP_THRESHOLD)
        fresh = FIRST_TOUCH_BYTES // 4
        yield Operation(
            kind="first_touch",
            dtype="float32",
            shape=(fresh,),
            work=float(FIRST_TOUCH_BYTES),
            unit="bytes/s",
            memory_bytes=FIRST_TOUCH_BYTES,
            build=lambda: lambda: torch.empty(fresh, dtype=torch.float32).fill_(1.0),
        )
    for kind, build, buffers in (("copy", build_copy, 2), ("add", build_add, 3)):
        yield Operation(
            kind=kind,
            dtype="float32",
            shape=(count,),
            work=4.0 * count * buffers,
            unit="bytes/s",
            memory_bytes=4 * count * (buffers + 1),
            build=build,
        )


def transfer_operations(device: torch.device) -> Iterator[Operation]:
    """Host to GPU and back, from pinned and from pageable memory; nothing on a CPU."""
    if device.type != "cuda":
        return
    for size in TRANSFER_SIZES_BYTES:
        for pinned in (True, False):
            for way in ("host_to_device", "device_to_host"):
                yield Operation(
                    kind=f"{way}_{'pinned' if pinned else 'pageable'}",
                    dtype="uint8",
                    shape=(size,),
                    work=float(size),
                    unit="bytes/s",
                    memory_bytes=size,
                    build=partial(_transfer, device, size, pinned, way),
                )


def _transfer(device: torch.device, size: int, pinned: bool, way: str) -> Callable[[], object]:
    # zeros, not empty: untouched pages of the host are not there yet
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    target, source = (there, host) if way == "host_to_device" else (host, there)
    return lambda: target.copy_(source, non_blocking=pinned)

"""FLOP/s of matrix products: per dtype, per size, and on the path that a training step takes.

Shapes are (m, n, k): `x[m, k]` times the transpose of `w[n, k]`, as nn.Linear has it, 2mnk flop forward.

- "matmul": the forward product with operands already in the dtype. Its best rate is the device's peak. In "float8" it
  is torch._scaled_mm of e4m3 operands with one scale each and a result in bfloat16, as fp8 training has it; on GPUs
  that have it, for sizes that are multiples of 16.
- "linear_train": forward and backward (6mnk flop) of a Linear with float32 weights, under autocast for
  bfloat16 and float16. This is what mixed-precision training runs. On a CPU without bfloat16 units it can be
  10 to 20 times slower than float32, with AMX several times faster: only a measurement shows which.
- "matmul_threads": (m, n, k, threads), float32 on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from autoplan.probes.timing import TORCH_DTYPES, Operation, filled

Shape = tuple[int, int, int]

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
CUDA_BRIEF_SHAPES: tuple[Shape, ...] = ((1024, 1024, 1024), (8192, 768, 768), (4096, 4096, 4096))
CPU_BRIEF_TRAIN_SHAPE: Shape = (128, 768, 768)
# A dtype that trains a linear layer at less than this share of float32's rate is one that nobody trains in here.
LOSING_SHARE = 0.5


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The dtypes worth measuring on that kind of device; tf32 from compute capability 8.0 on."""
    if device.type != "cuda":
        return ("float32", "bfloat16", "float16")
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return ("float32", "tf32", "bfloat16", "float16")
    return ("float32", "bfloat16", "float16")


def float8_operations(device: torch.device, shapes: Sequence[Shape]) -> Iterator[Operation]:
    """The forward product in 8 bits for each shape that it takes; none where the device or torch has no such product.

    Compute capability 8.9 and above (Ada, Hopper): torch's own check of torch._scaled_mm.
    """
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch, "_scaled_mm"):
        return
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    for shape in in_order(shapes, device):
        if all(size % 16 == 0 for size in shape):
            yield _float8_matmul(device, shape)


def _float8_matmul(device: torch.device, shape: Shape) -> Operation:
    m, n, k = shape

    def build() -> Callable[[], object]:
        x, w = (filled((rows, k), torch.bfloat16, device).to(torch.float8_e4m3fn) for rows in (m, n))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Operation(
        kind="matmul",
        dtype="float8",
        shape=shape,
        work=2.0 * m * n * k,
        unit="flop/s",
        memory_bytes=8 * (m * k + n * k + m * n),
        build=build,
    )


def in_order(shapes: Sequence[Shape], device: torch.device) -> list[Shape]:
    """Shapes in the order in which they are measured.

    On a CPU the smallest come first: a dtype without units of its own shows there, and its large ones are left out. A
    GPU does the largest in milliseconds, and they alone show the peak; where the time ends, small ones are missing.
    """
    return sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2], reverse=device.type == "cuda")


def matmul_operations(device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]) -> Iterator[Operation]:
    """The forward product `x @ w.T` for each dtype and shape; smallest first on a CPU, largest first on a GPU."""
    for shape in in_order(shapes, device):
        for dtype in dtypes:
            yield _matmul(device, dtype, shape)


def linear_train_operations(
    device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]
) -> Iterator[Operation]:
    """Forward and backward of a Linear with float32 weights, under autocast where the dtype asks for it."""
    for shape in in_order(shapes, device):
        for dtype in dtypes:
            m, n, k = shape
            yield Operation(
                kind="linear_train",
                dtype=dtype,
                shape=shape,
                work=6.0 * m * n * k,
                unit="flop/s",
                memory_bytes=8 * (m * n + 2 * m * k + 2 * n * k),
                build=_linear_train_builder(device, dtype, shape),
            )


def thread_operations(device: torch.device, counts: Sequence[int]) -> Iterator[Operation]:
    """The same float32 product with different numbers of threads (CPU)."""
    for count in counts:
        operation = _matmul(device, "float32", THREAD_SHAPE)
        yield Operation(
            kind="matmul_threads",
            dtype="float32",
            shape=(*THREAD_SHAPE, count),
            work=operation.work,
            unit=operation.unit,
            memory_bytes=operation.memory_bytes,
            build=operation.build,
            threads=count,
        )


def _matmul(device: torch.device, dtype: str, shape: Shape) -> Operation:
    m, n, k = shape
    torch_dtype = TORCH_DTYPES[dtype]

    def build() -> Callable[[], object]:
        x, w = filled((m, k), torch_dtype, device), filled((n, k), torch_dtype, device)
        return lambda: F.linear(x, w)

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


def _linear_train_builder(device: torch.device, dtype: str, shape: Shape) -> Callable[[], Callable[[], object]]:
    m, n, k = shape
    mixed = dtype in ("bfloat16", "float16")

    def build() -> Callable[[], object]:
        x = filled((m, k), torch.float32, device).requires_grad_()
        w = filled((n, k), torch.float32, device).requires_grad_()
        gradient = filled((m, n), TORCH_DTYPES[dtype] if mixed else torch.float32, device)

        def call() -> object:
            with torch.autocast(device.type, dtype=TORCH_DTYPES[dtype] if mixed else None, enabled=mixed):
                y = F.linear(x, w)
            return torch.autograd.grad(y, (x, w), gradient)

        return call

    return build

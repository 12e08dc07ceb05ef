"""From an exception in a trial to an outcome: the one list of exception types, and of texts where no type says it.

In: the qualified names of an exception's classes, its text and its traceback. Out: an `Outcome` and its detail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from autoplan.planner.records import Outcome

OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")

# Patterns of texts of a plain RuntimeError that mean out of memory, and whose it was. cuDNN has a status for each
# memory since 9.0 (cudnn_graph.h: CUDNN_STATUS_ALLOC_FAILED is now an older name of the host's); newer NCCL writes the
# number of the error too (checks.h); Triton's text is that of its driver (backends/nvidia/driver.c).
OUT_OF_MEMORY_TEXTS = (
    (r"DefaultCPUAllocator: can't allocate memory", "host"),
    (r"DefaultCPUAllocator: not enough memory", "host"),
    (r"Cannot allocate memory", "host"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "device"),
    (r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "device"),
    (r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host"),
    (r"CUDNN_STATUS_ALLOC_FAILED", "host"),
    (r"CUDA out of memory", "device"),
    (r"CUDA error: out of memory", "device"),
    (r"Triton Error \[CUDA\]: out of memory", "device"),
    (r"ncclUnhandledCudaError: Call to CUDA function failed. 'out of memory'", "device"),
    (r"Cuda failure (\d+ )?'out of memory'", "device"),
)

# The driver's own text, which a call says as well that takes page-locked memory of the host (cudaHostAlloc); torch's
# allocator of the device says "CUDA out of memory". Which of them it was is known by names where it was raised.
_DRIVERS_TEXT = "CUDA error: out of memory"
_PINNING = ("pin_memory", "pin memory thread", "CachingHostAllocator")

WORKLOAD = "workload"
"""The detail of a trial that crashed on a WorkloadError: the workload cannot be used under any configuration."""

# Types that mean: this build of torch, this device or this model does not support the configuration.
UNSUPPORTED_TYPES = (
    "NotImplementedError",
    "autoplan.errors.ConfigError",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.exc.BackendCompilerFailed",
    "torch._inductor.exc.InductorError",
)

# Texts of a plain RuntimeError that mean the same: torch's, where no allowed kernel of attention takes the call.
UNSUPPORTED_TEXTS = ("No available kernel", "No viable backend for scaled_dot_product_attention")


def classify_exception(type_names: Iterable[str], message: str, traceback: str = "") -> tuple[Outcome, str | None]:
    """Outcome and detail of an exception, by the qualified names of its class and bases, then by known texts.

    Memory is checked first, because the compiler wraps a failed allocation into its own error.

    Args:
        type_names: Qualified names of its class and bases.
        message: Its text.
        traceback: As Python prints it; its last two calls tell page-locked memory of the host from the device's.
    """
    names = tuple(type_names)
    for pattern, where in OUT_OF_MEMORY_TEXTS:
        if re.search(pattern, message):
            pins = _DRIVERS_TEXT in message and any(name in message + _last_calls(traceback) for name in _PINNING)
            return Outcome.OUT_OF_MEMORY, "host" if pins else where
    if _any_of(names, OUT_OF_MEMORY_TYPES):
        return Outcome.OUT_OF_MEMORY, "host" if "MemoryError" in _plain(names) else "device"
    if _any_of(names, UNSUPPORTED_TYPES) or any(text in message for text in UNSUPPORTED_TEXTS):
        return Outcome.UNSUPPORTED, None
    return Outcome.CRASHED, WORKLOAD if "autoplan.errors.WorkloadError" in names else None


def _last_calls(traceback: str) -> str:
    """The last two calls of a traceback; two, since torch's functions may pass through one of its own."""
    return "".join(re.split(r'^ +File "', traceback, flags=re.MULTILINE)[1:][-2:])


def _plain(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _any_of(names: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    plain = _plain(names)
    return any(name in names if "." in name else name in plain for name in wanted)

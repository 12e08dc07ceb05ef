"""From an exception in a trial to an outcome: the one list of exception types, and of texts where no type says it.

In: the qualified names of an exception's classes, and its text. Out: an `Outcome` and its detail.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.planner.records import Outcome

OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")

# Texts of a plain RuntimeError that mean out of memory, and whose memory it was.
OUT_OF_MEMORY_TEXTS = (
    ("DefaultCPUAllocator: can't allocate memory", "host"),
    ("DefaultCPUAllocator: not enough memory", "host"),
    ("Cannot allocate memory", "host"),
    ("CUBLAS_STATUS_ALLOC_FAILED", "device"),
    ("CUDNN_STATUS_ALLOC_FAILED", "device"),
    ("CUDA out of memory", "device"),
    ("CUDA error: out of memory", "device"),
    ("ncclUnhandledCudaError: Call to CUDA function failed. 'out of memory'", "device"),
    ("NCCL WARN Cuda failure 'out of memory'", "device"),
)

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


def classify_exception(type_names: Iterable[str], message: str) -> tuple[Outcome, str | None]:
    """Outcome and detail of an exception, by the qualified names of its class and bases, then by known texts.

    Memory is checked first, because the compiler wraps a failed allocation into its own error.
    """
    names = tuple(type_names)
    for text, where in OUT_OF_MEMORY_TEXTS:
        if text in message:
            return Outcome.OUT_OF_MEMORY, where
    if _any_of(names, OUT_OF_MEMORY_TYPES):
        return Outcome.OUT_OF_MEMORY, "host" if "MemoryError" in _plain(names) else "device"
    if _any_of(names, UNSUPPORTED_TYPES):
        return Outcome.UNSUPPORTED, None
    return Outcome.CRASHED, WORKLOAD if "autoplan.errors.WorkloadError" in names else None


def _plain(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _any_of(names: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    plain = _plain(names)
    return any(name in names if "." in name else name in plain for name in wanted)

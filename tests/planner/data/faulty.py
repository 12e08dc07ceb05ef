"""A workload whose loss misbehaves at some micro-batches, each in its own way. Handed to trials as file.py:function."""

import ctypes
import dataclasses
import os
import signal
import sys
import time

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.workload import LossSum, Workload

GLOBAL_BATCH = 384
HELD = []


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def eat_memory():
    while True:
        HELD.append(torch.ones(8 << 20))
        time.sleep(0.005)


def fail(kind, text):
    raise kind(text)


FAULTS = {
    3: eat_memory,
    4: lambda: fail(NotImplementedError, "planted: no such kernel"),
    8: hang,
    12: lambda: fail(RuntimeError, "planted"),
    16: lambda: os._exit(3),
    24: lambda: fail(WorkloadError, "planted: the loss is broken"),
    32: lambda: float("nan"),
    48: lambda: fail(RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    64: lambda: os._exit(0),
    96: lambda: sys.exit(3),
    192: lambda: os.kill(os.getpid(), signal.SIGKILL),
    384: lambda: ctypes.string_at(0),
}


def make(faults: bool = True, width: int = 64) -> Workload:
    """An MLP classifier; with `faults` only micro-batches of 1, 2, 6 and 128 are sound."""

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))

    def make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(num_samples, 32, generator=generator)
        return {"inputs": inputs, "labels": inputs[:, :8].argmax(1)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        factor = 1.0
        is_real = type(batch["labels"]) is torch.Tensor  # the trace looks at fake ones
        if faults and is_real and batch["labels"].shape[0] in FAULTS:
            factor = FAULTS[batch["labels"].shape[0]]() or 1.0
        total = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")
        return LossSum(total * factor, batch["labels"].numel())

    return Workload(
        name="faulty" if faults else "mlp",
        build_model=build_model,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=GLOBAL_BATCH,
        max_grad_norm=1.0,
    )


def make_sound() -> Workload:
    """The same without faults."""
    return make(faults=False)


def make_linear() -> Workload:
    """One layer without faults."""
    return dataclasses.replace(make_sound(), build_model=lambda: nn.Linear(32, 8))


def make_wide() -> Workload:
    """A wider one without faults, whose micro-steps take milliseconds."""
    return make(faults=False, width=1536)


def make_slow() -> Workload:
    """The sound one; it lingers in what LINGER_IN names (init, build, loss), so that a trial's phase is seen."""
    linger = os.environ.get("LINGER_IN")
    if linger == "init":
        time.sleep(1.0)
    sound = make_sound()

    def build_model() -> nn.Module:
        if linger == "build":
            time.sleep(1.0)
        return sound.build_model()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        if linger == "loss":
            time.sleep(0.05)
        return sound.loss(model, batch)

    return dataclasses.replace(sound, build_model=build_model, loss=loss)


def make_expensive() -> Workload:
    """One layer without faults, whose micro-steps take so long that parts are timed (request.EXPENSIVE_S)."""
    linear = make_linear()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        began = time.thread_time()
        while time.thread_time() - began < 0.55:
            pass
        return linear.loss(model, batch)

    return dataclasses.replace(linear, loss=loss)

"""Workloads whose functions take memory or time without end, each in one of its functions. None takes over 1.5 GiB."""

import os
import subprocess
import time

import torch
from torch import nn

from autoplan.strategies.workloads.workload import LossSum, Workload

MOST_BYTES = 1536 << 20
HELD = []


def eat_memory():
    """Takes memory in steps, and notes in RSS_FILE how much it has; ends by itself at MOST_BYTES."""
    resident = 0
    while resident < MOST_BYTES:
        HELD.append(torch.ones(2 << 20, device="cpu"))
        with open("/proc/self/status") as file:
            resident = next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
        if "RSS_FILE" in os.environ:
            with open(os.environ["RSS_FILE"] + ".new", "w") as file:
                file.write(str(resident))
            os.replace(os.environ["RSS_FILE"] + ".new", os.environ["RSS_FILE"])  # it may be killed at any time
        time.sleep(0.01)


def start_child():
    """A child in a session of its own, which keeps the rank's output open."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def wait_for_ever():
    start_child()
    while True:
        time.sleep(0.1)


def is_real(batch):
    return type(batch["x"]) is torch.Tensor  # the trace looks at fake ones


def make(**changed):
    parts = {
        "name": "unbounded",
        "build_model": lambda: nn.Linear(8, 8),
        "make_batch": lambda count, index: {"x": torch.rand(count, 8)},
        "loss": lambda model, batch: LossSum(model(batch["x"]).square().sum(), len(batch["x"])),
        "build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "global_batch": 8,
    }
    return Workload(**(parts | changed))


def sound():
    return make()


def greedy_loss():
    def loss(model, batch):
        if is_real(batch):
            eat_memory()
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))

    return make(loss=loss)


def greedy_check():
    """Greedy on a number of samples that is no micro-batch, as only the plain run of the parity check takes it."""

    def loss(model, batch):
        if is_real(batch) and len(batch["x"]) not in (1, 2, 4, 8):
            eat_memory()
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))

    return make(loss=loss)


def greedy_model():
    def build_model():
        eat_memory()
        return nn.Linear(8, 8)

    return make(build_model=build_model)


def one_large_tensor():
    def build_model():
        HELD.append(torch.empty(4 << 30, device="cpu"))  # 16 GiB, refused before any of it is touched
        return nn.Linear(8, 8)

    return make(build_model=build_model)


def full_device():
    def build_model():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")  # what torch says of a full GPU

    return make(build_model=build_model)


def hanging_load():
    wait_for_ever()


def hanging_data():
    return make(make_batch=lambda count, index: wait_for_ever())


def hanging_later_data():
    def make_batch(count, index):
        if index > 0:
            wait_for_ever()
        return {"x": torch.rand(count, 8)}

    return make(make_batch=make_batch)


def hanging_model():
    return make(build_model=wait_for_ever)


def model_with_a_child():
    def build_model():
        start_child()
        return nn.Linear(8, 8)

    return make(build_model=build_model)

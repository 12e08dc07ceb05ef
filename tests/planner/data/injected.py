"""A sound workload that ends badly where a test says so: in one part of a search, in one way, so many times.

The folder in FAULTS has `part`, the part of the search that runs now, and `plan.json`: the faults by part, each a kind
and how often. A fault leaves a file, so that what was planted can be counted.
"""

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.planner.data.faulty import eat_memory, make_sound

TEXT = "planted \udc80 \x1b[31m \x00 end"


def fail(text):
    raise RuntimeError(text)


def kill_zygote():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def leave_daemon():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill_zygote": kill_zygote,
    "segv": lambda: ctypes.string_at(0),
    "raise": lambda: fail("planted"),
    "surrogate": lambda: fail(TEXT),
    "full": lambda: fail("unable to write to file </torch_1_2_0>: No space left on device (28)"),
    "exit": lambda: os._exit(3),
    "exit_0": lambda: os._exit(0),
    "hang": hang,
    "memory": eat_memory,
    "daemon": leave_daemon,
    "nan": lambda: float("nan"),
}


def inject() -> float:
    """Does what is planted for this part, if it was not done often enough; the factor of the loss."""
    folder = Path(os.environ["FAULTS"])
    part = (folder / "part").read_text()
    fault = json.loads((folder / "plan.json").read_text()).get(part)
    if fault is None:
        return 1.0
    kind, times = fault
    done = len(list(folder.glob(f"{part}.*")))
    if done >= times:
        return 1.0
    (folder / f"{part}.{done}").touch()
    return KINDS[kind]() or 1.0


def make() -> Workload:
    """The sound classifier of the other tests, with what is planted in its loss."""
    sound = make_sound()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        factor = inject()
        total, items = sound.loss(model, batch)
        return LossSum(total * factor, items)

    def build_model() -> nn.Module:
        if (Path(os.environ["FAULTS"]) / "part").read_text() == "export":
            inject()  # an export builds the model, and takes no step
        return sound.build_model()

    return dataclasses.replace(sound, name="injected", build_model=build_model, loss=loss)


def make_odd() -> Workload:
    """The same with names that UTF-8 has no bytes for, and with what a terminal would obey."""
    sound = make()

    def build_model() -> nn.Module:
        model = nn.Sequential()
        for number, layer in enumerate(sound.build_model()):
            model.add_module(f"layer {number} \udc80 \x1b[31m 模", layer)
        return model

    return dataclasses.replace(sound, name="odd \udc80 \x1b[31m name", build_model=build_model)

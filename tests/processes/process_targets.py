"""What the ranks of these tests run: each a way to end, or to misbehave."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from autoplan.processes import RankContext


def give(context: RankContext, value: Any) -> Any:
    context.phase("measure")
    context.heartbeat(step=7)
    return value


def describe_self(context: RankContext) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "group": os.getpgid(0),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "cwd": os.getcwd(),
        "sockets": [link for link in _open_files() if link.startswith(("socket:", "anon_inode:"))],
        "rank": [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")],
        "chosen": os.environ.get("CHOSEN"),
        "torch_loaded": "torch" in sys.modules,
    }


def _open_files() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return links


def raise_error(context: RankContext) -> None:
    context.phase("build")
    raise FileNotFoundError("the file of the test")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


def raise_unspeakable(context: RankContext) -> None:
    raise UnspeakableError


def exit_with(context: RankContext, code: int) -> None:
    sys.exit(code)


def kill_self(context: RankContext, number: int) -> None:
    context.phase("warmup")
    os.kill(os.getpid(), number)


def read_address_zero(context: RankContext) -> None:
    ctypes.string_at(0)


def return_nothing(context: RankContext) -> None:
    pass


def return_unwritable(context: RankContext) -> object:
    return object()


def hang(context: RankContext) -> None:
    context.phase("build")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.phase("compile")
    time.sleep(600)


def sleep(context: RankContext, seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def take_memory(context: RankContext, size_bytes: int) -> int:
    """Touches memory in small steps, as a training run does, and keeps it."""
    context.phase("measure")
    kept = []
    for _ in range(size_bytes // 2**22):
        kept.append(bytearray(b"x" * 2**22))
        time.sleep(0.002)
    time.sleep(1.0)
    return len(kept)


def map_memory(context: RankContext, size_bytes: int) -> None:
    """One huge allocation, which no poll can be in time for."""
    bytearray(size_bytes)


def write_much(context: RankContext, lines: int, rest_s: float = 0.0, fails: bool = True) -> None:
    for number in range(lines):
        print(f"line {number} " + "x" * 1000, file=sys.stderr)
    print("the last line", file=sys.stderr)
    context.phase("rest")
    time.sleep(rest_s)
    if fails:
        raise RuntimeError("after the noise")


def leave_grandchildren(context: RankContext, stay: bool) -> list[int]:
    """Starts processes in sessions of their own, one of them by a double fork, and says who they are."""
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    pids = [child.pid, _double_fork(context.directory)]
    context.heartbeat(grandchildren=pids)
    context.phase("stay")
    if stay:
        time.sleep(600)
    return pids


def _double_fork(directory: Path) -> int:
    written = directory / f"double-fork-of-{os.getpid()}.pid"
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            written.with_suffix(".new").write_text(str(os.getpid()))
            written.with_suffix(".new").rename(written)
            time.sleep(600)
        os._exit(0)
    os.waitpid(first, 0)
    while not written.exists():
        time.sleep(0.005)
    return int(written.read_text())


def sum_of_ranks(context: RankContext) -> float:
    import torch
    import torch.distributed as dist

    context.init_process_group("gloo", timeout_s=60.0)
    value = torch.full((3,), float(context.rank + 1))
    dist.all_reduce(value)
    return float(value[0])


def die_in_the_group(context: RankContext, how: str) -> None:
    """Rank 1 ends while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    context.init_process_group("gloo", timeout_s=300.0)
    dist.all_reduce(torch.ones(1))
    context.phase("measure")
    if context.rank == 1:
        if how == "raise":
            raise ArithmeticError("rank 1 has had enough")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def multiply(context: RankContext, threads: int) -> list[float]:
    """Matrix products in torch and numpy with several threads: what hangs if the zygote ran one before the fork."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    size = 700
    product = (torch.ones(size, size) @ torch.ones(size, size)).sum()
    return [float(product), float((np.ones((size, size)) @ np.ones((size, size))).sum())]


def stay_with_grandchildren(context: RankContext) -> None:
    leave_grandchildren(context, stay=True)

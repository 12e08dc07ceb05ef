"""What the ranks of several nodes run. Agents run functions of autoplan alone, so these have a name there."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from autoplan.processes import RankContext
from autoplan.processes.task import Progress

NAME = "autoplan.node_targets"
sys.modules[NAME] = sys.modules[__name__]  # in each zygote, which preloads this module


def meet(context: RankContext, given: Progress, pair: tuple[int, ...]) -> dict[str, Any]:
    """All ranks meet, and each leaves a file and a line."""
    import torch
    import torch.distributed as dist

    context.phase("build")
    context.init_process_group("gloo", 60.0)
    total = torch.tensor([context.rank + 1])
    dist.all_reduce(total)
    (context.directory / f"left.{context.rank}.bin").write_bytes(b"\0" * 9 + bytes([context.rank]))
    print(f"line of {context.rank}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "AUTOPLAN_TOKEN")
    return {
        "total": int(total),
        "place": [os.environ.get(name) for name in names],
        "given": [given.phase, list(pair)],
        "node": os.environ.get("NODE", "first"),
    }


def end(context: RankContext, how: str, rank: int) -> None:
    """All meet; then one ends in some way, and the others wait for it."""
    import torch
    import torch.distributed as dist

    context.init_process_group("gloo", 60.0)
    context.phase("build")
    if context.rank == rank:
        match how:
            case "raise":
                raise ValueError("the error of the test")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "fill":
                kept = []
                while True:
                    kept.append(b"x" * (64 << 20))
                    time.sleep(0.05)
            case "hang":
                time.sleep(600.0)
    dist.all_reduce(torch.zeros(1))


def twice(context: RankContext, marker: str) -> int:
    """The second node is lost the first time."""
    import torch
    import torch.distributed as dist

    context.init_process_group("gloo", 60.0)
    if context.rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        _, _, agent = psutil.Process().parents()[:3]  # between them is the guard
        agent.kill()
        time.sleep(600.0)
    dist.all_reduce(torch.zeros(1))
    return context.rank


def say_place(context: RankContext) -> list[Any]:
    """Where a task of one rank runs."""
    return [os.environ.get("NODE", "first"), context.rank, context.world_size]


def hang_marked(context: RankContext, folder: str) -> None:
    """Leaves a file and hangs."""
    Path(folder, f"hanging{context.rank}").touch()
    time.sleep(600.0)


def add(context: RankContext, number: int) -> list[int]:
    """The ranks of two nodes meet without torch, and work for a moment; each has the number and the sum of both."""
    import socket

    place = (context.master_addr, context.master_port)
    if context.rank == 0:
        with socket.socket(fileno=os.dup(context._listen_fd)) as meeting:  # type: ignore[arg-type]
            meeting.listen()
            meeting.settimeout(20.0)
            peer, _ = meeting.accept()
        with peer:
            total = int(peer.recv(64)) + 10 * number
            time.sleep(0.2)
            peer.sendall(str(total).encode())
        return [number, total]
    until = time.monotonic() + 20.0
    while True:
        try:
            peer = socket.create_connection(place, timeout=20.0)
            break
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    with peer:
        peer.sendall(str(number).encode())
        return [number, int(peer.recv(64))]

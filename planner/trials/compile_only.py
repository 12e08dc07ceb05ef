"""Compiles a configuration ahead of its trial, beside others: what it makes lies in the compile cache. Runs in a rank.

In: one `CompileRequest` for each process of an independent task. Out: a `CompileAnswer`; nothing is measured of the
steps, and no verdict comes from here: where something fails, the configuration's own trial meets it again and says so.

The cache of FX graphs knows a graph by its operations, its inputs' shapes, the settings of the compiler, and on CPU by
the number of threads (torch 2.13, torch/_inductor/codecache.py, FxGraphHashDetails). So all of these are the trial's
own here: the run is made by the same `prepare`, the micro-batch is that of the trial's first micro-step, and torch's
number of threads is fixed before the process is kept to its share of the cores. The number of the compiler's own
workers is no part of that key.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import torch

from autoplan.planner.trials.device_monitor import CompileMonitor, MemoryMonitor
from autoplan.planner.trials.first_loss import first_samples
from autoplan.planner.trials.request import FITS_MICRO_STEPS, CompileAnswer, CompileRequest
from autoplan.planner.trials.worker import pick_device

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext


def run_compile_only(context: RankContext, requests: tuple[CompileRequest, ...]) -> CompileAnswer:
    """Compiles the configuration of this process: its forward and its backward, by one micro-step.

    Args:
        context: This process, one of several that are independent of each other.
        requests: One for each of them.
    """
    request = requests[context.rank]
    context.phase("init")
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    take_share(context.rank, len(requests))
    device = pick_device(context, request.device)
    workload = load_workload(request.spec)

    context.phase("build")
    MemoryMonitor(device, request.memory_limit_bytes)
    run = prepare(workload, request.config, device=device)
    same = first_samples(workload, request.config.micro_batch, min(run.accumulation, FITS_MICRO_STEPS))
    divisor = run.loss_divisor(same)
    micro = next(iter(run.micro_batches(same)))

    context.phase("compile")
    began, before = time.monotonic(), os.times()
    run.micro_step(micro, divisor, sync=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    after = os.times()
    seconds = time.monotonic() - began
    hits, misses = CompileMonitor.cache_counts()
    context.phase("done")
    return CompileAnswer(
        compile_s=seconds,
        own_cpu_s=after.user + after.system - before.user - before.system,
        children_cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
        hits=hits,
        misses=misses,
    )


def take_share(number: int, processes: int) -> None:
    """Keeps this process and what it starts to its share of the cores, and the compiler to as many workers.

    torch's number of threads stays: the kernels' code has it. With more threads than cores the one micro-step that is
    run is slow, and nothing is timed.

    Args:
        number: Of this process.
        processes: That share the cores.
    """
    torch.set_num_threads(torch.get_num_threads())  # a narrower affinity would else change it at the first operation
    cores = share_of(sorted(os.sched_getaffinity(0)), number, processes)
    with contextlib.suppress(OSError):  # a sandbox may forbid it: then they share the cores as the kernel has them
        os.sched_setaffinity(0, cores)
    from torch._inductor import config

    # What a kernel's variants take beside other processes says nothing: the trial times them anew.
    wanted = {"compile_threads": len(cores), "autotune_local_cache": False}
    no_part_of_the_key = getattr(config, "_cache_config_ignore_prefix", ())
    for name in wanted.keys() & set(no_part_of_the_key):
        setattr(config, name, wanted[name])


def share_of(cores: list[int], number: int, processes: int) -> list[int]:
    """The cores of one of several processes: neighbours, and as many as of the others or one more.

    With fewer cores than processes, several have the same one.
    """
    if len(cores) < processes:
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // processes : (number + 1) * len(cores) // processes]

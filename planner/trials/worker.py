"""A trial as its ranks run it: build, two short steps that show that it fits, warm-up, measuring.

In: a `TrialRequest`. Out: a `TrialAnswer`. A failure leaves the rank as an exception, a signal or a missing result, and
the planner (`runner.py`) turns it into an outcome. The answer has an outcome only where the rank itself must decide it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from autoplan.errors import DeviceError
from autoplan.planner.records import Interval, Outcome
from autoplan.planner.trials.device_monitor import CompileMonitor, MemoryMonitor
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.measure import spread_warning
from autoplan.planner.trials.rank_sync import RankSync
from autoplan.planner.trials.request import TrialAnswer, TrialRequest
from autoplan.planner.trials.step_runner import NonfiniteError
from autoplan.planner.trials.step_timer import BehindError, StepTimer

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

RENDEZVOUS_TIMEOUT_S = 300.0
"""Seconds for all ranks to join; a cold file system makes them slow."""

COLLECTIVE_TIMEOUT_S = 100.0
"""A collective that takes longer is stuck."""


def run_trial(context: RankContext, request: TrialRequest) -> TrialAnswer:
    """Measures one configuration.

    Args:
        context: This rank.
        request: What to measure, and for how long.

    Returns:
        The answer. Its times are those of the slowest rank, its memory is this rank's.
    """
    startup_s = context.seconds_since_request
    context.phase("init")
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    device = pick_device(context, request.device)
    join_ranks(context, request.device)
    ranks = RankSync(context.world_size, device)
    workload = load_workload(request.spec)

    context.phase("build")
    memory = MemoryMonitor(device, request.memory_limit_bytes)
    run = prepare(workload, request.config, device=device)
    ranks.barrier()
    load = LoadMonitor(device=device, root_pid=os.getppid())  # the zygote: all below it is this trial
    timer = StepTimer(context=context, request=request, run=run, ranks=ranks, mesh=run.mesh, load=load)
    behind: BehindError | None = None
    try:
        interval = _measure(timer, memory)
    except NonfiniteError as error:
        return TrialAnswer(outcome=Outcome.NONFINITE, reason=str(error), loss=None, startup_s=startup_s)
    except BehindError as error:
        interval, behind = error.interval, error
    answer = TrialAnswer(
        step_time_s=interval,
        method=timer.method,
        at_least_s=None if behind is None else behind.at_least_s,
        parts_s=timer.part_medians(),
        samples_s=timer.kept_samples(),
        peak_memory=memory.read(),
        loss=timer.last_loss,
        first_losses=tuple(timer.first_losses),
        items_per_step=timer.batches.items_per_step(ranks),
        warnings=tuple(_warnings(timer, request)),
        window=load.window(timer.disturbed),
        startup_s=startup_s,
    )
    context.phase("done")
    return _decide_outcome(answer, memory, request)


def pick_device(context: RankContext, kind: str) -> torch.device:
    """This rank's own device.

    Raises:
        DeviceError: there is no such device for this rank.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= context.local_rank:
        raise DeviceError(
            f"rank {context.local_rank} has no CUDA device: torch sees "
            f"{torch.cuda.device_count() if torch.cuda.is_available() else 0}",
            hint="Use --device cpu, or fewer ranks with --nproc.",
        )
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


def join_ranks(context: RankContext, device: str) -> None:
    """Joins the process group if there is more than one rank."""
    if context.world_size == 1:
        return
    context.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", RENDEZVOUS_TIMEOUT_S)
    _shorten_timeout(COLLECTIVE_TIMEOUT_S)


def _shorten_timeout(seconds: float) -> None:
    """Replaces the process group's timeout, which was for joining, by one for collectives."""
    from datetime import timedelta

    import torch.distributed as dist

    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(timedelta(seconds=seconds), None)


def _measure(timer: StepTimer, memory: MemoryMonitor) -> Interval:
    """Two short steps, then whole steps or parts until there are enough."""
    if not timer.request.config.pp > 1:
        timer.short_steps()
    if timer.choose_method() == "whole_steps":
        timer.warm_up()
        timer.context.phase("measure")
        memory.forget_retries()
        return timer.measure_whole_steps()
    timer.context.phase("measure")
    memory.forget_retries()
    return timer.measure_parts()


def _warnings(timer: StepTimer, request: TrialRequest) -> list[str]:
    warnings = list(timer.warnings)
    spread = spread_warning(timer.samples)
    if spread is not None:
        warnings.append(spread)
    if timer.disturbed is not None:
        warnings.append(f"the measurement was disturbed: {timer.disturbed}")
    elif timer.load.discarded:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in timer.load.discarded.items())
        warnings.append(f"stretches of the measurement were disturbed and measured again: {reasons}")
    if timer.skipped:
        warnings.append(f"fp16 loss scaling skipped {timer.skipped} step(s); they do not count")
    if request.config.compile != "off":
        warnings.append(CompileMonitor.cache_state())
        breaks = CompileMonitor.graph_breaks()
        if breaks:
            warnings.append(f"torch.compile broke the graph {breaks} time(s)")
        skips = CompileMonitor.cudagraph_skips()
        if skips:
            warnings.append(f"torch.compile skipped CUDA graphs {skips} time(s): those parts ran without them")
    return warnings


def _decide_outcome(answer: TrialAnswer, memory: MemoryMonitor, request: TrialRequest) -> TrialAnswer:
    """The outcome of a trial that ran to its end."""
    peak, limit = answer.peak_memory.peak_bytes, request.memory_limit_bytes
    if memory.allocator_retries:
        return answer.model_copy(
            update={
                "outcome": Outcome.OUT_OF_MEMORY,
                "detail": "fragile",
                "reason": f"it ran, but the allocator had to free its cache and retry {memory.allocator_retries} "
                "time(s): it would run out of memory as soon as the memory is more fragmented",
            }
        )
    if request.device == "cuda" and peak is not None and limit is not None and peak > limit:
        return answer.model_copy(
            update={
                "outcome": Outcome.OUT_OF_MEMORY,
                "detail": "device",
                "reason": f"it took {peak / 2**30:.2f} GiB of device memory; the limit is {limit / 2**30:.2f} GiB",
            }
        )
    if answer.at_least_s is not None:
        assert request.to_beat is not None, "a look is dropped for a leader"
        return answer.model_copy(
            update={
                "outcome": Outcome.PRUNED,
                "reason": f"stopped early: a step takes at least {answer.at_least_s:.3g} s, the best so far "
                f"{math.exp(request.to_beat.log_s):.3g} s",
            }
        )
    if answer.step_time_s is None or not math.isfinite(answer.step_time_s.median):
        return answer.model_copy(update={"outcome": Outcome.CRASHED, "reason": "no step could be timed"})
    return answer

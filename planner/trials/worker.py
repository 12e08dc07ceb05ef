"""A trial as its ranks run it: build, two short steps that show that it fits, warm-up, measuring.

Runs in ranks started by `autoplan.processes`. What goes wrong leaves as an exception, a signal or a missing result:
the parent (`runner.py`) makes an outcome of it. Only what needs judgement here is answered as an outcome.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from autoplan.errors import DeviceError
from autoplan.planner.records import Interval, Outcome
from autoplan.planner.trials.device_watch import CompilerWatch, MemoryWatch, ThrottleWatch
from autoplan.planner.trials.measure import Stop, spread_warning
from autoplan.planner.trials.request import TrialAnswer, TrialRequest
from autoplan.planner.trials.stepping import Losing, NonfiniteLoss, StepTimer
from autoplan.planner.trials.team import Team

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext

MEETING_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 100.0


def run_trial(context: RankContext, request: TrialRequest) -> TrialAnswer:
    """Measures one configuration.

    Args:
        context: This rank.
        request: What to measure, and for how long.

    Returns:
        The answer; times are the slowest rank's on every rank, memory is this rank's own.
    """
    startup_s = context.seconds_since_request
    context.phase("init")
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.sources import load_workload

    device = pick_device(context, request.device)
    join_ranks(context, request.device)
    team = Team(context.world_size, device)
    workload = load_workload(request.spec)

    context.phase("build")
    memory = MemoryWatch(device, request.memory_limit_bytes)
    run = prepare(workload, request.config, device=device)
    team.barrier()
    throttle = ThrottleWatch(device)
    timer = StepTimer(context=context, request=request, run=run, team=team, mesh=run.mesh, throttle=throttle)
    items = workload.global_batch * workload.tokens_per_sample
    try:
        interval, stop = _measure(timer)
    except NonfiniteLoss as error:
        return TrialAnswer(outcome=Outcome.NONFINITE, reason=str(error), loss=None, startup_s=startup_s)
    except Losing as losing:
        interval, stop = losing.interval, "losing"
    answer = TrialAnswer(
        step_time_s=interval,
        method=timer.method,
        parts_s=timer.part_medians(),
        peak_memory=memory.read(),
        loss=timer.last_loss,
        first_losses=tuple(timer.first_losses),
        items_per_step=items,
        warnings=tuple(_warnings(timer, request)),
        startup_s=startup_s,
    )
    context.phase("done")
    return _judge(answer, stop, memory, request)


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
    """Joins the process group where there is more than one rank."""
    if context.world_size == 1:
        return
    context.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", MEETING_TIMEOUT_S)
    _shorten_timeout(COLLECTIVE_TIMEOUT_S)


def _shorten_timeout(seconds: float) -> None:
    """The meeting may take long (cold file systems); a collective of a running trial that does is stuck."""
    from datetime import timedelta

    import torch.distributed as dist

    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(timedelta(seconds=seconds), None)


def _measure(timer: StepTimer) -> tuple[Interval, Stop]:
    """Two short steps, then whole steps or parts until the stop rule speaks."""
    if not timer.request.config.pp > 1:
        timer.short_steps()
    if timer.choose_method() == "whole_steps":
        timer.warm_up()
        timer.context.phase("measure")
        return timer.measure_whole_steps()
    timer.context.phase("measure")
    return timer.measure_parts()


def _warnings(timer: StepTimer, request: TrialRequest) -> list[str]:
    warnings = list(timer.warnings)
    scatter = spread_warning(timer.samples)
    if scatter is not None:
        warnings.append(scatter)
    if timer.throttle.seen:
        warnings.append(f"the GPU was throttled while measuring: {', '.join(sorted(timer.throttle.seen))}")
    if request.config.compile != "off":
        warnings.append(CompilerWatch.cache_state())
        breaks = CompilerWatch.graph_breaks()
        if breaks:
            warnings.append(f"torch.compile broke the graph {breaks} time(s)")
    return warnings


def _judge(answer: TrialAnswer, stop: Stop, memory: MemoryWatch, request: TrialRequest) -> TrialAnswer:
    """The outcome of a trial that ran to its end."""
    peak, limit = answer.peak_memory.peak_bytes, request.memory_limit_bytes
    if memory.allocator_retries:
        return answer.model_copy(
            update={
                "outcome": Outcome.OUT_OF_MEMORY,
                "detail": "fragile",
                "reason": f"it ran, but the allocator had to free its cache and retry {memory.allocator_retries} "
                "time(s): the next fragmentation would end it",
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
    if stop == "losing":
        assert answer.step_time_s is not None and request.best_high_s is not None
        return answer.model_copy(
            update={
                "outcome": Outcome.PRUNED,
                "reason": f"stopped early: a step takes {answer.step_time_s.median:.3g} s, the best so far at most "
                f"{request.best_high_s:.3g} s",
            }
        )
    if answer.step_time_s is None or not math.isfinite(answer.step_time_s.median):
        return answer.model_copy(update={"outcome": Outcome.CRASHED, "reason": "no step could be timed"})
    return answer

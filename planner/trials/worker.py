"""A trial as its ranks run it: build, two short steps that show that it fits, warm-up, measuring.

In: a `TrialRequest`. Out: a `TrialAnswer`. A failure leaves the rank as an exception, a signal or a missing result, and
the planner (`runner.py`) turns it into an outcome. The answer has an outcome only where the rank itself must decide it.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from autoplan.planner.records.trials import Interval, Outcome
from autoplan.planner.trials.device_monitor import MemoryMonitor
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.measure import spread_warning
from autoplan.planner.trials.ranks import RankSync, join_ranks, limit_collectives, pick_device
from autoplan.planner.trials.request import (
    TrialAnswer,
    TrialRequest,
)
from autoplan.planner.trials.slices import Slices, alternate
from autoplan.planner.trials.step_timer import BehindError, NonfiniteError, StepTimer

if TYPE_CHECKING:
    from autoplan.processes.context import RankContext


def run_round(
    context: RankContext, requests: tuple[TrialRequest, ...], weights: tuple[float, ...]
) -> TrialAnswer | None:
    """Measures configurations in slices of time (slices.py), each in a process of its own.

    Args:
        context: One of the processes; the last one has the others alternate.
        requests: Of the others.
        weights: Of their slices.
    """
    path = context.directory / f"slices-{context.requested_at}"  # each run of the task has its own
    if context.rank == len(requests):
        context.phase("measure")
        alternate(path, weights)
        return None
    return run_trial(context, requests[context.rank], Slices(path, context.rank, len(requests)))


def run_trial(context: RankContext, request: TrialRequest, slices: Slices | None = None) -> TrialAnswer:
    """Measures one configuration.

    Args:
        context: This rank.
        request: What to measure, and for how long.
        slices: What this process shares the machine with others by; None: it has the machine.

    Returns:
        The answer. Its times are those of the slowest rank, its memory is this rank's.
    """
    startup_s = time.monotonic() - context.requested_at  # one clock for all processes
    context.phase("init")
    from autoplan.strategies.prepare import prepare
    from autoplan.strategies.workloads.optimizers import with_lasting_schedule
    from autoplan.strategies.workloads.sources import load_workload

    device = pick_device(context, request.device)
    join_ranks(context, request.device)
    ranks = RankSync(context.world_size, device)
    workload = with_lasting_schedule(load_workload(request.spec))

    context.phase("build")
    memory = MemoryMonitor(device, request.memory_limit_bytes)
    run = prepare(workload, request.config, device=device)
    limit_collectives()  # its mesh has groups of its own
    ranks.barrier()
    if slices is not None:
        slices.ready()
    # all below the zygote is this trial
    load = LoadMonitor(device=device, root_pid=os.getppid(), gauge=device.type == "cpu")
    timer = StepTimer(context=context, request=request, run=run, ranks=ranks, load=load, slices=slices)
    behind: BehindError | None = None
    try:
        interval = _measure(timer, memory)
    except NonfiniteError as error:
        return TrialAnswer(outcome=Outcome.NONFINITE, reason=str(error), loss=None, startup_s=startup_s)
    except BehindError as error:
        interval, behind = error.interval, error
    if slices is not None:
        slices.end()
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
        pauses=0 if slices is None else slices.pauses,
    )
    context.phase("done")
    return _decide_outcome(answer, memory, request)


def _measure(timer: StepTimer, memory: MemoryMonitor) -> Interval:
    """Two short steps, then whole steps or parts until there are enough."""
    if not timer.request.config.pp > 1:
        timer.short_steps()
    whole = timer.choose_method() == "whole_steps"
    if whole:
        timer.warm_up()
    timer.context.phase("measure")
    memory.forget_retries()
    return timer.measure_whole_steps() if whole else timer.measure_parts()


def _warnings(timer: StepTimer, request: TrialRequest) -> list[str]:
    spread = spread_warning(timer.samples)
    warnings = [] if spread is None else [spread]
    if timer.disturbed is not None:
        warnings.append(f"the measurement was disturbed: {timer.disturbed}")
    elif timer.load.discarded:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in timer.load.discarded.items())
        warnings.append(f"stretches of the measurement were disturbed and measured again: {reasons}")
    if timer.skipped:
        warnings.append(f"fp16 loss scaling skipped {timer.skipped} step(s); they do not count")
    if request.config.compile != "off":
        from torch._dynamo.utils import counters  # of this process; what did not happen counts 0

        inductor = counters["inductor"]
        hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
        warnings.append(f"compile cache: {hits} hit(s), {misses} miss(es)")
        if breaks := sum(counters["graph_break"].values()):
            warnings.append(f"torch.compile broke the graph {breaks} time(s)")
        if skips := inductor["cudagraph_skips"]:
            warnings.append(f"torch.compile skipped CUDA graphs {skips} time(s): those parts ran without them")
    return warnings


def _decide_outcome(answer: TrialAnswer, memory: MemoryMonitor, request: TrialRequest) -> TrialAnswer:
    """The outcome of a trial that ran to its end."""
    peak, limit = answer.peak_memory.peak_bytes, request.memory_limit_bytes
    detail: str | None = None
    if memory.allocator_retries:
        outcome, detail = Outcome.OUT_OF_MEMORY, "fragile"
        reason = (
            f"it ran, but the allocator had to free its cache and retry {memory.allocator_retries} time(s): it would "
            "run out of memory as soon as the memory is more fragmented"
        )
    elif request.device == "cuda" and peak is not None and limit is not None and peak > limit:
        outcome, detail = Outcome.OUT_OF_MEMORY, "device"
        reason = f"it took {peak / 2**30:.2f} GiB of device memory; the limit is {limit / 2**30:.2f} GiB"
    elif answer.at_least_s is not None:
        assert request.to_beat is not None, "a look is dropped for a leader"
        best_s, outcome = math.exp(request.to_beat.log_s), Outcome.PRUNED
        reason = f"stopped early: a step takes at least {answer.at_least_s:.3g} s, the best so far {best_s:.3g} s"
    elif answer.step_time_s is None or not math.isfinite(answer.step_time_s.median):
        outcome, reason = Outcome.CRASHED, "no step could be timed"
    else:
        return answer
    return answer.model_copy(update={"outcome": outcome, "detail": detail, "reason": reason})

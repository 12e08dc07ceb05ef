"""The planner's request to a trial (`TrialRequest`), and the answer of each rank (`TrialAnswer`). Loads no torch."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autoplan.planner.records.trials import Interval, Outcome, PeakMemory, Window
from autoplan.planner.trials.measure import ToBeat
from autoplan.record import Record
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

Floats = NDArray[np.float64]

# How long a look lasts: one trial process of one configuration. It follows from the step alone, so that looks of one
# configuration are alike whatever the budget is.

FITS_MICRO_STEPS = 3
"""Most micro-steps in each of the two short steps that show that a configuration fits. Adam's state is allocated at the
end of the first step; in the second, accumulated gradients need memory beside it."""

EXPENSIVE_S, VERY_EXPENSIVE_S = 0.5, 2.0
"""If the first micro-step takes longer than these, the short steps have only 2 + 2, or 1 + 2, micro-steps: no step has
more than a few seconds of them before it is known what they cost. They are the samples too, from the second micro-step
on, so that such a look is over then."""

VERY_EXPENSIVE_LOOK, SHORTEST_RUN = 3, 2
"""Micro-steps of a look whose micro-steps are very expensive, and of a further run of it, which has only its time to
show. A look with two, the second of which added to gradients of zeros, saw 3.8 GiB of a GPT-2 with allocator=keep, one
with three 4.4, and a run of three steps 4.5: the order of allocations leaves holes."""

WARM_UP_S = 0.4
"""Seconds of steps before a sample counts, the two short steps among them; the same for all configurations. Clocks
rise, the allocator fills its cache, the second step compiles again. It is one stretch of the load monitor (load.py).
Expensive micro-steps alone count before, from the second one on."""

GRAPH_MICRO_STEPS = 2
"""So many micro-steps never count where torch.compile uses CUDA graphs: the first runs as usual, the second is recorded
(torch 2.13, torch/_inductor/cudagraph_trees.py, `CUDAGraphTreeManager.run`)."""

SAMPLES = 5
"""Enough samples: more steps of one process don't average what differs between processes (RUN_SPREAD)."""

FEWEST_SAMPLES = 3
"""So many are enough if they agree (`NARROW`), and where micro-steps are expensive; 1 where they are very expensive."""

MEASURING_S = 0.8
"""Measuring lasts so long at least: two stretches that the load monitor can judge (load.SHORTEST_STRETCH_S)."""

SLICED_S = 1.0
"""Measuring lasts so long at least where runs share the machine in slices: twenty slices of each. More would not
average what differs between processes (measure.SLICED)."""

MOST_MEASURING_S = 20.0
"""Measuring ends after so long, with what there is: a step of a pipeline, which has no parts, may take minutes."""

MOST_AGAIN_S = 5.0
"""A look whose measuring takes longer than this is not measured again within its process if other work disturbed it."""

WHOLE_STEP_S = 1.0
"""Whole steps are timed if one takes less, and its micro-steps are not expensive; otherwise its parts are."""

PART_MICRO_STEPS = 6
"""Micro-steps of a short step that is timed, unless they are expensive; the first two take longer than the rest."""


def samples_wanted(micro_step_s: float) -> int:
    """How many samples of its most expensive part, a micro-step of so many seconds, a step in parts needs."""
    if micro_step_s > VERY_EXPENSIVE_S:
        return 1
    return FEWEST_SAMPLES if micro_step_s > EXPENSIVE_S else SAMPLES


def records_graphs(config: TrainingConfig) -> bool:
    """Whether micro-steps are recorded as CUDA graphs: the first GRAPH_MICRO_STEPS are no samples."""
    return config.compile != "off" and config.compile_mode in CUDAGRAPH_MODES


def is_very_expensive(config: TrainingConfig, micro_step_s: float) -> bool:
    """Whether a look has no more micro-steps than show that the configuration fits (VERY_EXPENSIVE_LOOK)."""
    return config.world_size == 1 and micro_step_s > VERY_EXPENSIVE_S and not records_graphs(config)


def spared_micro_steps(config: TrainingConfig, micro_step_s: float, accumulation: float) -> int:
    """How many micro-steps a further run of a configuration has less than its look."""
    return VERY_EXPENSIVE_LOOK - SHORTEST_RUN if accumulation > 1 and is_very_expensive(config, micro_step_s) else 0


def look_s(step_s: Floats, accumulation: Floats) -> Floats:
    """Expected seconds of warm-up and measuring of an undisturbed look, without its compilation.

    Args:
        step_s: Seconds of whole steps.
        accumulation: Micro-steps of each of them.
    """
    micro_step_s = step_s / accumulation
    short = 2 * np.minimum(accumulation, FITS_MICRO_STEPS)
    very = np.where(accumulation > 1, VERY_EXPENSIVE_LOOK, SHORTEST_RUN)
    expensive = np.where(micro_step_s > VERY_EXPENSIVE_S, very, 4)
    fits = np.where(micro_step_s > EXPENSIVE_S, expensive, short) * micro_step_s
    warm = np.maximum(WARM_UP_S - fits, 0.0)
    whole_s = np.maximum(warm, step_s) + np.maximum(MEASURING_S, SAMPLES * step_s)
    part_s = np.minimum(accumulation, PART_MICRO_STEPS) * micro_step_s
    parts_s = np.where(micro_step_s > EXPENSIVE_S, 0.0, warm + np.maximum(MEASURING_S, 2 * part_s))
    whole = (step_s < WHOLE_STEP_S) & (micro_step_s <= EXPENSIVE_S)
    return np.asarray(fits + np.where(whole, whole_s, parts_s))


class TrialRequest(Record):
    """One configuration to look at."""

    spec: WorkloadSpec
    config: TrainingConfig
    device: Literal["cuda", "cpu"]
    to_beat: ToBeat | None = Field(default=None, description="None: measured to its end, however slow it is")
    memory_limit_bytes: int | None = Field(default=None, description="device memory a rank may take (CUDA)")
    method: Literal["whole_steps", "parts"] | None = Field(default=None, description="None: by WHOLE_STEP_S")
    most_s: float = Field(default=MOST_MEASURING_S, description="seconds of measuring at most")
    remeasure: float = Field(
        default=1.0, description="so many times what measuring takes may go into measuring disturbed stretches again"
    )
    again: bool = Field(default=False, description="it ran here before: this run has only its time to show")
    seed: int = 0


class TrialAnswer(Record):
    """The measurements of one rank. All its times are those of the slowest rank."""

    outcome: Outcome = Outcome.OK
    detail: str | None = None
    reason: str | None = None
    step_time_s: Interval | None = None
    method: Literal["whole_steps", "parts"] | None = None
    at_least_s: float | None = None
    parts_s: dict[str, float] = Field(default_factory=dict)
    samples_s: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    peak_memory: PeakMemory = PeakMemory()
    loss: float | None = None
    first_losses: tuple[float, ...] = ()
    items_per_step: int = Field(default=0, description="tokens, or samples, of the global batch")
    warnings: tuple[str, ...] = ()
    window: Window | None = None
    startup_s: float = 0.0
    pauses: int = 0

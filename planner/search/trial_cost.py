"""Predicts how many seconds a trial and a parity check will take in total, so that the search can plan its budget.

In: step times and finished trials. Out: expected seconds of each candidate's trial, of a compilation, of a check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    CHECK_SEQUENCE_LENGTH,
    CHECK_STEPS,
    DROPOUT_SEEDS,
    DROPOUT_SEQUENCE_LENGTH,
    LARGE_MODEL_SEQUENCE_LENGTH,
    LARGE_MODEL_STEPS,
    MOST_STEPS_S,
    SMALL_MODEL_PARAMETERS,
    WHOLE_STEPS,
    check_accumulation,
    twin_of,
)
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trials.request import (
    EXPENSIVE_S,
    MEASURING_S,
    SAMPLES,
    SLICED_S,
    is_very_expensive,
    look_s,
    spared_micro_steps,
)
from autoplan.strategies.config import PLAIN, SLOW_COMPILE_MODES, TrainingConfig

Array = NDArray[np.float64]

FIXED_S = 1.0
"""Seconds to start, build and end a trial; assumed until a trial has finished."""

COMPILE_S = {"cpu": (25.0, 3.5), "cuda": (10.0, 1.8)}
"""Seconds to compile one distinct block, and further seconds per block if the whole model is compiled; used until a
compiled trial has finished. Medians of small models and a GPT-2 on two CPU cores (18 to 38 s; 3.0 to 6.7 s for each of
5 to 12 blocks; an encoder-decoder took three times as long), and of one on an H100 with 16 cores (7 to 11 s, 30 s)."""

SLOW_MODE_FACTOR = 3.0
"""A compilation with max-autotune takes about so many times as long as one with the default mode: each matrix product
is compiled in a dozen or more Triton templates, and all of them are timed (torch/_inductor/select_algorithm.py,
`autotune_select_algorithm`). Assumed until one has finished."""

SLOW_MODE_SHARE = 0.3
"""Of the budget, what one trial in such a mode may take; where it is expected to take more, it is not tried."""

WARM_SHARE = 0.15
"""Of a compilation, what is left with the kernels in the compile cache: tracing and loading. Assumed until seen: in the
recorded tables of one rank it is 0.06 to 0.24, at the median 0.12 (benchmarks/results/search_tables)."""

_CACHE = re.compile(r"compile cache: (\d+) hit\(s\), (\d+) miss\(es\)")

_NO_PART_OF_THE_GRAPH = ("optimizer_step", "optimizer_state", "allocator", "offload")
"""Knobs that do not change what is compiled: trials that differ in these alone share their kernels in the cache.
`threads` does: kernels for the CPU have the number in their code (torch 2.13, torch/_inductor/codecache.py,
FxGraphHashDetails.cpp_runtime_thread_count)."""


class TrialCost:
    """Expected seconds of trials; arrays are in the order of the candidates (`configs`)."""

    def __init__(self, configs: Sequence[TrainingConfig], *, global_batch: int, num_blocks: int, device: str) -> None:
        self.global_batch = global_batch
        block, more = COMPILE_S[device]
        self._assumed_s = {"block": block, "model": block + more * num_blocks}
        # seconds by (scope, mode), with and without the kernels in the cache
        self._cold: dict[tuple[str, str], list[float]] = {}
        self._warm: dict[tuple[str, str], list[float]] = {}
        self._compiled: set[TrainingConfig] = set()
        self._fixed: dict[int, list[float]] = {}  # by the number of ranks: NCCL and several contexts take longer
        self._ratios: list[float] = []
        self._accumulation = np.array([float(config.accumulation(global_batch)) for config in configs])
        self._ranks = np.array([config.world_size for config in configs])
        self._kinds = [(config.compile, config.compile_mode) for config in configs]
        self._graphs = [what_is_compiled(config) for config in configs]

    def observe(self, trial: Trial) -> None:
        """Learns from a finished trial; how long it compiled, also from one that was given up afterwards."""
        config, seconds = trial.config, self._compiled_s(trial)
        if config.compile != "off" and seconds and trial.outcome in (Outcome.OK, Outcome.PRUNED):
            known = self._warm if was_warm(trial) else self._cold
            known.setdefault((config.compile, config.compile_mode), []).append(seconds)
            self._compiled.add(what_is_compiled(config))
        if trial.outcome is not Outcome.OK or trial.step_time_s is None or trial.round is not None:
            return  # a further run may be shorter than a look
        phases = trial.phase_seconds
        fixed_s = sum(phases.get(name, 0.0) for name in ("start", "init", "build", "done"))
        self._fixed.setdefault(config.world_size, []).append(fixed_s)
        accumulation = np.array([float(config.accumulation(self.global_batch))])
        expected = look_s(np.array([trial.step_time_s.median]), accumulation)
        spent = phases.get("warmup", 0.0) + phases.get("measure", 0.0)
        spent += phases.get("compile", 0.0) - seconds
        self._ratios.append(min(max(spent / float(expected[0]), 0.3), 3.0))

    def _micro_step_s(self, trial: Trial) -> float:
        step = trial.step_time_s
        return 0.0 if step is None else step.median / trial.config.accumulation(self.global_batch)

    def _compiled_s(self, trial: Trial) -> float:
        """Seconds of the compilation in a trial: of its first micro-step, without what that takes if it is long."""
        seconds, micro_step_s = trial.phase_seconds.get("compile", 0.0), self._micro_step_s(trial)
        if not is_very_expensive(trial.config, micro_step_s):
            return seconds
        return max(seconds - micro_step_s, 0.1 * seconds)

    @property
    def fixed_s(self) -> float:
        """Seconds to start, build and end a process that trains."""
        known = [seconds for found in self._fixed.values() for seconds in found]
        return float(np.median(known)) if known else FIXED_S

    def compile_s(self, config: TrainingConfig, *, warm: bool = False) -> float:
        """Expected seconds of a compilation, with its kernels in the cache or without; 0 where nothing is compiled."""
        return self._kind_s((config.compile, config.compile_mode), warm)

    def _kind_s(self, kind: tuple[str, str], warm: bool) -> float:
        """Seconds by scope and mode: seen, else from the other state of the cache, else from the nearest mode."""
        if kind[0] == "off":
            return 0.0
        if warm:
            seen = self._warm.get(kind)
            return float(np.median(seen)) if seen else WARM_SHARE * self._kind_s(kind, False)
        seen = self._cold.get(kind)
        if seen:
            return float(np.median(seen))
        scope, mode = kind
        factor = SLOW_MODE_FACTOR if mode in SLOW_COMPILE_MODES else 1.0
        default = self._cold.get((scope, "default"))
        cold_s = factor * (float(np.median(default)) if default else self._slower * self._assumed_s[scope])
        return max([cold_s, *self._warm.get(kind, ())])  # a warm one is no longer than a cold one

    @property
    def _slower(self) -> float:
        """How many times as long as assumed compilations in the default mode took here, of any scope."""
        seen = [
            seconds / self._assumed_s[scope]
            for (scope, mode), found in self._cold.items()
            for seconds in found
            if mode == "default"
        ]
        return float(np.median(seen)) if seen else 1.0

    def is_warm(self, config: TrainingConfig) -> bool:
        """Whether a trial has compiled the same before."""
        return what_is_compiled(config) in self._compiled

    def all_s(self, step_time_s: Array) -> Array:
        """Expected seconds of a trial of each candidate, given their step times."""
        kinds_s = {(kind, warm): self._kind_s(kind, warm) for kind in set(self._kinds) for warm in (False, True)}
        each = zip(self._kinds, self._graphs, strict=True)
        compiling = np.array([kinds_s[kind, graph in self._compiled] for kind, graph in each])
        return self._total(step_time_s, self._accumulation, compiling, self._ranks)

    def one_s(self, config: TrainingConfig, step_time_s: float) -> float:
        """Expected seconds of one trial."""
        accumulation = np.array([float(config.accumulation(self.global_batch))])
        compiling = self.compile_s(config, warm=self.is_warm(config))
        return float(self._total(np.array([step_time_s]), accumulation, compiling, np.array([config.world_size]))[0])

    def warm_s(self, config: TrainingConfig, step_time_s: float) -> float:
        """Expected seconds of a further run of a configuration: its kernels are in the cache, and it may be shorter."""
        accumulation = config.accumulation(self.global_batch)
        micro_step_s = step_time_s / accumulation
        shorter_s = spared_micro_steps(config, micro_step_s, accumulation) * micro_step_s
        cold_s = self.compile_s(config, warm=self.is_warm(config))
        return self.one_s(config, step_time_s) - cold_s + self.compile_s(config, warm=True) - shorter_s

    def repeat_s(self, trial: Trial) -> float:
        """Expected seconds of running a finished look again: its kernels are in the cache."""
        spent_s, compiled_s = trial.seconds_spent, self._compiled_s(trial)
        accumulation, micro_step_s = trial.config.accumulation(self.global_batch), self._micro_step_s(trial)
        spent_s -= spared_micro_steps(trial.config, micro_step_s, accumulation) * micro_step_s
        if trial.config.compile == "off" or not compiled_s:
            return spent_s
        again_s = compiled_s if was_warm(trial) else min(compiled_s, self.compile_s(trial.config, warm=True))
        return spent_s - compiled_s + again_s

    def round_s(
        self, one: Trial, other: Trial, *, sliced: bool, slower: Callable[[Trial], float] = lambda trial: 1.0
    ) -> float:
        """Expected seconds of running two finished trials again side by side.

        Args:
            one, other: The trials.
            sliced: In slices of time: both processes are built at once, and short steps are measured for SLICED_S.
            slower: How many times as long its steps take now; of short steps fewer are measured in the same time.
        """
        together_s = longer_s = 0.0
        for trial in (one, other):
            short = self._micro_step_s(trial) <= EXPENSIVE_S
            together_s += (1.0 if short else slower(trial)) * self.repeat_s(trial)
            if trial.step_time_s is not None and short:
                longer_s += max(0.0, SLICED_S - max(MEASURING_S, SAMPLES * trial.step_time_s.median))
        return together_s + longer_s - self.fixed_s if sliced else together_s

    def _total(
        self, step_time_s: Array, accumulation: Array, compiling: Array | float, ranks: NDArray[np.int64]
    ) -> Array:
        ratio = float(np.median(self._ratios)) if self._ratios else 1.0
        fixed_s = np.full(len(step_time_s), self.fixed_s)
        for number, seconds in self._fixed.items():
            fixed_s[ranks == number] = np.median(seconds)
        return fixed_s + compiling + ratio * look_s(step_time_s, accumulation)


def what_is_compiled(config: TrainingConfig) -> TrainingConfig:
    """The config without the knobs that do not change what is compiled."""
    return config.model_copy(update={knob: getattr(PLAIN, knob) for knob in _NO_PART_OF_THE_GRAPH})


def was_warm(trial: Trial) -> bool:
    """Whether a trial found all its kernels in the compile cache, as its warning says."""
    found = next(filter(None, map(_CACHE.match, trial.warnings)), None)
    return found is not None and int(found[1]) > 0 and int(found[2]) == 0


# A parity check (planner/parity/) runs the plain reference and the candidate: a few small steps, one pass at the
# workload's own length, passes with dropout on. A candidate compiles anew for each: sequences are shorter than in its
# trial. Where larger steps cost less than that, it takes the trial's own shapes (`takes_own_shapes`).

SMALL_BATCH_FACTOR = 1.5
"""A sample in the small micro-batches of the check takes so much longer than one in a trial's. With it, the check of a
GPT-2 of 124M on two cores is expected to take 50 s, where 44 CPU-seconds were measured. On a GPU, whose host launches
for as long as that, the first check says how much longer it takes (5 times on an H100: 9 s)."""

OPTIMIZER_STEP = 2.0
"""The check copies and compares parameters and gradients at each step of a run, and replays the optimizer on the
candidate's gradients: about as long as so many optimizer steps in a foreach form."""

DROPOUT_PASSES = 2 * DROPOUT_SEEDS + 1 + 12
"""Micro-batches with dropout on: a pass for each seed, the first again, and those whose losses alone count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """The cost of a check on one model, besides compiling."""

    sequence_length: int | None  # of the workload; None: samples are no sequences
    parameters: float  # that train
    sample_s: float  # seconds of a plain forward and backward of one sample of the workload's own length
    optimizer_s: float = 0.0  # seconds of the plain optimizer step
    has_dropout: bool = True  # passes with dropout on are made
    fixed_micro_batch: bool = False  # the micro-batch is part of what is trained, so that the check keeps it


def takes_own_shapes(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> bool:
    """Whether a check with a trial's own micro-batch and sequence length costs less, because nothing is compiled anew.

    Dropout is off in the steps of a check, so that a model with dropout is another graph there; so is a fused loss,
    which takes other chunks. What is kept rounded is compared on few additions, and products in fp8
    beside a reference with the same few samples behind each scale.
    """
    others = config.loss == "fused" or config.parameters != "own" or config.fp8 != "off" or config.pp > 1
    if config.compile == "off" or others or cost.has_dropout:
        return False
    saved_s = (1 + (_share(cost) < 1.0)) * trials.compile_s(config) - trials.compile_s(config, warm=True)
    small_s = _running_s(cost, config) + _passes_s(cost, config)
    return _running_s(cost, config, own_shapes=True) - small_s < saved_s


def _running_s(cost: ModelCost, config: TrainingConfig, *, own_shapes: bool = False) -> float:
    """Expected seconds of the steps and passes of a check: with the trial's own shapes, or with small ones."""
    micro_batch = config.micro_batch if own_shapes else _micro_batch(cost, config)
    share, sample_s = (1.0 if own_shapes else _share(cost)), SMALL_BATCH_FACTOR * cost.sample_s
    whole = check_accumulation(config) * micro_batch * config.dp
    slow = CHECK_STEPS * whole * share * sample_s > MOST_STEPS_S
    large = own_shapes or slow or cost.parameters > SMALL_MODEL_PARAMETERS
    few = (LARGE_MODEL_STEPS - WHOLE_STEPS) * micro_batch * config.dp if large else 0
    twin = 0 if twin_of(config) is None else whole if large else 3 * whole  # the first steps once more in fp32
    samples = share * (2.0 * (WHOLE_STEPS if large else CHECK_STEPS) * whole + few + twin)
    if cost.has_dropout:
        length = cost.sequence_length or 1
        samples += DROPOUT_PASSES * micro_batch * config.dp * min(DROPOUT_SEQUENCE_LENGTH / length, share)
    steps = WHOLE_STEPS + LARGE_MODEL_STEPS if large else 2 * CHECK_STEPS
    return samples * sample_s + OPTIMIZER_STEP * steps * cost.optimizer_s


def own_length_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Expected seconds of the passes at the workload's own length, reference included; a verdict can do without."""
    if takes_own_shapes(trials, cost, config):
        return 0.0
    passes_s = _passes_s(cost, config)
    return passes_s + trials.compile_s(config) if passes_s else 0.0


def _passes_s(cost: ModelCost, config: TrainingConfig) -> float:
    return 2.0 * config.dp * SMALL_BATCH_FACTOR * cost.sample_s if _share(cost) < 1.0 else 0.0


def first_steps_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Expected seconds of the shortest check: the first steps of both runs, which are always made."""
    steps, micro_batch = 2 * WHOLE_STEPS, _micro_batch(cost, config)
    samples = steps * check_accumulation(config) * micro_batch * config.dp * _share(cost)
    return 2 * trials.fixed_s + SMALL_BATCH_FACTOR * samples * cost.sample_s + OPTIMIZER_STEP * steps * cost.optimizer_s


def _micro_batch(cost: ModelCost, config: TrainingConfig) -> int:
    return config.micro_batch if cost.fixed_micro_batch else min(config.micro_batch, CHECK_MICRO_BATCH)


def _share(cost: ModelCost) -> float:
    """Of the workload's own sequence length, the check's."""
    longest = LARGE_MODEL_SEQUENCE_LENGTH if cost.parameters > SMALL_MODEL_PARAMETERS else CHECK_SEQUENCE_LENGTH
    return 1.0 if cost.sequence_length is None else min(1.0, longest / cost.sequence_length)


def parity_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Expected seconds of what a verdict needs, reference included: it does without a second compilation."""
    return sum(parity_parts_s(trials, cost, config))


def parity_parts_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> tuple[float, float]:
    """The same in two parts: starting and running, and compiling, of which trials say how long it takes."""
    own = takes_own_shapes(trials, cost, config)
    running_s = 2 * trials.fixed_s + _running_s(cost, config, own_shapes=own)
    return running_s, trials.compile_s(config, warm=own)

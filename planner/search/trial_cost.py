"""Predicts how many seconds a trial will take in total, so that the search can plan its budget.

In: step times and finished trials. Out: expected seconds of each candidate's trial, and of a compilation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trials.request import look_s
from autoplan.strategies.config import PLAIN, SLOW_COMPILE_MODES, TrainingConfig

Array = NDArray[np.float64]

FIXED_S = 1.0
"""Seconds to start, build and end a trial; assumed until a trial has finished."""

COMPILE_S = {"cpu": (25.0, 1.6), "cuda": (20.0, 1.2)}
"""Seconds to compile one distinct block, and further seconds per block if the whole model is compiled; used until a
compiled trial has finished (measured on a 2-core CPU, reported for recent GPUs). They only order the first compiled
trials."""

SLOW_MODE_FACTOR = 3.0
"""A compilation with max-autotune takes about so many times as long as one with the default mode: each matrix product
is compiled in a dozen or more Triton templates, and all of them are timed (torch/_inductor/select_algorithm.py,
`autotune_select_algorithm`). Assumed until one has finished."""

SLOW_MODE_SHARE = 0.3
"""Of the budget, what one trial in such a mode may take; where it is expected to take more, it is not tried."""

WARM_SHARE = 0.3
"""Of a compilation, what is left with the kernels in the compile cache: tracing and loading. Assumed until seen (in a
GPT-2 of two layers on a CPU: 3.6 s of 27)."""

_CACHE = re.compile(r"compile cache: (\d+) hit\(s\), (\d+) miss\(es\)")

_NO_PART_OF_THE_GRAPH = ("optimizer_step", "optimizer_state", "allocator", "offload")
"""Knobs that do not change what is compiled: trials that differ in these alone share their kernels in the cache.
`threads` does: kernels for the CPU have the number in their code (torch 2.13, torch/_inductor/codecache.py,
FxGraphHashDetails.cpp_runtime_thread_count)."""


class TrialCost:
    """Expected seconds of trials.

    Args:
        configs: The candidates; arrays are in their order.
        global_batch, num_blocks: Of the workload.
        device: cpu or cuda.
    """

    def __init__(
        self,
        configs: Sequence[TrainingConfig],
        *,
        global_batch: int,
        num_blocks: int,
        device: str,
    ) -> None:
        self.global_batch = global_batch
        block, more = COMPILE_S[device]
        self._assumed_s = {"block": block, "model": block + more * num_blocks}
        # seconds by (scope, mode), with and without the kernels in the cache
        self._cold: dict[tuple[str, str], list[float]] = {}
        self._warm: dict[tuple[str, str], list[float]] = {}
        self._compiled: set[TrainingConfig] = set()
        self._fixed: list[float] = []
        self._ratios: list[float] = []
        self._accumulation = np.array([float(config.accumulation(global_batch)) for config in configs])
        self._kinds = [(config.compile, config.compile_mode) for config in configs]
        self._graphs = [what_is_compiled(config) for config in configs]

    def observe(self, trial: Trial) -> None:
        """Learns from a finished trial; how long it compiled, also from one that was given up afterwards."""
        self._observe_compiling(trial)
        if trial.outcome is not Outcome.OK or trial.step_time_s is None:
            return
        phases = trial.phase_seconds
        self._fixed.append(sum(phases.get(name, 0.0) for name in ("start", "init", "build", "done")))
        expected = look_s(
            np.array([trial.step_time_s.median]), np.array([float(trial.config.accumulation(self.global_batch))])
        )
        spent = phases.get("warmup", 0.0) + phases.get("measure", 0.0)
        self._ratios.append(min(max(spent / float(expected[0]), 0.3), 3.0))

    def _observe_compiling(self, trial: Trial) -> None:
        config, seconds = trial.config, trial.phase_seconds.get("compile", 0.0)
        if config.compile == "off" or not seconds or trial.outcome not in (Outcome.OK, Outcome.PRUNED):
            return
        known = self._warm if was_warm(trial) else self._cold
        known.setdefault((config.compile, config.compile_mode), []).append(seconds)
        self._compiled.add(what_is_compiled(config))

    def observe_ahead(self, config: TrainingConfig, alone_s: float | None) -> None:
        """Learns from a configuration that was compiled ahead of its trial, beside others.

        Args:
            config: Its kernels are in the cache now.
            alone_s: What it would have taken alone with an empty cache; None: not known.
        """
        self._compiled.add(what_is_compiled(config))
        if alone_s is not None:
            self._cold.setdefault((config.compile, config.compile_mode), []).append(alone_s)

    @property
    def fixed_s(self) -> float:
        """Seconds to start, build and end a process that trains."""
        return float(np.median(self._fixed)) if self._fixed else FIXED_S

    def compile_s(self, config: TrainingConfig, *, warm: bool = False) -> float:
        """Expected seconds of a compilation; 0 where nothing is compiled.

        Args:
            config: Its scope and mode count.
            warm: With the kernels in the cache; otherwise without.
        """
        if config.compile == "off":
            return 0.0
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
        cold_s = factor * (float(np.median(default)) if default else self._assumed_s[scope])
        return max([cold_s, *self._warm.get(kind, ())])  # a warm one is no longer than a cold one

    def is_warm(self, config: TrainingConfig) -> bool:
        """Whether a trial has compiled the same before."""
        return what_is_compiled(config) in self._compiled

    def all_s(self, step_time_s: Array) -> Array:
        """Expected seconds of a trial of each candidate, given their step times."""
        cold = {kind: self._kind_s(kind, False) for kind in set(self._kinds)}
        warm = {kind: self._kind_s(kind, True) for kind in set(self._kinds)}
        compiling = np.array(
            [
                (warm if graph in self._compiled else cold)[kind]
                for kind, graph in zip(self._kinds, self._graphs, strict=True)
            ]
        )
        return self._total(step_time_s, self._accumulation, compiling)

    def one_s(self, config: TrainingConfig, step_time_s: float) -> float:
        """Expected seconds of one trial."""
        accumulation = np.array([float(config.accumulation(self.global_batch))])
        compiling = self.compile_s(config, warm=self.is_warm(config))
        return float(self._total(np.array([step_time_s]), accumulation, compiling)[0])

    def warm_s(self, config: TrainingConfig, trial_s: float) -> float:
        """Expected seconds of a further run of a configuration, of which `trial_s` are expected for the first."""
        if self.is_warm(config):
            return trial_s
        return trial_s - self.compile_s(config) + self.compile_s(config, warm=True)

    def repeat_s(self, trial: Trial) -> float:
        """Expected seconds of running a finished trial again: its kernels are in the cache."""
        compiled_s = trial.phase_seconds.get("compile", 0.0)
        if trial.config.compile == "off" or not compiled_s:
            return trial.seconds_spent
        again_s = compiled_s if was_warm(trial) else min(compiled_s, self.compile_s(trial.config, warm=True))
        return trial.seconds_spent - compiled_s + again_s

    def _total(self, step_time_s: Array, accumulation: Array, compiling: Array | float) -> Array:
        ratio = float(np.median(self._ratios)) if self._ratios else 1.0
        return self.fixed_s + compiling + ratio * look_s(step_time_s, accumulation)


def what_is_compiled(config: TrainingConfig) -> TrainingConfig:
    """The config without the knobs that do not change what is compiled."""
    return config.model_copy(update={knob: getattr(PLAIN, knob) for knob in _NO_PART_OF_THE_GRAPH})


def was_warm(trial: Trial) -> bool:
    """Whether a trial found all its kernels in the compile cache, as its warning says."""
    for text in trial.warnings:
        found = _CACHE.match(text)
        if found is not None:
            return int(found[1]) > 0 and int(found[2]) == 0
    return False

"""How long a trial will take, all told: what the budget is planned with. Learns from the trials that finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import Outcome, Trial
from autoplan.planner.trials.request import EXPENSIVE, FITS_MICRO_STEPS, VERY_EXPENSIVE, WHOLE_STEP_SHARE
from autoplan.strategies.config import TrainingConfig

Array = NDArray[np.float64]

FIXED_S = 1.0
"""Starting, building and ending a trial, until trials have shown it."""

COMPILE_S = {"cpu": (25.0, 1.6), "cuda": (20.0, 1.2)}
"""Seconds to compile one distinct block, and more per block where the whole model is compiled, until trials have
shown it (seen on a 2-core CPU and reported for recent GPUs; they only order the first compiled trials)."""


class TrialCost:
    """Expected seconds of trials.

    Args:
        configs: The candidates; costs come in their order.
        global_batch, num_blocks, device: Of the workload, and where it runs.
        time_box_s: Of each trial.
    """

    def __init__(
        self, configs: Sequence[TrainingConfig], *, global_batch: int, num_blocks: int, device: str, time_box_s: float
    ) -> None:
        self.time_box_s = time_box_s
        self.global_batch = global_batch
        block, more = COMPILE_S[device]
        self._compile_s = {"off": 0.0, "block": block, "model": block + more * num_blocks}
        self._fixed: list[float] = []
        self._ratios: list[float] = []
        self._accumulation = np.array([float(config.accumulation(global_batch)) for config in configs])
        self._scopes = np.array([config.compile for config in configs])

    def told(self, trial: Trial) -> None:
        """Takes in a finished trial."""
        if trial.outcome is not Outcome.OK or trial.step_time_s is None:
            return
        phases = trial.phase_seconds
        self._fixed.append(sum(phases.get(name, 0.0) for name in ("start", "init", "build", "done")))
        scope = trial.config.compile
        if scope != "off" and phases.get("compile"):
            self._compile_s[scope] = phases["compile"]
        expected = self._stepping(
            np.array([trial.step_time_s.median]), np.array([float(trial.config.accumulation(self.global_batch))])
        )
        spent = phases.get("warmup", 0.0) + phases.get("measure", 0.0)
        self._ratios.append(min(max(spent / float(expected[0]), 0.3), 3.0))

    def all_s(self, step_time_s: Array) -> Array:
        """Expected seconds of a trial of each candidate, given their step times."""
        compiling = np.array([self._compile_s[scope] for scope in self._scopes])
        return self._total(step_time_s, self._accumulation, compiling)

    def one_s(self, config: TrainingConfig, step_time_s: float) -> float:
        """Expected seconds of one trial."""
        accumulation = np.array([float(config.accumulation(self.global_batch))])
        return float(self._total(np.array([step_time_s]), accumulation, self._compile_s[config.compile])[0])

    def _total(self, step_time_s: Array, accumulation: Array, compiling: Array | float) -> Array:
        fixed = float(np.median(self._fixed)) if self._fixed else FIXED_S
        ratio = float(np.median(self._ratios)) if self._ratios else 1.0
        return fixed + compiling + ratio * self._stepping(step_time_s, accumulation)

    def _stepping(self, step_time_s: Array, accumulation: Array) -> Array:
        """Two short steps, then some ten whole steps or the rest of the time box by parts (`trials/stepping.py`)."""
        micro = step_time_s / accumulation
        most = 2 * np.minimum(accumulation, FITS_MICRO_STEPS)
        share = micro / self.time_box_s
        short = np.minimum(most, np.where(share > VERY_EXPENSIVE, 3, np.where(share > EXPENSIVE, 4, most))) * micro
        whole = np.minimum(self.time_box_s, 0.3 + 10 * step_time_s)
        parts = np.maximum(0.6 * (self.time_box_s - short), 0.0)
        return np.asarray(short + np.where(step_time_s < WHOLE_STEP_SHARE * self.time_box_s, whole, parts))

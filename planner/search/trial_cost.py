"""Predicts how many seconds a trial will take in total, so that the search can plan its budget.

In: step times and finished trials. Out: expected seconds of each candidate's trial.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.records import Outcome, Trial
from autoplan.planner.trials.request import EXPENSIVE, FITS_MICRO_STEPS, VERY_EXPENSIVE, WHOLE_STEP_SHARE
from autoplan.strategies.config import TrainingConfig

Array = NDArray[np.float64]

FIXED_S = 1.0
"""Seconds to start, build and end a trial; assumed until a trial has finished."""

COMPILE_S = {"cpu": (25.0, 1.6), "cuda": (20.0, 1.2)}
"""Seconds to compile one distinct block, and further seconds per block if the whole model is compiled; used until a
compiled trial has finished (measured on a 2-core CPU, reported for recent GPUs). They only order the first compiled
trials."""


class TrialCost:
    """Expected seconds of trials.

    Args:
        configs: The candidates; arrays are in their order.
        global_batch, num_blocks: Of the workload.
        device: cpu or cuda.
        time_box_s: Seconds of warm-up and measuring per trial.
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

    def observe(self, trial: Trial) -> None:
        """Learns from a finished trial."""
        if trial.outcome is not Outcome.OK or trial.step_time_s is None:
            return
        phases = trial.phase_seconds
        self._fixed.append(sum(phases.get(name, 0.0) for name in ("start", "init", "build", "done")))
        scope = trial.config.compile
        if scope != "off" and phases.get("compile"):
            self._compile_s[scope] = phases["compile"]
        expected = self._measuring_s(
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
        return fixed + compiling + ratio * self._measuring_s(step_time_s, accumulation)

    def _measuring_s(self, step_time_s: Array, accumulation: Array) -> Array:
        """Seconds of warm-up and measuring: two short steps, then whole steps or parts (`trials/step_timer.py`).

        Some ten whole steps; or parts, for 60 % of what is left of the time box.
        """
        micro_step_s = step_time_s / accumulation
        most = 2 * np.minimum(accumulation, FITS_MICRO_STEPS)
        share = micro_step_s / self.time_box_s
        micro_steps = np.minimum(most, np.where(share > VERY_EXPENSIVE, 3, np.where(share > EXPENSIVE, 4, most)))
        short_steps_s = micro_steps * micro_step_s
        whole_steps_s = np.minimum(self.time_box_s, 0.3 + 10 * step_time_s)
        parts_s = np.maximum(0.6 * (self.time_box_s - short_steps_s), 0.0)
        by_whole_steps = step_time_s < WHOLE_STEP_SHARE * self.time_box_s
        return np.asarray(short_steps_s + np.where(by_whole_steps, whole_steps_s, parts_s))

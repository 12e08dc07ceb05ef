"""The loss of the first samples before any update: every trial records it, and it has to be the baseline's.

It costs nothing: the micro-steps of a trial's first short step run on these samples. A micro-batch repeats the first
sample, so that the mean loss is the same at every micro-batch (and its shape is the one that is measured, which matters
to torch.compile); where the user fixed the micro-batch, it is the first micro-batch as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoplan.planner.records import Trial

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

TOLERANCES = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 1e-2}
"""Relative differences that pass, by precision. Wide: it says which trial to look at; the parity check decides."""

SPREADS = 10.0
"""Standard deviations that pass beside them, where dropout makes the loss random: they come from about four values."""


def first_samples(workload: Workload, micro_batch: int, micro_steps: int) -> Any:
    """A batch of a few micro-batches, each of the same first samples."""
    from autoplan.strategies.workloads.batch import repeat_samples
    from autoplan.strategies.workloads.randomness import with_seeded_batches

    fixed = workload.fixed_micro_batch
    batch = with_seeded_batches(workload).make_batch(fixed or 1, 0)
    return repeat_samples(batch, micro_batch * micro_steps // (fixed or 1))


def with_first_loss_compared(trial: Trial, baseline: Trial | None) -> Trial:
    """The trial, marked and with a warning where its loss of the first samples is not the baseline's."""
    if baseline is None or baseline.number == trial.number or not is_off(trial, baseline):
        return trial
    text = (
        f"the loss of the first samples before any update is {_mean(trial.first_losses):.6g}, the baseline's "
        f"{_mean(baseline.first_losses):.6g}: it may train something else, which the parity check decides"
    )
    return trial.model_copy(update={"loss_differs": True, "warnings": (*trial.warnings, text)})


def is_off(trial: Trial, baseline: Trial) -> bool:
    """Whether the mean losses differ by more than rounding and the spread of both explain."""
    one, other = trial.first_losses, baseline.first_losses
    if not one or not other:
        return False
    copies, base_copies = trial.config.micro_batch, baseline.config.micro_batch
    freedom = len(one) + len(other) - 2
    if freedom == 0:  # the spread is not known
        return False
    squares = copies * _squares(one) + base_copies * _squares(other)
    deviation = math.sqrt(squares / freedom * (1 / (copies * len(one)) + 1 / (base_copies * len(other))))
    allowed = TOLERANCES[trial.config.precision] * abs(_mean(other)) + SPREADS * deviation
    return abs(_mean(one) - _mean(other)) > allowed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _squares(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values)

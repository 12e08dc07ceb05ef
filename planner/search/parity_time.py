"""Predicts how many seconds a parity check takes: by what its parts cost on this model.

A check (planner/parity/) starts two processes. One runs the plain reference, the other builds the candidate as training
would. Both run a few small steps, then one pass at the workload's own sequence length, and passes with dropout on. A
compiled candidate is compiled anew for each of them: the sequences are shorter than those of its trial, so that no
kernel is in the cache. Where the larger steps cost less than that, the check takes the trial's own micro-batch and
sequence length (`takes_own_shapes`), and finds its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.planner.parity.records import (
    CHECK_MICRO_BATCH,
    CHECK_SEQUENCE_LENGTH,
    CHECK_STEPS,
    DROPOUT_SEEDS,
    DROPOUT_SEQUENCE_LENGTH,
    LARGE_MODEL_SEQUENCE_LENGTH,
    SMALL_MODEL_PARAMETERS,
    check_accumulation,
)
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.strategies.config import TrainingConfig

SMALL_BATCH_FACTOR = 1.5
"""A sample in the small micro-batches of the check takes so much longer than one in a trial's. With it, the check of a
GPT-2 of 124M on two cores is expected to take 50 s, where 44 CPU-seconds were measured. (On a GPU the factor is larger,
but there all of it takes a second.)"""

OPTIMIZER_STEPS = 4.0 * CHECK_STEPS
"""The check copies and compares parameters and gradients at each step of both runs, and replays the optimizer on the
candidate's gradients: each about as long as an optimizer step in a foreach form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """What a check costs on one model, besides compiling.

    Attributes:
        sequence_length: Of the workload; None: samples are no sequences.
        parameters: That train.
        sample_s: Seconds of a plain forward and backward of one sample of the workload's own length.
        optimizer_s: Seconds of the plain optimizer step.
        has_dropout: Whether passes with dropout on are made.
        fixed_micro_batch: The micro-batch is part of what is trained, so that the check keeps it.
    """

    sequence_length: int | None
    parameters: float
    sample_s: float
    optimizer_s: float = 0.0
    has_dropout: bool = True
    fixed_micro_batch: bool = False


def takes_own_shapes(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> bool:
    """Whether a check with a trial's own micro-batch and sequence length costs less, because nothing is compiled anew.

    Dropout is off in the steps of a check, so that a model with dropout is another graph there; so is a fused loss,
    which takes other chunks. What is kept rounded is compared on few additions, and products in fp8
    beside a reference with the same few samples behind each scale.
    """
    others = config.loss == "fused" or config.parameters != "own" or config.fp8 != "off" or config.pp > 1
    if config.compile == "off" or others or cost.has_dropout:
        return False
    own_length = cost.sequence_length is not None and cost.sequence_length > _longest(cost)
    saved_s = (1 + own_length) * trials.compile_s(config) - trials.compile_s(config, warm=True)
    return _running_with_own_shapes_s(cost, config) - _running_with_small_shapes_s(cost, config) < saved_s


def _running_with_own_shapes_s(cost: ModelCost, config: TrainingConfig) -> float:
    samples = 2.0 * CHECK_STEPS * check_accumulation(config) * config.micro_batch * config.dp
    return SMALL_BATCH_FACTOR * samples * cost.sample_s + OPTIMIZER_STEPS * cost.optimizer_s


def _running_with_small_shapes_s(cost: ModelCost, config: TrainingConfig) -> float:
    micro_batch = config.micro_batch if cost.fixed_micro_batch else min(config.micro_batch, CHECK_MICRO_BATCH)
    step_samples = CHECK_STEPS * check_accumulation(config) * micro_batch * config.dp
    dropout_samples = (2 * DROPOUT_SEEDS + 1) * micro_batch * config.dp
    if cost.sequence_length is None:
        samples = 2.0 * step_samples + dropout_samples
    else:
        length = min(_longest(cost), cost.sequence_length)
        samples = 2.0 * step_samples * length / cost.sequence_length
        samples += dropout_samples * min(DROPOUT_SEQUENCE_LENGTH, length) / cost.sequence_length
        if length < cost.sequence_length:
            samples += 2.0 * config.dp
    return SMALL_BATCH_FACTOR * samples * cost.sample_s + OPTIMIZER_STEPS * cost.optimizer_s


def _longest(cost: ModelCost) -> int:
    """The length of the check's own sequences."""
    return CHECK_SEQUENCE_LENGTH if cost.parameters <= SMALL_MODEL_PARAMETERS else LARGE_MODEL_SEQUENCE_LENGTH


def check_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Expected seconds of the parts of a check that a verdict needs, reference included: one compilation at most.

    The check leaves further ones out where time is short.
    """
    own = takes_own_shapes(trials, cost, config)
    running_s = (_running_with_own_shapes_s if own else _running_with_small_shapes_s)(cost, config)
    return 2 * trials.fixed_s + running_s + trials.compile_s(config, warm=own)

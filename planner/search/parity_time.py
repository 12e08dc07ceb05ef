"""The time that a search keeps free for the parity check: by what the parts of a check cost on this model.

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

LEAST_SHARE, LEAST_S, MOST_LEAST_S = 0.12, 5.0, 45.0
"""Kept at the least: a share of the budget, within these seconds."""

MOST_SHARE = 0.3
"""Of the budget that is kept at the most for what is not compiling; the check leaves parts out where time is short."""

MOST_COMPILING_SHARE = 0.3
"""Of the budget that is kept at the most for compiling."""

OVERRUN = 0.1
"""A check may end this share of the budget past the budget: without it the search would end with no plan."""

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
    saved_s = compilations(cost, config) * trials.compile_s(config) - trials.compile_s(config, warm=True)
    return _running_with_own_shapes_s(cost, config) - _running_with_small_shapes_s(cost, config) < saved_s


def running_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Seconds of all forwards and backwards of a check, and of its optimizer steps, without starts and compiling."""
    if takes_own_shapes(trials, cost, config):
        return _running_with_own_shapes_s(cost, config)
    return _running_with_small_shapes_s(cost, config)


def _running_with_own_shapes_s(cost: ModelCost, config: TrainingConfig) -> float:
    samples = 2.0 * CHECK_STEPS * check_accumulation(config) * config.micro_batch * config.dp
    return SMALL_BATCH_FACTOR * samples * cost.sample_s + OPTIMIZER_STEPS * cost.optimizer_s


def _running_with_small_shapes_s(cost: ModelCost, config: TrainingConfig) -> float:
    longest = CHECK_SEQUENCE_LENGTH if cost.parameters <= SMALL_MODEL_PARAMETERS else LARGE_MODEL_SEQUENCE_LENGTH
    micro_batch = config.micro_batch if cost.fixed_micro_batch else min(config.micro_batch, CHECK_MICRO_BATCH)
    step_samples = CHECK_STEPS * check_accumulation(config) * micro_batch * config.dp
    dropout_samples = (2 * DROPOUT_SEEDS + 1) * micro_batch * config.dp
    if cost.sequence_length is None:
        samples = 2.0 * step_samples + dropout_samples
    else:
        length = min(longest, cost.sequence_length)
        samples = 2.0 * step_samples * length / cost.sequence_length
        samples += dropout_samples * min(DROPOUT_SEQUENCE_LENGTH, length) / cost.sequence_length
        if length < cost.sequence_length:
            samples += 2.0 * config.dp
    return SMALL_BATCH_FACTOR * samples * cost.sample_s + OPTIMIZER_STEPS * cost.optimizer_s


def compilations(cost: ModelCost, config: TrainingConfig) -> int:
    """How often a check compiles: for its short sequences, for the workload's own length, and with dropout on."""
    if config.compile == "off":
        return 0
    longest = CHECK_SEQUENCE_LENGTH if cost.parameters <= SMALL_MODEL_PARAMETERS else LARGE_MODEL_SEQUENCE_LENGTH
    own_length = cost.sequence_length is not None and cost.sequence_length > longest
    return 1 + own_length + cost.has_dropout


def check_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """Expected seconds of a whole check of a configuration, reference included."""
    running = 2 * trials.fixed_s + running_s(trials, cost, config)
    if takes_own_shapes(trials, cost, config):
        return running + trials.compile_s(config, warm=True)
    return running + compilations(cost, config) * trials.compile_s(config)


def least_check_s(trials: TrialCost, cost: ModelCost, config: TrainingConfig) -> float:
    """The same of the parts that a verdict needs: one compilation, where there is any."""
    warm = takes_own_shapes(trials, cost, config)
    return 2 * trials.fixed_s + running_s(trials, cost, config) + trials.compile_s(config, warm=warm)

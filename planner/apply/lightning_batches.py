"""What a lightning.Trainer counts in batches, where a plan's batches have another size than those of the search.

In: what was read of the module and its Trainer, and the plan's configuration. Out: arguments that count the same
samples, and sentences on what no argument says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.strategies.workloads.trainers.lightning_optimizers import steps_between
from autoplan.strategies.workloads.trainers.mean_loss import CountLabels

if TYPE_CHECKING:
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.workloads.trainers.lightning import ModuleSource
    from autoplan.strategies.workloads.workload import Workload

COUNT_BATCHES = ("limit_train_batches", "val_check_interval")
"""Arguments of the Trainer that count training batches where they are whole numbers."""

LOOKED_AT = 8
"""So many micro-batches are looked at for their number of labels."""


def rescaled_counts(source: ModuleSource, trainer: Any, config: TrainingConfig) -> tuple[dict[str, int], list[str]]:
    """Arguments of the Trainer that count batches, for the plan's batches; and sentences on those that cannot.

    Args:
        source: The module as it was read.
        trainer: That of the search; None: not given.
        config: The plan's.
    """
    before, now = source.batch_samples, config.micro_batch * config.dp
    if before == now:
        return {}, []
    sizes = f"of {before} samples, and the plan's have {now}"
    if trainer is None:
        names = " and ".join(COUNT_BATCHES)
        return {}, [f"whole numbers for {names} count batches {sizes}; give trainer= to have them rescaled"]
    arguments, missing = {}, []
    for name in COUNT_BATCHES:
        value = getattr(trainer, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not value:
            continue  # a share of an epoch, or a time
        if value * before % now:
            missing.append(
                f"{name}={value} counts batches {sizes}: that is {value * before / now:.4g} of them, no whole number; "
                f"give the Trainer the {name} that you want"
            )
        else:
            arguments[name] = value * before // now
    return arguments, missing


def other_frequency(source: ModuleSource, accumulation: int) -> list[str]:
    """A sentence where the Trainer steps the schedule at other optimizer steps than the search; else none.

    Args:
        source: The module as it was read.
        accumulation: Of the plan.
    """
    wanted = steps_between(source.frequency, source.accumulation)
    found = steps_between(source.frequency, accumulation)
    if wanted == found:
        return []
    every = "each optimizer step" if found == 1 else f"every {found} optimizer steps"
    return [
        f"the schedule's frequency={source.frequency} counts batches: with the plan's accumulation {accumulation} "
        f"Lightning steps it after {every}, where the training has {wanted}. In configure_optimizers, give "
        f"frequency={wanted * accumulation}"
    ]


def mean_of_means(workload: Workload, config: TrainingConfig) -> list[str]:
    """A sentence where the Trainer's mean of micro-batches is not that of the global batch's labels; else none.

    Args:
        workload: The module's.
        config: The plan's.
    """
    parts = config.accumulation(workload.global_batch) * config.dp
    if parts == 1 or not isinstance(workload.count, CountLabels):
        return []
    return [
        f"the mean over all labels of the global batch: the loss is a mean over {workload.count.describe()}, and "
        f"Lightning averages the means of {parts} micro-batches, which weights the labels of a micro-batch with few of "
        "them more. autoplan export --to lightning writes global_mean and a callback that divide by the count of all"
    ]


def counts_differ(workload: Workload, config: TrainingConfig) -> bool:
    """Whether the first micro-batches of a workload whose loss counts labels have different numbers of them."""
    assert workload.count is not None, "the loss counts labels"
    parts = config.accumulation(workload.global_batch) * config.dp
    counts = {workload.count(workload.make_batch(config.micro_batch, k)) for k in range(min(max(parts, 2), LOOKED_AT))}
    return len(counts) > 1

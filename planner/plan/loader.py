"""The DataLoader of a training under a plan: its batch size, its share of the samples, its measured setting.

In: a plan and a dataset. Out: a DataLoader whose batches `run.step` takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoplan.errors import PlanError
from autoplan.planner.plan.parts import refuse_unverified
from autoplan.strategies.workloads.loading.settings import LoaderSetting

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from autoplan.planner.records.plan import PlanRecord
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.loading.source import LoaderSource


def make_plan_loader(
    plan: PlanRecord,
    dataset: Any,
    *,
    run: TrainingRun | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    shuffle: bool | None,
    seed: int,
    start: int,
) -> DataLoader[Any]:
    """The loader that Plan.loader returns; the docstring there says the parameters and errors."""
    from autoplan.strategies.workloads.loading.source import make_loader, source_of

    refuse_unverified(plan)
    source = source_of(dataset)
    if collate_fn is not None:
        source = dataclasses.replace(source, collate_fn=collate_fn)
    if shuffle is not None:
        source = dataclasses.replace(source, shuffled=shuffle, sampler=None)
    rank, ranks = _position(plan, run)
    _check_split(source, rank, ranks)
    return make_loader(
        source,
        setting_of(plan) or LoaderSetting(workers=0, pin_memory=plan.device == "cuda"),
        batch_size=plan.workload.global_batch // plan.config.dp,
        rank=rank,
        ranks=ranks,
        seed=seed,
        start=start,
    )


def _check_split(source: LoaderSource, rank: int, ranks: int) -> None:
    """Raises PlanError where a sampler that is split over processes has other samples than the plan wants here.

    The ranks of a model that is split share their samples: a sampler that knows all ranks gives each of them others.
    """
    own = getattr(source.sampler, "rank", rank)
    if source.split_over == 1 or (source.split_over, own) == (ranks, rank):
        return
    raise PlanError(
        f"the sampler ({type(source.sampler).__name__}) gives part {own} of {source.split_over} of the samples, "
        f"and the plan has part {rank} of {ranks} here",
        hint="Give the dataset, or a DataLoader whose sampler is not split: plan.loader takes this rank's part itself.",
    )


def setting_of(plan: PlanRecord) -> LoaderSetting | None:
    """The loader's setting that the search measured; None where it measured none."""
    return None if plan.loading is None else plan.loading.setting


def _position(plan: PlanRecord, run: TrainingRun | None) -> tuple[int, int]:
    """Which share of the samples this process takes, of how many."""
    config = plan.config
    if config.dp == 1:
        return 0, 1
    if run is not None:
        from autoplan.strategies.techniques.mesh import data_position

        return data_position(run.mesh)
    import torch.distributed as dist

    if config.tp * config.pp == 1 and dist.is_initialized() and dist.get_world_size() == config.dp:
        return dist.get_rank(), config.dp
    raise PlanError(
        f"the plan splits each batch over {config.dp} data-parallel ranks, and it is not known which of them this is",
        hint="Make the run first, and hand it in: plan.loader(dataset, run=plan.prepare(...)).",
    )

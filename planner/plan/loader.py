"""What `Plan.loader` asks of a plan: the loader's measured setting, and the share of the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.errors import PlanError
from autoplan.strategies.workloads.loading.settings import LoaderSetting

if TYPE_CHECKING:
    from autoplan.planner.records.plan import PlanRecord
    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.loading.source import LoaderSource


def check_split(source: LoaderSource, rank: int, ranks: int) -> None:
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


def position_of(plan: PlanRecord, run: TrainingRun | None) -> tuple[int, int]:
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

"""What ranks hold of a tensor comes together again, whichever way it was split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from autoplan.processes import RankContext, Zygote
from autoplan.strategies.techniques.mesh import make_mesh, whole_tensor
from tests.strategies.parallel.world import run_ranks

PARTS = 3  # query, key and value side by side


def gather(context: RankContext, dp_shard: int) -> dict[str, bool]:
    """Splits weights over tp, then over FSDP2's ranks; whether each comes together as it was."""
    context.init_process_group("gloo", 60.0)
    mesh = make_mesh((1, 1, dp_shard, 2), "cpu")
    whole = torch.arange(144.0).view(12, 12)
    placements: tuple[Any, ...] = (*(_StridedShard(dim, split_factor=PARTS) for dim in (0, 1)), Shard(0), Shard(1))
    same = {}
    for placement in placements:
        module = nn.Linear(12, 12, bias=False)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None))
        if dp_shard > 1:
            fully_shard(module, mesh=mesh["dp_shard"])
        weight = module.weight.detach()
        assert isinstance(weight, DTensor) and weight.to_local().numel() == 144 // (2 * dp_shard)
        same[str(placement)] = torch.equal(whole_tensor(weight), whole)
    return same


@pytest.mark.parametrize("dp_shard", [1, 2], ids=["tp", "fsdp_tp"])
def test_a_split_weight_is_whole_again(zygote: Zygote, dp_shard: int) -> None:
    ranks = 2 * dp_shard
    for rank in run_ranks(zygote, gather, ranks, (dp_shard,)).ranks:
        assert rank.result is not None and len(rank.result) == 4 and all(rank.result.values()), rank.result

"""Ranks of a trial: how long a collective may take."""

import torch
import torch.distributed as dist

from autoplan.planner.trials.ranks import COLLECTIVE_TIMEOUT_S, join_ranks, limit_collectives
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.techniques.mesh import make_mesh


def timeouts_s(context: RankContext) -> tuple[list[float], list[float]]:
    """Of all process groups: after joining and making a mesh, and once they are limited."""
    join_ranks(context, "cpu")
    make_mesh((1, 1, 2, 1), "cpu")
    found = []
    for _ in range(2):
        groups = dist.distributed_c10d._world.pg_map
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        found.append([backend.options._timeout.total_seconds() for backend in backends])
        limit_collectives()
    return found[0], found[1]


def test_the_groups_of_a_mesh_have_the_timeout_of_the_trial(training_zygote: Zygote):
    for before, after in training_zygote.run(Task(target=timeouts_s, ranks=2, total_deadline_s=60.0)).check().results:
        assert before[0] == COLLECTIVE_TIMEOUT_S < max(before), "torch gives a new group its own default"
        assert len(after) > 1 and set(after) == {COLLECTIVE_TIMEOUT_S}

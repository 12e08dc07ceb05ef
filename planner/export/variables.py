"""The environment variables that each rank of an exported script is given.

In: a plan. Out: their names and values, and sentences on those that a script does not set.
"""

from __future__ import annotations

import re
from pathlib import Path

from autoplan.planner.plan.current import PLAN_VARIABLE, variables_for
from autoplan.planner.plan.plan import Plan

_CARRIED = re.compile(r"CUDA_DEVICE_MAX_CONNECTIONS|(TORCH_)?NCCL_[A-Z0-9_]+")
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PLAIN = re.compile(r"[\w:,.^+-]{1,200}", re.ASCII)
"""Values that are taken from a plan's file into a script: no paths, no spaces, nothing that a shell reads."""
_MACHINE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def rank_variables(plan: Plan) -> dict[str, str]:
    """The environment variables of each rank, besides the plan's file: those of `autoplan run`, and NCCL's.

    torchrun sets OMP_NUM_THREADS to 1 where several ranks have none: not what was measured.
    """
    then, cores = plan.environment.variables, plan.hardware.host.cores_usable
    found = variables_for(plan, Path("plan.json"), {}, cores)
    del found[PLAN_VARIABLE]
    if plan.config.world_size > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.config.world_size)))
    for name in sorted(then):
        if _CARRIED.fullmatch(name) and _PLAIN.fullmatch(then[name]):
            found[name] = then[name]
    for name, other in (_ALLOCATOR_NAMES, _ALLOCATOR_NAMES[::-1]):  # older versions of torch read the second alone
        if name in found:
            found.setdefault(other, found[name])
    return dict(sorted(found.items()))


def not_carried(plan: Plan) -> tuple[str, ...]:
    """Sentences on the variables that the plan was found with and that a script does not set."""
    then, carried = plan.environment.variables, rank_variables(plan)
    others = [name for name in sorted(then) if name not in carried and name not in _MACHINE]
    if not others:
        return ()
    values = ", ".join(f"{name}={then[name]}" for name in others)
    return (f"the plan was found with {values}: set what of it you want, here or in your environment",)

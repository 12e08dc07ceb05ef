"""A plan on its way to a script: `autoplan run plan.json train.py` starts it with what the plan needs around it.

    plan = autoplan.current_plan()          # in train.py; None where nobody handed a plan over

In: a plan, the environment here. Out: the variables for the ranks. Only variables of threads and allocators are taken
from a plan, and only plain values: a plan's file may be from anywhere, and LD_PRELOAD would be code (threat_model.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from autoplan.planner.plan.plan import Plan

PLAN_VARIABLE = "AUTOPLAN_PLAN"
"""The environment variable with the absolute path of the plan that a script is run with."""

UNVERIFIED_VARIABLE = "AUTOPLAN_UNVERIFIED_OK"
"""Is set where `autoplan run --unverified-ok` started the script: the script's own calls take the plan then."""

CHANGED_VARIABLE = "AUTOPLAN_CHANGED_OK"
"""The same of `autoplan run --changed-ok`."""

TAKEN = ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that are taken over from where the plan was found, unless they are set here."""

NOT_TAKEN = ("LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME")
"""Variables to set by hand if the plan was found with them: they load code, or are for libraries other than torch."""

_PLAIN = re.compile(r"[\w:,.\[\]-]{1,200}")


def current_plan() -> Plan | None:
    """The plan that `autoplan run plan.json script.py` was given; None in a program that it did not start.

    A script that works either way: `plan = autoplan.current_plan() or autoplan.load_plan("plan.json")`. Loading it
    runs no code. Programs that the script starts see the same plan.

    Raises:
        PlanError: the file is gone, or is no plan any more.
    """
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return None
    return Plan.load(path).accepted(UNVERIFIED_VARIABLE in os.environ, changed_ok=CHANGED_VARIABLE in os.environ)


def variables_for(
    plan: Plan, path: Path, here: Mapping[str, str], cores: int, ranks: int | None = None
) -> dict[str, str]:
    """The environment variables with which a script of this plan starts.

    Args:
        plan: The plan.
        path: Its file.
        here: The environment; a variable that is set wins, but for the plan's own threads and allocator.
        cores: That the script may use.
        ranks: That share them; None: all of the plan's.
    """
    taken = {UNVERIFIED_VARIABLE: plan.unverified_ok, CHANGED_VARIABLE: plan.changed_ok}
    variables = {PLAN_VARIABLE: str(path.absolute())} | {name: "1" for name, is_so in taken.items() if is_so}
    for name in TAKEN:
        value = plan.environment.variables.get(name)
        if value is None or name in here or not _PLAIN.fullmatch(value):
            continue
        if name == "OMP_NUM_THREADS" and not (value.isdecimal() and 1 <= int(value) <= cores):
            continue  # a plan's file may say any number
        variables[name] = value
    config = plan.config
    if config.allocator == "expandable":
        own = [text for name in TAKEN[1:] if (text := {**variables, **here}.get(name))]
        if not any("expandable_segments" in text for text in own):
            variables["PYTORCH_ALLOC_CONF"] = ",".join([*own[:1], "expandable_segments:True"])
    if plan.device == "cpu":
        if config.threads is not None:
            variables["OMP_NUM_THREADS"] = str(config.threads)
        elif config.world_size > 1 and "OMP_NUM_THREADS" not in {**here, **variables}:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // (ranks or config.world_size)))  # as in the trials
        if config.allocator == "keep":
            from autoplan.strategies.techniques.allocator import LARGEST_MAPPED_BYTES, NEVER

            variables |= {"MALLOC_MMAP_THRESHOLD_": str(LARGEST_MAPPED_BYTES), "MALLOC_TRIM_THRESHOLD_": str(NEVER)}
    return variables


def too_many_threads(plan: Plan, variables: Mapping[str, str], cores: int) -> str | None:
    """A sentence where the ranks here start more threads than there are cores for them.

    Args:
        plan: The plan.
        variables: The environment of the ranks.
        cores: That they may use together.
    """
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    ranks = variables.get("LOCAL_WORLD_SIZE", "") if "RANK" in variables else str(plan.config.world_size)
    if not (threads.isdecimal() and ranks.isdecimal() and int(threads) * int(ranks) > cores):
        return None
    each = f"{ranks} ranks of {threads} threads each" if int(ranks) > 1 else f"{threads} threads"
    return (
        f"the plan runs {each}, and there are {cores} core(s) for them: they take turns, and the training is slower. "
        "Give it more cores (taskset, the limits of a container or a job), or search on this machine: autoplan search"
    )


def not_taken(plan: Plan, here: Mapping[str, str]) -> str | None:
    """A sentence on variables that the plan was found with, that are not set so here, and that no file may set."""
    then = plan.environment.variables
    names = [name for name in NOT_TAKEN if name in then and here.get(name) != then[name]]
    if not names:
        return None
    return f"the plan was found with {', '.join(f'{name}={then[name]}' for name in names)}, which you may want to set"

"""Where the ranks of a search run: on this machine, or on several nodes that --launcher starts agents on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.preload import preload_for
from autoplan.processes import Zygote

if TYPE_CHECKING:
    from autoplan.probes.profile import HardwareProfile
    from autoplan.processes import RankContext
    from autoplan.processes.nodes import Engine

DESCRIBE = f"{__name__}:describe_node"


def open_engine(options: SearchOptions) -> Engine | None:
    """What starts agents on the other nodes; None: the search runs on this machine.

    Raises:
        SystemExit: torchrun started this process as an agent, and the search that it was for has ended.
        AutoplanError: the engine is not installed, or this is no place where it can be used.
    """
    if options.launcher == "local":
        return None
    from autoplan.processes.engines import ENGINES, Elastic

    engine = ENGINES[options.launcher](options.layout[1] if options.device != "cpu" else 0)
    if isinstance(engine, Elastic) and not engine.first:
        raise SystemExit(engine.serve())
    return engine


def make_launcher(
    options: SearchOptions, profile: HardwareProfile, engine: Engine | None, on_note: Callable[[str], None]
) -> Zygote:
    """What runs the tasks of a search; not started yet."""
    if engine is None:
        return Zygote(preload=preload_for(options.spec))
    from autoplan.processes.nodes import Nodes

    nodes, ranks_per_node = options.layout
    return Nodes(
        engine,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        describe=DESCRIBE,
        check=partial(_why_not, describe(profile)),
        on_note=on_note,
        preload=preload_for(options.spec),
    )


def describe(profile: HardwareProfile) -> dict[str, Any]:
    """What all nodes of a search must have in common."""
    from autoplan.planner.store.database import source_version

    gpus = [device.name for device in profile.devices if device.type == "cuda"]
    kind = {"GPUs": ", ".join(gpus) or "none", "CPU": profile.host.cpu_model, "torch": profile.host.torch}
    return {"autoplan": source_version(), **kind, "hardware": profile.kind}


def describe_node(context: RankContext) -> dict[str, Any]:
    """The same of the node that this rank runs on."""
    from autoplan.probes.run import read_host_profile

    return describe(read_host_profile())


def _why_not(own: dict[str, Any], its: Any) -> str | None:
    if not isinstance(its, dict):
        return "it does not say what it is"
    other = next((name for name, value in own.items() if its.get(name) != value), None)
    if other is None:
        return None
    return f"its {other} is {its.get(other)}, and this node's {own[other]}: their times cannot be compared"

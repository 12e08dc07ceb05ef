"""Where the ranks of a search, or of a plan, run: on this machine, or on nodes that --launcher starts agents on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autoplan.errors import PlanError, UsageError
from autoplan.files import source_version
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.preload import preload_for
from autoplan.planner.trials.runner import COMPILER
from autoplan.processes import Zygote
from autoplan.processes.nodes import Nodes

if TYPE_CHECKING:
    from autoplan.planner.records.plan import PlanRecord
    from autoplan.probes.profile import HardwareProfile
    from autoplan.processes import RankContext
    from autoplan.processes.nodes import Engine

DESCRIBE = f"{__name__}:describe_node"
R = TypeVar("R")


def options_for(plan: PlanRecord, launcher: str | None = None, nodes: str | None = None, **more: Any) -> SearchOptions:
    """The options of a search of the plan's workload on the nodes that were given, else on those it was measured on.

    Args:
        plan, more: The plan, and further options.
        launcher: None: the plan's ranks run on this machine, and were measured on one.
        nodes: As in a search; None: as many as the plan was measured on.

    Raises:
        PlanError: the plan was measured on several nodes, and no launcher was given.
        UsageError: the nodes do not hold the plan's ranks, or are given without a launcher.
    """
    measured, ranks = plan.nodes, plan.config.world_size
    if launcher is None and measured is not None:
        raise PlanError(
            f"the plan was measured on {measured.describe()}, and no launcher was given: its {ranks} ranks would all "
            "run on this machine",
            hint=f"Start it on such nodes with --launcher {measured.launcher} (or another), or on this machine with "
            "--launcher local.",
        )
    if launcher not in (None, "local") and nodes is None and measured is not None:
        nodes = f"{measured.count}x{measured.ranks_per_node}"
    place: dict[str, Any] = {"device": plan.device, "launcher": launcher or "local", "nodes": nodes}
    options = SearchOptions(spec=plan.workload, **place, **more)
    most = options.layout[0] * options.layout[1]
    if nodes is not None and most < ranks:
        raise UsageError(f"the plan has {ranks} ranks, and --nodes {nodes} have {most}")
    return options


def with_engine(
    options: SearchOptions,
    work: Callable[[Engine | Nodes | None], R],
    exit_code: Callable[[R], int],
    on_note: Callable[[str], None] = lambda text: None,
) -> R:
    """Does some work with what starts agents, and tells these how it ended.

    Args:
        options: Which launcher.
        work: Is given the engine, or the nodes where this machine is none of them; None: all runs on this machine.
        exit_code: Of what came of it: 0 if torchrun shall not start it again.
        on_note: Is told what is waited for before the work begins.

    Raises:
        SystemExit: torchrun started this process as an agent, and what it was for has ended.
        AutoplanError: the engine is not installed, or this is no place where it can be used.
    """
    if options.launcher == "local":
        return work(None)
    from autoplan.probes.run import pick_device, read_host_profile
    from autoplan.processes import engines

    outside = engines.is_outside(options.launcher)  # what devices there are is then seen on the nodes
    device = options.device or "cuda" if outside else pick_device(read_host_profile(), options.device)
    gpus = options.layout[1] if device == "cuda" else 0

    def do(engine: Engine) -> R:
        return work(engine) if engine.here else _from_outside(options, engine, work, on_note)

    return engines.with_engine(options.launcher, gpus, do, lambda result: exit_code(result) == 0)


def _from_outside(
    options: SearchOptions, engine: Engine, work: Callable[[Engine | Nodes | None], R], on_note: Callable[[str], None]
) -> R:
    """Does the work once the nodes are there, for machines like the first of them."""
    from autoplan.probes.nodes import read_first_profile
    from autoplan.probes.run import machine_is

    first: dict[str, Any] = {}

    def check(its: Any) -> str | None:
        """This machine is none of the nodes: all are as the first of them, with this autoplan."""
        if not first and isinstance(its, dict):
            first.update(its | {"autoplan": source_version()})
        return _why_not(first, its)

    with _make_nodes(options, engine, check, on_note) as launcher, machine_is(read_first_profile(launcher)):
        return work(launcher)


def make_launcher(
    options: SearchOptions, profile: HardwareProfile, engine: Engine | Nodes | None, on_note: Callable[[str], None]
) -> Zygote:
    """What runs the tasks of a search; not started yet, where this machine is one of the nodes."""
    if engine is None:
        return Zygote(preload=preload_for(options.spec))
    if isinstance(engine, Nodes):
        engine.tell(on_note)
        return engine
    return _make_nodes(options, engine, partial(_why_not, describe(profile)), on_note)


def _make_nodes(
    options: SearchOptions, engine: Engine, check: Callable[[Any], str | None], on_note: Callable[[str], None]
) -> Nodes:
    nodes, ranks_per_node = options.layout
    return Nodes(
        engine,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        describe=DESCRIBE,
        check=check,
        on_note=on_note,
        preload=(*preload_for(options.spec), *COMPILER),  # agents import nothing later
    )


def describe(profile: HardwareProfile) -> dict[str, Any]:
    """What all nodes of a search must have in common."""
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

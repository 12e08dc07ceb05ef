"""The probes of several nodes: the profile of each, the links between them, and which is slower than the others.

    profile = probe_nodes("slurm", "4x8")       # on the first node: as a search starts there

In: a launcher and a layout. Out: a `NodesProfile`. Each rank measures its own GPU (on CPU one rank of each node the
whole node), all at the same time; then collectives run over all ranks, and between two nodes while the others wait.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import Field

from autoplan.errors import DeviceError, DidNotRunError, UsageError
from autoplan.files import source_version
from autoplan.probes.collectives import CPU_SIZES_BYTES, CUDA_SIZES_BYTES, OPERATIONS, make_reading
from autoplan.probes.merge import merge_measured
from autoplan.probes.profile import CollectiveReading, Device, HardwareProfile
from autoplan.probes.run import (
    default_budget_s,
    host_limit_bytes,
    machine_is,
    make_request,
    pick_device,
    read_host_profile,
)
from autoplan.probes.worker import Measured, probe_devices
from autoplan.processes import ProcessReport, Task, Zygote, run_again
from autoplan.processes.engines import ENGINES, is_outside, with_engine
from autoplan.processes.nodes import Nodes, parse_layout
from autoplan.record import Reading, Record

if TYPE_CHECKING:
    from autoplan.processes import RankContext
    from autoplan.processes.nodes import Engine

LINKS_S = 20.0
"""Seconds for all collectives; with many pairs of nodes each has `LEAST_S`."""

LEAST_S = 0.5
"""Of one operation over one group."""

READ_S = 120.0
"""For a rank to read what its node is; a driver can take tens of seconds."""

MOST_FOR_ALL_PAIRS = 8
"""With more nodes than this, each is measured with the next one alone: n pairs in place of n (n - 1) / 2."""

SLOW_SHARE = 0.1
"""A node or a link is named where it is slower than the median of the others by more than this share, and by more than
both readings scatter. Chosen, not measured."""

OF_PAIRS = ("send_recv", "all_reduce")


class NodeProfile(Record):
    """One node."""

    number: int = Field(description="0 for the first node, where the command runs")
    host: str = Field(description="as its machine calls itself")
    profile: HardwareProfile = Field(description="without collectives inside the node")


class NodeLink(Record):
    """The link between two nodes, while no other was used."""

    a: int = Field(description="the number of a node")
    b: int
    readings: tuple[CollectiveReading, ...] = Field(
        description="send_recv between the first ranks of both, all_reduce over all ranks of both"
    )

    def reading(self, operation: str) -> CollectiveReading | None:
        """The reading of an operation; None: it could not be measured."""
        return next((one for one in self.readings if one.operation == operation), None)


class NodesProfile(Record):
    """What several nodes can do, and which of them is slower than the others."""

    schema_version: int = 1
    created: str = Field(description="UTC, ISO 8601")
    seconds_spent: float
    launcher: str
    layout: str = Field(description="nodes and ranks on each: 2x8")
    device: str = Field(description="cuda or cpu: what was measured")
    nodes: tuple[NodeProfile, ...]
    collectives: tuple[CollectiveReading, ...] = Field(default=(), description="over all ranks")
    links: tuple[NodeLink, ...] = Field(default=(), description="between pairs of nodes")
    slow: tuple[str, ...] = Field(default=(), description="sentences on what is slower than its like; empty: nothing")
    notes: tuple[str, ...] = Field(default=(), description="nodes of another kind, and what was not measured")


def probe_nodes(
    launcher: str,
    nodes: str,
    *,
    device: str | None = None,
    budget_s: float | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> NodesProfile:
    """Measures several nodes and the links between them. Nothing comes from a cache, and nothing is kept there.

    Args:
        launcher: elastic, slurm or ray, as in a search (docs/nodes.md).
        nodes: N nodes with R ranks each, this one among them: `"2x8"`. On GPUs R is the GPUs of a node.
        device: cuda or cpu; None: the GPUs, if this node has any.
        budget_s: Seconds for the profile of each node, all at once; None: 12 s on a CPU, 20 s on a GPU.
        on_progress: Is told what is done.

    Raises:
        UsageError: the launcher or the nodes are none.
        DeviceError: there is no such device, a node did not come, has another version of autoplan, or nothing could be
            measured on it.
        DidNotRunError: something outside ended it each time, such as a node that was lost.
        SystemExit: torchrun started this process as an agent of the first node, and the probes have ended.
    """
    count, ranks = parse_layout(nodes)
    if launcher not in ENGINES:
        raise UsageError(f"--launcher is {launcher!r}", hint="It is elastic, slurm or ray.")
    outside = is_outside(launcher)  # what devices there are is then seen on the nodes
    wanted = device or "cuda" if outside else pick_device(read_host_profile(), device)

    def work(engine: Engine) -> NodesProfile:
        with Nodes(
            engine,
            nodes=count,
            ranks_per_node=ranks,
            describe=f"{__name__}:say_version",
            check=_why_not,
            on_note=on_progress,
            preload=("torch", "autoplan.probes.nodes"),
        ) as zygote:
            profile = read_host_profile() if engine.here else read_first_profile(zygote)
            kind = pick_device(profile, device)
            with machine_is(profile):
                return _probe(zygote, launcher, (count, ranks), kind, budget_s or default_budget_s(kind), on_progress)

    return with_engine(launcher, ranks if wanted == "cuda" else 0, work, lambda _: True)


def read_first_profile(zygote: Zygote) -> HardwareProfile:
    """What is read of the first node, where this machine is none; waits until all nodes are there.

    Raises:
        DidNotRunError: something outside ended it each time.
    """
    zygote.await_nodes()
    task = Task(target=f"{__name__}:say_profile", total_deadline_s=READ_S)
    return HardwareProfile.model_validate(_settled(zygote, task).check().results[0])


def say_profile(context: RankContext) -> HardwareProfile:
    """What is read of this node."""
    return read_host_profile()


def say_version(context: RankContext) -> str:
    """What all nodes must have in common: the probes' own sources. Their hardware may differ, which is said."""
    return source_version()


def _why_not(its: Any) -> str | None:
    own = source_version()
    return None if its == own else f"its autoplan is {its}, and this node's {own}"


def _probe(
    zygote: Zygote,
    launcher: str,
    layout: tuple[int, int],
    kind: str,
    budget_s: float,
    on_progress: Callable[[str], None],
) -> NodesProfile:
    count, per_node = layout
    began = time.monotonic()
    on_progress(f"measuring {count} nodes, some {budget_s:.0f} s")
    task = Task(
        target=f"{__name__}:profile_in_rank",
        args=(kind, budget_s),
        ranks=count * per_node,
        deadlines_s={"*": 3 * budget_s + 30},
        total_deadline_s=3 * budget_s + 90,  # a first CUDA context can take tens of seconds
        memory_limit_bytes=host_limit_bytes(read_host_profile().host),
    )
    found = _profiles(_settled(zygote, task), layout, kind)
    pairs = choose_pairs(count)
    asked = groups_of(layout, pairs)
    links_s = max(LINKS_S, LEAST_S * sum(len(operations) for _, operations in asked))
    on_progress(f"measuring collectives over {count * per_node} ranks and {len(pairs)} pair(s) of nodes")
    task = Task(
        target="autoplan.probes.collectives:measure_groups",
        args=(kind, CUDA_SIZES_BYTES if kind == "cuda" else CPU_SIZES_BYTES, asked, links_s),
        ranks=count * per_node,
        deadlines_s={"*": 3 * links_s + 30},
        total_deadline_s=3 * links_s + 90,
        env={"OMP_NUM_THREADS": "1"} if kind == "cpu" else {},
    )
    notes = [*_kind_notes(found)]
    whole: tuple[CollectiveReading, ...] = ()
    links: tuple[NodeLink, ...] = ()
    if count * per_node > 1:
        whole, links, more = _links(_settled(zygote, task), layout, pairs)
        notes += more
    if len(pairs) < count * (count - 1) // 2:
        notes.append(f"of {count} nodes each was measured with the next one alone, and the last with the first")
    return NodesProfile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds_spent=time.monotonic() - began,
        launcher=launcher,
        layout=f"{count}x{per_node}",
        device=kind,
        nodes=found,
        collectives=whole,
        links=links,
        slow=(*slow_nodes(found, kind), *slow_links(found, links)),
        notes=tuple(notes),
    )


def _settled(zygote: Zygote, task: Task) -> ProcessReport:
    runs = run_again(zygote, task)
    if not runs.settled:
        raise DidNotRunError(runs.report.describe(), hint="The same command tries it again.")
    return runs.report


def choose_pairs(count: int) -> list[tuple[int, int]]:
    """The pairs of nodes to measure: all, or of many a ring."""
    if count <= MOST_FOR_ALL_PAIRS:
        return list(itertools.combinations(range(count), 2))
    return [(number, number + 1) for number in range(count - 1)] + [(0, count - 1)]


def groups_of(layout: tuple[int, int], pairs: Sequence[tuple[int, int]]) -> list[tuple[list[int], list[str]]]:
    """The groups of ranks to measure, each with its operations: all ranks, then those of each pair of nodes."""
    count, per_node = layout
    groups = [(list(range(count * per_node)), list(OPERATIONS[:4]))]
    for a, b in pairs:
        both = [*range(a * per_node, (a + 1) * per_node), *range(b * per_node, (b + 1) * per_node)]
        groups.append(([a * per_node, b * per_node], ["send_recv"]))
        if count > 2:
            groups.append((both, ["all_reduce"]))
    return groups


# The ranks' side.


def profile_in_rank(context: RankContext, kind: str, budget_s: float) -> None:
    """Measures this rank's device; the first rank of a node says what the node is."""
    context.phase("read")
    profile = read_host_profile()
    pick_device(profile, kind)
    devices = [found for found in profile.devices if found.type == kind]
    mine = devices[context.local_rank : context.local_rank + 1]
    asked = [make_request(profile, device, budget_s) for device in mine]
    measured = [one.model_dump(mode="json") for one in probe_devices(context, asked)]
    own = profile.model_dump(mode="json") if context.local_rank == 0 else None
    context.report({"host": platform.node(), "profile": own, "measured": measured})


# From what the ranks measured to the profile.


def _profiles(report: ProcessReport, layout: tuple[int, int], kind: str) -> tuple[NodeProfile, ...]:
    """The nodes.

    Raises:
        DeviceError: nothing could be measured on one of them.
    """
    count, per_node = layout
    found = []
    for number in range(count):
        results = report.results[number * per_node : (number + 1) * per_node]
        said = [result for result in results if isinstance(result, dict)]
        own = said[0] if said else {}
        if not own.get("profile") or not own["measured"]:
            raise DeviceError(
                f"nothing could be measured on {kind} of node {number}: {report.describe()}",
                hint="autoplan probe on that node says more.",
            )
        profile = HardwareProfile.model_validate(own["profile"])
        measured = [Measured.model_validate(one) for result in said for one in result["measured"]]
        notes = [note for one in measured for note in one.notes]
        others = max(one.others_cpu_share for one in measured)
        profile = profile.model_copy(
            update={
                "devices": tuple(merge_measured(device, measured) for device in profile.devices),
                "others_cpu_share": others,
                "notes": (*profile.notes, *dict.fromkeys(notes)),
            }
        )
        found.append(NodeProfile(number=number, host=str(own["host"])[:64], profile=profile))
    return tuple(found)


def _links(
    report: ProcessReport, layout: tuple[int, int], pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[CollectiveReading, ...], tuple[NodeLink, ...], list[str]]:
    """The collectives over all ranks, the links, and notes on what is missing. A group is read from its first rank."""
    per_node, entries, notes = layout[1], dict[tuple[int, ...], list[CollectiveReading]](), list[str]()
    for rank, result in enumerate(report.results):
        if not isinstance(result, dict):
            continue
        for entry in result["entries"]:
            if entry["ranks"][0] == rank:
                entries.setdefault(tuple(entry["ranks"]), []).append(make_reading(entry))
        notes += result["notes"]
    if not entries:
        notes.append(f"collectives could not be measured: {report.describe()}")
    whole = entries.get(tuple(range(layout[0] * per_node)), [])
    links = []
    for a, b in pairs:
        both = (*range(a * per_node, (a + 1) * per_node), *range(b * per_node, (b + 1) * per_node))
        between = [*entries.get((a * per_node, b * per_node), ()), *entries.get(both, ())]
        readings = {reading.operation: reading for reading in between if reading.operation in OF_PAIRS}
        links.append(NodeLink(a=a, b=b, readings=tuple(readings.values())))
    return tuple(one for one in whole if one.operation in OPERATIONS[:4]), tuple(links), list(dict.fromkeys(notes))


def _kind_notes(nodes: Sequence[NodeProfile]) -> Iterator[str]:
    """Sentences on nodes that are of another kind than the first: a search refuses them."""
    first = nodes[0].profile
    for node in nodes[1:]:
        if node.profile.kind == first.kind:
            continue
        here, there = _kind_facts(first), _kind_facts(node.profile)
        name = next((name for name in here if here[name] != there[name]), "limits of memory or cores")
        what = (
            f": its {name} is {there[name]}, and the first node's {here[name]}" if name in here else f" by its {name}"
        )
        yield f"{name_of(node)} is of another kind{what}; a search over both refuses it"


def _kind_facts(profile: HardwareProfile) -> dict[str, str]:
    gpus = ", ".join(device.name for device in profile.devices if device.type == "cuda")
    return {"CPU": profile.host.cpu_model, "GPUs": gpus or "none", "torch": profile.host.torch}


def name_of(node: NodeProfile) -> str:
    """`node 2 (gpu-17)`."""
    return f"node {node.number} ({node.host})"


# What is slow.


def figures_of(device: Device) -> dict[str, Reading]:
    """The figures that devices are compared by, by their names."""
    found = {f"{dtype} products": reading for dtype, reading in device.peak_flops_per_s.items()}
    for way, readings in (
        ("memory", {"bandwidth": device.memory_bandwidth_bytes_per_s}),
        ("host to device", device.host_to_device_bytes_per_s),
        ("device to host", device.device_to_host_bytes_per_s),
    ):
        found |= {f"{way} {kind}": reading for kind, reading in readings.items() if reading is not None}
    return {name: reading for name, reading in found.items() if reading.value}


def slow_nodes(nodes: Sequence[NodeProfile], kind: str) -> list[str]:
    """A sentence for each device that is slower than its like: by the figure in which it is the furthest behind."""
    devices = [
        (name_of(node) + (f", cuda:{device.index}" if kind == "cuda" else ""), device)
        for node in nodes
        for device in node.profile.devices
        if device.type == kind
    ]
    said = []
    for place, (name, device) in enumerate(devices):
        like = [other for number, (_, other) in enumerate(devices) if number != place and other.name == device.name]
        behind = {}
        for figure, reading in figures_of(device).items():
            others = [known for other in like if (known := figures_of(other).get(figure)) is not None]
            share = share_behind(reading, others)
            if share > 0:
                behind[figure] = share
        if behind:
            worst = max(behind, key=lambda figure: behind[figure])
            said.append(f"{name} is slow: {worst} {behind[worst]:.0%} below the median of the others")
    return said


def slow_links(nodes: Sequence[NodeProfile], links: Sequence[NodeLink]) -> list[str]:
    """A sentence for each slow link; for a node all of whose links are slow, one."""
    behind: dict[tuple[int, int], float] = {}
    for link in links:
        for operation in OF_PAIRS:
            own = link.reading(operation)
            others = [other.reading(operation) for other in links if other is not link]
            known = [other.busbw_bytes_per_s for other in others if other is not None]
            share = 0.0 if own is None else share_behind(own.busbw_bytes_per_s, known)
            if share > behind.get((link.a, link.b), 0.0):
                behind[link.a, link.b] = share
    of_node = {node.number: [link for link in links if node.number in (link.a, link.b)] for node in nodes}
    whole = [n for n, own in of_node.items() if len(own) > 1 and all((link.a, link.b) in behind for link in own)]
    said = []
    for number in whole:
        least = min(behind[link.a, link.b] for link in of_node[number])
        said.append(
            f"{name_of(nodes[number])} has slow links: each at least {least:.0%} below the median of the others"
        )
    for (a, b), share in behind.items():
        if a not in whole and b not in whole:
            ends = f"{name_of(nodes[a])} and {name_of(nodes[b])}"
            said.append(f"the link between {ends} is slow: {share:.0%} below the median of the others")
    return said


def share_behind(reading: Reading, others: Sequence[Reading]) -> float:
    """By which share it is below the median of the others; 0 where SLOW_SHARE or their spread explain that."""
    known = [other for other in others if other.value]
    if reading.value is None or not known:
        return 0.0
    share = 1.0 - reading.value / statistics.median(other.value or 0.0 for other in known)
    spread = (reading.spread or 0.0) / 2 + statistics.median(other.spread or 0.0 for other in known) / 2
    return share if share > max(SLOW_SHARE, spread) else 0.0

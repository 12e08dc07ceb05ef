"""The probes of several nodes: what is named as slow; and real ones, of which each is an agent on this machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autoplan.cli.probe import link_rows, node_rows, show_nodes
from autoplan.errors import UsageError
from autoplan.probes.nodes import (
    MOST_FOR_ALL_PAIRS,
    NodeLink,
    NodeProfile,
    NodesProfile,
    choose_pairs,
    groups_of,
    probe_nodes,
    share_behind,
    slow_links,
    slow_nodes,
)
from autoplan.probes.profile import CollectiveReading
from autoplan.processes.engines import ENGINES
from autoplan.record import Reading
from tests.processes.test_nodes import Here
from tests.recorded import make_hardware


def reading(value: float, spread: float = 0.02) -> Reading:
    return Reading(value=value, unit="bytes/s", provenance="measured", spread=spread)


def node(number: int, memory: float = 1e12, products: float = 1e14) -> NodeProfile:
    profile = make_hardware(gpu=True)
    rates: dict[str, Any] = {"peak_flops_per_s": {"bfloat16": reading(products)}}
    rates["memory_bandwidth_bytes_per_s"] = reading(memory)
    card, cpu = profile.devices
    profile = profile.model_copy(update={"devices": (card.model_copy(update=rates), cpu)})
    return NodeProfile(number=number, host=f"host{number}", profile=profile)


def link(a: int, b: int, rate: float) -> NodeLink:
    one = CollectiveReading(
        operation="send_recv",
        backend="nccl",
        group_size=2,
        latency_s=reading(1e-5),
        algbw_bytes_per_s=reading(rate),
        busbw_bytes_per_s=reading(rate),
    )
    return NodeLink(a=a, b=b, readings=(one,))


def test_a_slow_node_is_named_with_its_worst_figure() -> None:
    nodes = [node(0), node(1), node(2, memory=0.8e12, products=0.85e14), node(3, products=0.95e14)]
    assert slow_nodes(nodes, "cuda") == [
        "node 2 (host2), cuda:0 is slow: memory bandwidth 20% below the median of the others"
    ]
    assert slow_nodes([node(0), node(1, products=0.8e14)], "cuda")[0].startswith("node 1 (host1)")
    assert not slow_nodes([node(0)], "cuda")


def test_what_scatters_more_is_not_slow() -> None:
    assert share_behind(reading(0.85), [reading(1.0)]) == pytest.approx(0.15)
    assert share_behind(reading(0.85, spread=0.3), [reading(1.0)]) == 0.0
    assert share_behind(reading(0.95), [reading(1.0)]) == 0.0
    assert share_behind(reading(1.0), []) == 0.0


def test_a_slow_link_is_told_from_a_node_with_slow_links() -> None:
    nodes = [node(number) for number in range(4)]
    pairs = list(itertools.combinations(range(4), 2))
    one = [link(a, b, 5e9 if (a, b) == (1, 3) else 1e10) for a, b in pairs]
    (text,) = slow_links(nodes, one)
    assert text == "the link between node 1 (host1) and node 3 (host3) is slow: 50% below the median of the others"
    node_2 = [link(a, b, 6e9 if 2 in (a, b) else 1e10) for a, b in pairs]
    assert any(text.startswith("node 2 (host2) has slow links") for text in slow_links(nodes, node_2))
    assert not slow_links(nodes, [link(a, b, 1e10) for a, b in pairs])
    assert not slow_links(nodes[:2], [link(0, 1, 1.0)]), "one link has none to be compared with"


def test_many_nodes_are_measured_in_a_ring() -> None:
    assert len(choose_pairs(MOST_FOR_ALL_PAIRS)) == MOST_FOR_ALL_PAIRS * (MOST_FOR_ALL_PAIRS - 1) // 2
    ring = choose_pairs(20)
    assert len(ring) == 20 and {end for pair in ring for end in pair} == {*range(20)}
    groups = groups_of((3, 2), [(0, 2)])
    assert [ranks for ranks, _ in groups] == [[0, 1, 2, 3, 4, 5], [0, 4], [0, 1, 4, 5]]


def test_what_is_no_launcher_is_refused() -> None:
    with pytest.raises(UsageError, match="elastic, slurm or ray"):
        probe_nodes("ssh", "2x1")
    with pytest.raises(UsageError, match="for example 2x8"):
        probe_nodes("slurm", "2")


@pytest.mark.slow
def test_two_nodes_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine, said = Here(), list[str]()
    monkeypatch.setitem(ENGINES, "slurm", lambda gpus: engine)
    found = probe_nodes("slurm", "2x1", device="cpu", budget_s=2.0, on_progress=said.append)
    assert NodesProfile.model_validate_json(found.model_dump_json()) == found
    assert [one.number for one in found.nodes] == [0, 1] and engine.left
    for one in found.nodes:
        assert one.profile.device("cpu").peak_flops_per_s["float32"].value
    assert not [note for note in found.notes if "another kind" in note]
    assert {one.operation for one in found.collectives} >= {"all_reduce", "all_gather"}
    (between,) = found.links
    assert {one.operation for one in between.readings} == {"send_recv", "all_reduce"}
    assert any("there" in text for text in said)
    assert len(list(node_rows(found))) == 2 and len(list(link_rows(found))) == 1
    show_nodes(found)
    assert "0 - 1" in capsys.readouterr().out

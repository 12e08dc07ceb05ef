"""The placement group of `--launcher ray`: what a real cluster of four nodes, all on this machine, says is held."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import DeviceError
from autoplan.processes import engines
from autoplan.processes.engines import Ray
from autoplan.processes.nodes import Nodes
from tests.engines.ways import ROOT, are_gone, environment, ray_nodes

DESCRIBE = "autoplan.planner.search.nodes:describe_node"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Its nodes have two CPUs each and no GPU; this process is on the first."""
    with ray_nodes(4) as found:
        import ray

        ray.init(address=found.address, log_to_driver=False)
        yield found
        ray.shutdown()


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_ADDRESS", "127.0.0.1")


def groups(*states: str) -> dict[str, dict[str, Any]]:
    """The placement groups in these states."""
    import ray

    return {name: group for name, group in ray.util.placement_group_table().items() if group["state"] in states}


def is_true(asked: Callable[[], bool], within_s: float = 30.0) -> bool:
    give_up_at = time.monotonic() + within_s
    while not (found := asked()) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return found


def all_is_free() -> bool:
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    return not groups("CREATED", "PENDING", "RESCHEDULING") and free.get("CPU") == total["CPU"]


def test_one_group_holds_the_other_nodes_and_a_lost_node_is_replaced(cluster: Any) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    with Nodes(Ray(), nodes=3, ranks_per_node=1, preload=()) as launcher:
        launcher.await_nodes()
        ((name, group),) = groups("CREATED").items()
        assert group["strategy"] == "STRICT_SPREAD" and list(group["bundles"].values()) == [{"CPU": 1.0}] * 2
        held = set(group["bundles_to_node_id"].values())
        assert len(held) == 2 and here not in held
        assert len(launcher._agents) == 2

        lost = next(node for node in cluster.worker_nodes if node.node_id in held)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=2)

        def is_noticed() -> bool:
            launcher._take_in()
            return len(launcher._agents) == 1

        assert is_true(is_noticed)
        launcher.await_nodes()
        assert len(launcher._agents) == 2
        ((again, group),) = groups("CREATED").items()
        now = set(group["bundles_to_node_id"].values())
        assert again == name and len(now) == 2 and not now & {here, lost.node_id}
    assert is_true(all_is_free) and are_gone()


def test_a_node_that_is_sent_away_is_not_asked_for_again(cluster: Any) -> None:
    asked, notes = list[Any](), list[str]()

    def check(its: Any) -> str | None:
        asked.append(its)
        return "it is the first" if len(asked) == 1 else None

    before = set(groups("REMOVED"))
    engine = Ray()
    launcher = Nodes(
        engine, nodes=3, ranks_per_node=1, preload=(), describe=DESCRIBE, check=check, on_note=notes.append
    )
    with launcher:
        launcher.await_nodes()
        (group,) = groups("CREATED").values()
        held = set(group["bundles_to_node_id"].values())
        assert len(launcher._agents) == 2 and len(engine._useless) == 1, notes
        assert not held & engine._useless
        assert len(set(groups("REMOVED")) - before) == 1, "the first group was given back"
    assert is_true(all_is_free) and are_gone()


def test_too_few_nodes_are_left_when_agents_were_sent_away(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AGAIN_S", 1.0)
    launcher = Nodes(Ray(), nodes=2, ranks_per_node=1, preload=(), describe=DESCRIBE, check=lambda its: "it is another")
    with launcher, pytest.raises(DeviceError, match=r"0 other node\(s\) of Ray's cluster can be used, and 1 are"):
        launcher.await_nodes()
    assert is_true(all_is_free) and are_gone()


def failing_on_first(marker: Path) -> type[engines.RayNode]:
    """An actor whose agents cannot start on the node that is given first. Its code travels by value."""

    class Failing(engines.RayNode):
        def serve(self, planner: str, token: str, threads: str | None) -> tuple[int, str, str]:
            from ray import get_runtime_context

            node = get_runtime_context().get_node_id()
            own = marker.with_name(node)
            own.write_text(node)
            with contextlib.suppress(FileExistsError):
                os.link(own, marker)
            if marker.read_text() == node:
                engines._COMMAND = (sys.executable, "-c", "raise SystemExit('no space is left')")
            return engines.RayNode.serve(self, planner, token, threads)

    return Failing


@pytest.mark.parametrize(("spares", "nodes"), [(2, 2), (0, 4)])
def test_a_node_on_which_no_agent_lives_is_left(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spares: int, nodes: int
) -> None:
    """Another takes its place; where there is none, the error has the cause."""
    monkeypatch.setattr(engines, "AGAIN_S", 0.5)
    monkeypatch.setattr("autoplan.processes.nodes.GATHER_S", 45.0)
    monkeypatch.setattr(engines, "RayNode", failing_on_first(tmp_path / "first"))
    notes, engine = list[str](), Ray()
    cause = r"3 agents in a row ended at once on Ray's node \w+, the last with exit code 1: no space is left"
    with Nodes(engine, nodes=nodes, ranks_per_node=1, preload=(), on_note=notes.append) as launcher:
        if spares:
            launcher.await_nodes()
            assert len(launcher._agents) == nodes - 1, notes
        else:
            with pytest.raises(DeviceError, match=rf"2 other node\(s\).* can be used, and 3 are needed; {cause}"):
                launcher.await_nodes()
        assert engine._useless == {(tmp_path / "first").read_text()}
        assert len([note for note in notes if re.fullmatch(cause, note)]) == 1, notes
    assert is_true(all_is_free) and are_gone()


def test_a_single_node_reserves_no_other(cluster: Any) -> None:
    with Nodes(Ray(), nodes=1, ranks_per_node=1, preload=()) as one:
        one.await_nodes()
        assert not groups("CREATED", "PENDING")
    assert is_true(all_is_free) and are_gone()


@pytest.mark.parametrize(
    ("nodes", "gpus", "asked"),
    [(3, 8, r"2 other node\(s\) with 1 CPU and 8 GPU each"), (5, 0, r"4 other node\(s\) with 1 CPU each")],
)
def test_what_the_cluster_has_not_is_said(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, nodes: int, gpus: int, asked: str
) -> None:
    """The planner's own node is not counted: four nodes are three others."""
    monkeypatch.setattr(engines, "PLACE_S", 1.0)
    monkeypatch.setattr(engines, "RESERVE_S", 2.0)
    notes = list[str]()
    has = r"the cluster has, besides this node, 3 node\(s\) with 2 CPU and 0 GPU; free in all of it: 8 CPU and 0 GPU"
    launcher = Nodes(Ray(gpus), nodes=nodes, ranks_per_node=1, preload=(), on_note=notes.append)
    with pytest.raises(DeviceError, match=f"Ray did not give {asked} in 2 s: {has}"):
        launcher.start()
    assert len(notes) == 1 and notes[0].startswith("Ray is asked for")
    assert is_true(all_is_free)


def test_ctrl_c_gives_back_what_is_waited_for(cluster: Any) -> None:
    """Also in a process that lives on, as a notebook does."""
    launcher = Nodes(Ray(8), nodes=2, ranks_per_node=1, preload=())
    threading.Timer(2.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        launcher.start()
    assert is_true(all_is_free)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_group_ends_with_its_planner(cluster: Any, tmp_path: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.engines.launch", "ray", str(tmp_path), "hang"]
    planner = subprocess.Popen(command, env=environment(RAY_ADDRESS=cluster.address), cwd=ROOT)
    try:
        assert is_true(Path(tmp_path, "hanging1").exists, 120.0), "the ranks do not run"
        assert len(groups("CREATED")) == 1
    finally:
        planner.send_signal(end)
        planner.wait(60.0)
    assert is_true(all_is_free) and are_gone()

"""Where ranks run: the share of NUMA nodes and what the kernel's files say."""

from __future__ import annotations

from pathlib import Path

from autoplan.strategies.techniques.threads import local_position, read_gpu_node, read_node_cpus, share_of_nodes

NODES = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
ALL = tuple(range(8))


def test_ranks_share_the_nodes_out_in_order() -> None:
    assert share_of_nodes(NODES, ALL, 2, 0) == (0, 1, 2, 3)
    assert share_of_nodes(NODES, ALL, 2, 1) == (4, 5, 6, 7)
    assert [share_of_nodes(NODES, ALL, 4, rank) for rank in range(4)] == [NODES[0], NODES[0], NODES[1], NODES[1]]
    four = {node: (node,) for node in range(4)}
    assert share_of_nodes(four, (0, 1, 2, 3), 2, 1) == (2, 3)


def test_one_node_or_an_uneven_share_leaves_ranks_where_they_are() -> None:
    assert share_of_nodes({0: ALL}, ALL, 2, 0) is None
    assert share_of_nodes(NODES, ALL, 3, 0) is None
    assert share_of_nodes(NODES, (0, 1), 2, 0) is None  # the cgroup allows one node only


def test_cpus_that_are_not_allowed_are_left_out() -> None:
    assert share_of_nodes(NODES, (1, 2, 6), 2, 0) == (1, 2)
    assert share_of_nodes(NODES, (1, 2, 6), 2, 1) == (6,)


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-2,8,10-11\n")
    assert read_node_cpus(tmp_path) == {1: (0, 1, 2, 8, 10, 11)}
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert read_gpu_node(tmp_path, "0000:1b:00.0") == 1
    (device / "numa_node").write_text("-1\n")
    assert read_gpu_node(tmp_path, "0000:1b:00.0") is None
    assert read_gpu_node(tmp_path, "0000:00:00.0") is None


def test_torchrun_says_which_rank_of_the_node_this_is() -> None:
    assert local_position({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "RANK": "7"}) == (4, 3)

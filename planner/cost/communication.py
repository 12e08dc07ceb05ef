"""Communication: seconds of collectives over two tiers of links, and of what each parallel degree exchanges.

A ring over n ranks moves (n - 1)/n of the payload per rank for an all-gather or a reduce-scatter and twice that for an
all-reduce (Thakur et al. 2005; nccl-tests PERFORMANCE.md): t = steps x latency + factor x S / bandwidth. A group that
spans nodes goes in two tiers: within the node first, then each rank exchanges its share with its peers on other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.cost.candidates import SHARDINGS, Candidates, Floats
from autoplan.probes.profile import HardwareProfile

# Where no probe measured it. Share of a link's rate that NCCL's rings reach on large messages: 230-240 GB/s of 300 on
# A100 NVLink, 360-450 of 450 on H100, 80-90 % on InfiniBand (nccl-tests results as NVIDIA publishes them).
ASSUMED_LINK_EFFICIENCY = 0.8
# what NCCL takes to come up to its bandwidth and its peers to meet, beyond the ring's steps, for a gather or a scatter
# (an all-reduce is both): messages of some MB move at half the rate of large ones
RAMP_S = 4e-5
# per step of a ring: an all-reduce of few bytes over 8 GPUs takes some 30 us in nccl-tests, 14 steps
ASSUMED_INTRA_LATENCY_S = 2.2e-6
ASSUMED_INTER_LATENCY_S = 15e-6
# per step of a ring between nodes; all-gather and reduce-scatter have no trees in NCCL, so every node is a step
ASSUMED_RING_LATENCY_S = 6e-6
# gloo on loopback, where its probe did not run
ASSUMED_GLOO_BYTES_PER_S = 1.0e9
ASSUMED_GLOO_LATENCY_S = 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What joins the ranks: bandwidths per rank in one direction, latencies per step of a ring."""

    intra_bytes_per_s: float | Floats
    inter_bytes_per_s: float | Floats
    intra_latency_s: float = ASSUMED_INTRA_LATENCY_S
    inter_latency_s: float = ASSUMED_INTER_LATENCY_S
    ranks_per_node: float | Floats = 8
    ramp_s: float = 0.0
    assumed: tuple[str, ...] = field(default=())

    def all_reduce_s(self, payload: Floats, ranks: Floats, local: Floats) -> Floats:
        """Seconds of an all-reduce of `payload` bytes over `ranks`, `local` of them on each node."""
        return 2 * self.gather_s(payload, ranks, local)

    def gather_s(self, payload: Floats, ranks: Floats, local: Floats) -> Floats:
        """Seconds of an all-gather to, or a reduce-scatter of, `payload` bytes in all."""
        local = np.minimum(local, ranks)
        nodes = ranks / np.maximum(local, 1)
        # all rails of a node work side by side, so each local rank carries 1/local of the payload between nodes
        inside = (local - 1) / local * payload / self.intra_bytes_per_s
        between = (nodes - 1) / nodes * payload / local / self.inter_bytes_per_s
        # NCCL pipelines the two tiers: the slower one shows
        moving = np.maximum(inside, between)
        # trees between nodes: the latency grows with their depth (NCCL 2.4, double binary trees)
        waiting = (local - 1) * self.intra_latency_s + self.ramp_s
        waiting = waiting + np.log2(np.maximum(nodes, 1.0)) * self.inter_latency_s
        return np.asarray(np.where(ranks > 1, moving + waiting, 0.0))

    def ring_latency_s(self, ranks: Floats, local: Floats) -> Floats:
        """Seconds that the smallest all-gather or reduce-scatter takes: one step of a ring per rank and node."""
        local = np.minimum(local, ranks)
        nodes = ranks / np.maximum(local, 1)
        return np.asarray((local - 1) * self.intra_latency_s + (nodes - 1) * ASSUMED_RING_LATENCY_S)

    def send_s(self, payload: Floats, crosses_nodes: Floats) -> Floats:
        """Seconds of one message between two ranks."""
        bandwidth = np.where(crosses_nodes > 0, self.inter_bytes_per_s, self.intra_bytes_per_s)
        latency = np.where(crosses_nodes > 0, self.inter_latency_s, self.intra_latency_s)
        return np.asarray(payload / bandwidth + latency)


def links_of(hardware: HardwareProfile, device: str) -> Links:
    """Links as the probe measured them; where it did not, assumed, and said."""
    readings = [r for r in hardware.collectives if r.operation == "all_reduce" and r.busbw_bytes_per_s.value]
    if readings:
        widest = max(readings, key=lambda r: r.group_size)
        bandwidth = float(widest.busbw_bytes_per_s.value or 0.0)
        latency = float(widest.latency_s.value or 0.0) / max(2 * (widest.group_size - 1), 1)
        return Links(
            intra_bytes_per_s=bandwidth,
            inter_bytes_per_s=bandwidth,
            intra_latency_s=latency,
            inter_latency_s=latency,
            ranks_per_node=max(len(hardware.devices), widest.group_size),
        )
    if device == "cpu":
        return Links(
            intra_bytes_per_s=ASSUMED_GLOO_BYTES_PER_S,
            inter_bytes_per_s=ASSUMED_GLOO_BYTES_PER_S,
            intra_latency_s=ASSUMED_GLOO_LATENCY_S,
            inter_latency_s=ASSUMED_GLOO_LATENCY_S,
            ranks_per_node=hardware.host.cores_usable,
            assumed=("gloo on loopback: not measured, 1 GB/s",),
        )
    rates = [link.bandwidth_bytes_per_s.value for link in hardware.links if link.bandwidth_bytes_per_s.value]
    rate = min(rates) if rates else 32e9
    note = "links between GPUs: from the driver's topology" if rates else "links between GPUs: assumed PCIe 4 x16"
    return Links(
        intra_bytes_per_s=ASSUMED_LINK_EFFICIENCY * rate,
        inter_bytes_per_s=ASSUMED_LINK_EFFICIENCY * rate,
        ranks_per_node=len(hardware.devices),
        assumed=(note,),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Seconds of communication: exposed per micro-step and block (tensor parallel), and per step what may overlap.

    Attributes:
        tensor_s: Per micro-step, of all blocks of a rank; nothing hides it.
        gather_s: Per micro-step, of gathering sharded parameters; overlaps with the micro-step.
        gradient_s: Per optimizer step, of reducing gradients; overlaps with the backward of each micro-step that does.
        after_s: Per optimizer step, of gathering updated parameters (ZeRO-1 and -2); overlaps with nothing.
        send_s: Per micro-step and stage boundary, forward and backward together.
    """

    tensor_s: Floats
    gather_s: Floats
    gradient_s: Floats
    after_s: Floats
    send_s: Floats


def exchange(
    candidates: Candidates,
    links: Links,
    *,
    parameters: Floats,
    boundary_bytes: Floats,
    num_blocks: float | Floats,
    block_all_reduces: Floats,
    gather_bytes: Floats,
    gradient_bytes: Floats,
    reduce_every_micro_step: bool | NDArray[np.bool_],
    replicas_once: bool = False,
) -> Exchange:
    """What a rank exchanges.

    Args:
        candidates: The degrees.
        links: What joins the ranks.
        parameters: Elements that a rank's tensor and pipeline shares hold, before sharding.
        boundary_bytes: The activation between two blocks, in the dtype that is sent, per micro-step.
        num_blocks: Blocks in the model.
        block_all_reduces: All-reduce equivalents per block and micro-step: 4, or 6 with full recomputation
            (Korthikanti et al. 2022, section 4); sequence parallelism swaps each for a gather and a scatter.
        gather_bytes, gradient_bytes: Bytes per element, gathered and reduced.
        reduce_every_micro_step: ZeRO-2 and -3 scatter gradients at each micro-step (no accumulation of whole ones).
        replicas_once: Replicas of shards then reduce theirs once per step all the same, not at each micro-step.
    """
    c = candidates
    node = np.asarray(links.ranks_per_node, dtype=np.float64)
    local_tp = np.minimum(c.tp, node)
    tensor = block_all_reduces * np.ceil(num_blocks / c.pp) * links.all_reduce_s(boundary_bytes, c.tp, local_tp)
    ranks = c.dp_shard
    local = np.clip(node / c.tp, 1, None)
    local_shard = np.minimum(local, ranks)
    local_replicas = np.clip(local / ranks, 1, None)
    zero3 = c.sharding == SHARDINGS.index("zero3")
    sharded = c.sharding > 0
    whole = parameters * gather_bytes
    units = np.ceil(num_blocks / c.pp)
    waiting = units * links.ring_latency_s(ranks, local_shard)  # FSDP gathers and scatters block by block
    once = links.gather_s(whole, ranks, local_shard) + np.where(zero3, waiting, 0.0)
    # forward and backward gather; with parameters kept after the forward once per optimizer step
    gather = np.where(zero3, 2 * once, 0.0)
    reduced = parameters * gradient_bytes
    scatter = links.gather_s(reduced, ranks, local_shard) + np.where(zero3, waiting, 0.0)
    shards = np.where(sharded, scatter, links.all_reduce_s(reduced, ranks, local_shard))
    replicas = links.all_reduce_s(reduced / np.where(sharded, ranks, 1.0), c.dp_replicate, local_replicas)
    scattering = np.isin(c.sharding, (2, 3)) & reduce_every_micro_step
    times = np.where(scattering, c.accumulation, 1.0)
    gradient = shards * times + replicas * (1.0 if replicas_once else times)
    after = np.where(sharded & ~zero3, once, 0.0)
    crosses = (c.tp * c.dp_shard * c.dp_replicate >= node).astype(np.float64)
    send = np.where(c.pp > 1, 2 * links.send_s(boundary_bytes / c.tp, crosses), 0.0)
    return Exchange(
        tensor_s=np.asarray(tensor),
        gather_s=np.asarray(gather),
        gradient_s=np.asarray(gradient),
        after_s=np.asarray(after),
        send_s=np.asarray(send),
    )

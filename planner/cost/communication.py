"""Communication: seconds of collectives over two tiers of links, and of what each parallel degree exchanges.

A ring over n ranks moves (n - 1)/n of the payload per rank for an all-gather or a reduce-scatter and twice that for an
all-reduce (Thakur et al. 2005; nccl-tests PERFORMANCE.md): t = steps x latency + factor x S / bandwidth. A group that
spans nodes goes in two tiers: within the node first, then each rank exchanges its share with its peers on other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoplan.planner.cost.columns import SHARDINGS, Bools, Columns, Floats
from autoplan.planner.cost.states import ModelSize, StateWidths
from autoplan.probes.profile import HardwareProfile

# Where no probe measured it. Share of a link's rate that NCCL's rings reach on large messages: 230-240 GB/s of 300 on
# A100 NVLink, 360-450 of 450 on H100, 80-90 % on InfiniBand (nccl-tests results as NVIDIA publishes them). Not fitted.
ASSUMED_LINK_EFFICIENCY = 0.8
# What NCCL takes to come up to its bandwidth and its peers to meet, beyond the ring's steps, for a gather or a scatter
# (an all-reduce is both): messages of some MB move at half the rate of large ones. Fitted to the step times of
# llm-foundry, fms-fsdp and vTrain (docs/accuracy.md).
RAMP_S = 4e-5
# Per step of a ring: an all-reduce of few bytes over 8 GPUs takes some 30 us in nccl-tests, 14 steps. Not fitted.
ASSUMED_INTRA_LATENCY_S = 2.2e-6
# Per level of NCCL's trees between nodes, and per step of a ring between nodes (all-gather and reduce-scatter have no
# trees in NCCL, so every node is a step). Fitted to llm-foundry's and fms-fsdp's step times on 16 to 512 GPUs.
ASSUMED_INTER_LATENCY_S = 15e-6
ASSUMED_RING_LATENCY_S = 6e-6
# gloo on loopback, where its probe did not run. Assumed, of the size that gloo shows on two cores; not fitted.
ASSUMED_GLOO_BYTES_PER_S = 1.0e9
ASSUMED_GLOO_LATENCY_S = 2e-4
# PCIe 4 x16 in one direction, where the driver tells no link.
ASSUMED_PCIE_BYTES_PER_S = 32e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links between the ranks: bandwidths per rank in one direction, latencies per step of a ring."""

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

    def send_s(self, payload: Floats, crosses_nodes: Floats) -> Floats:
        """Seconds of one message between two ranks."""
        bandwidth = np.where(crosses_nodes > 0, self.inter_bytes_per_s, self.intra_bytes_per_s)
        latency = np.where(crosses_nodes > 0, self.inter_latency_s, self.intra_latency_s)
        return np.asarray(payload / bandwidth + latency)


def datasheet_links(
    intra_bytes_per_s: float | Floats,
    inter_bytes_per_s: float | Floats,
    ranks_per_node: float | Floats,
    *,
    assumed: tuple[str, ...] = (),
) -> Links:
    """Links of which only the nominal rates per rank and direction are known: NCCL reaches a share, and ramps up."""
    return Links(
        intra_bytes_per_s=ASSUMED_LINK_EFFICIENCY * intra_bytes_per_s,
        inter_bytes_per_s=ASSUMED_LINK_EFFICIENCY * inter_bytes_per_s,
        ranks_per_node=ranks_per_node,
        ramp_s=RAMP_S,
        assumed=assumed,
    )


def links_of(hardware: HardwareProfile, device: str) -> Links:
    """Links as the probe measured them; where it did not, assumed, and said."""
    readings = [r for r in hardware.collectives if r.operation == "all_reduce" and r.busbw_bytes_per_s.value]
    if readings or device == "cpu":
        bandwidth, latency, ranks = ASSUMED_GLOO_BYTES_PER_S, ASSUMED_GLOO_LATENCY_S, hardware.host.cores_usable
        if readings:
            widest = max(readings, key=lambda r: r.group_size)
            bandwidth = float(widest.busbw_bytes_per_s.value or 0.0)
            latency = float(widest.latency_s.value or 0.0) / max(2 * (widest.group_size - 1), 1)
            ranks = max(len(hardware.devices), widest.group_size)
        return Links(
            intra_bytes_per_s=bandwidth,
            inter_bytes_per_s=bandwidth,
            intra_latency_s=latency,
            inter_latency_s=latency,
            ranks_per_node=ranks,
            assumed=() if readings else ("gloo on loopback: not measured, 1 GB/s",),
        )
    rates = [(link.kind == "network", link.bandwidth_bytes_per_s.value or 0.0) for link in hardware.links]
    inside = [rate for network, rate in rates if rate and not network]
    rate = min(inside, default=ASSUMED_PCIE_BYTES_PER_S)
    between = min((rate for network, rate in rates if rate and network), default=rate)
    note = "links between GPUs: from the driver's topology" if inside else "links between GPUs: assumed PCIe 4 x16"
    return datasheet_links(rate, between, len(hardware.devices), assumed=(note,))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockExchange:
    """What ranks of one micro-step exchange within each block because experts or sequences are shared; arrays.

    Attributes:
        sent_bytes: Of tokens, that a rank sends to experts in the mean block, forward: rows x width.
        keys_bytes: Of a rank's own part of the keys and values in a block.
        attention_s: Forward attention of a block, which a ring of keys and values runs beside.
        ring: Keys and values go round (Liu et al. 2023, arXiv 2310.01889); else they are gathered before attention
            (Llama 3, arXiv 2407.21783, section 3.3.2) and nothing hides it.
    """

    sent_bytes: Floats
    keys_bytes: Floats
    attention_s: Floats
    ring: Bools

    def seconds(self, c: Columns, links: Links, num_blocks: Floats) -> Floats:
        """Seconds per micro-step of all blocks of a stage that show: twice forward's in the backward, and once more as
        far as blocks are checkpointed.

        Tokens go to their experts and come back, in each pass: two all-to-alls of (ep - 1)/ep of them (GShard, Lepikhin
        et al. 2020, arXiv 2006.16668, section 3). Nothing hides them; DeepSeek's DualPipe would.
        """
        per_node = np.asarray(links.ranks_per_node, dtype=np.float64)
        on_node = np.clip(per_node / c.tp, 1.0, None)
        inside = np.minimum(on_node, c.ep)
        leaves = 1.0 - inside / c.ep  # the share of its tokens that a rank sends to other nodes
        moved = self.sent_bytes * np.maximum(
            (c.ep - 1) / c.ep / links.intra_bytes_per_s, leaves / links.inter_bytes_per_s
        )
        waits = links.ramp_s + (inside - 1) * links.intra_latency_s + (c.ep / inside - 1) * ASSUMED_RING_LATENCY_S
        sent = np.where((c.ep > 1) & (self.sent_bytes > 0), 2 * (moved + waits), 0.0)
        whole = links.gather_s(self.keys_bytes * c.cp, c.cp, np.minimum(on_node, c.cp))
        shown = np.where(self.ring, np.maximum(whole - self.attention_s, 0.0), whole)
        once = sent + np.where(c.cp > 1, shown, 0.0)
        # the backward sends gradients as the forward sends tokens; of keys and values it moves both, at twice the work
        return np.asarray(num_blocks * (sent + once + np.where(c.cp > 1, shown, 0.0) + c.checkpointed * once))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Seconds of communication of a rank, by kind, before any of it hides behind compute.

    Attributes:
        tensor_s: Per micro-step, of all blocks of a rank, by tensor, expert and context parallelism; nothing hides it.
        send_s: Per micro-step and stage boundary, forward and backward together; nothing hides it.
        gather_s: Per micro-step, of gathering sharded parameters; overlaps with the micro-step.
        gradient_s: Per optimizer step, of reducing gradients; overlaps with the backward of each micro-step that does.
        after_s: Per optimizer step, of gathering updated parameters (ZeRO-1 and -2); overlaps with nothing.
    """

    tensor_s: Floats
    send_s: Floats
    gather_s: Floats
    gradient_s: Floats
    after_s: Floats


def exchange(
    columns: Columns,
    links: Links,
    size: ModelSize,
    widths: StateWidths,
    boundary_bytes: Floats,
    shared: BlockExchange | None = None,
) -> Exchange:
    """The communication of a rank in a step, by kind.

    Args:
        columns: The configurations.
        links: What joins the ranks.
        size: The model.
        widths: Bytes per parameter that are gathered and reduced.
        boundary_bytes: The activation between two blocks, per micro-step, in the width in which it is kept.
        shared: What is exchanged where experts or sequences are shared; None: neither is.
    """
    c, tp = columns, columns.tp
    per_node = np.asarray(links.ranks_per_node, dtype=np.float64)
    # tensor ranks are neighbours, then come shards, then replicas (strategies/techniques/mesh.py)
    on_node = np.clip(per_node / tp, 1, None)
    local, local_replicas = np.minimum(on_node, c.dp_shard), np.clip(on_node / c.dp_shard, 1, None)
    held, blocks = size.parameters / (tp * c.pp), np.ceil(size.num_blocks / c.pp)
    whole_bytes, reduced_bytes = held * widths.gathered, held * size.gradient_share * widths.reduced
    # FSDP gathers and scatters block by block, and each takes at least the latency of a ring: a step per rank and node
    ring_s = (local - 1) * links.intra_latency_s + (c.dp_shard / np.maximum(local, 1) - 1) * ASSUMED_RING_LATENCY_S
    waiting = np.where(c.shards_parameters, blocks * ring_s, 0.0)
    gathered = links.gather_s(whole_bytes, c.dp_shard, local)
    # 4 all-reduces per block and micro-step, forward and backward, and 2 more where the forward is run again
    # (Korthikanti et al. 2022, section 4); sequence parallelism swaps each for a gather and a scatter of equal cost
    all_reduces = (4.0 + 2.0 * c.checkpointed) * blocks
    # one message forward and one backward; stages are outermost, so they are on other nodes where nodes are full
    message = links.send_s(boundary_bytes / tp, (tp * c.dp >= per_node).astype(np.float64))
    # FSDP gathers in the forward, and again in the backward where it freed in between; after each backward it frees in
    # any case (torch 2.13, FSDPParamGroup.reshard_after_backward), so every micro-step gathers
    times = np.where(c.sharding == SHARDINGS.index("zero3"), 2.0, 1.0)
    # gradients are scattered over the shards, at each micro-step or once, and each share is reduced over the replicas
    # once per step (strategies/techniques/data_parallel.py, fsdp_gradient_sync: set_requires_all_reduce at the last)
    scattered = links.gather_s(reduced_bytes, c.dp_shard, local) + waiting
    shards = np.where(c.sharding > 0, scattered, links.all_reduce_s(reduced_bytes, c.dp_shard, local))
    # ranks that share sequences have gradients of their own parts, reduced like a replica's
    copies = c.dp_replicate * c.cp
    replicas = links.all_reduce_s(reduced_bytes * size.alone(c) / c.shards, copies, local_replicas)
    tensor_s = all_reduces * links.all_reduce_s(boundary_bytes, tp, np.minimum(tp, per_node))
    if shared is not None:
        tensor_s = tensor_s + shared.seconds(c, links, blocks)
    return Exchange(
        tensor_s=tensor_s,
        send_s=np.where(c.pp > 1, 2 * message, 0.0),
        gather_s=np.where(c.shards_parameters, times * (gathered + waiting), 0.0),
        gradient_s=shards * reductions(c) + replicas,
        # ZeRO-1 and -2 step shares of whole parameters and then gather the updated ones
        after_s=np.where((c.sharding > 0) & ~c.shards_parameters, gathered, 0.0),
    )


def boundary_width(columns: Columns) -> Floats:
    """Bytes of an element of the activation between two blocks.

    Under autocast the residual stream stays in fp32 (strategies/techniques/data_parallel.py, cast_forward_inputs); with
    16-bit parameters it is in 16 bits.
    """
    return np.asarray(np.where((columns.states > 0) & columns.half, 2.0, 4.0))


def reductions(columns: Columns) -> Floats:
    """Micro-steps of an optimizer step whose gradients are scattered over the shards: each, or the last one."""
    each = columns.shards_gradients & columns.scatters_each
    return np.asarray(np.where(each, columns.accumulation, 1.0))

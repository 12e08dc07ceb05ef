"""Offload: what lies in the host's memory, and what its way over the link shows in a step.

    optimizer     states of a step in and out
    activations   out in the forward, in in the backward: both on the stream that computes, so nothing hides them
    parameters    shards in at each gathering, gradients out at each reduction, the optimizer's passes in host memory

No GPU has measured any of it: the rates of the link are the probe's, the shares that hide are those of communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoplan.planner.cost.columns import SHARDINGS, Columns, Floats, Ints
from autoplan.planner.cost.communication import reductions
from autoplan.planner.cost.states import ModelSize, StateBytes, StateWidths, rank_parameters
from autoplan.planner.cost.step import BACKWARD_SHARE, OVERLAP
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import knob_values
from autoplan.strategies.techniques.sizes import PIECE_BYTES

OFFLOADS: tuple[str, ...] = knob_values("offload") or ()
OPTIMIZER, ACTIVATIONS, PARAMETERS = (OFFLOADS.index(name) for name in ("optimizer", "activations", "parameters"))

# Where no probe measured the link: PCIe 4 x16 gives some 25 of its 32 GB/s to copies from pinned memory. Assumed.
ASSUMED_LINK_BYTES_PER_S = 25e9
# What the threads of a host read and write together, where no probe measured it. Assumed.
ASSUMED_HOST_BYTES_PER_S = 40e9
# torch rounds each pinned buffer up to a power of two (CachingHostAllocator): a third more on average over sizes that
# are spread evenly. States, activations and shards are pinned one by one.
PINNED = 4 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """The link between a device and the host, and the host's memory, in bytes per second."""

    to_device_bytes_per_s: float = ASSUMED_LINK_BYTES_PER_S
    to_host_bytes_per_s: float = ASSUMED_LINK_BYTES_PER_S
    host_bytes_per_s: float = ASSUMED_HOST_BYTES_PER_S


def host_link(hardware: HardwareProfile, device: str) -> HostLink:
    """The link as the probe measured it, from pinned memory; what it did not measure is assumed."""
    gpu = hardware.device(device)
    cpu = next((found.memory_bandwidth_bytes_per_s for found in hardware.devices if found.type == "cpu"), None)
    readings = {
        "to_device_bytes_per_s": gpu.host_to_device_bytes_per_s.get("pinned"),
        "to_host_bytes_per_s": gpu.device_to_host_bytes_per_s.get("pinned"),
        "host_bytes_per_s": cpu,
    }
    return HostLink(**{name: found.value for name, found in readings.items() if found is not None and found.value})


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """The data that each configuration moves, in bytes of one rank.

    Attributes:
        offload: The knob, as a place in OFFLOADS.
        states: Optimizer states on the host.
        shards: Parameters and gradients on the host.
        activations: Saved by one micro-step, on the host.
    """

    offload: Ints
    states: Floats
    shards: Floats
    activations: Floats

    @property
    def host_bytes(self) -> Floats:
        """The pinned memory on the host, in bytes of one rank."""
        return PINNED * (self.states + self.shards + self.activations)


def offloaded(offload: Ints, columns: Columns, size: ModelSize, widths: StateWidths, saved_bytes: Floats) -> Offloaded:
    """The data that each configuration moves.

    Args:
        offload: The knob, as a place in OFFLOADS.
        columns: The configurations.
        size: The model.
        widths: Bytes per parameter of each state.
        saved_bytes: What the blocks of a rank save for the backward of one micro-step.
    """
    held = rank_parameters(size, columns) / columns.shards
    stepped = held * size.trained_share
    with_states = (offload == OPTIMIZER) | (offload == PARAMETERS)
    shards = held * widths.parameter + held * size.gradient_share * widths.gradient
    return Offloaded(
        offload=offload,
        states=np.where(with_states, stepped * widths.optimizer, 0.0),
        shards=np.where(offload == PARAMETERS, shards, 0.0),
        activations=np.where(offload == ACTIVATIONS, saved_bytes, 0.0),
    )


def device_states(states: StateBytes, moved: Offloaded, columns: Columns, size: ModelSize) -> StateBytes:
    """The states that are left on the device, with the pieces of a step that come and go."""
    whole_gradients = columns.keeps_whole_gradients
    on_host = moved.offload == PARAMETERS
    away = on_host | (moved.offload == OPTIMIZER)
    stepped = rank_parameters(size, columns) * size.trained_share / columns.shards
    largest = np.asarray(size.largest_parameter) / columns.shards
    piece = np.minimum(np.maximum(PIECE_BYTES / 4.0, largest) / np.maximum(stepped, 1.0), 1.0)
    in_pieces = piece * (states.optimizer + states.temporaries)
    temporaries = np.where(moved.offload == OPTIMIZER, in_pieces, states.temporaries)
    return replace(
        states,
        parameters=np.where(on_host, 0.0, states.parameters),
        gradients=np.where(on_host & ~whole_gradients, 0.0, states.gradients),
        optimizer=np.where(away, 0.0, states.optimizer),
        stepped_gradients=np.where(on_host, 0.0, states.stepped_gradients),
        temporaries=np.where(on_host, 0.0, temporaries),
    )


def transfer_s(moved: Offloaded, link: HostLink, columns: Columns, micro_step_s: Floats, device: str) -> Floats:
    """Seconds of an optimizer step in which copies to and from the host show.

    Args:
        moved: What is moved; half of FSDP2's shards are parameters, half gradients where all train.
        link: Its rates.
        columns: The configurations.
        micro_step_s: Compute of one micro-step.
        device: cpu or cuda.
    """
    both_ways = 1 / link.to_device_bytes_per_s + 1 / link.to_host_bytes_per_s
    hides = OVERLAP[device] * micro_step_s
    gatherings = np.where(columns.sharding == SHARDINGS.index("zero3"), 2.0, 1.0)
    half = moved.shards / 2
    coming = np.maximum(gatherings * half / link.to_device_bytes_per_s - hides, 0.0)
    going = np.maximum(half / link.to_host_bytes_per_s - BACKWARD_SHARE * hides, 0.0)
    shards = np.asarray(columns.accumulation * coming + reductions(columns) * going)
    return (moved.states * (moved.offload == OPTIMIZER) + columns.accumulation * moved.activations) * both_ways + shards

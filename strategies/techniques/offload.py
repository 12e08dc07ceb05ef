"""The offload knob: which tensors lie in the host's memory instead of the device's, and come when they are needed.

States and activations: host_memory.py. Parameters: FSDP2's CPUOffloadPolicy, which data_parallel.py gives to
fully_shard. On a CPU the host is the device: the same code runs and saves nothing, so a search does not offer it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from autoplan.errors import ConfigError
from autoplan.probes.host import read_host
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build, check_applies
from autoplan.strategies.techniques.host_memory import HostActivations, keep_states_on_host, reason_against_pieces
from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.workloads.optimizers import kept_states, trainable
from autoplan.strategies.workloads.workload import Workload
from autoplan.units import format_bytes

HOST_SHARE = 0.8
"""Of the host's available memory that what is offloaded may take, as of a trial's processes."""


class OffloadStrategy:
    """none; optimizer, activations or parameters on the host."""

    name = "offload"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CUDA all three; states where the optimizer can be stepped in pieces. Ranks are for the rules to say."""
        values = ("optimizer", "activations", "parameters")
        if device == "cpu":
            return offer(self.name, ("none",), dict.fromkeys(values, "the host is the device: nothing can be moved"))
        pieces = reason_against_pieces(workload.build_optimizer, len(trainable(structure.model)))
        return offer(self.name, ("none",), {"optimizer": pieces, "activations": None, "parameters": None})

    def apply(self, build: Build) -> None:
        """Moves the states or the activations of a run whose optimizer is made; FSDP2 has moved the parameters.

        Raises:
            ConfigError: the host's memory cannot hold it, or the optimizer cannot be stepped in pieces.
        """
        value = build.config.offload
        if value == "activations":
            build.hooks.forward_context = saving_on_host(build.hooks.forward_context)
        if value in ("none", "activations"):
            return
        assert build.optimizer is not None, "applied after the optimizer strategy"
        parameters = trainable(build.model)
        if value == "optimizer":
            pieces = reason_against_pieces(build.workload.build_optimizer, len(parameters))
            check_applies(build.config, self.name, pieces)
        states = kept_states(build.workload.build_optimizer, parameters).tensors
        tensors = states if value == "optimizer" else states + 1  # the parameters lie there already
        sizes = [local_tensor(parameter).numel() * parameter.element_size() for parameter in parameters]
        # As the launcher says; else all. Each finds the memory as it is before the others took theirs, or some of it.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", build.config.world_size))
        rank_bytes = tensors * sum(sizes)
        available = read_host().memory_available_bytes.value
        if available is not None and ranks * rank_bytes > HOST_SHARE * available:
            raise ConfigError(
                f"offload={value} puts {format_bytes(ranks * rank_bytes)} into the host's memory ({ranks} rank(s) of "
                f"{format_bytes(rank_bytes)}), and {format_bytes(HOST_SHARE * available)} may be taken: "
                f"{HOST_SHARE:.0%} of the {format_bytes(available)} that are available",
                hint="Use a machine with more memory, more machines, or checkpointing=full with a smaller micro_batch.",
            )
        if value == "optimizer":
            keep_states_on_host(build.optimizer)


def saving_on_host(forward_context: Any) -> Any:
    """A context of each forward, with what the forward saves on the host."""

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        with forward_context(), HostActivations():
            yield

    return opened

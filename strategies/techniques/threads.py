"""The threads knob (CPU): how many threads one operation is spread over, per rank."""

from __future__ import annotations

import torch

from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload


class ThreadsStrategy:
    """None leaves torch's own number; a number is set for the whole process."""

    name = "threads"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CPU every power of two up to the usable cores, and the cores themselves."""
        if device != "cpu":
            reason = "the work runs on the GPU; the CPU only launches it"
            return offer(self.name, (None,), {"1..": reason})
        cores = hardware.host.cores_usable
        own = torch.get_num_threads()
        counts = sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})
        others = (count for count in counts if count != own)
        return offer(self.name, (None, *others), {own: f"{own} is torch's own number here, which None stands for"})

    def apply(self, build: Build) -> None:
        """Sets torch's intra-operation threads; this holds for the process, not only for the run."""
        if build.config.threads is not None and build.device.type == "cpu":
            torch.set_num_threads(build.config.threads)

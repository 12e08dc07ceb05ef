"""The micro_batch knob: samples per forward and backward. Accumulation follows from it and the global batch."""

from __future__ import annotations

from autoplan.errors import WorkloadError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import micro_batches
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload


class MicroBatchStrategy:
    """Any divisor of a rank's share of the global batch, unless modules depend on the micro-batch."""

    name = "micro_batch"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """All divisors of the global batch; with one data-parallel rank. Only the fixed one where there is one.

        No value at all stands for: the user has to fix it.
        """
        values = tuple(micro_batches(workload.global_batch))
        fixed = workload.fixed_micro_batch
        if structure.micro_batch_dependent:
            reason = "it would train something else: " + describe_dependence(structure)
        elif fixed is not None:
            reason = f"the workload fixes the micro-batch to {fixed}"
        else:
            return offer(self.name, values)
        others = dict.fromkeys((value for value in values if value != fixed), reason)
        return offer(self.name, () if fixed is None else (fixed,), others)

    def apply(self, build: Build) -> None:
        """Refuses a micro-batch that would change what is trained.

        Raises:
            WorkloadError: modules depend on the micro-batch, and the user did not fix it to this one.
        """
        fixed = build.workload.fixed_micro_batch
        if fixed == build.config.micro_batch:
            return
        if build.structure.micro_batch_dependent:
            raise WorkloadError(
                f"{build.workload.name} trains something else at each micro-batch: "
                f"{describe_dependence(build.structure)}" + ("" if fixed is None else f"; it is fixed to {fixed}"),
                hint="Fix the micro-batch that the training is meant to have, with --fix micro_batch=N or "
                "Workload(fixed_micro_batch=N); the search then varies everything else.",
            )
        if fixed is not None:
            raise WorkloadError(
                f"{build.workload.name} fixes the micro-batch to {fixed}, and the config has "
                f"{build.config.micro_batch}",
                hint=f"Use micro_batch={fixed}, or leave fixed_micro_batch out of the workload.",
            )


def describe_dependence(structure: Structure) -> str:
    """Which modules depend on the micro-batch and why, in one sentence."""
    first = structure.micro_batch_dependent[0]
    more = len(structure.micro_batch_dependent) - 1
    others = f" and {more} more like it" if more else ""
    return f"{first.module} ({first.kind}){others} {first.why}"

"""Where a search runs: the device, how many ranks, and what a trial may take there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autoplan.errors import ConfigError, DeviceError
from autoplan.planner.search.options import SearchOptions
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import RANK_COUNTS

if TYPE_CHECKING:
    from autoplan.strategies.analysis.facts import LeftOut, WorkloadFacts

MEMORY_SHARE = 0.8
"""Share of the available host memory that a trial may take unless --memory-limit says otherwise: the system's own
out-of-memory killer must never have to act."""

CUDA_MEMORY_SHARE = 0.95
"""The same of a GPU, less what a process takes there before any tensor: running out is an exception of one process."""

CONTEXT_BYTES = 6e8
"""Of a CUDA context with its libraries, where the probes did not measure it (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a search runs, by its options and this machine.

    Attributes:
        device: cuda or cpu.
        nproc: The largest number of ranks.
        given_limit_bytes: The memory limit that the options give; None: they give none.
    """

    device: Literal["cuda", "cpu"]
    nproc: int
    given_limit_bytes: int | None


def find_target(options: SearchOptions, hardware: HardwareProfile) -> Target:
    """Where the search runs: the device, up to how many ranks (by default all visible GPUs; 1 on CPU), the limit.

    Raises:
        DeviceError: CUDA was asked for and there is none.
        UsageError: the memory limit is a share, and the memory of the device is not known.
    """
    from autoplan.probes.run import pick_device

    device = pick_device(hardware, options.device)
    gpus = sum(found.type == "cuda" for found in hardware.devices) if device == "cuda" else 0
    nproc = max(1, gpus) if options.nproc is None else options.nproc
    limit = options.memory_limit_bytes(_least(hardware, device, nproc, "memory_total_bytes"))
    return Target(device=device, nproc=nproc, given_limit_bytes=limit)


def _least(hardware: HardwareProfile, device: str, ranks: int, name: str) -> float | None:
    """The least of a reading over the devices of the ranks: one limit holds for all of them."""
    devices = [found for found in hardware.devices if found.type == device][:ranks]
    known = [value for found in devices if (value := getattr(found, name).value) is not None]
    return min(known, default=None)


def limits(
    hardware: HardwareProfile,
    device: Literal["cuda", "cpu"],
    wanted_bytes: int | None,
    *,
    ranks: int = 1,
    measured: HardwareProfile | None = None,
) -> tuple[int, int]:
    """The most memory that one trial may take: on its device, and of the host.

    Args:
        hardware: The machine as it is now.
        device: cuda or cpu.
        wanted_bytes: The limit that was given; None: a share of what is available.
        ranks: At most so many, each with a GPU of its own: the one with the least memory counts.
        measured: The probed machine, which says what a CUDA context takes; None: assumed.

    Raises:
        DeviceError: the machine does not say how much is available, and no limit was given.
    """
    host = hardware.host.memory_available_bytes.value
    here = _least(hardware, device, ranks, "memory_available_bytes") if device == "cuda" else host
    if here is None and wanted_bytes is None:
        raise DeviceError(
            f"how much memory is free on {hardware.device(device).name} is not known",
            hint="Say how much a trial may take with --memory-limit, for example --memory-limit 8GiB.",
        )
    host_limit = int(MEMORY_SHARE * host) if host is not None else int(wanted_bytes or here or 0)
    share = MEMORY_SHARE * (here or 0)
    if device == "cuda":
        share = max(0.0, CUDA_MEMORY_SHARE * (here or 0) - context_bytes(measured))
    limit = int(share) if wanted_bytes is None else wanted_bytes
    return limit, (limit if device == "cpu" else host_limit)


def context_bytes(measured: HardwareProfile | None) -> float:
    """Bytes of a GPU that a process takes before any tensor: measured by the probes, else assumed."""
    reading = None if measured is None else measured.device("cuda").context_bytes
    return CONTEXT_BYTES if reading is None or reading.value is None else reading.value


def degree_combinations(
    fix: Mapping[str, Any], facts: WorkloadFacts, target: Target
) -> tuple[Sequence[Mapping[str, Any]], Sequence[LeftOut]]:
    """The legal degrees for up to --nproc ranks, and what was left out.

    Raises:
        ConfigError: a fixed degree that is not legal, and why.
    """
    from autoplan.strategies.techniques.degrees import explain_degree, legal_degrees

    for knob, value in fix.items():
        reason = explain_degree(facts, knob, value, target.nproc)
        if reason is not None:
            more = f"Add --nproc {value}, or leave" if knob in RANK_COUNTS and value > target.nproc else "Leave"
            raise ConfigError(reason, hint=f"{more} {knob} to the search, or fix it to a legal degree.")
    if target.nproc <= 1:
        return ({},), ()
    combinations, dropped = legal_degrees(facts, target.nproc, device=target.device)
    return [{}, *combinations], dropped

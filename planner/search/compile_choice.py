"""How many compilations to run side by side: arithmetic on what they take, the cores, the memory and the time left.

In: candidates whose trials would compile with an empty cache, best first. Out: how many of them save the most time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.strategies.config import TrainingConfig

COMPILERS = 7
"""At a time in one compilation: those of a graph's kernels are started together and waited for. The graphs of a block
of GPT-2, forward and backward, had 15 kernels on CPU."""

MOST = 8
"""Processes side by side: the ranking says little of what comes after as many trials."""

COMPILER_BYTES = 0.4 * 2**30
"""Of one compiler process: 870 MiB were measured at the peak of a trial that compiled with one, 500 from the cache."""

HOST_BYTES = 3.0 * 2**30
"""Of host memory, what a process takes that trains on a GPU. Assumed."""

LEAST_SAVING_S, LEAST_SAVING_SHARE = 2.0, 0.1
"""A smaller saving than this, and than this share of what the compilations take alone, is within what is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A candidate whose trial would compile with an empty cache.

    Attributes:
        config: What to compile.
        cold_s, warm_s: Seconds of its compilation alone, and with the kernels in the cache.
        trial_s: Of its trial without compiling.
        micro_step_s: Of one micro-step.
        peak_bytes: High bound of its peak on the device.
    """

    config: TrainingConfig
    cold_s: float
    warm_s: float
    trial_s: float
    micro_step_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where they would be compiled.

    Attributes:
        cores: That may be used.
        memory_limit_bytes, host_limit_bytes: On the device, and of host memory, for all processes together.
        context_bytes: Of the device, what a further process takes before any tensor; 0 on CPU.
        serial_share: Of a compilation on one core, what runs in one thread.
        fixed_s: To start and build a process.
        used_share: Of the candidates after the first, how many will be measured.
        left_s: For the compilations and the trials after them.
    """

    cores: int
    memory_limit_bytes: float
    host_limit_bytes: float
    context_bytes: float
    serial_share: float
    fixed_s: float
    used_share: float
    left_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How many of the waiting candidates to compile side by side, from the first on; 1: each in its own trial.

    Attributes:
        number: How many.
        seconds: Expected, for all of them.
        saving_s: Expected, over compiling each in its own trial.
        why_not: Why not more than one; empty where it is more.
    """

    number: int = 1
    seconds: float = 0.0
    saving_s: float = 0.0
    why_not: str = ""


def compile_share(cores: float, serial_share: float) -> float:
    """What a compilation takes on some cores, as a share of what it takes on one (Amdahl's law).

    Args:
        cores: That it has to itself; more than it has compilers at a time are of no use.
        serial_share: Of its time on one core, what runs in one thread.
    """
    return serial_share + (1.0 - serial_share) / min(cores, COMPILERS)


def slowdown(processes: int, cores: int, serial_share: float) -> float:
    """How many times as long a compilation takes on its share of the cores as on all of them.

    Args:
        processes: Side by side; not more than cores.
        cores: All of them.
        serial_share: Of its time on one core, what runs in one thread.
    """
    return compile_share(cores / processes, serial_share) / compile_share(cores, serial_share)


def choose(waiting: Sequence[Waiting], machine: Machine) -> Choice:
    """How many to compile side by side: as many as save the most time.

    What a further candidate saves counts only as often as it will be measured. The micro-step that each runs shares
    the device with the others', so those add up.
    """
    if machine.cores < 2:
        return Choice(why_not="only one core may be used, on which nothing goes faster side by side")
    if len(waiting) < 2:
        return Choice(why_not="no second one that would be compiled was worth a trial at that time")
    best, why_not = Choice(), ""
    for number in range(2, min(len(waiting), machine.cores, MOST) + 1):
        group = waiting[:number]
        together_s = machine.fixed_s + sum(one.micro_step_s for one in group)
        together_s += max(one.cold_s for one in group) * slowdown(number, machine.cores, machine.serial_share)
        kept = [one.cold_s - one.warm_s for one in group]
        saving_s = kept[0] + machine.used_share * sum(kept[1:]) - together_s
        alone_s = sum(one.cold_s for one in group)
        least_s = max(LEAST_SAVING_S, LEAST_SAVING_SHARE * alone_s)
        if not _fits(group, machine):
            why_not = why_not or f"{number} of them together would need more memory than a trial may take"
            break
        if together_s + sum(one.warm_s + one.trial_s for one in group) > machine.left_s:
            why_not = why_not or f"the time left has no room for {number} of them"
            break
        if saving_s < least_s:
            warm_s = sum(one.warm_s for one in group)
            why_not = why_not or (
                f"on {machine.cores} cores {number} of them side by side were expected to take {together_s:.0f} s and "
                f"then {warm_s:.0f} s in their trials, and {alone_s:.0f} s one after the other"
            )
        elif saving_s > best.saving_s:
            best = Choice(number=number, seconds=together_s, saving_s=saving_s)
    return best if best.number > 1 else Choice(why_not=why_not)


def _fits(group: Sequence[Waiting], machine: Machine) -> bool:
    """Whether they fit beside each other: on the device, and with their compilers in the host's memory."""
    compilers = COMPILER_BYTES * max(machine.cores, len(group))
    device = sum(one.peak_bytes for one in group) + machine.context_bytes * (len(group) - 1)
    host = HOST_BYTES * len(group) if machine.context_bytes else device
    return device <= machine.memory_limit_bytes and host + compilers <= machine.host_limit_bytes

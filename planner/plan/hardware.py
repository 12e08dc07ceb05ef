"""The machine where a plan was found beside this one.

In: a plan, or two machines. Out: sentences.
"""

from __future__ import annotations

from autoplan.errors import AutoplanError
from autoplan.planner.records.plan import PlanRecord
from autoplan.probes.profile import HardwareProfile


def found_elsewhere(plan: PlanRecord, device: str | None = None) -> str | None:
    """A sentence where the plan was found on other hardware than this; None where it is the same.

    A plan loads anywhere; what it says was measured where it was found.

    Args:
        plan: The plan.
        device: The kind that it runs on; None: the plan's own.
    """
    from autoplan.probes.run import read_host_profile

    try:
        here = read_host_profile()
    except (AutoplanError, OSError) as error:
        why = error.message if isinstance(error, AutoplanError) else error
        return f"this machine could not be read: {why}; the plan's figures are from where it was found"
    if here.fingerprint == plan.hardware.fingerprint:
        return None
    texts = hardware_differences(plan.hardware, here, device or plan.device)
    if here.host.torch != plan.hardware.host.torch:
        texts.append(f"torch {here.host.torch} here, {plan.hardware.host.torch} then")
    what = "; ".join(texts) or "its parts have the same names, and a size, a limit or another device differs"
    return (
        f"the plan was found on other hardware: {what}. Another plan may be faster here: autoplan search. autoplan "
        "verify measures this one"
    )


def hardware_differences(then: HardwareProfile, here: HardwareProfile, device: str) -> list[str]:
    """The parts of the machine that a step's speed depends on, where they differ."""
    texts = []
    for what in ("cpu_model", "cores_usable", "driver", "cuda"):
        before, after = getattr(then.host, what), getattr(here.host, what)
        if before != after:
            texts.append(f"{what.replace('_', ' ')} {after or 'none'} here, {before or 'none'} then")
    before_s, after_s = ([found.name for found in profile.devices if found.type == device] for profile in (then, here))
    if device != "cpu" and before_s != after_s:
        texts.insert(0, f"{', '.join(after_s) or 'no GPU'} here, {', '.join(before_s)} then")
    return texts

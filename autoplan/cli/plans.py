"""What the commands that take a plan share: the argument, loading it, saying when it was made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.errors import AutoplanError

if TYPE_CHECKING:
    from autoplan.planner.plan import Plan

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as autoplan search writes it.", show_default=True)
]
DEFAULT_PLAN = Path("plan.json")


def load_plan(path: Path) -> Plan:
    """The plan in a file; PlanError says what is wrong with it."""
    from autoplan.planner.plan import Plan

    return Plan.load(path)


def other_hardware(plan: Plan) -> str | None:
    """A sentence where the plan was found on other hardware than this; None where it is the same.

    A plan loads anywhere: what it says was measured there, and may be wrong here.
    """
    try:
        from autoplan.probes.run import read_host_profile

        here = read_host_profile()
    except AutoplanError as error:
        return f"this machine could not be read ({error.message}); the plan's figures are from {plan.created[:10]}"
    if here.fingerprint == plan.hardware.fingerprint:
        return None
    return f"this plan was found on other hardware than this machine: {differences(plan, here_devices(here))}"


def here_devices(profile: object) -> str:
    """The names of a profile's devices."""
    from autoplan.probes.profile import HardwareProfile

    assert isinstance(profile, HardwareProfile)
    return ", ".join(f"{device.name} ({device.type})" for device in profile.devices)


def differences(plan: Plan, here: str) -> str:
    """What the plan was found on, against what is here."""
    there = here_devices(plan.hardware)
    return f"{there} there, {here} here" if there != here else "the same devices with other limits or versions"

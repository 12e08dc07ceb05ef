"""The device-hours of a search: what it holds, times how long, over all planners of the study; and their limit.

A device is a GPU, or on CPU a machine. A search holds all devices that it may use from its start to its end, also while
a piece of work uses fewer: nobody else can have them. So of one planner the device-hours are the devices times the
search's own clock; of several they are summed over the pieces of work in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from autoplan.planner.records.trials import WorkLine, seconds_of
from autoplan.planner.search.options import DEFAULT_BUDGET_S, SearchOptions
from autoplan.units import format_number, format_seconds

HOUR_S = 3600.0


def devices_held(options: SearchOptions, device: Literal["cuda", "cpu"], nproc: int) -> int:
    """How many devices one planner of a search on cuda or cpu holds, whose largest number of ranks is `nproc`."""
    return nproc if device == "cuda" else options.layout[0]


def used_s(ledger: Iterable[WorkLine]) -> float:
    """Device-seconds of the pieces of work of all planners."""
    return sum(seconds * line.devices for line, seconds in seconds_of(ledger))


def alone_s(options: SearchOptions, devices: int) -> float:
    """Seconds that one planner alone may take by --max-device-hours; infinite: no limit was given."""
    limit = options.max_device_hours
    return math.inf if limit is None else limit * HOUR_S / devices


def budget_s(options: SearchOptions, stored_s: float | None, devices: int) -> float:
    """The budget in seconds: what is given, else `stored_s` of an earlier run, at most what --max-device-hours allow.

    Those alone are a budget too.
    """
    limit_s = alone_s(options, devices)
    if options.budget_s is None and limit_s < math.inf:
        return limit_s
    return min(options.budget_s or stored_s or DEFAULT_BUDGET_S, limit_s)


def describe_limit(options: SearchOptions, devices: int) -> str:
    """`--max-device-hours is 0.5: at most 225 s on 8 device(s), less what other planners of the study take`."""
    hours, seconds = format_number(options.max_device_hours or 0.0), format_seconds(alone_s(options, devices))
    return (
        f"--max-device-hours is {hours}: at most {seconds} on {devices} device(s), less what other planners of the "
        "study take"
    )


def describe_used(ledger: Iterable[WorkLine], options: SearchOptions) -> str:
    """`the pieces of work took 0.42 of 0.5 device-hours`."""
    used, limit = used_s(ledger) / HOUR_S, options.max_device_hours or 0.0
    return f"the pieces of work took {format_number(used)} of {format_number(limit)} device-hours"

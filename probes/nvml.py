"""The one place that calls the GPU driver (NVML): every call returns a value or the reason why there is none.

The driver library is a port: `Nvml` takes anything shaped like the `pynvml` module, so that a test can pass a
driver that supports nothing. A call that fails never raises: GPUs, drivers, MIG and containers each leave out
some of the calls, and one missing figure must not cost the others.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from autoplan.record import Reading

# NVML return codes (nvml.h, nvmlReturn_t) as text for the user
REASONS = {
    1: "the driver library was not initialised",
    2: "the driver refused the argument",
    3: "not supported by this GPU or driver",
    4: "not permitted for this user or in this container",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    10: "the driver did not answer in time",
    12: "the NVIDIA driver library (libnvidia-ml) is not installed",
    13: "this driver does not have the function",
    15: "the GPU has fallen off the bus",
    16: "the GPU must be reset",
    18: "driver library and kernel module have different versions: reboot or reload the driver",
    20: "the driver is out of memory",
    21: "the driver has no data yet",
    28: "the GPU was not found",
    999: "unknown driver error",
}

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReason*): why the clock is not higher. Idle
# (0x1) is left out.
CLOCK_EVENTS = {
    0x2: "clocks set by an application",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}

POWER_CAP = CLOCK_EVENTS[0x4]
"""A GPU at full load: "clocks have been optimized to ensure not to exceed currently set power limits" (nvml.h)."""

SLOWDOWNS = frozenset(CLOCK_EVENTS[bit] for bit in (0x8, 0x20, 0x40, 0x80))
"""Events that make a card slower than it usually is: throttling. A software power cap does not: cards under load run at
their power limit all the time. Nor do clocks that a person has set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one call to the driver: a value, or the reason why there is none."""

    value: Any = None
    reason: str | None = None


class Nvml:
    """An open driver library. Use `open_nvml()`."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def query(self, function: str, *args: Any) -> Answer:
        """Call one function of the driver library; never raises for what the driver does.

        Args:
            function: Its name, for example "nvmlDeviceGetName".
            args: Its arguments.
        """
        call = getattr(self._api, function, None)
        if call is None:
            return Answer(reason=f"{function}: this version of nvidia-ml-py does not have it")
        try:
            value = call(*args)
        except self._api.NVMLError as error:
            code = getattr(error, "value", None)
            reason = REASONS.get(code) if isinstance(code, int) else None
            return Answer(reason=f"{function}: {reason or error}")
        except (OSError, TypeError, ValueError, UnicodeDecodeError) as error:  # a library that does not fit the binding
            return Answer(reason=f"{function}: {type(error).__name__}: {error}")
        return Answer(value=value.decode(errors="replace") if isinstance(value, bytes) else value)

    def reading(self, unit: str, scale: float, function: str, *args: Any) -> Reading:
        """A number from the driver as a `Reading`.

        Args:
            unit: The unit after scaling.
            scale: What the driver's number is multiplied with (MHz to Hz: 1e6).
            function: As in `query`.
            args: As in `query`.
        """
        answer = self.query(function, *args)
        if answer.reason is not None:
            return Reading.unknown(unit, answer.reason, function)
        return Reading.driver(answer.value * scale, unit, function)

    def close(self) -> None:
        """Shut the library down; an error of that call is ignored."""
        self.query("nvmlShutdown")


def open_nvml(api: Any = None) -> tuple[Nvml | None, str | None]:
    """Open the driver library.

    Args:
        api: Anything shaped like the `pynvml` module; None imports that.

    Returns:
        The open library and None, or None and the reason: no binding, no driver, no permission.
    """
    if api is None:
        try:
            api = importlib.import_module("pynvml")
        except ImportError as error:
            return None, f"nvidia-ml-py cannot be imported: {error}"
    nvml = Nvml(api)
    answer = nvml.query("nvmlInit")
    return (nvml, None) if answer.reason is None else (None, answer.reason)

"""Bounds: the values that a user allows for a knob, and how they are written on the command line. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autoplan.errors import ConfigError
from autoplan.strategies.config import knob_values
from autoplan.strategies.knob_text import check_knob


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The values a user allows for a knob: a range of numbers (inclusive), or a list."""

    low: int | None = None
    high: int | None = None
    values: tuple[Any, ...] | None = None

    def allows(self, value: Any) -> bool:
        """Whether the value is within the bound."""
        if self.values is not None:
            return value in self.values
        if not isinstance(value, int):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def describe(self) -> str:
        """`1..8` or `a, b`."""
        if self.values is not None:
            return ", ".join(map(str, self.values))
        return f"{'' if self.low is None else self.low}..{'' if self.high is None else self.high}"


def parse_bound(text: str) -> tuple[str, Bound]:
    """Reads `knob=low..high` (either end may be left out) or `knob=a,b,c`.

    Raises:
        ConfigError: another form, an unknown knob, or values the knob does not take.
    """
    knob, separator, allowed = text.partition("=")
    knob = knob.strip().replace("-", "_")
    if not separator or not allowed.strip():
        raise ConfigError(
            f"{text!r} is not of the form knob=low..high or knob=a,b,c", hint="For example: --bound micro_batch=1..8"
        )
    closed = knob_values(knob)
    if closed is None and (dashed := re.fullmatch(r"\s*(\d+)\s*[-:]\s*(\d+)\s*", allowed)):
        raise ConfigError(
            f"{knob}={allowed}: a range is written with two dots",
            hint=f"For example: --bound {knob}={dashed[1]}..{dashed[2]}",
        )
    if ".." not in allowed:
        return knob, Bound(values=tuple(check_knob(knob, value.strip()) for value in allowed.split(",")))
    if closed is not None:
        raise ConfigError(
            f"{knob} takes {', '.join(map(str, closed))}: a range has no meaning there",
            hint=f"List the values: --bound {knob}={closed[0]},{closed[-1]}",
        )
    low_text, _, high_text = allowed.partition("..")
    low, high = (check_knob(knob, end.strip()) if end.strip() else None for end in (low_text, high_text))
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{knob}={allowed}: the low end is above the high end", hint=f"--bound {knob}={high}..{low}")
    return knob, Bound(low=low, high=high)


def bound_of(knob: str, value: Any) -> Bound:
    """A bound from `(low, high)`, a list of values, or the text `1..8` or `a,b`.

    Raises:
        ConfigError: an unknown knob, or values the knob does not take.
    """
    if isinstance(value, Bound):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(end is None or type(end) is int for end in value):
        low, high = ("" if end is None else end for end in value)
        return parse_bound(f"{knob}={low}..{high}")[1]
    if isinstance(value, (list, tuple, set, frozenset)):
        return Bound(values=tuple(check_knob(knob, one) for one in value))
    return parse_bound(f"{knob}={value}")[1]

"""Durations, sizes and counts as people write and read them. Inside autoplan a duration is `_s`, a size `_bytes`."""

from __future__ import annotations

import math
import re

from autoplan.errors import UsageError

_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_BYTES |= {"t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TOKENS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_duration_s(text: str | float, *, option: str = "--budget") -> float:
    """Reads `90s`, `10m`, `1h`, `1h30m`; a number is seconds.

    Raises:
        UsageError: not a duration, a text without a unit, or not above zero.
    """
    hint = "Write it like 90s, 10m, 1h or 1h30m."
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        total = float(text)
    else:
        total, place, text = 0.0, 0, str(text).strip()
        while place < len(text):
            part = _PART.match(text, place)
            if part is not None and not part[2]:
                raise UsageError(f"{option} is {text!r}, which has no unit", hint=f"Seconds or minutes? {hint}")
            if part is None or part[2].lower() not in _SECONDS:
                raise UsageError(f"{option} is {text!r}, which is not a duration", hint=hint)
            total += float(part[1]) * _SECONDS[part[2].lower()]
            place = part.end()
    if not (math.isfinite(total) and total > 0):
        raise UsageError(f"{option} is {text!r}; a duration is above zero", hint=hint)
    return total


def parse_memory_bytes(text: str | int, *, option: str = "--memory-limit") -> int | float:
    """Reads `8GiB`, `8GB`, `500MiB` as bytes (an int), `80%` as a share of what there is (a float up to 1).

    Raises:
        UsageError: not a size, a text without a unit, or not above zero.
    """
    hint = "Write it like 8GiB, 8GB or 80%."
    if isinstance(text, int) and not isinstance(text, bool):
        text = f"{text}B"
    given = str(text).strip()
    if given.endswith("%"):
        try:
            share = float(given[:-1]) / 100
        except ValueError:
            raise UsageError(f"{option} is {text!r}, which is not a share", hint=hint) from None
        if not 0 < share <= 1:
            raise UsageError(f"{option} is {text!r}; a share is above 0 % and at most 100 %", hint=hint)
        return share
    part = _PART.fullmatch(given)
    if part is not None and not part[2] and float(part[1]):
        raise UsageError(f"{option} is {text!r}, which has no unit", hint=hint)
    if part is None or part[2].lower() not in _BYTES:
        raise UsageError(f"{option} is {text!r}, which is not a size", hint=hint)
    size = round(float(part[1]) * _BYTES[part[2].lower()])
    if size <= 0:
        raise UsageError(f"{option} is {text!r}; a size is above zero", hint=hint)
    return size


def parse_tokens(text: str | float) -> float:
    """Reads `2T`, `300B`, `1.5e12`, or a number.

    Raises:
        UsageError: no number above 0.
    """
    body = str(text).strip().lower()
    scale = _TOKENS.get(body[-1:])
    try:
        value = float(body) if scale is None else float(body[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"--tokens {text!r} is no number of tokens", hint="For example: --tokens 2T or 300B.")
    return value


def format_bytes(size: float | None) -> str:
    """`1.93 GiB`, `512 MiB`; `unknown` for None."""
    if size is None:
        return "unknown"
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{format_number(size / scale)} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """`12.3 ms`, `4.56 s`, `3 min 20 s`, `2 h 05 min`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if abs(seconds) < 1e-3:
        return f"{format_number(seconds * 1e6)} µs"
    if abs(seconds) < 1:
        return f"{format_number(seconds * 1e3)} ms"
    if abs(seconds) < 120:
        return f"{format_number(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_clock(seconds: float) -> str:
    """`4:05`, `1:02:09`: time left or spent, in the width of a clock."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def format_number(value: float | None) -> str:
    """`1,234`, `87.5`, `0.0123`: three digits that count, or all before the point; `unknown` for None."""
    if value is None:
        return "unknown"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"

"""Texts of a user's (exceptions, names, output), made fit for files and screens. Nothing is left out in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

# What a terminal obeys instead of showing it: C0 without tab and newline, DEL, C1 (ECMA-48).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLOURS = re.compile(
    "\x1b\\[[0-9;?]*[ -/]*[@-~]"
)  # control sequences: colours, movements of the cursor (ECMA-48, 5.4)


def writable(text: str) -> str:
    r"""The text with lone surrogates written as `\udc80`: UTF-8, JSON readers and databases refuse them."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    r"""The text as a screen may show it: no colours, a line for each return of the carriage, `\x1b` for the rest."""
    text = _COLOURS.sub("", writable(text)).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def all_writable(value: Any) -> Any:
    """A value of JSON with every text in it writable, keys too; the same object where there was nothing to change."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, dict):
        return {all_writable(key): all_writable(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(all_writable, value))
    return value


OTHER_NAMES = {
    "batch_size": "global_batch",
    "seq_len": "sequence_length",
    "max_length": "sequence_length",
    "lr": "learning_rate",
    "time": "budget",
    "timeout": "budget",
    "output": "out",
    "gpus": "nproc",
    "price_per_gpu_hour": "price_per_hour",
}
"""The names that other tools, or an earlier version, have for an option: for each of them, ours."""


def right_name(given: str, names: Iterable[str]) -> str | None:
    """The name that was meant: another tool's word for it, or the nearest in spelling; None: none is near."""
    names = list(names)
    if OTHER_NAMES.get(given) in names:
        return OTHER_NAMES[given]
    return next(iter(difflib.get_close_matches(given, names, n=1)), None)

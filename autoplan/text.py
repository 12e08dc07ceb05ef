"""Texts of a user's (exceptions, names, output), made fit for files and screens. Nothing is left out in silence."""

from __future__ import annotations

import re
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

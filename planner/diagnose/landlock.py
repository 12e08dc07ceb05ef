"""A rule of the kernel: this process, and all that it starts from now on, write below some places alone (Landlock).

It needs no rights, and cannot be taken back. It knows nothing of what a file's owner may still do to it: change its
mode and its times. Linux 5.19 and later have what is needed here: before that, nothing could be moved between folders.
See https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_VERSION, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
"""Bits of <linux/landlock.h>: folders and files removed; what a folder can hold made in it."""

_WITH_MOVES, _WITH_TRUNCATE = 2, 3
"""Versions of Landlock from which on files can be moved between folders, and cutting them off is a write."""


def can_restrict() -> bool:
    """Whether the kernel has what is needed here."""
    return _version() >= _WITH_MOVES


def _version() -> int:
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))


def restrict_writes(places: Iterable[str]) -> bool:
    """Refuses writes outside of these places from now on, for this thread and what it starts.

    Args:
        places: Folders and files; what is not there is passed over.

    Returns:
        Whether the kernel does it.
    """
    if not can_restrict():
        return False
    handled = _WRITE_FILE | _MAKE_AND_REMOVE | _REFER | (_TRUNCATE if _version() >= _WITH_TRUNCATE else 0)
    rules = _call(_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(handled)), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for place in places:
            _allow(rules, place, handled)
        no_more_rights = ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
        return no_more_rights and _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0)) == 0
    finally:
        os.close(rules)


def _allow(rules: int, place: str, handled: int) -> None:
    """Allows all that is handled below a folder; to a file what a file can have."""
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            handled &= _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", handled, opened)
        _call(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments))

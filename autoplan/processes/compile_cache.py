"""Libraries of torch's compile cache that were cut off.

The compiler writes a library in place (torch 2.13, `_inductor/codecache.py`: it builds where no file is, and loads
what is there). A process that is killed meanwhile leaves a part of it, which every later process finds and cannot load.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from autoplan.processes.report import ErrorReport

CUT_OFF_TEXTS = ("file too short", "invalid ELF header", "cannot read file data")
"""What dlopen(3) of glibc says of a part of a library."""

_LIBRARY = re.compile(rf"(/[^\s:]+\.so): (?:{'|'.join(CUT_OFF_TEXTS)})")


def remove_cut_off(error: ErrorReport) -> Path | None:
    """Removes the library of the compile cache that an exception could not load, so that it is built again.

    A library of another folder is left alone.

    Returns:
        The removed file; None: the exception is another, or its file is not of the cache.
    """
    found = _LIBRARY.search(error.message) or _LIBRARY.search(error.traceback)
    if found is None:
        return None
    path = Path(found[1])
    own = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    in_cache = any(part.startswith("torchinductor_") for part in path.parts[:-1])  # torch's own choice, by the user
    if not in_cache and not (own and path.is_relative_to(own)):
        return None
    path.unlink(missing_ok=True)
    return path

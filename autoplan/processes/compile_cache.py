"""torch's compile cache: where it is, and libraries in it that were cut off.

torch's own place for it is `torchinductor_USER` in the temporary folder that all users share (torch 2.13,
`_inductor/runtime/cache_dir_utils.py`), where anybody can make that folder first; and what is in it is loaded as code.
autoplan's is a folder of the user's own, for what it compiles in its processes and in the user's program. Headers that
are compiled ahead stay in torch's place, whatever the variable says (`_inductor/codecache.py`, `_HEADER_DIR`): there
only where that folder is this user's alone, and else not at all.

The compiler writes a library in place (torch 2.13, `_inductor/codecache.py`: it builds where no file is, and loads
what is there). A process that is killed meanwhile leaves a part of it, which every later process finds and cannot load.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import sys
import tempfile
from pathlib import Path

import platformdirs

from autoplan.files import make_private_folder, refuse_foreign
from autoplan.processes.owner import folder_prefix
from autoplan.processes.report import ErrorReport

CUT_OFF_TEXTS = ("file too short", "invalid ELF header", "cannot read file data")
"""The messages of glibc's dlopen(3) about a library of which only a part is there."""

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS_VARIABLE = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"

_LIBRARY = re.compile(rf"(/[^\s:]+\.so): (?:{'|'.join(CUT_OFF_TEXTS)})")


def cache_folder() -> Path:
    """The folder of the compile cache: the one that the user names in the environment, else one of the user's own.

    Where that cannot be made, or belongs to another user, it is a temporary folder of this process.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named and not _is_torchs_own(Path(named)):
        return Path(named)
    folder = Path(platformdirs.user_cache_dir("autoplan")) / "inductor"
    try:
        make_private_folder(folder)
        refuse_foreign(folder.parent, root_ok=True)
    except OSError:
        return _temporary_folder()
    return folder


def cache_variables() -> dict[str, str]:
    """The environment variables of a process that compiles."""
    variables = {CACHE_VARIABLE: str(cache_folder())}
    try:
        make_private_folder(_torchs_own())  # nobody else can make it then
    except OSError:
        variables[HEADERS_VARIABLE] = "0"
    return variables


def use_own_cache() -> None:
    """Keeps in `cache_folder()` all that this process compiles from now on."""
    variables = cache_variables()
    os.environ.update(variables)
    settings = sys.modules.get("torch._inductor.config")
    if settings is not None and HEADERS_VARIABLE in variables:  # it was read when that was imported
        settings.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]


def _torchs_own() -> Path:
    """torch's own place, as its `default_cache_dir` makes the name."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _is_torchs_own(path: Path) -> bool:
    """Whether it is torch's own choice: torch writes that into the environment when it compiles."""
    return path.name.startswith("torchinductor_") and path.parent in (Path(tempfile.gettempdir()), Path("/tmp"))


@functools.cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix=folder_prefix("compiled")))


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
    if not path.is_relative_to(cache_folder()):
        return None
    path.unlink(missing_ok=True)
    return path

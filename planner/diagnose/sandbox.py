"""What the script would write goes into a folder that is removed afterwards, and can be read from there meanwhile.

Python's own functions for files are replaced before the script runs: to open for writing, to make, rename and remove.
Files that a library writes in C go there where a hook knows the call (torch.save, safetensors); others are not seen.
Nothing outside the folder is changed or removed: to remove a file that was there before does nothing.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUIET = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The environment of a script that talks to nobody."""

LARGEST_COPY_BYTES = 1 << 30
"""A larger file that the script changes in place is not copied: opening it fails as on a read-only disk."""

_FREE = ("/dev/", "/proc/", "/sys/")


class Sandbox:
    """The folder, and the functions that send writes there.

    Args:
        root: The folder.
        free: Folders where the script may write as it is: caches of compiled code.
    """

    def __init__(self, root: Path, free: tuple[str, ...] = ()) -> None:
        self.root = str(root)
        self._files = os.path.join(self.root, "files")
        self._free = (*_FREE, self.root + os.sep, *(place.rstrip(os.sep) + os.sep for place in free if place))
        self._local = threading.local()
        self.refused: list[str] = []

    def moved(self, path: Any, *, copy: bool = False) -> Any:
        """Where a write of this path goes; with `copy` the file that is there already comes along."""
        target = self._target(path)
        if target is None:
            return path
        with self._plain():
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if copy and os.path.isfile(path) and not os.path.exists(target):
                if os.path.getsize(path) > LARGEST_COPY_BYTES:
                    self.refused.append(os.path.basename(os.fspath(path)))
                    raise OSError(30, "the diagnosis does not change files in place that are larger than 1 GiB")
                shutil.copyfile(path, target)
        return target

    def seen(self, path: Any) -> Any:
        """Where a read of this path goes: to what the script has written, if it has."""
        target = self._target(path)
        if target is None:
            return path
        with self._plain():
            return target if os.path.lexists(target) else path

    def _target(self, path: Any) -> str | None:
        if not isinstance(path, (str, bytes, os.PathLike)) or self._busy:
            return None
        absolute = os.path.abspath(os.fsdecode(path))
        if (absolute + os.sep).startswith(self._free):
            return None
        return self._files + absolute

    @property
    def _busy(self) -> bool:
        return bool(getattr(self._local, "depth", 0))

    @contextlib.contextmanager
    def _plain(self) -> Any:
        """The functions as they were, for our own use of them."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    # The functions that take the place of Python's.

    def install(self) -> None:
        """Puts the functions in place, for this process and those that it forks."""
        temporary = os.path.join(self.root, "tmp")
        os.makedirs(temporary, exist_ok=True)
        os.environ.update(QUIET, TMPDIR=temporary, MLFLOW_TRACKING_URI=f"file:{self.root}/mlruns")
        tempfile.tempdir = temporary
        sys.dont_write_bytecode = True
        builtins.open = io.open = self._open(io.open)
        os.open = self._os_open(os.open)
        for name in ("mkdir", "symlink", "link", "mkfifo"):
            setattr(os, name, self._writes(getattr(os, name), last=name in ("symlink", "link")))
        for name in ("remove", "unlink", "rmdir"):
            setattr(os, name, self._removes(getattr(os, name)))
        for name in ("chmod", "utime", "truncate"):
            setattr(os, name, self._changes(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._renames(getattr(os, name)))
        for name in ("stat", "lstat", "access", "readlink"):
            setattr(os, name, self._reads(getattr(os, name)))
        os.listdir = self._lists(os.listdir)
        shutil.rmtree = self._removes(shutil.rmtree)  # type: ignore[assignment]

    def _open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and set(mode) & set("wxa+"):
                file = self.moved(file, copy=bool(set(mode) & set("a+")) and "w" not in mode)
            else:
                file = self.seen(file)
            return function(file, mode, *args, **kwargs)

        return opened

    def _os_open(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                path = self.moved(path, copy=not flags & os.O_TRUNC) if writes else self.seen(path)
            return function(path, flags, *args, **kwargs)

        return opened

    def _writes(self, function: Callable[..., Any], *, last: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def written(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None and args:
                place = 1 if last and len(args) > 1 else 0
                path = args[place]
                if not last and self._target(path) is not None and self._really(path):
                    raise FileExistsError(17, "File exists", path)
                args = (*args[:place], self.moved(path), *args[place + 1 :])
            return function(*args, **kwargs)

        return written

    def _really(self, path: Any) -> bool:
        with self._plain():
            return os.path.exists(path)

    def _removes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def removed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or self._target(path) is None:
                return function(path, *args, **kwargs)
            target = self.seen(path)
            if target is path and self._really(path):
                return None  # it stays where it is
            with self._plain():
                return function(target, *args, **kwargs)

        return removed

    def _changes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None and self._target(path) is not None:
                target = self.seen(path)
                if target is path:
                    return None
                path = target
            return function(path, *args, **kwargs)

        return changed

    def _renames(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def renamed(source: Any, target: Any, **kwargs: Any) -> Any:
            if self._target(source) is None and self._target(target) is None:
                return function(source, target, **kwargs)
            found = self.seen(source)
            if found is source and self._target(source) is not None:
                if self._really(source) and os.path.isfile(source):  # a file of the user's stays, a copy is moved
                    found = self.moved(source, copy=True)
                elif self._really(source):
                    return None
            return function(found, self.moved(target), **kwargs)

        return renamed

    def _reads(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._busy or kwargs.get("dir_fd") is not None:
                return function(path, *args, **kwargs)
            return function(self.seen(path), *args, **kwargs)

        return read

    def _lists(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def listed(path: Any = ".") -> Any:
            found = self.seen(path)
            if found is path:
                return function(path)
            names = list(function(found))
            if self._really(path):
                names += [name for name in function(path) if name not in names]
            return names

        return listed

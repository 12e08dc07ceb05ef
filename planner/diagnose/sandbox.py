"""What the script would write goes into a folder that is removed afterwards, and can be read from there meanwhile.

Python's own functions for files are replaced before the script runs: to open, to make, rename and remove, to list and
to change into a folder; in Python processes that the script starts too. Of libraries that open files in C,
`libraries.py` knows the calls. Nothing outside the folder is changed or removed: a file that was there before and
that the script removes stays, and the script sees it no more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posix
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoplan.planner.diagnose.libraries import Function, Libraries, around, replace_everywhere

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
}
"""The environment of a script that talks to nobody."""

LARGEST_COPY_BYTES = 1 << 30
"""A larger file that the script changes in place is not copied: opening it fails as on a read-only disk."""

FILES = "files"
"""In the folder: what the script has made, at the path that it has for the script. It is empty when a run begins."""

GONE = "gone"
"""In the folder: the paths that the script has removed, for the processes that it starts."""

SITE = "site"
"""In the folder: what a Python process that the script starts runs first."""

_FREE = ("/dev/", "/proc/", "/sys/")

_SHARED = "/dev/shm/"
_OF_RUNTIME = re.compile(r"(torch_\d+_\d+_\d+|sem\.[^/]+|psm_[0-9a-f]+|pym-\d+-[^/]+|pymp-[^/]+)/")
"""Memory that processes share by files, and the names that torch and multiprocessing give theirs."""

_READS = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr")
_CHANGES = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
"""Functions of `os` that read what is at a path, and that change it without opening it."""


class Sandbox:
    """The folder, and the functions that send writes there.

    The real path of a file is the one that it has without the sandbox.

    Args:
        root: The folder.
        free: Folders where the script may write as it is: caches of compiled code.
    """

    def __init__(self, root: Path, free: tuple[str, ...] = ()) -> None:
        self.root = str(root)
        self._files = os.path.join(self.root, FILES)
        self.free = tuple(place.rstrip(os.sep) for place in (self.root, *free) if place)
        self._free = tuple(place + os.sep for place in self.free)
        self._local = threading.local()
        self._gone: set[str] = set()  # real paths of what was there before, and the script has removed
        self._saved: set[str] = set()  # real paths of checkpoints
        self._stand_ins: set[str] = set()  # real paths of the empty files in place of checkpoints
        self._entered = False
        self.refused: list[str] = []
        self.libraries = Libraries(self)

    def moved(self, path: Any, *, copy: bool = False) -> Any:
        """Where a write of this path goes; with `copy` the file that is there already comes along."""
        real = self._real(path)
        if real is None:
            return path
        target = self._files + real
        with self._plain():
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if copy and os.path.isfile(real) and not os.path.exists(target) and self._really(real):
                self._refuse_large(real, os.path.getsize(real))
                own = f"{target}.{os.getpid()}.{threading.get_ident()}"
                shutil.copyfile(real, own)
                try:
                    os.link(own, target)
                except FileExistsError:
                    pass  # another process was first
                except OSError:  # a file system without links
                    os.replace(own, target)
                Path(own).unlink(missing_ok=True)
        return target

    def moved_folder(self, path: Any) -> Any:
        """Where the files go that are written into a folder."""
        target = self.moved(path)
        if target != path:
            with self._plain():
                os.makedirs(target, exist_ok=True)
        return target

    def note_save(self, path: Any) -> None:
        """A checkpoint is written there."""
        name = self._name(path)
        if name is not None:
            self._saved.add(name)
            self._stand_ins.discard(name)

    def stand_in(self, path: Any) -> None:
        """In place of a checkpoint: the one that is there; else an empty file, which can be renamed and removed."""
        name = self._name(path)
        if name is not None and not self._is_there(name):
            self._saved.add(name)
            self._stand_ins.add(name)
            with contextlib.suppress(OSError):
                target = self.moved(path)
                with self._plain():
                    Path(target).touch()

    def is_saved(self, path: Any) -> bool:
        """Whether it is a checkpoint."""
        return bool(self._saved) and self._name(path) in self._saved

    def _name(self, path: Any) -> str | None:
        """The path of a file of the script: the real one, or where it is in the folder; None: it is not known."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not path or self._busy:
            return None
        return self._real(path) or os.path.abspath(os.fsdecode(path))

    def _is_there(self, name: str) -> bool:
        """Whether the script sees a file there."""
        return self._made(name) or self._really(name)

    def is_users(self, path: Any) -> bool:
        """Whether it was there before, and the script has not changed it."""
        real = self._real(path)
        return real is not None and not self._made(real) and self._really(real)

    def seen(self, path: Any) -> Any:
        """Where a read of this path goes: to what the script has written, if it has."""
        real = self._real(path)
        if real is None:
            return path
        if self._made(real) or self._is_gone(real):
            return self._files + real
        return real if self._entered else path

    def _real(self, path: Any) -> str | None:
        """The real path of what is redirected, also where the script is in a folder of the sandbox; None: it is not."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not path or self._busy:
            return None
        real = os.path.abspath(os.fsdecode(path))
        if (real + os.sep).startswith(self._files + os.sep):
            real = real[len(self._files) :] or os.sep
        place = real + os.sep
        if place.startswith(self._free):
            return None
        if place.startswith(_SHARED):
            return None if _OF_RUNTIME.fullmatch(place, len(_SHARED)) else real
        return None if place.startswith(_FREE) else real

    def _made(self, real: str) -> bool:
        """Whether the script has made it."""
        with self._plain():
            return os.path.lexists(self._files + real)

    def _really(self, real: str) -> bool:
        """Whether it was there before, and the script has not removed it."""
        with self._plain():
            return os.path.lexists(real) and not self._is_gone(real)

    def _is_gone(self, real: str) -> bool:
        """Whether the script has removed it, or a folder that it was in."""
        return bool(self._gone) and not self._gone.isdisjoint((real, *map(str, Path(real).parents)))

    def _note_gone(self, real: str) -> None:
        self._gone.add(real)
        with open(os.path.join(self.root, GONE), "a") as file:
            file.write(real + "\0")

    def _entries(self, path: Any) -> dict[str, Any] | None:
        """What is in a folder that the script has changed, by name; None: as it was before, or there is none."""
        real = None if isinstance(path, bytes) else self._real(path)
        if real is None:
            return None
        made, there = self._made(real), self._really(real)
        if not made and not (there and any(os.path.dirname(one) == real for one in self._gone)):
            return None
        found: dict[str, Any] = {}
        with self._plain():
            for folder in [self._files + real] * made + [real] * (there and os.path.isdir(real)):
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if folder != real or os.path.join(real, entry.name) not in self._gone:
                            found.setdefault(entry.name, entry)
        return found

    def _refuse_large(self, path: Any, size_bytes: int) -> None:
        if size_bytes > LARGEST_COPY_BYTES:
            self.refused.append(os.path.basename(os.fspath(path)))
            raise OSError(errno.EROFS, "the diagnosis does not change files in place that are larger than 1 GiB")

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
        """Puts the functions in place, for this process and those that it starts."""
        temporary = os.path.join(self.root, "tmp")
        os.makedirs(temporary, exist_ok=True)
        os.environ.update(QUIET, TMPDIR=temporary, MLFLOW_TRACKING_URI=f"file:{self.root}/mlruns")
        tempfile.tempdir = temporary
        sys.dont_write_bytecode = True
        self._make_site()
        with contextlib.suppress(FileNotFoundError):
            self._gone.update(Path(self.root, GONE).read_text().split("\0")[:-1])
        changed: dict[Any, Any] = {
            io.open: around(io.open, self._open),
            io.open_code: around(io.open_code, self._reads),
        }
        for name, method in self._methods().items():
            function = getattr(os, name, None)  # attributes of files are Linux's
            if function is None:
                continue
            changed[function] = wrapped = around(function, method)
            changed.setdefault(getattr(posix, name, function), wrapped)  # imports ask that module
            if function in os.supports_follow_symlinks:  # shutil asks
                os.supports_follow_symlinks.add(wrapped)
        changed[shutil.rmtree] = around(shutil.rmtree, self._removes)
        replace_everywhere(changed)
        self.libraries.install()

    def _methods(self) -> dict[str, Function]:
        """What is called in place of each function of `os`: with it, and with its arguments."""
        return {
            "open": self._os_open,
            **dict.fromkeys(("mkdir", "mkfifo"), self._makes),
            **dict.fromkeys(("symlink", "link"), self._links),
            **dict.fromkeys(("remove", "unlink", "rmdir"), self._removes),
            **dict.fromkeys(("rename", "replace"), self._renames),
            **dict.fromkeys(_CHANGES, self._changes),
            **dict.fromkeys(_READS, self._reads),
            **dict.fromkeys(("listdir", "scandir"), self._lists),
            "chdir": self._enters,
        }

    def _make_site(self) -> None:
        """Has the Python processes that the script starts put the functions in place before they run anything."""
        site = os.path.join(self.root, SITE)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if site in paths:  # this is such a process
            return
        home = os.path.dirname(sys.modules["autoplan"].__path__[0])
        text = _SITECUSTOMIZE.format(home=home, root=self.root, free=self.free[1:], site=site)
        os.makedirs(site, exist_ok=True)
        made = Path(site, f"{os.getpid()}.py")  # another rank may be reading
        made.write_text(text)
        made.replace(Path(site, "sitecustomize.py"))
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *filter(None, paths)])

    def _open(self, function: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wxa+"):
            file = self.moved(file, copy=bool(set(mode) & set("a+")) and "w" not in mode)
        else:
            file = self.seen(file)
        return function(file, mode, *args, **kwargs)

    def _os_open(self, function: Function, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = self.moved(path, copy=not flags & os.O_TRUNC) if writes else self.seen(path)
        return function(path, flags, *args, **kwargs)

    def _makes(self, function: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            real = self._real(path)
            if real is not None and self._really(real):
                raise FileExistsError(errno.EEXIST, "File exists", path)
            path = self.moved(path)
        return function(path, *args, **kwargs)

    def _links(self, function: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        if all(kwargs.get(name) is None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            dst = self.moved(dst)
            if function.__name__ == "link":  # what writes to one of its names writes to the file
                src = self.moved(src, copy=True)
            elif os.path.isabs(src):
                src = self.seen(src)
        return function(src, dst, *args, **kwargs)

    def _removes(self, function: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        """What was there before stays, and the script sees it no more."""
        real = self._real(path)
        if kwargs.get("dir_fd") is not None or real is None:
            return function(path, *args, **kwargs)
        if function.__name__ == "rmdir" and os.listdir(os.fsdecode(path)):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        there, made = self._really(real), self._made(real)
        with self._plain():
            is_folder = os.path.isdir(real) and not os.path.islink(real)
            if made:
                function(self._files + real, *args, **kwargs)
        of_files = function.__name__ in ("remove", "unlink")
        if not made and (not there or is_folder is of_files):
            return function(self.seen(path), *args, **kwargs)  # it fails, or the caller ignores that
        if there:
            self._note_gone(real)
        return None

    def _changes(self, function: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        real = self._real(path)
        if kwargs.get("dir_fd") is None and real is not None:
            if not self._made(real) and self._really(real):
                return None  # it stays as it is
            path = self.seen(path)
        return function(path, *args, **kwargs)

    def _renames(self, function: Function, src: Any, dst: Any, **kwargs: Any) -> Any:
        name, goal = self._name(src), self._name(dst)
        if name in self._stand_ins and goal is not None:
            self._stand_ins.discard(name)
            if self._is_there(goal):  # what a script has there, it may read
                return os.remove(src)
            self._stand_ins.add(goal)
        elif goal is not None:
            self._stand_ins.discard(goal)
        if name in self._saved and goal is not None:
            self._saved.add(goal)
        real = self._real(src)
        if real is None and self._real(dst) is None:
            return function(src, dst, **kwargs)
        if real is None or not self._really(real):
            return function(self.seen(src), self.moved(dst), **kwargs)
        if os.path.isdir(src):  # what is the user's stays, a copy is moved
            sizes = [os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(src) for name in names]
            self._refuse_large(src, sum(sizes))
            shutil.copytree(src, dst, symlinks=True)
            with self._plain():
                shutil.rmtree(self._files + real, ignore_errors=True)
        else:
            function(self.moved(src, copy=True), self.moved(dst), **kwargs)
        self._note_gone(real)
        return None

    def _reads(self, function: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        path = path if kwargs.get("dir_fd") is not None else self.seen(path)
        return function(path, *args, **kwargs)

    def _lists(self, function: Function, path: Any = ".") -> Any:
        path = "." if path is None else path
        entries = self._entries(path)
        if entries is None:
            return function(path if isinstance(path, bytes) else self.seen(path))
        if function.__name__ == "listdir":
            return list(entries)
        return _Scan(_Entry(entry, path) for entry in entries.values())

    def _enters(self, function: Function, path: Any) -> Any:
        """Changes into the folder that was there before; into the sandbox's where only the script has made one."""
        real = self._real(path)
        if real is None or self._really(real):
            return function(path if real is None else real)
        self._entered = True
        return function(self.seen(path))


_SITECUSTOMIZE = """
import sys
from pathlib import Path

sys.path.append({home!r})
from autoplan.planner.diagnose.sandbox import Sandbox

del sys.path[-1]
Sandbox(Path({root!r}), {free!r}).install()
own = sys.modules.pop("sitecustomize")
sys.path.remove({site!r})
try:
    import sitecustomize  # the user's own
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", own)
"""
"""What a Python process runs before its own code: site.py imports the first module of this name on the path."""


class _Entry:
    """An entry of os.scandir, under the path that the script knows."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        self._entry = entry
        self.name = entry.name
        self.path: str = os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Scan(Iterator[_Entry], contextlib.AbstractContextManager["_Scan"]):
    """What os.scandir gives: an iterator that is closed, also by `with`."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._left = entries

    def __next__(self) -> _Entry:
        return next(self._left)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())

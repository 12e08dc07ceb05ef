"""One search at a time on a device: a lock for each GPU and for each CPU core that a search uses.

Two searches on the same device disturb each other's measurements, whatever they search for; so each takes the locks of
its devices before it measures. A lock is a `flock` on a small file. The kernel releases it when the process ends, also
after SIGKILL. The file contains the process that took the lock last.

The files are in the user's own runtime folder (`$XDG_RUNTIME_DIR`, else `/run/user/UID`), or in `/tmp/autoplan-UID`
where there is none: no other variable changes the place, so that all searches of a user meet there. Searches of other
users are not seen here; what they take from a trial is measured (`planner/trials/load.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from autoplan.errors import DeviceBusyError, StoreError
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import ProcessIdentity

RETRY_S = 0.2
"""Seconds between two attempts of a search that waits."""

LONGEST_OWNER_BYTES = 4096

SHARED = Path("/tmp")
"""Not $TMPDIR, which schedulers set for each job."""


def device_names(hardware: HardwareProfile, device: Literal["cuda", "cpu"], nproc: int) -> tuple[str, ...]:
    """The names of what a search uses: `GPU-...` for each GPU, `cpu-MACHINE-CORE` for each core that it may run on."""
    if device == "cuda":
        cards = [found for found in hardware.devices if found.type == "cuda"][:nproc]
        return tuple(card.uuid or f"gpu-{machine_name()}-{card.index}" for card in cards)
    return tuple(f"cpu-{machine_name()}-{core}" for core in sorted(os.sched_getaffinity(0)))


def machine_name() -> str:
    """Eight hex digits that tell machines with one home folder apart (machine-id(5), else the host's name)."""
    try:
        text = Path("/etc/machine-id").read_text().strip()
    except OSError:
        text = ""
    return hashlib.sha256((text or platform.node()).encode()).hexdigest()[:8]


def lock_folder() -> Path:
    """Where the locks are: a folder that this user alone can use, made if it is not there.

    Raises:
        StoreError: it cannot be made, or it belongs to another user.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    top = runtime / "autoplan" if _is_own(runtime) else SHARED / f"autoplan-{os.getuid()}"
    for folder in (top, top / "devices"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the folder of the device locks, {folder}, cannot be made: {error.strerror}",
                hint="Set XDG_RUNTIME_DIR to a folder of your own, which nobody else can write to.",
            ) from error
        if not _is_own(folder):
            raise StoreError(
                f"the folder of the device locks, {folder}, is not a folder that belongs to this user alone",
                hint="Set XDG_RUNTIME_DIR to a folder of your own, which nobody else can write to.",
            )
    return top / "devices"


def _is_own(folder: Path) -> bool:
    """Whether it is a folder (no link) of this user that nobody else can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


class DeviceLock:
    """The locks of all devices of one search; a context manager.

    Args:
        names: Of `device_names`.
        wait: Wait until the devices are free. False: raise an error if one of them is taken.
        on_wait: Called once with a sentence if it has to wait.
        folder: Where the files are; None: `lock_folder()`.

    Raises:
        DeviceBusyError: another search has one of them.
        StoreError: the files cannot be used.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        wait: bool = False,
        on_wait: Callable[[str], None] = lambda text: None,
        folder: Path | None = None,
    ) -> None:
        self._fds: list[int] = []
        folder = lock_folder() if folder is None else folder
        said = False
        while True:
            busy = self._take_all(folder, sorted(set(names)))
            if busy is None:
                return
            if not wait:
                raise DeviceBusyError(
                    f"{_describe(busy)} is in use by another search, {_owner(folder / busy)}",
                    hint="Wait for it with --wait, end it, or give this search other cores (taskset) or other GPUs "
                    "(CUDA_VISIBLE_DEVICES). Two searches on one device would disturb each other's measurements.",
                )
            if not said:
                said = True
                on_wait(f"waiting for {_describe(busy)}: another search uses it, {_owner(folder / busy)}")
            time.sleep(RETRY_S)

    def __enter__(self) -> DeviceLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the devices back; calling it twice is fine."""
        while self._fds:
            os.close(self._fds.pop())

    def _take_all(self, folder: Path, names: Sequence[str]) -> str | None:
        """Takes all locks or none; returns the name of one that is taken."""
        try:
            for name in names:
                if not self._take(folder / name):
                    self.release()
                    return name
        except BaseException:
            self.release()
            raise
        return None

    def _take(self, path: Path) -> bool:
        try:
            # O_NOFOLLOW: what lies behind a link is not ours to write to. Python adds O_CLOEXEC.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error.strerror) from error
        self._fds.append(fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise _unusable(path, "it is not a file of this user")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unusable(path, error.strerror) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, ProcessIdentity.current().model_dump_json().encode(), 0)
        return True


def _unusable(path: Path, why: str | None) -> StoreError:
    return StoreError(
        f"the device lock {path} cannot be used: {why}",
        hint="Remove that file, or set XDG_RUNTIME_DIR to a folder of your own.",
    )


def _describe(name: str) -> str:
    """A device as people call it."""
    return f"core {name.rpartition('-')[2]} of the CPU" if name.startswith("cpu-") else f"the GPU {name}"


def _owner(path: Path) -> str:
    """The process that holds a lock, as it wrote itself down."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return "process unknown"
    try:
        identity = ProcessIdentity.model_validate_json(os.read(fd, LONGEST_OWNER_BYTES))
    except (OSError, ValidationError):
        return "process unknown"
    finally:
        os.close(fd)
    return f"process {identity.pid}"

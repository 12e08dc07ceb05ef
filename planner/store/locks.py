"""Locks between searches: one search at a time in a study's folder (`OwnedLock`), and on a device (`DeviceLock`).

The locks are those of the package filelock (flock(2) on a small file): the kernel releases them when the process ends,
also after SIGKILL. `NAME.owner` beside a lock says which process took it last.

Two searches on the same device disturb each other's measurements, whatever they search for; so each takes a lock for
each GPU, or each CPU core, that it uses before it measures. These files are in the user's own runtime folder
(`$XDG_RUNTIME_DIR`, else `/run/user/UID`), or in `/tmp/autoplan-UID` where there is none: no other variable changes the
place, so that all searches of a user meet there. Searches of other users are not seen here; what they take from a trial
is measured (`planner/trials/load.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import filelock
from pydantic import ValidationError

from autoplan.errors import DeviceBusyError, StoreError
from autoplan.files import PRIVATE_FILE, make_private_folder, read_regular, replace_file
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import ProcessIdentity, is_alive

RETRY_S = 0.2
"""Seconds between two attempts of a search that waits."""

SHARED = Path("/tmp")
"""Not $TMPDIR, which schedulers set for each job."""


class OwnedLock:
    """A lock on a file, which says who has it. Not taken yet.

    Args:
        path: The file; it is made, for the user alone, and stays.

    Taking and releasing raise OSError where the file or the one beside it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(path, mode=PRIVATE_FILE)
        self._owner = path.with_name(f"{path.name}.owner")

    def acquire(self, *, wait: bool = False) -> bool:
        """Takes it; returns False where another process, or another lock of this one, has it."""
        try:
            self._lock.acquire(timeout=-1 if wait else 0, poll_interval=RETRY_S)
        except filelock.Timeout:
            return False
        try:
            replace_file(self._owner, ProcessIdentity.current().model_dump_json(), private=True)
        except BaseException:
            self._lock.release()
            raise
        return True

    def release(self) -> None:
        """Gives it back; calling it twice is fine."""
        if self._lock.is_locked:
            self._owner.unlink(missing_ok=True)
            self._lock.release()

    @property
    def owner(self) -> str:
        """`process 123`: the one that has it."""
        try:
            identity = ProcessIdentity.model_validate_json(read_regular(self._owner, limit_bytes=4096))
        except (OSError, ValidationError):
            return "process unknown"
        return f"process {identity.pid}" + ("" if is_alive(identity) else " (not on this machine)")


class DeviceLock(contextlib.ExitStack):
    """The locks of all devices of one search; a context manager.

    Args:
        names: Of `device_names`.
        wait: Wait until the devices are free, one after another in the order of their names, so that no two searches
            wait for each other. False: raise an error if one of them is taken.
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
        on_wait: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        folder = lock_folder() if folder is None else folder
        super().__init__()
        try:
            for name in sorted(set(names)):
                lock = OwnedLock(folder / name)
                if not lock.acquire():
                    busy = f"{_describe(name)} is in use by another search, {lock.owner}"
                    if not wait:
                        raise DeviceBusyError(
                            busy,
                            hint="Wait for it with --wait, end it, or give this search other cores (taskset) or other "
                            "GPUs (CUDA_VISIBLE_DEVICES). Two searches on one device would disturb each other's "
                            "measurements.",
                        )
                    if on_wait is not None:
                        on_wait(f"waiting: {busy}")
                        on_wait = None
                    lock.acquire(wait=True)
                self.callback(lock.release)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _unusable(folder, error) from error
            raise


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
    """Where the locks of devices are: a folder for this user alone, made if it is not there.

    Raises:
        StoreError: it cannot be made, or it belongs to another user.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    top = runtime / "autoplan" if _is_own(runtime) else SHARED / f"autoplan-{os.getuid()}"
    folder = top / "devices"
    try:
        make_private_folder(top)
        make_private_folder(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user that nobody else can write to."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return folder.is_dir() and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _unusable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the folder of the device locks, {folder}, cannot be used: {error.strerror} ({error.filename})",
        hint="Set XDG_RUNTIME_DIR to a folder of your own, which nobody else can write to.",
    )


def _describe(name: str) -> str:
    """A device as people call it."""
    return f"core {name.rpartition('-')[2]} of the CPU" if name.startswith("cpu-") else f"the GPU {name}"

"""How files are written: whole or not at all, never through a link that somebody else put there.

A temporary file has a name that nobody can predict, is made by this process alone (O_EXCL, O_NOFOLLOW) in the folder
of the file, and is then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def replace_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes a file as a whole: a reader sees the old file or the new one.

    Args:
        path: The file. What is no regular file (a pipe, /dev/stdout) is written to directly.
        content: Text is written as UTF-8.
        private: For the user alone (0600). Else the file gets the permissions that the umask leaves.

    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="backslashreplace")
    if is_special(path):
        with path.open("wb") as file:
            file.write(data)
        return
    temporary = path.parent / f".{path.name[:64]}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(temporary, flags, PRIVATE_FILE if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_private(path: str, flags: int) -> int:
    """The `opener` of Python's open() for a file of the user alone; a link in its place is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)


def read_regular(path: Path, *, limit_bytes: int = 64 << 20) -> bytes:
    """The bytes of a regular file; a pipe or a device in its place is not waited for.

    Raises:
        OSError: it is not there, cannot be read, is no regular file, or is larger than the limit.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        refuse_special(file.fileno(), path)
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes >> 20} MiB", str(path))
    return content


def read_or_empty(path: Path) -> str:
    """The text of a small file, as the kernel has many; empty where it is not there or cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def refuse_special(fd: int, path: Path) -> None:
    """Refuses what is open but no regular file: a pipe would be waited for, a device read without an end.

    Raises:
        OSError: it is none.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def make_private_folder(path: Path) -> None:
    """Makes a folder, and the folders above it that are missing, for the user alone (0700).

    One that is there, and that others could enter, is closed to them. The folders above it stay as they are.

    Raises:
        PermissionError: the folder, or the link in its place, belongs to somebody else.
        OSError: it cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    refuse_foreign(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(PRIVATE_FOLDER)


def refuse_foreign(path: Path, *, root_ok: bool = False) -> None:
    """Refuses a file or a folder, or a link to one, that belongs to another user.

    Args:
        path: It, or the link.
        root_ok: What belongs to root is fine too: root can write anywhere.

    Raises:
        PermissionError: it belongs to somebody else.
    """
    own = {os.geteuid(), 0} if root_ok else {os.geteuid()}
    for status in (path.lstat(), path.stat()):
        if status.st_uid not in own:
            raise PermissionError(
                errno.EPERM, f"it belongs to the user with the number {status.st_uid}, not to you", str(path)
            )


def is_private_file(path: Path) -> bool:
    """True for a regular file of the user's own, in a folder of their own, that nobody else can write to."""
    try:
        statuses = (path.lstat(), path.parent.stat())
    except OSError:
        return False
    return stat.S_ISREG(statuses[0].st_mode) and all(
        status.st_uid == os.geteuid() and not status.st_mode & 0o022 for status in statuses
    )


def is_special(path: Path) -> bool:
    """True for what is neither a regular file nor a folder: a pipe, a terminal, /dev/stdout."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) and not path.is_dir()
    except OSError:
        return False


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder and below; what vanishes meanwhile, or cannot be seen, counts nothing."""
    size = 0
    for place, _, names in os.walk(folder):  # says nothing of a folder that vanishes
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size


def source_version() -> str:
    """The version of autoplan and a digest of its sources: what works together has the same."""
    import autoplan

    digest = hashlib.sha256()
    for folder, folders, files in os.walk(Path(autoplan.__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            digest.update(Path(folder, name).read_bytes())
    return f"{autoplan.__version__} ({digest.hexdigest()[:8]})"

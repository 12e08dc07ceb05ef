"""The files of a task: which rank writes what, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from autoplan.files import replace_file
from autoplan.processes import linux
from autoplan.text import all_writable

KINDS = ("heartbeat.json", "result.json", "error.json", "stdout", "stderr")
_TAIL_BYTES = 16_384
_OUTPUT_LIMIT_BYTES = 16 << 20
_OUTPUT_KEPT_BYTES = 1 << 20
_OUTPUT_LEFT_BYTES = 256 << 10
"""Of each stream of a rank, once its task has ended: a store has hundreds of tasks."""


def rank_file(directory: Path, rank: int, kind: str) -> Path:
    """The path of one of a rank's files.

    Args:
        directory: The task's directory.
        rank: Whose file.
        kind: "heartbeat.json", "result.json", "error.json", "stdout" or "stderr".
    """
    assert kind in KINDS, kind
    return directory / f"rank{rank}.{kind}"


def clear_rank_files(directory: Path) -> None:
    """Removes what an earlier task left, so that it cannot be taken for this task's."""
    for kind in KINDS:
        for path in directory.glob(f"rank*.{kind}"):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON under another name first, then renames it: a reader sees the old file or the new one."""
    text = json.dumps(value, default=_to_json)
    replace_file(path, text, private=True)


def read_json(path: Path) -> Any | None:
    """The value in a JSON file, every text in it writable; None if it is not there or cannot be read."""
    try:
        text = path.read_text()
        value = json.loads(text)
    except (OSError, ValueError):
        return None
    return all_writable(value) if "\\ud" in text else value  # json escapes a lone surrogate so


def read_tail(path: Path, limit_bytes: int = _TAIL_BYTES) -> str:
    """The last bytes of a file as text; empty if it is not there."""
    try:
        with path.open("rb") as file:
            return read_end(file, limit_bytes)
    except OSError:
        return ""


def read_end(file: IO[bytes], limit_bytes: int) -> str:
    """The last bytes of an open file as text."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, size_bytes - limit_bytes))
    return file.read().decode(errors="replace")


def drop_early_output(path: Path, limit_bytes: int = _OUTPUT_LIMIT_BYTES, kept_bytes: int = _OUTPUT_KEPT_BYTES) -> None:
    """Gives the disk back what a rank printed first, once it is too much, so that no rank can fill the disk.

    The rank goes on writing meanwhile and nothing of that is lost: the file keeps its length and becomes sparse.
    """
    try:
        status = path.stat()
        if 512 * status.st_blocks <= limit_bytes:  # stat(2) counts in 512 bytes
            return
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            linux.punch_hole(fd, status.st_size - kept_bytes)
        finally:
            os.close(fd)
    except OSError:  # gone; or a file system without sparse files: some lines may be lost there
        _cut(path, limit_bytes, kept_bytes)


def _cut(path: Path, limit_bytes: int, kept_bytes: int) -> None:
    """Cuts a rank's output to its last part, if it is too long."""
    note = b"[autoplan: earlier output was dropped here]\n"
    try:
        if path.stat().st_size <= limit_bytes:
            return
        with path.open("rb") as file:
            file.seek(len(note) - kept_bytes, os.SEEK_END)
            kept = file.read(kept_bytes - len(note))
        os.truncate(path, 0)
        with path.open("ab") as file:  # as the rank has it open
            file.write(note + kept)
    except OSError:
        pass  # gone, or the disk is full already: the deadline ends the rank


def cut_output(directory: Path) -> None:
    """Cuts what the ranks of a task that has ended have printed, however fast they were, to its last part."""
    for kind in ("stdout", "stderr"):
        for path in directory.glob(f"rank*.{kind}"):
            _cut(path, _OUTPUT_LEFT_BYTES, _OUTPUT_LEFT_BYTES)


def _to_json(value: Any) -> Any:
    """Pydantic models as their fields, paths as text, numpy and torch scalars as numbers."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a result of type {type(value).__qualname__} cannot be written as JSON")

"""The files of a task: which rank writes what, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from autoplan.files import replace_file
from autoplan.text import all_writable

_KINDS = ("heartbeat.json", "result.json", "error.json", "stdout", "stderr")
_TAIL_BYTES = 16_384
_OUTPUT_LIMIT_BYTES = 16 << 20
_OUTPUT_KEPT_BYTES = 1 << 20


def rank_file(directory: Path, rank: int, kind: str) -> Path:
    """The path of one of a rank's files.

    Args:
        directory: The task's directory.
        rank: Whose file.
        kind: "heartbeat.json", "result.json", "error.json", "stdout" or "stderr".
    """
    assert kind in _KINDS, kind
    return directory / f"rank{rank}.{kind}"


def clear_rank_files(directory: Path) -> None:
    """Removes what an earlier task left, so that it cannot be taken for this task's."""
    for kind in _KINDS:
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


def trim_output(path: Path, limit_bytes: int = _OUTPUT_LIMIT_BYTES, kept_bytes: int = _OUTPUT_KEPT_BYTES) -> None:
    """Cuts a rank's output to its last part once it is too long, so that no rank can fill the disk.

    The rank goes on writing meanwhile: it has the file open to append, so it simply writes after what is left.
    """
    try:
        if path.stat().st_size <= limit_bytes:
            return
        with path.open("rb") as file:
            file.seek(-kept_bytes, os.SEEK_END)
            kept = file.read(kept_bytes)
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(b"[autoplan: earlier output was dropped here]\n" + kept)
    except OSError:
        pass  # gone, or the disk is full already: the deadline ends the rank


def _to_json(value: Any) -> Any:
    """Pydantic models as their fields, paths as text, numpy and torch scalars as numbers."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a result of type {type(value).__qualname__} cannot be written as JSON")

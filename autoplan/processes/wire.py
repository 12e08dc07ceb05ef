"""Frames between the planner and its zygote: a JSON header and raw bytes, both with their length in front.

Not `multiprocessing.connection`: its reader loses its place where Ctrl-C interrupts it, and the end of a task is still
to be read then; and its writer waits for a planner that does not read.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from autoplan.processes import linux

_LENGTHS = struct.Struct(">IQ")  # bytes of the header, bytes of the payload
_CHUNK_BYTES = 1 << 20


class GoneError(Exception):
    """The other end of a connection is gone. No OSError: a disk that is full here is something else."""


def encode_frame(header: dict[str, Any], payload: bytes = b"") -> list[bytes]:
    """A frame as the pieces to send, so that a large payload is not copied."""
    text = json.dumps(header).encode()
    return [_LENGTHS.pack(len(text), len(payload)) + text, payload]


def send_frame(connection: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    """Sends one frame, however long it takes.

    Raises:
        GoneError: The other end is gone.
    """
    try:
        for piece in encode_frame(header, payload):
            connection.sendall(piece)
    except OSError as error:
        raise GoneError(str(error)) from error


class FrameReader:
    """Takes frames off a socket and keeps what has come of the next one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def read(self, timeout_s: float | None) -> tuple[dict[str, Any], bytes] | None:
        """The next frame.

        Args:
            timeout_s: How long to wait; None waits for ever, 0 takes only what is there.

        Returns:
            Header and payload, or None after the time.

        Raises:
            GoneError: The other end is gone.
        """
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._take()) is None:
            wait_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            if not linux.await_readable([self._connection.fileno()], wait_s):
                return None
            try:
                data = self._connection.recv(_CHUNK_BYTES)
            except OSError as error:
                why = "the other end is gone" if isinstance(error, ConnectionError) else str(error)
                raise GoneError(why) from error
            if not data:
                raise GoneError("the other end is closed")
            self._buffer += data
        return frame

    def _take(self) -> tuple[dict[str, Any], bytes] | None:
        if len(self._buffer) < _LENGTHS.size:
            return None
        header_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer)
        header_end = _LENGTHS.size + header_bytes
        end = header_end + payload_bytes
        if len(self._buffer) < end:
            return None
        header = json.loads(self._buffer[_LENGTHS.size : header_end])
        payload = bytes(self._buffer[header_end:end])
        del self._buffer[:end]
        return header, payload

"""The zygote's own process: imports once, then forks the ranks of one task after another.

Started by exec (`python -c`), so that a user's unguarded script is never entered again. It stays single-threaded,
runs no tensor operation and never initialises CUDA: both would be broken in the ranks that it forks. It ends with
the planner, and takes everything that it started with it. Its parent is the guard (guard.py), for the case that both
are killed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from autoplan.processes import linux
from autoplan.processes.guard import Terminated, end_on_sigterm, fork_guarded
from autoplan.processes.supervisor import Supervisor
from autoplan.processes.task import Request
from autoplan.processes.wire import FrameReader, GoneError, encode_frame, send_frame

HIDDEN = ("torchao",)
"""Packages that ask for the GPU while they are imported, which libraries import wherever they are installed (torchao
0.18: prototype/mx_formats/kernels.py, `has_triton()`). The zygote's imports do not find them; ranks do."""


def main(connection_fd: int, planner_pid: int, preload: list[str]) -> NoReturn:
    """Serves the planner until it is gone.

    Args:
        connection_fd: Our end of the socket pair; its end is the planner's end.
        planner_pid: Watched too, since a fork of the planner may have a copy of its end.
        preload: Modules to import before the first fork.
    """
    planner_pidfd = linux.open_pidfd(planner_pid) if os.getppid() == planner_pid else None
    fork_guarded(planner_pidfd, connection_fd)
    connection = socket.socket(fileno=connection_fd)
    _die_if_planner_goes(connection)
    linux.become_subreaper()
    server = ZygoteServer(connection, planner_pidfd)
    errors, initializer = _import_all(preload)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC)  # from here on we look
    signal.signal(signal.SIGTERM, end_on_sigterm)
    _keep_shared()
    exit_code = 0
    try:
        server.announce(errors, initializer)
        server.serve()
    except (GoneError, Terminated, OSError) as stop:
        exit_code = 0 if isinstance(stop, GoneError) else 1
    for pid in linux.descendants(os.getpid()):
        linux.signal_quietly(pid, signal.SIGKILL)
    os._exit(exit_code)


class ZygoteServer:
    """Answers the planner's requests, one at a time."""

    def __init__(self, connection: socket.socket, planner_pidfd: int | None) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._planner_pidfd = planner_pidfd
        self._unsent = bytearray()
        self._fds = [connection.fileno()]
        if self._planner_pidfd is not None:
            self._fds.append(self._planner_pidfd)

    def announce(self, preload_errors: dict[str, str], cuda_initializer: str | None) -> None:
        """Sends the planner that the imports are done, how they went, and which of them asked for the GPU."""
        ready = {
            "kind": "ready",
            "pid": os.getpid(),
            "preload_errors": preload_errors,
            "cuda_initializer": cuda_initializer,
        }
        send_frame(self._connection, ready)

    def serve(self) -> None:
        """Runs tasks until the planner is gone (`GoneError`)."""
        while True:
            header, payload = self._next_request()
            if header["kind"] == "load":
                errors, initializer = _import_all(header["modules"])
                _keep_shared()
                self.announce(errors, initializer)
                continue
            if header["kind"] != "run":
                continue  # a cancellation that crossed the end of its task
            supervisor = Supervisor(
                request=Request.model_validate(header["request"]),
                payload=payload,
                is_cancelled=self._is_cancelled,
                planner_fds=self._fds,
                send_progress=self._send_progress,
            )
            del payload
            ended = supervisor.run()
            self._flush(wait=True)
            send_frame(self._connection, ended)

    def _next_request(self) -> tuple[dict[str, Any], bytes]:
        while True:
            linux.await_readable(self._fds)
            self._check_planner()
            frame = self._reader.read(timeout_s=0)
            if frame is not None:
                return frame

    def _is_cancelled(self) -> bool:
        self._check_planner()
        frame = self._reader.read(timeout_s=0)
        return frame is not None and frame[0]["kind"] == "cancel"

    def _check_planner(self) -> None:
        if self._planner_pidfd is not None and linux.await_readable([self._planner_pidfd], 0.0):
            raise GoneError

    def _send_progress(self, message: dict[str, Any]) -> None:
        """Sends what the planner can take now, and drops the message if it has not taken the last one."""
        self._flush(wait=False)
        if not self._unsent:
            self._unsent += encode_frame(message)[0]
            self._flush(wait=False)

    def _flush(self, *, wait: bool) -> None:
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            del self._unsent[:sent]


def _keep_shared() -> None:
    """The collector would otherwise touch, and so copy, every inherited page in each rank."""
    gc.collect()
    gc.freeze()


def _import_all(names: list[str]) -> tuple[dict[str, str], str | None]:
    """Imports modules; gives what failed, and the first module after which forked processes cannot use CUDA."""
    errors = {}
    with _hidden():
        for name in names:
            if name in sys.modules:
                continue  # another one has brought it
            try:
                importlib.import_module(name)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
            if not _forks_can_use_cuda():
                return errors, name
    return errors, None


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Lets no import find the packages of `HIDDEN`; afterwards nothing remembers that they were missing."""
    hidden = [name for name in HIDDEN if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: "not found", also for find_spec
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
            found = getattr(sys.modules.get("transformers.utils.import_utils"), f"is_{name}_available", None)
            getattr(found, "cache_clear", lambda: None)()


def _forks_can_use_cuda() -> bool:
    """Asks a fork: here torch may say that CUDA is not initialised where the driver was started all the same."""
    if "torch" not in sys.modules:
        return True
    pid = os.fork()
    if pid == 0:
        broken = 1
        try:
            broken = int(getattr(sys.modules["torch"].cuda, "_is_in_bad_fork", lambda: False)())
        finally:
            os._exit(broken)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _die_if_planner_goes(connection: socket.socket) -> None:
    """Has the kernel end this process when the planner's end closes, as long as imports keep us from looking."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, whose default action is the end
    if linux.await_readable([connection.fileno()], 0.0):
        os._exit(0)  # it was gone before we asked

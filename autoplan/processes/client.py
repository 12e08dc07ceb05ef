"""The planner's side: one zygote per search, one task at a time."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from autoplan.errors import UsageError
from autoplan.processes import linux
from autoplan.processes.compile_cache import cache_variables
from autoplan.processes.files import clear_rank_files, cut_output, read_end
from autoplan.processes.owner import (
    MARKER,
    ProcessIdentity,
    folder_prefix,
    kill_marked,
    sweep_abandoned,
    sweep_folders,
)
from autoplan.processes.report import Ended, ProcessReport, StopTask, ZygoteError, build_report
from autoplan.processes.task import Progress, Request, Task
from autoplan.processes.wire import FrameReader, GoneError, send_frame

_START_S = 300.0
LOAD_S = 60.0
"""For modules that are imported later: a rank can import them too."""
_CLOSE_S = 10.0
_SWEEP_S = 15.0  # the guard's own limit, and some more
_CANCEL_S = 20.0
_SILENCE_S = 120.0  # the zygote speaks every second while a task runs
_LISTEN_S = 0.5

_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from autoplan.processes.zygote import main; main({fd}, {pid}, {preload!r})"
)


class Zygote:
    """Starts tasks in processes forked from one that has done the imports.

    A context manager; `run` starts the process if need be, and starts another if it was lost. Not for use by two
    threads at once.

    Args:
        preload: Modules to import before the first fork. What fails to import is listed in `preload_errors`. They
            must not run tensor operations while they are imported. One that initialises CUDA is left out with those
            after it, and listed too: each rank then imports it by itself.
        env: Added to the planner's environment, for the zygote and so for every rank.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = ("torch", "transformers"),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._preload = list(preload)
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None  # the guard, which ends when the zygote has
        self._connection: socket.socket | None = None
        self._reader: FrameReader | None = None
        self._output: IO[bytes] | None = None
        self._marker = ""
        self._busy = threading.Lock()
        self.pid: int | None = None
        """Of the zygote; None if it was not started or is closed."""
        self.layout = ""
        """NODESxRANKS where its tasks run on several nodes (nodes.py)."""
        self.preload_errors: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the zygote runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process and waits for its imports; does nothing if it runs.

        Raises:
            ZygoteError: It could not be started, or died before it was ready.
        """
        if self.alive:
            return
        if sys.platform != "linux":
            raise ZygoteError(
                f"this is {sys.platform}; trials need Linux (process control by prctl, pidfd and /proc)",
                hint="run autoplan on Linux, or in a Linux container",
            )
        self._discard()
        sweep_abandoned()
        sweep_folders()
        began_at = time.monotonic()
        ready = self._begin(began_at)
        left_out: dict[str, str] = {}
        while (initializer := ready["cuda_initializer"]) is not None:  # CUDA works in no process forked from this one
            self._discard()
            left_out[initializer] = "it initialises CUDA while it is imported, so each rank imports it by itself"
            del self._preload[self._preload.index(initializer) :]
            ready = self._begin(began_at)
        self.pid, self.preload_errors = ready["pid"], ready["preload_errors"] | left_out

    @property
    def preloaded(self) -> tuple[str, ...]:
        """The modules that it imports when it starts, those that were loaded since with them."""
        return tuple(self._preload)

    def load(self, modules: Sequence[str]) -> None:
        """Has further modules imported before the next task: what the tasks before had no use for.

        What fails to import is left to the ranks, and so is all of it if the zygote is lost by it: the next task starts
        another one.
        """
        new = [name for name in modules if name not in self._preload]
        if not new:
            return
        self._preload += new
        if not self.alive:
            return  # they are imported when it starts
        try:
            self._send({"kind": "load", "modules": new})
            ready = self._await_ready(time.monotonic(), LOAD_S)
        except (GoneError, ZygoteError):
            self._preload = [name for name in self._preload if name not in new]
            self._lose()
            return
        except BaseException:
            self._discard()
            raise
        self.preload_errors |= ready["preload_errors"]
        if ready["cuda_initializer"] is not None:  # `start` finds out again which it is
            self._discard()

    def close(self) -> None:
        """Ends the zygote and everything that it started."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # reaches the zygote through every copy of the fd
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        self._discard()

    def await_nodes(self) -> None:
        """Waits for the other nodes, where there are any (nodes.py)."""

    def renew(self) -> None:
        """Ends the zygote; the next task starts another."""
        self.close()

    def run(self, task: Task, *, on_progress: Callable[[Progress], None] | None = None) -> ProcessReport:
        """Runs a task to its end, whatever that is.

        Args:
            task: What to run.
            on_progress: Called at each new heartbeat, and every second. An exception of it ends the task and is
                raised again here, except `StopTask`: that gives a report with `Ended.CANCELLED`.

        Returns:
            How the task ended. Nothing that it started runs any more (see `left_behind`).

        Raises:
            ZygoteError: No zygote could be started.
            UsageError: The target or its arguments cannot be pickled.
        """
        if not self._busy.acquire(blocking=False):
            raise ZygoteError("this zygote runs a task already", hint="use one Zygote per thread")
        requested_at = time.monotonic()
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._busy.release)
            payload = _pickle_payload(task)
            self.start()
            if task.directory is None:
                directory = Path(tempfile.mkdtemp(prefix=folder_prefix("task")))
                at_end.callback(shutil.rmtree, directory, ignore_errors=True)
            else:
                directory = task.directory.absolute()
                directory.mkdir(parents=True, exist_ok=True)
                clear_rank_files(directory)
                at_end.callback(cut_output, directory)
            oom_kills_before = linux.kernel_oom_kills()
            ended = self._run_request(_make_request(task, directory, requested_at), payload, on_progress)
            if ended["ended"] == Ended.ZYGOTE_LOST.value:  # its own count is lost with it
                ended["kernel_oom_kills"] = linux.kernel_oom_kills() - oom_kills_before
            return build_report(task, directory, requested_at, ended)

    # -- one request ---------------------------------------------------------------------------------------

    def _run_request(
        self, request: Request, payload: bytes, on_progress: Callable[[Progress], None] | None
    ) -> dict[str, Any]:
        try:
            self._send({"kind": "run", "request": request.model_dump()}, payload)
        except GoneError:
            return self._lose()
        except BaseException:
            self._lose()  # half a request was sent: the zygote cannot understand what follows
            raise
        try:
            ended = self._await_end(on_progress)
        except StopTask:
            return self._cancel()
        except BaseException:
            self._cancel()
            raise
        return self._lose() if ended is None else ended

    def _await_end(self, on_progress: Callable[[Progress], None] | None) -> dict[str, Any] | None:
        """The last message of the task; None: the zygote is gone or silent."""
        heard_at = time.monotonic()
        while True:
            try:  # not around the callback, which may have lost a connection of its own
                message = self._receive(_LISTEN_S)
            except GoneError:
                return None
            if message is None:
                if not self.alive or time.monotonic() - heard_at > _SILENCE_S:
                    return None
                continue
            heard_at = time.monotonic()
            if message["kind"] == "ended":
                return message
            if message["kind"] == "progress" and on_progress is not None:
                on_progress(Progress(**{name: value for name, value in message.items() if name != "kind"}))

    def _cancel(self) -> dict[str, Any]:
        """Asks for the end of the task and waits for it; a second Ctrl-C, or no answer, ends the zygote."""
        give_up_at = time.monotonic() + _CANCEL_S
        try:
            self._send({"kind": "cancel"})
            while time.monotonic() < give_up_at and self.alive:
                message = self._receive(_LISTEN_S)
                if message is not None and message["kind"] == "ended":
                    return message
        except GoneError:
            pass
        except BaseException:
            self._lose()
            raise
        return self._lose() | {"ended": Ended.CANCELLED.value}

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        assert self._connection is not None
        send_frame(self._connection, header, payload)

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._reader is not None
        frame = self._reader.read(timeout_s)
        return None if frame is None else frame[0]

    def _lose(self) -> dict[str, Any]:
        """Ends what is left of a zygote that can no longer be used."""
        swept = self._discard()
        return {"kind": "ended", "ended": Ended.ZYGOTE_LOST.value, "swept": swept}

    # -- the process ---------------------------------------------------------------------------------------

    def _begin(self, began_at: float) -> dict[str, Any]:
        """Starts the process and gives what it says once its imports are done."""
        self._launch()
        try:
            return self._await_ready(began_at)
        except BaseException:
            self._discard()
            raise

    def _launch(self) -> None:
        planner_end, zygote_end = socket.socketpair()
        identity = ProcessIdentity.current()
        self._marker = f"{identity.boot_id}:{identity.pid}:{identity.start_time}:{uuid.uuid4().hex}"
        environment = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # is_available() then asks the driver, and starts no context
            **cache_variables(),
            **self._env,
            MARKER: self._marker,
        }
        path, fd = list(map(str, sys.path)), zygote_end.fileno()
        code = _BOOTSTRAP.format(path=path, fd=fd, pid=os.getpid(), preload=self._preload)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment,
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C is the planner's to handle
            )
        except OSError as error:
            raise ZygoteError(f"{sys.executable} could not be started: {error}", transient=True) from error
        finally:
            zygote_end.close()
        self._connection, self._reader = planner_end, FrameReader(planner_end)

    def _await_ready(self, began_at: float, most_s: float = _START_S) -> dict[str, Any]:
        assert self._process is not None and self._output is not None
        state, killed = f"was not ready after {most_s:.0f} s", False
        try:
            while time.monotonic() - began_at < most_s:
                message = self._receive(_LISTEN_S)
                if message is not None and message["kind"] == "ready":
                    return message
        except GoneError:
            # Its end closes a moment before its status can be read.
            status = self._process.wait(_SWEEP_S)
            state, killed = f"ended with status {status}", status > 128 or status < 0
        raise ZygoteError(
            f"the process that starts the trials {state}, while it imported {', '.join(self._preload)}",
            hint="the last it said: " + (read_end(self._output, 2000).strip() or "(nothing)"),
            transient=killed,
        )

    def _discard(self) -> int:
        """Kills the zygote and the processes that carry its mark; returns the number of those."""
        swept = 0
        if self._process is not None:
            for end in (self._process.terminate, self._process.kill):  # the guard ends the rest; else it is done here
                end()
                try:
                    self._process.wait(_SWEEP_S)
                    break
                except subprocess.TimeoutExpired:
                    pass  # uninterruptible: nothing more can be done from here
            swept = kill_marked(self._marker)
        if self._connection is not None:
            self._connection.close()
        if self._output is not None:
            self._output.close()
        self._process = self._connection = self._reader = self._output = self.pid = None
        return swept


def _pickle_payload(task: Task) -> bytes:
    import cloudpickle

    target = None if isinstance(task.target, str) else task.target
    try:
        return bytes(cloudpickle.dumps((target, task.args), protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        raise UsageError(
            f"the target or its arguments cannot be sent to another process: {type(error).__name__}: {error}",
            hint="locks, sockets, generators and the like cannot travel: create them inside the function",
        ) from error


def _make_request(task: Task, directory: Path, requested_at: float) -> Request:
    same = {name: getattr(task, name) for name in Request.model_fields if hasattr(task, name)}
    here = {"requested_at": requested_at, "cwd": os.getcwd(), "sys_path": list(map(str, sys.path))}
    target = task.target if isinstance(task.target, str) else None
    return Request.model_validate(same | here | {"target": target, "directory": str(directory)})

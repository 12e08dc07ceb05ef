"""Runs a Python program in several ranks with torch elastic, as torchrun does, so that nothing of it is left behind.

    exit_code = run_ranks(["train.py", "--lr", "1"], ranks=2, env={"OMP_NUM_THREADS": "1"})

The chain of processes: we (the owner) -> guard -> launcher (torch elastic) -> ranks. torchrun, ended by SIGKILL, leaves
its ranks alive in sessions of their own. Here each rank has PR_SET_PDEATHSIG on the launcher, the launcher on the
guard, and the guard sweeps what they started once the owner or the launcher is gone.

SIGINT, SIGTERM and SIGHUP are forwarded to the ranks, once each, and what the ranks make of it is the answer: elastic
itself would drop their exit codes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from autoplan.processes import linux
from autoplan.processes.guard import fork_guarded
from autoplan.processes.owner import folder_prefix, sweep_folders

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MONITOR_S = 0.1
"""Between two looks at the ranks; torchrun's own default."""
NOTE_S = 0.002
"""Between two looks at which rank has ended: one that a peer's end made fail ends later than that."""

_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from autoplan.processes.launch import main; main({fd}, {pid})"

# What a rank runs before the program: the kernel ends it with the launcher. Its imports are those of Python alone.
_RANK = (
    "import os, runpy, sys; launcher = int(sys.argv[1]); "
    f"runpy.run_path({linux.__file__!r})['die_with_parent'](launcher) or sys.exit(1); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def run_ranks(arguments: Sequence[str], *, ranks: int, env: Mapping[str, str]) -> int:
    """Runs `python ARGUMENTS` in several ranks of this machine until all have ended.

    Args:
        arguments: Of the interpreter: a script and what it is given, or `-m` and a module.
        ranks: How many; each has the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...).
        env: Added to the environment of the ranks.

    Returns:
        The exit code of the rank that failed first, 128 + N for one that signal N ended; 0 if none failed. When the
        first one fails, elastic ends the others: SIGTERM, and SIGKILL after TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30 s).
    """
    sweep_folders()
    logs = tempfile.mkdtemp(prefix=folder_prefix("run"))
    ours, theirs = socket.socketpair()
    code = _BOOTSTRAP.format(path=[str(entry) for entry in sys.path], fd=theirs.fileno(), pid=os.getpid())
    process = None
    try:
        with _forwarding(ours):
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(ranks), logs, *arguments],
                env={**os.environ, **env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C comes to us alone, and is forwarded once
            )
            theirs.close()
            return process.wait()
    finally:
        ours.close()  # the launcher sees it, and the guard sees us end
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        shutil.rmtree(logs, ignore_errors=True)


@contextlib.contextmanager
def _forwarding(connection: socket.socket) -> Iterator[None]:
    """Sends the signals that come to us on to the launcher; those that are ignored stay so."""

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            connection.send(bytes([number]))

    heard = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(connection_fd: int, owner_pid: int) -> NoReturn:
    """The guard, and then in its child the launcher; `sys.argv` has the ranks, the folder for logs, the arguments."""
    owner_pidfd = linux.open_pidfd(owner_pid) if os.getppid() == owner_pid else None
    fork_guarded(owner_pidfd, connection_fd, grace_s=0.0)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored here is ignored by the ranks too
            signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=connection_fd)
    connection.set_inheritable(False)
    threading.Thread(target=_listen, args=(connection,), daemon=True).start()
    ranks, logs, *arguments = sys.argv[1:]
    exit_code = _launch(int(ranks), logs, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _listen(connection: socket.socket) -> NoReturn:
    """Sends each signal that the owner names to the ranks; ends everything when the owner is gone."""
    while True:
        try:
            received = connection.recv(1)
        except OSError:
            received = b""
        ranks = [pid for pid in linux.all_pids() if linux.parent_of(pid) == os.getpid()]
        if not received:
            for pid in linux.descendants(os.getpid()):
                linux.signal_quietly(pid, signal.SIGKILL)
            os._exit(128 + signal.SIGHUP)
        if not ranks:  # before the first one, or after the last
            os._exit(128 + received[0])
        for pid in ranks:
            linux.signal_quietly(pid, received[0])


def _launch(ranks: int, logs: str, arguments: Sequence[str]) -> int:
    """Runs the ranks with torch elastic; returns the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]  # --standalone
    options += [f"--nproc-per-node={ranks}", "--max-restarts=0", f"--log-dir={logs}"]
    config, python, _ = run.config_from_args(run.parse_args([*options, "-"]))  # type: ignore[no-untyped-call]
    config.monitor_interval = MONITOR_S
    if hasattr(config, "signals_to_handle"):
        config.signals_to_handle = "SIGQUIT"  # the others are ours to forward
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    ended: list[int] = []
    threading.Thread(target=_note_ends, args=(ended,), daemon=True).start()
    try:
        elastic_launch(config=config, entrypoint=python)("-P", "-c", _RANK, str(os.getpid()), *arguments)
    except ChildFailedError as failed:
        order = {pid: place for place, pid in enumerate(ended)}
        # Those that elastic ended come after the one that it ended them for.
        failures = failed.failures
        rank = min(failures, key=lambda rank: order.get(failures[rank].pid, len(order)))
        code = failures[rank].exitcode
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        print(f"autoplan run: rank {rank} ended with {how}, and so the others were ended", file=sys.stderr)
        return 128 - code if code < 0 else code
    return 0


def _note_ends(ended: list[int]) -> NoReturn:
    """Adds the pid of each child that ends, in their order: elastic looks ten times a second, and then ends the others.

    WNOWAIT leaves the child to be waited for by elastic; until then the same one is named again.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # before the first rank
            found = None
        if found is not None and found.si_pid not in ended:
            ended.append(found.si_pid)
        time.sleep(NOTE_S)

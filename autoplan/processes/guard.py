"""The guard: a small process between the planner and its zygote, which outlives both and then ends what is left.

A rank's own children (loader workers, a daemon that a library starts) may be in sessions of their own, where no signal
of the kernel reaches them. The zygote adopts and ends them, and the planner ends them where the zygote died. Where both
are killed at the same moment, the guard does it: it is the zygote's parent and a subreaper, so all of them are its
descendants then. It is forked before any import of a library, and waits in a system call.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import NoReturn

from autoplan.processes import linux

_ZYGOTE_GRACE_S = 15.0  # for the zygote to end its ranks and itself, once the planner is gone
_SWEEP_S = 10.0


class _Terminated(Exception):
    """The planner asks for the end."""


def fork_zygote(planner_pidfd: int | None, connection_fd: int) -> None:
    """Forks the zygote and returns in it; the process that calls this becomes the guard, and never returns.

    Args:
        planner_pidfd: Readable when the planner has ended; None where the kernel has no pidfd.
        connection_fd: The zygote's end of the connection; the guard keeps no copy, so that the planner sees the zygote
            end.
    """
    linux.become_subreaper()
    signal.signal(signal.SIGTERM, _on_sigterm)
    guard_pid = os.getpid()
    zygote_pid = os.fork()
    if zygote_pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # so that a signal to its group does not reach the guard
        if not linux.die_with_parent(guard_pid):
            os._exit(1)
        return
    os.close(connection_fd)
    _guard(zygote_pid, planner_pidfd)


def _guard(zygote_pid: int, planner_pidfd: int | None) -> NoReturn:
    exit_code = 1
    try:
        exit_code = _await_zygote(zygote_pid, planner_pidfd)
    except _Terminated:
        linux.signal_quietly(zygote_pid, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _sweep()
        os._exit(exit_code)


def _await_zygote(zygote_pid: int, planner_pidfd: int | None) -> int:
    """Waits for the zygote's end; returns its status as a shell gives it.

    A zygote whose planner is gone ends by itself. One that does not, because it was stopped, is killed.
    """
    pidfd = linux.open_pidfd(zygote_pid)
    watched = [fd for fd in (pidfd, planner_pidfd) if fd is not None]
    while pidfd is not None:
        ready, _, _ = select.select(watched, [], [])
        if pidfd in ready:
            break
        if not select.select([pidfd], [], [], _ZYGOTE_GRACE_S)[0]:
            linux.signal_quietly(zygote_pid, signal.SIGKILL)
        watched = [pidfd]
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == zygote_pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _sweep() -> None:
    """SIGKILL to every descendant, until none is left or the time is over."""
    give_up_at = time.monotonic() + _SWEEP_S
    while time.monotonic() < give_up_at:
        for pid in linux.descendants(os.getpid()):
            linux.signal_quietly(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _on_sigterm(number: int, frame: object) -> NoReturn:
    raise _Terminated

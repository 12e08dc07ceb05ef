"""The guard: a small process between an owner and what it started, which outlives both and then ends what is left.

The owner is the planner and the started process its zygote; or `autoplan run` and the launcher of its ranks.

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


class Terminated(BaseException):
    """The owner asks for the end, by SIGTERM."""


def fork_guarded(owner_pidfd: int | None, connection_fd: int, *, grace_s: float = _ZYGOTE_GRACE_S) -> None:
    """Forks a child and returns in it; the process that calls this becomes the guard, and never returns.

    Args:
        owner_pidfd: Readable when the owner has ended; None where the kernel has no pidfd.
        connection_fd: The child's end of the connection; the guard keeps no copy, so that the owner sees the child
            end.
        grace_s: For the child to end itself, once the owner is gone.
    """
    linux.become_subreaper()
    signal.signal(signal.SIGTERM, end_on_sigterm)
    guard_pid = os.getpid()
    child_pid = os.fork()
    if child_pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # so that a signal to its group does not reach the guard
        if not linux.die_with_parent(guard_pid):
            os._exit(1)
        return
    os.close(connection_fd)
    exit_code = 1
    try:
        exit_code = _await_child(child_pid, owner_pidfd, grace_s)
    except Terminated:
        linux.signal_quietly(child_pid, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _sweep()
        os._exit(exit_code)


def _await_child(child_pid: int, owner_pidfd: int | None, grace_s: float) -> int:
    """Waits for the child's end; returns its status as a shell gives it.

    A zygote whose planner is gone ends by itself. A child that does not, because it was stopped, is killed.
    """
    pidfd = linux.open_pidfd(child_pid)
    watched = [fd for fd in (pidfd, owner_pidfd) if fd is not None]
    while pidfd is not None:
        ready, _, _ = select.select(watched, [], [])
        if pidfd in ready:
            break
        if not select.select([pidfd], [], [], grace_s)[0]:
            linux.signal_quietly(child_pid, signal.SIGKILL)
        watched = [pidfd]
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child_pid:
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


def end_on_sigterm(number: int, frame: object) -> NoReturn:
    """Handles the signal."""
    raise Terminated

"""Runs that share a CPU in slices of time, so that what changes the speed of its cores changes all of them alike.

In each of the processes:

    slices = Slices(path, number)
    slices.ready()                       # it is built: waits until it may warm up, alone
    slices.count()                       # it is warm: waits until all are; from here on they alternate
    began_s = slices.now_s()             # a clock that stands still while this process is stopped
    slices.end()                         # it is measured: waits for the others

and in one more, which does nothing else: `alternate(path, weights)`.

Cores that other machines share change their speed from one tenth of a second to the next. Runs that are made one after
the other have different speeds; so have steps of 14 s that take turns. So all but one are stopped (SIGSTOP) while that
one runs, and they change every SLICE_S, whatever they are doing. Each has the machine to itself in its slices, and its
clock counts only these. What a change costs (caches to be filled again) is the same for all.

They share a file of a few numbers. This works on a CPU: what a GPU was given to do goes on while its process is
stopped.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoplan.processes import linux

SLICE_S = 0.05
"""Of the run with the shorter slices. On two cores that other machines share the speed of one had a correlation of 0.9
after 4 ms, 0.7 after 40 ms, 0.5 after 0.2 s and 0.1 after 1.5 s. By that record two equal runs of 2 s each differ by
13 % (standard deviation) one after the other, by 3.5 % in slices of 0.25 s, by 1.3 % in slices of 0.05 s; in another
hour by 16 %, 3.5 % and 1.1 % (`python -m benchmarks.false_wins --core-speed`). A change takes about 1 ms, until the
caches are filled again."""

MOST_WEIGHT = 4.0
"""The longer slices are at most so many times as long."""

POLL_S = 0.02
"""How often a process that waits looks whether it may go on."""

MOST_RUNS = 16
"""At a time."""

BUILDING, BUILT, WARM, DONE = range(4)
"""How far a process is, as it says itself."""

WAIT, WARM_UP, COUNT = range(3)
"""What it may do."""

_AT, _MAY, _PID, _PAUSED_S, _PAUSES, _BROKEN = range(6)
"""The rows of the shared numbers; each has a number of every process. Of the last row the first one is of all."""


class OtherEndedError(Exception):
    """Another run of the round ended before it was measured."""


def _shared_numbers(path: Path) -> NDArray[np.float64]:
    """The numbers that the processes share, each written by one of them."""
    path.touch(0o600)
    os.truncate(path, 6 * MOST_RUNS * np.dtype(np.float64).itemsize)  # whoever is first makes them, all zeros
    return np.memmap(path, dtype=np.float64, mode="r+", shape=(6, MOST_RUNS))


class Slices:
    """One of the processes.

    Args:
        path: The file that they share; it does not exist before.
        number: Its own; 0 warms up first and has the first slice.
        runs: How many they are.
    """

    def __init__(self, path: Path, number: int, runs: int = 2) -> None:
        self._shared, self._number, self._runs = _shared_numbers(path), number, runs
        self.counts = False
        """Whether it has said that it is warm."""
        self._shared[_PID, number] = os.getpid()

    def now_s(self) -> float:
        """Seconds of a clock that stands still while this process is stopped (CLOCK_MONOTONIC without the pauses)."""
        while True:
            before_s = float(self._shared[_PAUSED_S, self._number])
            now_s = time.perf_counter()
            if before_s == self._shared[_PAUSED_S, self._number]:  # it was not stopped in between
                return now_s - before_s

    @property
    def pauses(self) -> int:
        """How often this process was stopped."""
        return int(self._shared[_PAUSES, self._number])

    def ready(self) -> None:
        """Says that all is built, and waits until this process may warm up: the others then wait.

        Raises:
            OtherEndedError: another run ended.
        """
        self._say(BUILT)
        self._await(lambda: self._shared[_MAY, self._number] >= WARM_UP)

    def count(self) -> None:
        """Says that it is warm, and waits until all are; called again it does nothing.

        Raises:
            OtherEndedError: another run ended.
        """
        if not self.counts:
            self.counts = True
            self._say(WARM)
            self._await(lambda: self._shared[_MAY, self._number] >= COUNT)

    def end(self) -> None:
        """Says that it is measured, and waits for the others, which what comes now would disturb.

        Raises:
            OtherEndedError: another run ended.
        """
        self._say(DONE)
        self._await(lambda: all(self._shared[_AT, number] >= DONE for number in range(self._runs)))

    def _say(self, at: int) -> None:
        self._shared[_AT, self._number] = at

    def _await(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._shared[_BROKEN, 0]:
                raise OtherEndedError("another run of the round ended before it was measured")
            time.sleep(POLL_S)


def alternate(path: Path, weights: Sequence[float]) -> None:
    """Lets processes warm up one after the other, and then run in slices until all are measured.

    Args:
        path: The file that they share.
        weights: One for each. Their slices are to each other as these: where each runs a fixed number of steps, that
            take so long each, they end together.
    """
    _Alternation(_shared_numbers(path), weights).run()


class _Alternation:
    def __init__(self, shared: NDArray[np.float64], weights: Sequence[float]) -> None:
        assert len(weights) <= MOST_RUNS, f"{len(weights)} runs are more than {MOST_RUNS}"
        self._shared, self._all = shared, range(len(weights))
        self._slices_s = [SLICE_S * min(MOST_WEIGHT, weight / min(weights)) for weight in weights]
        self._pidfds: list[int] = []
        self._stopped_at_s = [0.0 for _ in weights]

    def run(self) -> None:
        whole = False
        try:
            while not all(self._pid(number) for number in self._all):
                time.sleep(POLL_S)
            self._pidfds = [os.pidfd_open(self._pid(number)) for number in self._all]
            whole = self._await(BUILT) and self._warm_up() and self._slice() and self._await(DONE)
        finally:
            if not whole:
                self._shared[_BROKEN, 0] = 1.0
            for pidfd in self._pidfds:
                os.close(pidfd)

    def _at(self, number: int) -> float:
        return self._shared[_AT, number]

    def _pid(self, number: int) -> int:
        return int(self._shared[_PID, number])

    def _await(self, at: int) -> bool:
        """Waits until all are so far; False: one of them ended."""
        while not all(self._at(number) >= at for number in self._all):
            if self._ended(POLL_S):
                return False
        return True

    def _warm_up(self) -> bool:
        """Lets one after the other warm up; False: one of them ended."""
        for number in self._all:
            self._shared[_MAY, number] = WARM_UP
            while self._at(number) < WARM:
                if self._ended(POLL_S):
                    return False
        return True

    def _slice(self) -> bool:
        """Runs them in slices until all but one are measured; False: one of them ended before."""
        left = deque(self._all)
        for number in self._all[1:]:
            self._stop(number)
        for number in self._all:
            self._shared[_MAY, number] = COUNT
        while len(left) > 1:
            if self._ended(self._slices_s[left[0]]):
                for number in list(left)[1:]:
                    self._go_on(number)
                return False
            runs = left.popleft()
            if self._at(runs) < DONE:
                self._stop(runs)
                left.append(runs)
            self._go_on(left[0])
        return True

    def _ended(self, timeout_s: float) -> bool:
        """Whether a process ends within some time before it is measured."""
        running = {self._pidfds[number]: number for number in self._all if self._at(number) < DONE}
        poller = select.poll()
        for pidfd in running:
            poller.register(pidfd, select.POLLIN)
        return any(self._at(running[pidfd]) < DONE for pidfd, _ in poller.poll(timeout_s * 1000))

    def _stop(self, number: int) -> None:
        """Stops a process, and waits until it stands still: two would run for a moment else."""
        self._stopped_at_s[number] = time.perf_counter()
        if self._signal(number, signal.SIGSTOP):
            while linux.runs(self._pid(number)):
                time.sleep(0)

    def _go_on(self, number: int) -> None:
        if self._at(number) < DONE:  # else it only waits
            self._shared[_PAUSES, number] += 1
        self._shared[_PAUSED_S, number] += time.perf_counter() - self._stopped_at_s[number]
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, what: signal.Signals) -> bool:
        """To the process and what it has started: each rank leads a group of its own."""
        return linux.signal_quietly(self._pid(number), what, group=True)

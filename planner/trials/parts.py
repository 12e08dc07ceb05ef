"""Parts of this machine, and runs on several of them at once. Runs in the planner's process.

    with Parts(parts, runners, idle) as machine:
        machine.begin(0, order, left_s)
        machine.begin(1, other, left_s)
        for ended in machine.wait():
            ...

On a CPU a part is a set of cores; on GPUs it is one GPU with its share of the cores near it. Each part has a zygote of
its own, so that a run that fails, is killed or loses its zygote ends no other. To the load monitor of a run (load.py)
the others are no load: they are on other cores, or on another GPU. What they share (memory bandwidth, caches, clocks)
slows all of them, which is why the load is kept the same: a part that has nothing to do runs something that does not
count (`fill`).

Each run has a thread that waits for its processes. What it hears goes through one queue, so that callbacks are called
in the thread of `wait` alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from autoplan.errors import DeviceError, UsageError
from autoplan.files import read_or_empty
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.cgroup import read_cgroup_limits
from autoplan.probes.host import count_usable_cores, parse_id_list
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import ProcessReport, Progress, StopTask
from autoplan.strategies.config import TrainingConfig

END_S = 40.0
"""For a run to end that is asked to: it hears of it within a second, and its ranks have a grace period."""

FILL_PAUSE_S = 1.0
"""After a run that does not count and failed, before the next one."""

FILL_DEADLINE_S = 3600.0
"""Of a run that does not count. It ends when it is told to."""

LISTEN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of this machine.

    Attributes:
        number: From 0 on.
        cores: Of its runs.
        gpu: Its GPU as CUDA_VISIBLE_DEVICES names it; None: it has none.
    """

    number: int
    cores: frozenset[int]
    gpu: str | None = None


def split(count: int | None, hardware: HardwareProfile, device: Literal["cuda", "cpu"], nproc: int) -> tuple[Part, ...]:
    """The parts of this machine; none where one run at a time was asked for.

    Args:
        count: How many.
        hardware: The machine.
        device: cuda: a part is a GPU; cpu: it is as many cores as each other part has.
        nproc: How many GPUs the search may use.

    Raises:
        UsageError: the machine has fewer GPUs or cores than that.
    """
    if count is None or count == 1:
        return ()
    allowed = os.sched_getaffinity(0)
    if device == "cpu":
        cores = by_place(allowed)[: count_usable_cores(read_cgroup_limits())]
        if len(cores) < count:
            raise UsageError(
                f"--side-by-side is {count}, and {len(cores)} core(s) can be used",
                hint="Each part needs a core at the least.",
            )
        return tuple(
            Part(number=number, cores=frozenset(share)) for number, share in enumerate(equal_shares(cores, count))
        )
    if nproc < count:
        raise UsageError(
            f"--side-by-side is {count}, and the search uses {nproc} GPU(s)",
            hint="A part is one GPU: give as many parts as GPUs, or fewer.",
        )
    cards = [found for found in hardware.devices if found.type == "cuda"][:count]
    near = [_near(card.numa_node, allowed) for card in cards]
    parts = []
    for number, (card, place) in enumerate(zip(cards, near, strict=True)):
        shares = equal_shares(by_place(place), near.count(place))
        share = frozenset(shares[near[:number].count(place)])
        parts.append(Part(number=number, cores=share, gpu=card.uuid or str(card.index)))
    return tuple(parts)


def equal_shares(cores: Sequence[int], count: int) -> list[Sequence[int]]:
    """As many cores for each, neighbours together; with fewer cores than shares, several have the same one."""
    each = len(cores) // count
    if each == 0:
        return [[cores[number % len(cores)]] for number in range(count)]
    return [cores[number * each : (number + 1) * each] for number in range(count)]


def by_place(cores: Iterable[int], root: Path = Path("/")) -> list[int]:
    """Cores in the order of their place: NUMA node, then physical core, whose threads stand together."""
    nodes = {core: node for node, found in _node_cores(root).items() for core in found}

    def place(core: int) -> tuple[int, int, int]:
        siblings = read_or_empty(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return nodes.get(core, 0), min(parse_id_list(siblings), default=core), core

    return sorted(cores, key=place)


def _near(node: int | None, allowed: Iterable[int]) -> frozenset[int]:
    """The allowed cores of a NUMA node; all of them where it is not known, or has none."""
    near = frozenset(allowed) & frozenset(() if node is None else _node_cores(Path("/")).get(node, ()))
    return near or frozenset(allowed)


def _node_cores(root: Path) -> dict[int, tuple[int, ...]]:
    """The cores of each NUMA node; empty where the kernel does not say."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return {int(path.parent.name.removeprefix("node")): parse_id_list(read_or_empty(path)) for path in lists}


def sit(cores: Iterable[int]) -> None:
    """Keeps this thread, and what it starts from now on, to some cores.

    Raises:
        DeviceError: this is not allowed here.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise DeviceError(
            f"this process may not choose its cores: {error}",
            hint="A sandbox may forbid it. Without --side-by-side the search does not need it.",
        ) from error


@contextmanager
def on_part(parts: Sequence[Part]) -> Iterator[None]:
    """This thread on the cores of the first part, if they are parts of a CPU; then where it was.

    What it reads of the machine there, and the processes that it starts, are those of a machine of that size.
    """
    if not parts or parts[0].gpu is not None:
        yield
        return
    before = os.sched_getaffinity(0)
    sit(parts[0].cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRun:
    """A run that has ended.

    Attributes:
        part: The number of its part.
        order: What was to be measured.
        trial: What came of it.
    """

    part: int
    order: TrialOrder
    trial: Trial


@dataclass(kw_only=True, slots=True)
class _Run:
    """A run on a part; without an order it is one that does not count."""

    order: TrialOrder | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Parts:
    """Runs trials on the parts of a machine, one at a time on each; a context manager.

    Args:
        parts: The parts.
        runners: Of each part, with a zygote that no other has.
        idle: The same, for runs that do not count, with a folder of their own.
        owned: The zygotes that end with this.
    """

    def __init__(
        self, parts: Sequence[Part], runners: Sequence[TrialRunner], idle: Sequence[TrialRunner], owned: Sequence[Any]
    ) -> None:
        self._parts, self._runners, self._idle, self._owned = tuple(parts), tuple(runners), tuple(idle), tuple(owned)
        self._runs: dict[int, _Run] = {}
        self._heard: SimpleQueue[tuple[str, int, _Run, Any]] = SimpleQueue()

    def __enter__(self) -> Parts:
        """Starts the zygotes, side by side, and waits for them."""
        try:
            for part, runner in zip(self._parts, self._runners, strict=True):
                self._start(part.number, _Run(), lambda run, runner=runner: runner.zygote.start())  # type: ignore[misc]
            while self._runs:
                self._take(time.monotonic() + LISTEN_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def free(self) -> list[int]:
        """The parts without a run that counts; those that are idle first."""
        waiting = [part.number for part in self._parts if part.number not in self._runs]
        return waiting + [number for number, run in self._runs.items() if run.order is None]

    def begin(self, number: int, order: TrialOrder, left_s: Callable[[], float]) -> None:
        """Starts a trial on a part that is free; what runs there and does not count is ended first.

        Args:
            number: Of the part.
            order: What to measure.
            left_s: Seconds left for running it again, where something outside ended it.
        """
        self._end([number])
        runner = self._runners[number]

        def measure(run: _Run) -> Trial:
            return runner.run(
                order,
                on_progress=lambda progress: self._on_progress(number, run, progress),
                on_attempt=lambda report: self._heard.put(("attempt", number, run, (order, report))),
                left_s=left_s,
            )

        self._start(number, _Run(order=order), measure)

    def fill(self, config: TrainingConfig) -> None:
        """Keeps each part that has nothing to do busy with a configuration, until a run is begun there."""
        for part in self._parts:
            if part.number in self._runs:
                continue
            runner = self._idle[part.number]
            order = TrialOrder(
                number=part.number, purpose="repeat", config=config, prediction=None, deadline_s=FILL_DEADLINE_S
            )

            def keep_busy(run: _Run, runner: TrialRunner = runner, order: TrialOrder = order) -> None:
                while not run.stop.is_set():
                    trial = runner.run(order, on_progress=lambda progress: _stop_if_told(run))
                    if trial.outcome is not Outcome.OK:
                        run.stop.wait(FILL_PAUSE_S)

            self._start(part.number, _Run(), keep_busy)

    def empty(self) -> None:
        """Ends what does not count."""
        self._end([number for number, run in self._runs.items() if run.order is None])

    def wait(
        self,
        *,
        on_progress: Callable[[int, Progress], None] = lambda number, progress: None,
        on_attempt: Callable[[TrialOrder, ProcessReport], None] = lambda order, report: None,
    ) -> EndedRun:
        """Waits until a trial has ended.

        Args:
            on_progress: Is told how far the trial of a part is.
            on_attempt: Is told of each run that something outside ended; the trial is then run again.

        Raises:
            AutoplanError: no process could be started on a part.
        """
        while True:
            heard = self._take(time.monotonic() + LISTEN_S)
            if heard is None:
                continue
            kind, number, what = heard
            if kind == "progress":
                on_progress(number, what)
            elif kind == "attempt":
                on_attempt(*what)
            elif isinstance(what, EndedRun):
                return what

    def close(self) -> list[EndedRun]:
        """Ends everything; returns the trials that had come to their end."""
        ended = []
        try:
            self._end(list(self._runs))
            while not self._heard.empty():
                *_, what = self._heard.get_nowait()
                if isinstance(what, EndedRun) and what.trial.outcome is not Outcome.INTERRUPTED:
                    ended.append(what)
        finally:
            self._runs.clear()
            for zygote in self._owned:
                zygote.close()
        return ended

    def sit(self, number: int) -> None:
        """Moves this thread to a part where nothing is measured now; on GPUs it stays where it is."""
        if self._parts[number].gpu is None:
            sit(self._parts[number].cores)

    # -- threads -------------------------------------------------------------------------------------------

    def _start(self, number: int, run: _Run, work: Callable[[_Run], Any]) -> None:
        """Does some work on a part, in a thread of its own; what it returns or raises is heard as its end."""
        part = self._parts[number]

        def body() -> None:
            try:
                sit(part.cores)  # a zygote that it starts is there too
                what = work(run)
            except BaseException as error:
                what = error
            if run.order is not None and isinstance(what, Trial):
                what = EndedRun(part=number, order=run.order, trial=what)
            self._heard.put(("end", number, run, what))

        run.thread = threading.Thread(target=body, name=f"part {number}", daemon=True)
        self._runs[number] = run
        run.thread.start()

    def _on_progress(self, number: int, run: _Run, progress: Progress) -> None:
        _stop_if_told(run)
        self._heard.put(("progress", number, run, progress))

    def _take(self, until: float) -> tuple[str, int, Any] | None:
        """The next that is heard; None: nothing until then, or it is of a run that was told to end.

        An error of a part is raised.
        """
        try:
            kind, number, run, what = self._heard.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return None
        if self._runs.get(number) is not run:
            return None
        if kind == "end":
            del self._runs[number]
            if isinstance(what, BaseException):
                raise what
        return kind, number, what

    def _end(self, numbers: Sequence[int]) -> None:
        """Tells the runs of some parts to end, and waits for them."""
        asked = [self._runs[number] for number in numbers if number in self._runs]
        for run in asked:
            run.stop.set()
        give_up_at = time.monotonic() + END_S
        for run in asked:
            if run.thread is not None:
                run.thread.join(max(0.0, give_up_at - time.monotonic()))
        for number in numbers:
            self._runs.pop(number, None)


def _stop_if_told(run: _Run) -> None:
    if run.stop.is_set():
        raise StopTask

"""Where the time of a step goes: each moment belongs to one part, the innermost region that a hook has entered.

What no hook knows is `loop`, or `loss` between a forward and its backward. Inside saving, logging, evaluation and a
loader everything belongs to that part, but for gc. Only the thread that runs the script is timed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.planner.diagnose.records import Part
from autoplan.processes.cause import is_users_file

MOST_FRAMES = 6
"""Lines of a stack: the innermost of the user's own."""

KEEPS = frozenset({"data", "saving", "logging", "evaluation"})
"""Parts that keep what happens inside them."""


@dataclass(kw_only=True, slots=True)
class Step:
    """One step: from the end of an optimizer step to the end of the next."""

    seconds: float
    parts: dict[Part, float]
    inputs: int = 0
    """Elements of the tensors that trained models were called with."""


@dataclass(kw_only=True)
class Clock:
    """The parts of the step that runs.

    Attributes:
        skipped: Parts whose regions return at once: the cause that is removed.
        acted: How often something was left out, or taken the other way, since a cause was removed.
        lines: Seconds and calls by part and line of the user's code.
        inputs: Elements that trained models were called with in this step.
    """

    skipped: set[str] = field(default_factory=set)
    acted: int = 0
    lines: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    background: Part = "loop"
    inputs: int = 0
    _parts: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    _stack: list[Part] = field(default_factory=list)
    _mark: float = 0.0
    _began: float = 0.0
    _thread: int = field(default_factory=threading.get_ident)
    _process: int = field(default_factory=os.getpid)
    _evaluated: tuple[float, dict[Part, float]] | None = None
    _evaluation: tuple[float, dict[Part, float]] | None = None

    @property
    def here(self) -> bool:
        """Whether this is the thread of the script, and no process that it has forked."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    @property
    def current(self) -> Part:
        """The part that this moment belongs to."""
        return self._stack[-1] if self._stack else self.background

    def open(self) -> None:
        """Begins a step."""
        self._parts = defaultdict(float)
        self.inputs = 0
        self._evaluation = self._evaluated = None
        self._began = self._mark = time.perf_counter()

    def close(self) -> Step:
        """Ends a step."""
        self._add(time.perf_counter())
        parts = self._parts
        if self._evaluation is not None and self._evaluated is not None:  # what lies between belongs to it too
            (began, before), (ended, after) = self._evaluation, self._evaluated
            for part, seconds in after.items():
                parts[part] -= seconds - before.get(part, 0.0)
            parts["evaluation"] += ended - began
        self.background = "loop"
        return Step(seconds=self._mark - self._began, parts=dict(parts), inputs=self.inputs)

    def enter(self, part: Part) -> None:
        """Begins a region."""
        self._add(time.perf_counter())
        outer = self._stack[-1] if self._stack else None
        self._stack.append(outer if outer in KEEPS and part != "gc" else part)

    def leave(self) -> None:
        """Ends the innermost region."""
        self._add(time.perf_counter())
        if self._stack:
            self._stack.pop()

    @property
    def depth(self) -> int:
        """How many regions this moment is in."""
        return len(self._stack)

    def leave_all(self, depth: int) -> None:
        """Ends the innermost regions, to so many: those of a call that failed."""
        self._add(time.perf_counter())
        del self._stack[depth:]

    def evaluation_mark(self) -> None:
        """Notes a moment of an evaluation; from the first to the last one of a step all is evaluation."""
        now = time.perf_counter()
        self._add(now)
        if self._evaluation is None:
            self._evaluation = now, dict(self._parts)
        self._evaluated = now, dict(self._parts)

    def note_line(self, part: str, seconds: float) -> None:
        """Adds a call of some seconds to the line of the user's code that made it."""
        line = users_line(sys._getframe())
        if line is not None:
            found = self.lines[part, line]
            found[0] += seconds
            found[1] += 1

    def region(
        self,
        function: Callable[..., Any],
        part: Part,
        *,
        skip: bool = True,
        instead: Callable[..., Any] = lambda *args, **kwargs: None,
    ) -> Callable[..., Any]:
        """A function whose time belongs to a part; with `skip`, `instead` is called while the part is removed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.here:
                return function(*args, **kwargs)
            if skip and part in self.skipped:
                self.acted += 1
                return instead(*args, **kwargs)
            self.enter(part)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self.current == part:
                    self.note_line(part, time.perf_counter() - began)
                self.leave()

        return timed

    def _add(self, now: float) -> None:
        self._parts[self._stack[-1] if self._stack else self.background] += now - self._mark
        self._mark = now


def telling(function: Callable[..., Any], tell: Callable[..., object]) -> Callable[..., Any]:
    """The function, of whose arguments `tell` is told before it runs."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell(*args, **kwargs)
        return function(*args, **kwargs)

    return told


_is_users = functools.cache(is_users_file)


def users_line(frame: Any) -> str | None:
    """The innermost line of the user's own code, as `train.py:12`: no text of it and no values."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def stack_of(frame: Any) -> tuple[str, ...]:
    """The user's lines that a frame is in, the outermost first: `train.py:12 in fit`; no text of them and no values.

    The last is the function of a library that runs for them, where it is Python: `json.decoder.raw_decode`.
    """
    own: list[str] = []
    inside: str | None = None
    while frame is not None and len(own) < MOST_FRAMES:
        if _is_users(frame.f_code.co_filename):
            own.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        elif not own and inside is None:
            module = str(frame.f_globals.get("__name__"))
            if not module.startswith("autoplan."):  # a hook is no part of it
                inside = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return (*reversed(own), *([inside] if own and inside else []))


def worst_line(lines: Mapping[tuple[str, str], Any], part: str) -> str | None:
    """The line with the most of a part: of the seconds of `Clock.lines`, or of the looks of a `LineSampler`."""
    own = {line: most for (of, line), most in list(lines.items()) if of == part}
    return max(own, key=lambda line: own[line]) if own else None


class LineCounter:
    """Counts how often each line of the user's code runs, for one step; that step is not timed.

    A line counts by the object whose method it is in: the layers of a model run the same lines once each, and are no
    loop over small operations; the cell of a recurrent network that is called for each token is.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._by_object: dict[tuple[str, int, int], int] = defaultdict(int)
        self._frames: list[Any] = []

    def start(self) -> None:
        """Begins to count in this thread, also in the functions that run already; not under a debugger."""
        if sys.gettrace() is not None:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            if _is_users(frame.f_code.co_filename):
                frame.f_trace = self._line_function(frame)
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._call)

    def stop(self) -> None:
        """Ends it."""
        if sys.gettrace() == self._call:
            sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames = []
        for (file, line, _), count in self._by_object.items():
            name = f"{Path(file).name}:{line}"
            self.counts[name] = max(self.counts.get(name, 0), count)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line_function(frame) if _is_users(frame.f_code.co_filename) else None

    def _line_function(self, frame: Any) -> Any:
        file, owner = frame.f_code.co_filename, id(frame.f_locals.get("self"))
        counts = self._by_object

        def line(frame: Any, event: str, argument: Any) -> Any:
            if event == "line":
                counts[file, frame.f_lineno, owner] += 1
            return line

        return line


class LineSampler:
    """Looks every few milliseconds where the script's thread is: its part, the user's lines, the memory.

    The time of Python code that no hook knows has a line so. Runs only while the first steps are looked at. It needs no
    ptrace, as py-spy does, since it is a thread of the script's process; processes of a DataLoader it does not see.
    """

    EVERY_S = 0.005

    def __init__(self, clock: Clock, read_bytes: Callable[[], int]) -> None:
        self._clock = clock
        self._ends = threading.Event()
        self.is_paused = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: dict[tuple[str, str], int] = defaultdict(int)
        self.stacks: dict[tuple[Part, tuple[str, ...]], int] = defaultdict(int)
        self.peaks: dict[Part, tuple[int, str | None]] = {}
        self._read_bytes = read_bytes

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._ends.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ends.wait(self.EVERY_S):
            if self.is_paused:
                continue
            frame = sys._current_frames().get(self._clock._thread)
            line = users_line(frame)
            part, memory = self._clock.current, self._read_bytes()
            if line is not None:
                self.seen[part, line] += 1
                self.stacks[part, stack_of(frame)] += 1
            if part not in self.peaks or memory > self.peaks[part][0]:
                self.peaks[part] = memory, line

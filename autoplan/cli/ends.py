"""How the process of a command ends: signals, and output that nobody reads or that has no room. Standard library only.

`prepare()` comes first, before any library is imported. SIGTERM and SIGHUP then end a command as Ctrl-C does, with the
codes that a shell gives (128 + the signal); one that was ignored, as nohup does with SIGHUP, stays ignored. Narration
(stderr) that cannot be written is dropped, and the command goes on. Data (stdout) that cannot be written ends it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any, NoReturn

from autoplan.errors import UsageError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BROKEN_PIPE = 128 + signal.SIGPIPE
"""The exit code of a command whose reader has gone, as of any program that SIGPIPE ends."""

_received: list[int] = []
said: list[str] = []
"""Is not empty once the command itself has said how it ended."""


class OutputError(UsageError):
    """The output of a command cannot be written."""

    code = "output"


class Asked(KeyboardInterrupt):
    """A signal asked for the end.

    Not KeyboardInterrupt itself: where that leaves a piece of code that `exec` compiled, as libraries do while they are
    imported, CPython notes it as unhandled, and `python -m` then ends with SIGINT whatever the exit code is.
    """


class ReaderGone(Exception):
    """The reader of our output has closed it, as `head` does: there is nothing more to say."""


def prepare() -> None:
    """Sets the streams and the handlers of signals up, for the whole process."""
    _open_closed()
    sys.stdout = _Output(sys.stdout, 1, _end_with_output)
    sys.stderr = _Output(sys.stderr, 2, lambda error: None)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def received() -> int | None:
    """The first signal that asked for the end; None if none did."""
    return _received[0] if _received else None


def exit_code(code: int) -> int:
    """The code of an end: that of the signal, where one asked for it and the command did not come to its own end."""
    number = received()
    return code if number is None or code == 0 else 128 + number


def flush() -> None:
    """Writes what is left of the data.

    Raises:
        ReaderGone, OutputError: it cannot be written.
    """
    sys.stdout.flush()
    sys.stderr.flush()


def _on_signal(number: int, frame: object) -> NoReturn:
    _received.append(number)
    raise Asked


class _Output:
    """A stream that shows everything as text, and whose failure to write is handled once."""

    def __init__(self, stream: Any, fd: int, fail: Any) -> None:
        self._stream, self._fd, self._fail = stream, fd, fail
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Points the descriptor at nothing, so that what is buffered troubles nobody again, then says what it means."""
        gone = _is_stdout(self._fd) if error.errno == errno.EPIPE else False
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._fd)
        os.close(nothing)
        if gone:
            raise ReaderGone from error
        self._fail(error)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (sys, "stdout" if self._fd == 1 else "stderr")  # what refers to it travels without it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _end_with_output(error: OSError) -> NoReturn:
    raise OutputError(
        f"stdout cannot be written: {error.strerror}", hint="Free some space there, or print to another place."
    ) from error


def _is_stdout(fd: int) -> bool:
    """Whether a descriptor is stdout, or goes where stdout goes (`2>&1`)."""
    if fd == 1:
        return True
    try:
        return os.path.sameopenfile(fd, 1)
    except OSError:
        return False


def _open_closed() -> None:
    """Opens descriptors 0 to 2 that were closed: the next file that a library opens would get their numbers."""
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

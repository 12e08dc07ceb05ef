"""A node's agent: it connects to the planner, and runs this node's ranks of each task in a zygote of its own.

    python -m autoplan.processes.agent          # with AUTOPLAN_PLANNER=HOST:PORT and AUTOPLAN_TOKEN in the environment

What starts it (srun, an actor of Ray, torchrun) is in engines.py; the planner's side is nodes.py. Nothing is unpickled
here that came from the network: a task names a function of autoplan, and its arguments are JSON and records of
autoplan. Both sides prove that they have the token before anything else is read. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from autoplan.errors import DeviceError, UsageError
from autoplan.processes import linux
from autoplan.processes.client import Zygote
from autoplan.processes.files import KINDS
from autoplan.processes.owner import folder_prefix, sweep_folders
from autoplan.processes.report import StopTask
from autoplan.processes.task import Placement, Progress, Task
from autoplan.processes.wire import FrameReader, GoneError, send_frame
from autoplan.record import Record

PLANNER_VARIABLE = "AUTOPLAN_PLANNER"
TOKEN_VARIABLE = "AUTOPLAN_TOKEN"
PARENT_VARIABLE = "AUTOPLAN_PARENT"
"""The pid that an agent ends with, where what started it has no other hold on it."""
BEAT_S = 2.0
"""Between two signs of life of an agent."""
CONNECT_S = 300.0
"""An agent tries so long to reach a planner."""
CONNECT_ONCE_S = 10.0
"""One attempt, and the same for both sides to show that they have the token."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Of a connection: the kernel ends it after 25 s without an answer (tcp(7))."""
PIECE_BYTES = 8 << 20
"""Of a file that goes back to the planner."""
SENT_AWAY = 3
"""The exit code of an agent whose node the planner cannot use."""
OF_LAUNCHERS = ("SLURM_", "PMI", "TORCHELASTIC_", "GROUP_", "ROLE_")
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RefusedError(DeviceError):
    """The other side is not of this search, or of another version."""


# What planner and agent both do.


def set_keepalive(connection: socket.socket) -> None:
    """Has the kernel notice that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, name, value)


def prove(connection: socket.socket, token: str, *, planner: bool, within_s: float) -> None:
    """Each side shows that it has the token, without sending it.

    Args:
        connection: It has no time limit afterwards.
        token: Of the search.
        planner: Which side this is.
        within_s: Seconds for all of it, also if the other side sends byte after byte.

    Raises:
        RefusedError: the other side has another one, or speaks something else.
        OSError: it is gone, or too slow.
    """
    mine, until = secrets.token_bytes(32), time.monotonic() + within_s
    connection.settimeout(within_s)
    connection.sendall(mine)
    theirs = _exactly(connection, 32, until)
    connection.sendall(_answer(token, theirs, planner))
    if not hmac.compare_digest(_exactly(connection, 32, until), _answer(token, mine, not planner)):
        raise RefusedError("the other side of the connection has another token", hint="Start it again.")
    connection.settimeout(None)


def _answer(token: str, asked: bytes, planner: bool) -> bytes:
    return hmac.digest(token.encode(), (b"planner" if planner else b"agent") + asked, hashlib.sha256)


def _exactly(connection: socket.socket, size_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < size_bytes:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side did not show in time that it has the token")
        connection.settimeout(left_s)
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise RefusedError("the connection was closed before it was used")
        data += piece
    return data


def forget_launcher(environment: dict[str, str] | os._Environ[str]) -> None:
    """Takes out what a launcher said of this process, the planner or an agent: it is itself no rank."""
    for name in [name for name in environment if name in RANK_NAMES or name.startswith(OF_LAUNCHERS)]:
        del environment[name]


def encode(value: Any) -> Any:
    """An argument of a task as JSON that says which record it is.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, Record):
        if type(value).__module__.partition(".")[0] == "autoplan":
            if getattr(getattr(value, "spec", value), "payload", None) is not None:
                raise UsageError(
                    "objects of a library call do not travel to other nodes: that would need pickle",
                    hint="Name a function that makes them, file.py:function, in a file that each node has at the same "
                    "path.",
                )
            name = f"{type(value).__module__}:{type(value).__qualname__}"
            return {"record": name, "fields": value.model_dump(mode="json")}
    elif isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(one) for key, one in value.items()}}
    elif value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise UsageError(f"a {type(value).__qualname__} cannot be sent to another node", hint="Use --model or --trainer.")


def decode(value: Any) -> Any:
    """The argument of `encode`. Only records of autoplan are made."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: decode(one) for key, one in value["dict"].items()}
    module, _, name = value["record"].partition(":")
    if module.partition(".")[0] != "autoplan":
        raise RefusedError(f"the planner sent a record of {module}")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise RefusedError(f"{value['record']} is no record")
    return kind.model_validate(value["fields"])


# The agent.


class Agent:
    """One node's side of one search.

    Args:
        connection: To the planner, proved.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def serve(self) -> int:
        """Runs what the planner asks for until it says goodbye; returns SENT_AWAY if that was a refusal.

        Raises:
            GoneError: it is gone.
        """
        self._send({"kind": "hello", "host": platform.node(), "pid": os.getpid()})
        welcome, _ = self._reader.read(None) or ({}, b"")
        threading.Thread(target=self._beat, daemon=True).start()
        with Zygote(preload=welcome["preload"]) as zygote:
            try:
                while True:
                    header, _ = self._reader.read(None) or ({}, b"")
                    if header["kind"] == "bye":
                        if header.get("why"):
                            print(f"autoplan: the planner cannot use this node: {header['why']}", file=sys.stderr)
                        return SENT_AWAY if header.get("why") else 0
                    if header["kind"] == "port":
                        self._say_port()
                    if header["kind"] == "run":
                        self._run(zygote, header["task"])
            finally:
                self._ended.set()

    def _say_port(self) -> None:
        """Where the ranks of a task can meet; if another program takes the port first, the task is run again."""
        address = self._connection.getsockname()[0]
        with socket.create_server((address, 0)) as found:
            self._send({"kind": "port", "address": address, "port": found.getsockname()[1]})

    def _run(self, zygote: Zygote, asked: dict[str, Any]) -> None:
        try:
            with contextlib.ExitStack() as at_end:
                folder = Path(tempfile.mkdtemp(prefix=folder_prefix("task")))
                at_end.callback(shutil.rmtree, folder, ignore_errors=True)
                args = tuple(decode(asked.pop("args")))
                place = Placement(**asked.pop("placement"), local_addr=self._connection.getsockname()[0])
                if not asked["target"].startswith("autoplan."):
                    raise RefusedError(f"the planner asked for {asked['target']}")
                whole, tells = place.world_size == asked["ranks"], asked.pop("progress", False)
                task = Task(**asked, args=args, directory=folder, placement=None if whole else place)
                report = zygote.run(task, on_progress=self._tell if tells else self._look)
                for path in sorted(path for path in folder.iterdir() if path.is_file()):
                    self._send_file(path, place.first_rank)
                self._send({"kind": "ended", "report": report.model_dump(mode="json")})
        except GoneError:
            raise
        except Exception as error:
            self._send({"kind": "failed", "text": f"{type(error).__name__}: {error}"})

    def _look(self, progress: Progress) -> None:
        """Between two looks at the ranks: what the planner says meanwhile."""
        frame = self._reader.read(0)
        if frame is not None and frame[0]["kind"] == "cancel":
            raise StopTask

    def _tell(self, progress: Progress) -> None:
        """The same where the first rank is here: the planner has no rank of its own to look at."""
        self._send({"kind": "progress", "progress": progress.model_dump(mode="json")})
        self._look(progress)

    def _send_file(self, path: Path, first_rank: int) -> None:
        """A file of the ranks, under the numbers that they have among all."""
        name, kind = path.name, path.name.partition(".")[2]
        if name.startswith("rank") and kind in KINDS:
            name = f"rank{first_rank + int(name[4:].partition('.')[0])}.{kind}"
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                self._send({"kind": "file", "name": name, "at": file.tell() - len(piece)}, piece)

    def _beat(self) -> None:
        """Says that this node lives until it is done; ends the process when nobody hears it meanwhile."""
        while not self._ended.wait(BEAT_S):
            try:
                self._send({"kind": "beat"})
            except GoneError:
                if self._ended.wait(0.5):
                    return
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60.0)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        with self._lock:
            send_frame(self._connection, header, payload)


def connect(address: str, token: str) -> socket.socket:
    """A proved connection to the planner at HOST:PORT.

    Raises:
        OSError: nobody is there.
        RefusedError: it is not the planner of this token.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_ONCE_S)
    try:
        prove(connection, token, planner=False, within_s=CONNECT_ONCE_S)
        set_keepalive(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def serve(connection: socket.socket) -> int:
    """Serves over a proved connection until the planner is gone; returns the exit code."""
    forget_launcher(os.environ)
    sweep_folders()
    # Its zygote ends all that it started. With 0 torchrun would take it for done, and start nothing again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with connection, contextlib.suppress(GoneError):
        return Agent(connection).serve()
    return 0


def main() -> int:
    """Connects to the planner of the environment, which may not look for agents yet, and serves."""
    address, token = os.environ[PLANNER_VARIABLE], os.environ.pop(TOKEN_VARIABLE)
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None and not linux.die_with_parent(int(parent)):
        return 0
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = connect(address, token)
        except ConnectionRefusedError:
            return 0  # the search has ended
        except (OSError, RefusedError) as error:
            if time.monotonic() > until:
                print(f"autoplan: no planner at {address}: {error}", file=sys.stderr)
                return 1
            time.sleep(0.5)
            continue
        return serve(connection)


if __name__ == "__main__":
    sys.exit(main())

"""What engines and agents do where no engine is needed to see it; `tests/engines` has real ones."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import DeviceError
from autoplan.processes import Zygote, engines
from autoplan.processes.agent import TOKEN_VARIABLE, Agent, RefusedError, prove
from autoplan.processes.engines import ADDRESS_VARIABLE, THREADS_VARIABLE, own_address, ray_environment, with_engine
from autoplan.processes.wire import FrameReader


def test_an_address_that_no_other_node_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives a machine's own name 127.0.1.1: the agents would look for the planner on themselves."""
    known = {"node7": "127.0.1.1", "node8": "10.0.0.8", "localhost": "127.0.0.1"}
    monkeypatch.setattr(engines.socket, "gethostbyname", lambda name: known.get(name, name))
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(DeviceError, match=r"node7 is 127\.0\.1\.1 here") as caught:
        own_address("node7")
    assert ADDRESS_VARIABLE in (caught.value.hint or "")
    assert own_address("node8") == "10.0.0.8"
    assert own_address("localhost") == own_address("127.0.0.1") == "127.0.0.1", "as torchrun was told"
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    assert own_address("node7") == "127.0.0.1"


def test_an_agent_of_ray_has_the_threads_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "1")  # as Ray sets it in an actor
    assert THREADS_VARIABLE not in ray_environment("10.0.0.1:4000", "token", None)
    assert ray_environment("10.0.0.1:4000", "token", "4")[THREADS_VARIABLE] == "4"
    assert ray_environment("10.0.0.1:4000", "token", None)[TOKEN_VARIABLE] == "token"


class Broken:
    """An engine whose torchrun has ended."""

    name, here = "elastic", True
    first = True

    def leave(self, *, ok: bool) -> None:
        raise DeviceError("the store of torchrun cannot be used")


def test_the_cause_of_a_bad_end_is_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "elastic", lambda gpus: Broken())

    def interrupt(engine: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_engine("elastic", 0, interrupt, lambda result: True)
    with pytest.raises(DeviceError, match="store"):
        with_engine("elastic", 0, lambda engine: None, lambda result: True)


def test_an_agent_that_cannot_write_says_so_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk is not the planner's end: the planner would lose a node, and torchrun would start no other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    mine, theirs = socket.socketpair()
    with mine, theirs:
        place = {"first_rank": 0, "world_size": 1, "master_addr": "", "master_port": 0}
        asked = {"target": "autoplan.nothing:nothing", "args": [], "ranks": 1, "placement": place}
        Agent(theirs)._run(Zygote(preload=()), asked)
        frame = FrameReader(mine).read(1.0)
    assert frame is not None
    assert frame[0]["kind"] == "failed" and "FileNotFoundError" in frame[0]["text"]


def test_a_stranger_who_sends_byte_after_byte_is_sent_away_in_time() -> None:
    mine, theirs = socket.socketpair()
    ended = threading.Event()

    def dribble() -> None:
        while not ended.wait(0.05):
            theirs.sendall(b"x")

    thread = threading.Thread(target=dribble)
    with mine, theirs:
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises((OSError, RefusedError)):
                prove(mine, "token", planner=True, within_s=0.5)
            assert time.monotonic() - began < 1.5, "64 bytes take 3 s"
        finally:
            ended.set()
            thread.join()

"""The launcher over several nodes: a zygote here, and an agent (agent.py) on each other node.

    with Nodes(engine, nodes=2, ranks_per_node=8, address="10.0.0.1", preload=("torch",)) as launcher:
        report = launcher.run(task)     # as `Zygote.run`

`Nodes` is a `Zygote`: a task that fits on one node runs here, as without nodes. One that does not is divided: the first
ranks run here, the next on each agent, each part under its node's own supervisor (deadlines, memory, process trees,
output). Where this machine is no node (`Engine.here`), all parts run on agents, also that of a task of one rank. What
comes back is one `ProcessReport`. A node that is gone or silent makes it `Ended.NODE_LOST`, which is no verdict on the
task; `run_again` then tries it on the agents that are there.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autoplan.errors import DeviceError, UsageError
from autoplan.processes.agent import encode, prove, set_keepalive
from autoplan.processes.client import Zygote
from autoplan.processes.files import clear_rank_files
from autoplan.processes.owner import folder_prefix
from autoplan.processes.report import Ended, ProcessReport, RankReport, StopTask, build_report
from autoplan.processes.supervisor import EFFECT_WITHIN_S
from autoplan.processes.task import Placement, Progress, Task
from autoplan.processes.wire import FrameReader, GoneError, send_frame
from autoplan.text import printable

SILENCE_S = 30.0
"""An agent says every two seconds that it lives; one that is silent for so long is lost."""
GATHER_S = 300.0
"""How long a task waits until as many nodes as it needs are there, the first time; srun may wait for a node to boot."""
REGATHER_S = 60.0
"""The same once a node was lost."""
END_S = 25.0
"""For an agent to end its ranks when it is asked to."""
PROVE_S = 3.0
"""For a new connection to show that it is an agent of this search; until then the others wait."""
LOOK_S = 0.2

# What ends one part makes the others fail: a peer's exception comes of the part that these ended.
ORDER = (
    Ended.NODE_LOST,
    Ended.MEMORY_LIMIT,
    Ended.DEADLINE,
    Ended.ZYGOTE_LOST,
    Ended.NOT_STARTED,
    Ended.RANK_FAILED,
    Ended.CANCELLED,
    Ended.FINISHED,
)


def parse_layout(text: object) -> tuple[int, int]:
    """Nodes, and ranks on each, of `2x8`.

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,2})", text) if isinstance(text, str) else None
    if found is None:
        raise UsageError(f"--nodes is {text!r}", hint="It is the nodes and the ranks on each, for example 2x8.")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What an engine is told of the agents that it shall start.

    Attributes:
        planner: HOST:PORT to connect to.
        token: What an agent proves itself with; never for a command line.
        agents: How many there shall be, where the engine chooses the nodes.
        on_note: Is told what the engine waits for.
    """

    planner: str
    token: str
    agents: int
    on_note: Callable[[str], None]


class Engine(Protocol):
    """What starts the agents: SLURM, Ray, torch elastic (engines.py)."""

    name: str
    here: bool
    """Whether this machine is the first node. If not, it runs no rank: all nodes have agents."""
    others: bool
    """Whether it takes another node in place of one whose agent was sent away, and has an error where there is none."""

    def address(self) -> str:
        """The IPv4 address of this node that the others reach."""

    def ensure(self, wanted: Wanted) -> None:
        """Starts an agent on each other node that has none; called again and again while a node is missing."""

    def close(self) -> None:
        """Ends what it started; agents end by themselves when the planner is gone."""

    def leave(self, *, ok: bool) -> None:
        """The command ends, well or not: the last that is called."""


class Nodes(Zygote):
    """Runs tasks on several nodes.

    Args:
        engine: What starts the agents.
        nodes: How many nodes a task may have, this one among them if it is one; agents beyond that wait as spares.
        ranks_per_node: Ranks on each.
        check: Is given what a node says of itself (the result of `describe`) and returns why it cannot be used, if so.
        describe: "package.module:function" of autoplan, which an agent runs once in one rank.
        on_note: Is told of nodes that come, are refused and are lost.
        preload: As a `Zygote` takes it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        nodes: int,
        ranks_per_node: int,
        check: Callable[[Any], str | None] | None = None,
        describe: str | None = None,
        on_note: Callable[[str], None] = lambda text: None,
        preload: Sequence[str] = ("torch", "transformers"),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(preload=preload, env=env)
        self.layout = f"{nodes}x{ranks_per_node}"
        self._engine, self._nodes, self._per_node = engine, nodes, ranks_per_node
        self._check, self._describe, self._note = check, describe, on_note
        self._own = 1 if engine.here else 0
        self._listener: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._agents: list[AgentLink] = []
        self._asked: list[AgentLink] = []
        self._any_lost = False
        self._refused: list[str] = []

    def start(self) -> None:
        """Starts what is not there, here and on the other nodes; waits for this node alone.

        Raises:
            ZygoteError: no zygote could be started here.
            AutoplanError: the engine cannot be used.
        """
        if self._own:
            super().start()
        if self._listener is None:
            self._listener = socket.create_server((self._engine.address(), 0), backlog=128)
            try:
                self._ensure()
            except BaseException:  # Ctrl-C while SLURM has a job wait: nothing of it may stay
                self.close()
                raise

    def await_nodes(self) -> None:
        """Waits until all nodes are there, or as long as a task would; who is missing then is missed by the tasks."""
        self.start()
        self._gather(self._nodes - self._own)

    def tell(self, on_note: Callable[[str], None]) -> None:
        """From now on this is told of nodes that come, are refused and are lost."""
        self._note = on_note

    def renew(self) -> None:
        """Ends the zygote here; agents stay."""
        super().close()

    def close(self) -> None:
        """Ends the agents and everything here."""
        for agent in (*self._agents, *self._asked):
            agent.say({"kind": "bye"})
            agent.close()
        self._agents, self._asked = [], []
        if self._listener is not None:
            self._engine.close()
            self._listener.close()
            self._listener = None
        super().close()

    def run(self, task: Task, *, on_progress: Callable[[Progress], None] | None = None) -> ProcessReport:
        """As `Zygote.run`, over as many nodes as the task's ranks need.

        Raises:
            ZygoteError: no zygote could be started here.
            DeviceError: a node is of another kind, or has another version.
            UsageError: an argument of the task cannot travel, or there are more ranks than all nodes have.
        """
        fits = task.ranks <= self._per_node  # on one node
        if fits and self._own:
            self._take_in()
            return super().run(task, on_progress=on_progress)
        if not fits and task.ranks > self._nodes * self._per_node:
            raise UsageError(f"a task of {task.ranks} ranks was asked for", hint=f"There are {self.layout}.")
        if task.directory is None:
            with tempfile.TemporaryDirectory(prefix=folder_prefix("task")) as folder:
                return self.run(replace(task, directory=Path(folder)), on_progress=on_progress)
        requested_at = time.monotonic()
        if not isinstance(task.target, str):
            raise UsageError("a task that has no name cannot be sent to another node", hint="Name a function.")
        args = encode(task.args)
        self.start()
        wanted = (1 if fits else -(-task.ranks // self._per_node)) - self._own
        agents = self._gather(wanted)
        if len(agents) < wanted:
            trouble = f"only {self._own + len(agents)} of the nodes that it needs ({self.layout}) are there"
            ended = {"ended": Ended.NODE_LOST.value, "trouble": trouble}
            return build_report(task, task.directory, requested_at, ended)
        try:
            return self._run_parts(task, args, agents, requested_at, on_progress)
        finally:
            for agent in agents:
                if agent.busy:
                    agent.end()
            self._drop_lost()

    # -- agents --------------------------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        assert self._listener is not None
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def _ensure(self) -> None:
        agents = self._nodes - self._own
        self._engine.ensure(Wanted(planner=self._address, token=self._token, agents=agents, on_note=self._note))

    def _gather(self, wanted: int) -> list[AgentLink]:
        """As many agents as that, once they are there; fewer: they did not come in time."""
        assert self._listener is not None
        give_up_at = time.monotonic() + (REGATHER_S if self._any_lost else GATHER_S)  # no part of a trial's deadline
        while True:
            self._take_in()
            if len(self._agents) >= wanted or time.monotonic() > give_up_at:
                return self._agents[:wanted]
            if self._refused and not self._engine.others:
                raise DeviceError(self._refused[-1], hint="Each node needs the same hardware and the same versions.")
            asked_at = time.monotonic()
            self._ensure()
            give_up_at += time.monotonic() - asked_at  # a queue that nodes are waited for in is no part of it
            select.select([self._listener], [], [], LOOK_S)

    def _take_in(self) -> None:
        """Looks once at who has come, and who is gone."""
        self._drop_lost()
        while self._listener is not None and select.select([self._listener], [], [], 0)[0]:
            self._accept()
        self._admit()

    def _accept(self) -> None:
        """Takes one connection; whoever is no agent of this search is sent away."""
        assert self._listener is not None
        connection, (address, *_) = self._listener.accept()
        try:
            prove(connection, self._token, planner=True, within_s=PROVE_S)
            set_keepalive(connection)
            agent = AgentLink(connection, str(address))
            agent.greet(self._preload)
        except (DeviceError, OSError, GoneError):
            connection.close()
            return
        if self._describe is not None:
            place = {"first_rank": 0, "world_size": 1, "master_addr": agent.address, "master_port": 0}
            agent.begin({"target": self._describe, "args": [], "ranks": 1, "total_deadline_s": GATHER_S}, place, None)
        self._asked.append(agent)

    def _admit(self) -> None:
        """Takes the agents that have said what they are, and sends away those that are of no use."""
        for agent in [agent for agent in self._asked if not agent.busy]:
            self._asked.remove(agent)
            why = self._why_not(agent)
            if why is None:
                self._agents.append(agent)
                self._note(f"node {agent} is there")
                continue
            if not agent.lost:
                self._refused.append(f"the node {agent} cannot be used: {why}")
                if self._engine.others:
                    self._note(self._refused[-1])
            agent.say({"kind": "bye", "why": why})
            agent.close()

    def _why_not(self, agent: AgentLink) -> str | None:
        """Why an agent is of no use, by what it says of itself."""
        if self._describe is None or self._check is None:
            return None
        if agent.report is None:
            return agent.trouble
        if agent.report.ended is not Ended.FINISHED:
            return agent.report.describe()
        return self._check(agent.report.ranks[0].result)

    def _drop_lost(self) -> None:
        for agent in (*self._agents, *self._asked):
            agent.look(0)
        for agent in [agent for agent in self._agents if agent.lost]:
            self._agents.remove(agent)
            self._any_lost = True
            self._note(f"node {agent} was lost: {agent.trouble}")

    # -- one task ------------------------------------------------------------------------------------------

    def _run_parts(
        self,
        task: Task,
        args: Any,
        agents: list[AgentLink],
        requested_at: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> ProcessReport:
        assert task.directory is not None
        per_node = self._per_node
        lead = None if self._own else agents[0]
        address, port = ("", 0) if task.ranks <= per_node else self._meeting_place(lead)
        place: dict[str, Any] = {"world_size": task.ranks, "master_addr": address, "master_port": port}
        limits = {
            "target": task.target,
            "args": args,
            "deadlines_s": dict(task.deadlines_s),
            "total_deadline_s": task.total_deadline_s,
            "memory_limit_bytes": task.memory_limit_bytes,
            "env": dict(task.env),
        }
        watch = _Watch(agents, on_progress)
        task.directory.mkdir(parents=True, exist_ok=True)
        for number, agent in enumerate(agents, self._own):
            first = number * per_node
            ranks = min(per_node, task.ranks - first)
            asked = {**limits, "ranks": ranks, "progress": agent is lead}
            agent.begin(asked, {**place, "first_rank": first}, task.directory)
        local = None
        if self._own:
            here = Placement(**place, first_rank=0, local_addr=address)
            own = replace(task, ranks=per_node, placement=here)
            local = super().run(own, on_progress=watch.look)
        else:
            clear_rank_files(task.directory)
        watch.await_end(lead, failing=local is not None and local.ended is not Ended.FINISHED)
        for agent in agents:
            if agent.busy:
                agent.end()
        for agent in agents:
            agent.write_files()
        return _joined(task, local, agents, requested_at, by_caller=watch.by_caller)

    def _meeting_place(self, lead: AgentLink | None) -> tuple[str, int]:
        """Where the ranks meet: at the first one. The port is free now; if another takes it, the task is run again."""
        if lead is not None:
            return lead.ask_port()
        address = self._engine.address()
        with socket.create_server((address, 0)) as found:
            return address, found.getsockname()[1]


class _Watch:
    """Looks at the agents while the ranks here run, and ends those where another node's have failed."""

    def __init__(self, agents: Sequence[AgentLink], on_progress: Callable[[Progress], None] | None) -> None:
        self._agents, self._on_progress = agents, on_progress
        self._failed_at: float | None = None
        self.stopped = self.by_caller = False

    def look(self, progress: Progress) -> None:
        # Where another node's ranks fail, those here fail by themselves, and say how; those that hang are ended.
        if self._have_failed(0):
            self.stopped = True
            raise StopTask
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except BaseException:
                self.stopped = self.by_caller = True
                raise

    def await_end(self, lead: AgentLink | None, *, failing: bool) -> None:
        """Waits for the agents; once one has failed, or the ranks here have (`failing`), for a moment.

        Args:
            lead: Has the first rank, where that is not here: how far it is goes to the caller.
            failing: Of the ranks here.
        """
        if failing:
            self._failed_at = time.monotonic()
        while not self.stopped and any(agent.busy for agent in self._agents):
            if self._have_failed(LOOK_S / len(self._agents)):
                return
            if lead is not None and (progress := lead.take_progress()) is not None:
                with contextlib.suppress(StopTask):
                    self.look(progress)

    def _have_failed(self, timeout_s: float) -> bool:
        """Looks at each agent, for so long; whether some have failed, and the others had a moment to fail by that."""
        for agent in self._agents:
            agent.look(timeout_s)
        if self._failed_at is None and any(agent.failed for agent in self._agents):
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > EFFECT_WITHIN_S


class AgentLink:
    """The planner's end of a connection to an agent.

    Attributes:
        host: As the agent's machine calls itself.
        address: Where it connects from.
        busy: It has a task that has not ended.
        lost: It is gone, or silent.
        report: Of its last task.
        trouble: Why it was lost, or had no report.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        self._connection = connection
        self._reader = FrameReader(connection)
        self._heard_at = time.monotonic()
        self._directory: Path | None = None
        self._files: list[tuple[str, int, bytes]] = []
        self.address = address
        self.host = address
        self.busy = self.lost = False
        self.report: ProcessReport | None = None
        self.first_rank = 0
        self.trouble = ""
        self._progress: Progress | None = None
        self._meeting: tuple[str, int] | None = None

    def __str__(self) -> str:
        return f"{printable(self.host)} ({self.address})"

    @property
    def failed(self) -> bool:
        """Whether its part of the task will not come to a good end, or has not."""
        return self.lost or (not self.busy and (self.report is None or self.report.ended is not Ended.FINISHED))

    def greet(self, preload: Sequence[str]) -> None:
        """Hears who it is, and says what its zygote shall import.

        Raises:
            GoneError: it is gone, or says something else.
        """
        frame = self._reader.read(PROVE_S)
        if frame is None or frame[0].get("kind") != "hello":
            raise GoneError("it did not say who it is")
        self.host = str(frame[0]["host"])[:64]
        send_frame(self._connection, {"kind": "welcome", "preload": list(preload)})

    def begin(self, asked: dict[str, Any], place: dict[str, Any], directory: Path | None) -> None:
        """Sends it a task."""
        self.busy, self.report, self.trouble, self._progress = True, None, "", None
        self._directory, self._files, self.first_rank = directory, [], place["first_rank"]
        self._heard_at = time.monotonic()
        self.say({"kind": "run", "task": {**asked, "placement": place}})

    def ask_port(self) -> tuple[str, int]:
        """An address of its node with a port that is free there now; ("", 0): it is lost."""
        self._meeting = None
        self.say({"kind": "port"})
        give_up_at = time.monotonic() + SILENCE_S
        while self._meeting is None and not self.lost and time.monotonic() < give_up_at:
            self.look(LOOK_S)
        return self._meeting or ("", 0)

    def take_progress(self) -> Progress | None:
        """How far its first rank is, where it has said so since the last call."""
        progress, self._progress = self._progress, None
        return progress

    def end(self) -> None:
        """Asks it to end its ranks and waits until it has, or is lost."""
        self.say({"kind": "cancel"})
        give_up_at = time.monotonic() + END_S
        while self.busy and time.monotonic() < give_up_at:
            self.look(LOOK_S)
        if self.busy:
            self._lose("it did not end its ranks when it was told to")

    def look(self, timeout_s: float) -> None:
        """Takes in what it has sent."""
        try:
            while not self.lost and (frame := self._reader.read(timeout_s)) is not None:
                self._heard_at, timeout_s = time.monotonic(), 0
                self._take(*frame)
        except (GoneError, ValueError) as error:
            self._lose(str(error) or type(error).__name__)
        if not self.lost and time.monotonic() - self._heard_at > SILENCE_S:
            self._lose(f"it was silent for {SILENCE_S:.0f} s")

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        match header["kind"]:
            case "file" if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", header["name"]) and self._directory is not None:
                self._files.append((header["name"], int(header["at"]), payload))
            case "progress":
                self._progress = Progress.model_validate(header["progress"])
            case "port":
                self._meeting = str(header["address"]), int(header["port"])
            case "ended":
                self.report, self.busy = ProcessReport.model_validate(header["report"]), False
            case "failed":
                self.busy, self.trouble = False, str(header["text"])

    def write_files(self) -> None:
        """Writes what its ranks left beside that of the ranks here; after those, since a task clears its folder."""
        for name, at, data in self._files:
            assert self._directory is not None
            with (self._directory / name).open("r+b" if at else "wb") as file:
                file.seek(at)
                file.write(data)
        self._files = []

    def say(self, header: dict[str, Any]) -> None:
        """Sends it a message; that it is gone is seen at the next look."""
        try:
            send_frame(self._connection, header)
        except GoneError as error:
            self._lose(str(error))

    def close(self) -> None:
        """Closes the connection: the agent ends what it runs."""
        self._connection.close()

    def _lose(self, why: str) -> None:
        self.busy, self.lost, self.trouble = False, True, why
        self._connection.close()


# From the parts' reports to the task's.


def _joined(
    task: Task,
    local: ProcessReport | None,
    agents: Sequence[AgentLink],
    requested_at: float,
    *,
    by_caller: bool,
) -> ProcessReport:
    """One report of a task whose parts ran on several nodes; the ranks have their numbers among all."""
    assert task.directory is not None
    nothing = build_report(task, task.directory, requested_at, {"ended": Ended.NODE_LOST.value})
    parts: list[tuple[int, ProcessReport]] = [] if local is None else [(0, local)]
    parts += [(agent.first_rank, agent.report) for agent in agents if agent.report is not None]
    ranks: dict[int, RankReport] = {}
    for first, part in parts:
        ranks |= {first + one.rank: one.model_copy(update={"rank": first + one.rank}) for one in part.ranks}
    missing = [rank for rank in range(task.ranks) if rank not in ranks]
    ranks |= {rank: nothing.ranks[rank] for rank in missing}
    first, lead = min(parts or [(0, nothing)], key=lambda part: (ORDER.index(part[1].ended), _failed_at(part[1])))
    ended, trouble = lead.ended, lead.trouble
    gone = [agent for agent in agents if agent.report is None]
    if by_caller:
        ended = Ended.CANCELLED
    elif gone:
        ended = Ended.NODE_LOST if any(agent.lost for agent in gone) else Ended.NOT_STARTED
        trouble = "; ".join(f"the node {agent} was lost: {agent.trouble}" for agent in gone)
    alone = ended in (Ended.NODE_LOST, Ended.CANCELLED, Ended.NOT_STARTED)
    failed = None if alone or lead.failed_rank is None else first + lead.failed_rank
    starts = [part.startup_s for _, part in parts]
    peaks = [lead.peak_memory_bytes] if ended is Ended.MEMORY_LIMIT else [part.peak_memory_bytes for _, part in parts]
    return lead.model_copy(
        update={
            "ended": ended,
            "phase_deadline_s": lead.phase_deadline_s if ended is Ended.DEADLINE else None,
            "failed_rank": failed,
            "ranks": tuple(ranks[rank] for rank in range(task.ranks)),
            "seconds": time.monotonic() - requested_at,
            "startup_s": None if None in starts or missing else max(start for start in starts if start is not None),
            "peak_memory_bytes": sum(peaks),
            "swept": sum(part.swept for _, part in parts),
            "left_behind": sum(part.left_behind for _, part in parts),
            "trouble": trouble,
        }
    )


def _failed_at(report: ProcessReport) -> float:
    """When a part's rank failed; one that a signal ended is the cause of what its peers raised just before."""
    failure = report.first_failure
    if failure is None or failure.failed_after_s is None:
        return 0.0
    killed = failure.signal not in (None, signal.SIGABRT)
    return failure.failed_after_s - (EFFECT_WITHIN_S if killed else 0.0)

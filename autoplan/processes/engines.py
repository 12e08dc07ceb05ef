"""What starts the agents of a search on the other nodes: torch elastic, SLURM, Ray. The search runs on the first node.

- `elastic`: one torchrun on each node starts the same command, as it does for `autoplan run`. The first rank searches,
  the others are agents, and find it through torchrun's own store. torchrun starts lost ones again (--max-restarts).
- `slurm`: inside an allocation, one `srun` for each other node of it. Outside, as on a login node, `sbatch` of a job
  with an agent on each of its nodes; this machine then runs no rank.
- `ray`: a placement group reserves the other nodes that are wanted, with their GPUs; an actor on each starts the agent.

What an agent needs to know goes in its environment or through the engine, never in a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import platformdirs

from autoplan.errors import AutoplanError, DeviceError, UsageError
from autoplan.processes import agent
from autoplan.processes.nodes import Engine, Wanted

ADDRESS_VARIABLE = "AUTOPLAN_ADDRESS"
"""The IPv4 address that the other nodes reach this one at, where the engine's own name for it is not that."""
KEY = "autoplan/planner"
_STORE_S = 120.0
QUEUE_LOOK_S = 5.0
"""Between two questions to SLURM about a job."""
AGAIN_S = 5.0
"""Between two starts of an agent on one node: one that ends at once would be started again without a pause."""
NODE_LABEL = "ray.io/node-id"
"""Ray gives each node this label."""
PLACE_S = 10.0
"""How long Ray may take to reserve the nodes before the user is told what is waited for."""
RESERVE_S = 600.0
"""How long it may take at most: its autoscaler rents and starts a machine in minutes."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
SHORT_S, MOST_SHORT = 20.0, 3
"""A job, or an agent of Ray's, that ran for less has done nothing. So many such jobs in a row are an error; with Ray
the node of so many such agents is left out. An agent that cannot start ends at once."""
WAITING = ("PENDING", "CONFIGURING")
_ALIVE = (*WAITING, "RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
R = TypeVar("R")
_COMMAND = (sys.executable, "-P", "-m", "autoplan.processes.agent")

# Runs in a process of its own: the planner loads no torch. {"host", "port", "key", "do", "value"} come on stdin.
_STORE = """
import datetime, json, sys, time
from torch.distributed import TCPStore
asked = json.load(sys.stdin)
key, value, wait = asked["key"], asked["value"], datetime.timedelta(seconds=asked["wait_s"])
store = TCPStore(asked["host"], asked["port"], is_master=False, timeout=wait)
match asked["do"]:
    case "set":
        store.set(key, value)
    case "delete":
        store.delete_key(key)
    case "read":
        # without a limit: torchrun ends this process, or its store, if the first node fails
        while not store.check([key]) or (found := store.get(key).decode()) == value:
            time.sleep(0.2)
        sys.stdout.write(found)
"""


def own_address(name: str) -> str:
    """The address of this node: ADDRESS_VARIABLE, else what its name resolves to.

    Raises:
        DeviceError: the name resolves to nothing, or to an address that only this node reaches. Debian's /etc/hosts has
            127.0.1.1 for the machine's own name.
    """
    said = os.environ.get(ADDRESS_VARIABLE)
    name = said or name
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise DeviceError(
            f"this node's name {name} has no IPv4 address: {error}", hint=f"Set {ADDRESS_VARIABLE} to its address."
        ) from error
    if address.startswith("127.") and not said and name not in ("localhost", address):
        raise DeviceError(
            f"this node's name {name} is {address} here, which no other node reaches",
            hint=f"Set {ADDRESS_VARIABLE} to its address; to 127.0.0.1 where all nodes are on this machine.",
        )
    return address


def child_environment(planner: str, token: str) -> dict[str, str]:
    """The environment of an agent: this one, and where the planner is."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {agent.PLANNER_VARIABLE: planner, agent.TOKEN_VARIABLE: token, "PYTHONPATH": path}
    return {**os.environ, **more}


class Elastic:
    """torchrun has started this process and the agents.

    Raises:
        UsageError: this process was not started by torchrun.
    """

    name, here, others = "elastic", True, False

    def __init__(self, gpus_per_node: int = 0) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        missing = [name for name in names if name not in os.environ]
        if missing or os.environ["LOCAL_WORLD_SIZE"] != "1":
            why = f"{missing[0]} is not set" if missing else "there are several processes on this node"
            raise UsageError(
                f"--launcher elastic needs one process of torchrun on each node: {why}",
                hint="On each node: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint "
                "FIRST:29400 -m autoplan search ... --launcher elastic --nodes 2x8",
            )
        self.first = os.environ["RANK"] == "0"
        self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._said = False
        self._environment = dict(os.environ)
        agent.forget_launcher(os.environ)  # a trial of one rank is a plain process

    def address(self) -> str:
        """MASTER_ADDR is this node's own on the first node."""
        return own_address(self._host)

    def ensure(self, wanted: Wanted) -> None:
        """Tells the agents where the planner is, once."""
        if not self._said:
            self._store("set", json.dumps([wanted.planner, wanted.token]))
            self._said = True

    def serve(self) -> int:
        """Is an agent of the first node's command, until that ends well; returns the exit code.

        Where that fails, torchrun ends this process too, and starts both again; one that had ended by itself would keep
        its torchrun from that.
        """
        until, known = time.monotonic() + agent.CONNECT_S, ""
        while True:
            said = self._store("read", known)
            if (found := json.loads(said)) is None:
                return 0
            try:  # after a restart the store may still name the planner that was killed
                connection = agent.connect(*found)
            except (OSError, agent.RefusedError) as error:
                if time.monotonic() > until:
                    print(f"autoplan: no planner at {found[0]}: {error}", file=sys.stderr)
                    return 1
                time.sleep(1.0)
                continue
            if (code := agent.serve(connection)) != 0:
                return code
            known, until = said, time.monotonic() + agent.CONNECT_S  # the next word: that all is done

    def close(self) -> None:
        """This process is torchrun's again. Agents wait for `leave`."""
        os.environ.update(self._environment)

    def leave(self, *, ok: bool) -> None:
        """Tells the agents that all is done; torchrun ends those of a command that failed."""
        if ok:
            self._store("set", json.dumps(None))
        else:
            self._store("delete", "")  # else those that torchrun starts next would find it

    def _store(self, do: str, value: str) -> str:
        asked = {"host": self._host, "port": self._port, "key": KEY, "do": do, "value": value, "wait_s": _STORE_S}
        command = [sys.executable, "-P", "-c", _STORE]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
        if done.returncode:
            why = _last_line(done.stderr)
            raise DeviceError(f"the store of torchrun at {self._host}:{self._port} cannot be used: {why}")
        return done.stdout


class Slurm:
    """This process runs on one node of an allocation; `srun` starts an agent on each other node.

    Raises:
        UsageError: this is no node of an allocation.
        DeviceError: srun or scontrol is not installed, or scontrol does not name the nodes.
    """

    name, here, others = "slurm", True, False

    def __init__(self, gpus_per_node: int = 0) -> None:
        if "SLURM_JOB_NODELIST" not in os.environ or "SLURMD_NODENAME" not in os.environ:
            raise UsageError(
                "--launcher slurm was given in an allocation, on none of its nodes",
                hint="In the allocation: srun --nodes 1 --ntasks 1 --overlap autoplan ...; outside of any allocation "
                "autoplan makes a job of its own.",
            )
        _need("srun", "scontrol")
        named = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        done = _run_slurm(*named)
        nodes = done.stdout.split()
        if done.returncode or not nodes:
            raise DeviceError(f"scontrol does not name the nodes of the allocation: {_last_line(done.stderr)}")
        self._here = os.environ["SLURMD_NODENAME"]
        self._others = [node for node in nodes if node != self._here]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}

    def address(self) -> str:
        """What the name of this node resolves to."""
        return own_address(self._here)

    def ensure(self, wanted: Wanted) -> None:
        """One srun for each other node; one that has ended is started again."""
        for node in self._others:
            running = self._running.get(node)
            if running is not None and (running.poll() is None or _is_early(self._started_at[node])):
                continue
            # --overlap: the batch script is itself a step that has the nodes; --mem=0: all of the node's memory;
            # --cpu-bind=none: all of its cores, also where the cluster binds each task to one
            one = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", f"--nodelist={node}"]
            steps = [*one, "--export=ALL", "--unbuffered", "--quiet", *_COMMAND]
            self._started_at[node] = time.monotonic()
            self._running[node] = subprocess.Popen(
                steps, env=child_environment(wanted.planner, wanted.token), stdin=subprocess.DEVNULL, stdout=2
            )

    def close(self) -> None:
        """SIGTERM to the steps that do not end by themselves within some seconds, then SIGKILL."""
        give_up_at = time.monotonic() + 10.0
        while any(step.poll() is None for step in self._running.values()) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for step in self._running.values():
                if step.poll() is None:
                    end(step)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        step.wait(5.0)
        self._running.clear()

    def leave(self, *, ok: bool) -> None:
        """Nothing waits."""


class SlurmJob:
    """A job of its own: `sbatch` has SLURM choose the nodes, and `srun` starts an agent on each. This machine has none.

    What the job needs besides is said as for any sbatch: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and so on.

    Args:
        gpus_per_node: That a trial may use; none are asked for if SLURM has none.

    Raises:
        DeviceError: a program of SLURM is not installed.
    """

    name, here, others = "slurm", False, False

    def __init__(self, gpus_per_node: int = 0) -> None:
        _need("sbatch", "squeue", "scancel", "sinfo")
        has_gpus = gpus_per_node and "gpu" in _run_slurm("sinfo", "--noheader", "--format=%G").stdout
        self._gpus = gpus_per_node if has_gpus else 0
        self._job_name = f"autoplan-{secrets.token_hex(4)}"
        self._log = Path()
        self._job: str | None = None
        self._asked = False
        self._began_at = self._looked_at = 0.0
        self._short = 0

    def address(self) -> str:
        """What the name of this machine resolves to; agents connect to it."""
        return own_address(platform.node())

    def ensure(self, wanted: Wanted) -> None:
        """A job with so many nodes; one that has ended is made again. Waits for as long as SLURM has it wait.

        Raises:
            DeviceError: SLURM refuses the job, or it ends each time before it has done anything.
        """
        if self._job is not None and time.monotonic() < self._looked_at + QUEUE_LOOK_S:
            return
        state = self._state()
        if state is None:
            if self._job is not None:
                self._count_short()
            self._submit(wanted)
            state = self._state()
        said = ""
        while state is not None and state[0] in WAITING:
            if said != state[1]:
                said = state[1]
                wanted.on_note(f"job {self._job} of SLURM waits for {wanted.agents} node(s): {said}")
            time.sleep(QUEUE_LOOK_S)
            self._began_at, state = time.monotonic(), self._state()

    def _submit(self, wanted: Wanted) -> None:
        folder = Path(platformdirs.user_cache_dir("autoplan")) / "slurm"  # below the home folder, which nodes share
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log = folder / f"{self._job_name}.log"
        command = job_command(self._job_name, wanted.agents, self._gpus, self._log)
        environment = child_environment(wanted.planner, wanted.token)
        self._asked = True
        done = subprocess.run(command, input=JOB_SCRIPT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DeviceError(
                f"SLURM refuses the job: {_last_line(done.stderr)}",
                hint="What a job needs here is said by SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT (sbatch(1)).",
            )
        self._job, self._began_at = done.stdout.strip().partition(";")[0], time.monotonic()  # ID, or ID;CLUSTER

    def _state(self) -> tuple[str, str] | None:
        """The job's state and the reason for it; None: there is none, or it has ended."""
        if self._job is None:
            return None
        self._looked_at = time.monotonic()
        asked = ("squeue", "--noheader", f"--jobs={self._job}", "--states=all", "--format=%T %r")
        done = _run_slurm(*asked)
        if done.returncode and "Invalid job id" not in done.stderr:
            return "UNKNOWN", "SLURM does not answer"  # no reason to make another one
        return parse_state(done.stdout)

    def _count_short(self) -> None:
        """A job whose nodes cannot start an agent would end so each time.

        Raises:
            DeviceError: the last ones were all short.
        """
        self._short = self._short + 1 if time.monotonic() - self._began_at < SHORT_S else 0
        if self._short >= MOST_SHORT:
            text = self._log.read_text(errors="replace") if self._log.is_file() else ""
            raise DeviceError(
                f"{MOST_SHORT} jobs of SLURM ended at once, the last with: {_last_line(text)}",
                hint=f"Each node needs {sys.executable} and {self._log.parent} at these paths.",
            )

    def close(self) -> None:
        """Ends the job if it does not end by itself, as it does when the agents were told goodbye."""
        give_up_at = time.monotonic() + 10.0
        while (state := self._state()) is not None and state[0] not in WAITING and time.monotonic() < give_up_at:
            time.sleep(0.5)
        if self._asked:  # by its name: Ctrl-C may have come after sbatch made it and before it said its number
            _run_slurm("scancel", "--quiet", f"--name={self._job_name}")
            self._log.unlink(missing_ok=True)
        self._job, self._asked = None, False

    def leave(self, *, ok: bool) -> None:
        """Nothing waits."""


JOB_SCRIPT = f"""#!/bin/sh
# --kill-on-bad-exit: an agent that is killed ends the job, and the planner makes another.
exec srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --mem=0 \\
  --cpu-bind=none --kill-on-bad-exit=1 --unbuffered --export=ALL {shlex.join(_COMMAND)}
"""
"""What sbatch reads on stdin. Where the planner is, and the token, are in its environment."""


def job_command(name: str, nodes: int, gpus_per_node: int, log: Path) -> list[str]:
    """The sbatch of a job that has whole nodes: what others run there would disturb what is measured.

    Args:
        name: Of the job.
        nodes, gpus_per_node: That it needs.
        log: Where SLURM writes what srun and the agents say.
    """
    asked = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--no-requeue"]
    asked += [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    return ["sbatch", "--parsable", "--export=ALL", f"--output={log}", *asked]


def parse_state(text: str) -> tuple[str, str] | None:
    """State and reason of `squeue --format="%T %r"`; None: there is no such job any more, or it has ended."""
    state, _, reason = text.strip().partition("\n")[0].partition(" ")
    return (state, reason) if state in _ALIVE else None


def _run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer in a minute")


def _need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise DeviceError(f"{program} of SLURM is not on the PATH", hint="On Debian: apt install slurm-client.")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["(nothing)"])[-1]


class Ray:
    """A placement group reserves the other nodes; on each an actor starts the agent, and has the node's GPUs.

    The group has one bundle for each node, and Ray gives all of them or none. The label of the planner's own node is
    excluded: that is a node of the search already. If a node is lost, Ray places its bundle on another one. There is
    one actor on a node, not one for each rank: its agent starts the ranks as processes of its own, so that limits of
    memory, deadlines and the end of process trees are the same code as on one machine.

    Ray removes the group of a process that was killed, since it is not detached.

    Raises:
        DeviceError: Ray is not installed, or no cluster is found.
    """

    name, here, others = "ray", True, True

    def __init__(self, gpus_per_node: int = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise DeviceError(
                f"--launcher ray needs Ray, which cannot be imported: {error}", hint="pip install 'autoplan[ray]'"
            ) from error
        self._ray, self._gpus = ray, gpus_per_node
        self._began = False
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                raise DeviceError(
                    f"no cluster of Ray was found: {error}",
                    hint="ray start --head; elsewhere ray start --address HOST:6379",
                ) from error
            self._began = True
        self._group: Any = None
        self._actors: dict[int, Any] = {}  # by the number of the bundle, as all below
        self._ends: dict[int, Any] = {}
        self._started_at: dict[int, float] = {}
        self._short: dict[str, int] = {}  # by node: how many agents in a row ended soon after their start
        self._left_at: float | None = None  # the last time that a node of this group turned out to be of no use
        self._useless = set[str]()  # nodes whose agent was sent away, or cannot live: the next group is without them
        self._why_left = ""

    def address(self) -> str:
        """Ray's own for this node."""
        return own_address(self._ray.util.get_node_ip_address())

    def ensure(self, wanted: Wanted) -> None:
        """Reserves the nodes, once, and starts an agent on each; one that has ended is started again.

        A group cannot change one of its nodes. So where an agent was sent away, or ends each time soon after its start,
        the whole group is given back, and another is asked for; after a pause, in which others of the same start may be
        sent away too.

        Raises:
            DeviceError: Ray does not give the nodes, or nodes are of no use and there are too few others.
        """
        if not wanted.agents:
            return
        for index in [index for index, end in self._ends.items() if self._ray.wait([end], timeout=0)[0]]:
            self._take_end(index, wanted)
        if self._left_at is not None and not _is_early(self._left_at):
            if (usable := len(self._others())) < wanted.agents:
                raise DeviceError(
                    f"{usable} other node(s) of Ray's cluster can be used, and {wanted.agents} are needed"
                    f"{self._why_left}",
                    hint="Each node needs the same hardware and the same versions.",
                )
            wanted.on_note("Ray is asked for other nodes, and all agents start again")
            self._give_back()
        if self._group is None:
            self._reserve(wanted)
        for index in range(wanted.agents):
            if index not in self._ends and not _is_early(self._started_at.get(index)):
                self._start_in(index, wanted)

    def _reserve(self, wanted: Wanted) -> None:
        """Waits until Ray has reserved as many other nodes as agents are wanted.

        Raises:
            DeviceError: it has not, in time.
        """
        bundle = {"CPU": 1} | ({"GPU": self._gpus} if self._gpus else {})
        excluded = ",".join(sorted(self._excluded()))
        self._group = self._ray.util.placement_group(
            [bundle] * wanted.agents,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{NODE_LABEL: f"!in({excluded})"}] * wanted.agents,
        )
        ready = self._group.ready()
        if self._ray.wait([ready], timeout=PLACE_S)[0]:
            return
        asked = " and ".join(f"{count} {name}" for name, count in bundle.items())
        asked = f"{wanted.agents} other node(s) with {asked} each"
        wanted.on_note(f"Ray is asked for {asked}: {self._describe_cluster()}")
        if not self._ray.wait([ready], timeout=max(0.0, RESERVE_S - PLACE_S))[0]:
            raise DeviceError(
                f"Ray did not give {asked} in {RESERVE_S:g} s: {self._describe_cluster()}",
                hint="`ray status` says what holds them; --nodes asks for fewer.",
            )

    def _describe_cluster(self) -> str:
        """What the nodes have that may be given, and what is free."""
        having = [_resources(node["Resources"]) for node in self._others()]
        kinds = ", ".join(f"{having.count(kind)} node(s) with {kind}" for kind in dict.fromkeys(having)) or "no node"
        free = _resources(self._ray.available_resources())
        return f"the cluster has, besides this node, {kinds}; free in all of it: {free}"

    def _excluded(self) -> set[str]:
        """The planner's own node, and those that are of no use."""
        return {str(self._ray.get_runtime_context().get_node_id()), *self._useless}

    def _others(self) -> list[dict[str, Any]]:
        """The living nodes that may be given."""
        excluded = self._excluded()
        return [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in excluded]

    def _start_in(self, index: int, wanted: Wanted) -> None:
        """Starts the actor of a bundle, and the agent in it; Ray has them wait while a lost bundle has no node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        kind = self._ray.remote(num_cpus=1, num_gpus=self._gpus, scheduling_strategy=place)(RayNode)
        self._started_at[index] = time.monotonic()
        self._actors[index] = kind.remote()
        threads = os.environ.get(THREADS_VARIABLE)
        self._ends[index] = self._actors[index].serve.remote(wanted.planner, wanted.token, threads)

    def _take_end(self, index: int, wanted: Wanted) -> None:
        """Ends the actor of an agent that has ended, and notes a node that is of no use."""
        try:
            code, node, said = self._ray.get(self._ends[index])
            why = f"exit code {code}: {_last_line(said)}"
        except self._ray.exceptions.RayError as error:  # the actor, or its node, has ended; or no actor can start there
            places = self._ray.util.placement_group_table(self._group).get("bundles_to_node_id", {})
            code, node, why = None, str(places.get(index) or ""), _last_line(str(error))  # "": it has no node now
        if node in self._useless:  # it stays in _ends, so that no agent is started there again
            return
        if code == agent.SENT_AWAY or self._is_short_again(index, node, why, wanted):
            self._useless.add(node)
            self._left_at = time.monotonic()
        else:
            self._ray.kill(self._actors.pop(index))
            self._ends.pop(index)

    def _is_short_again(self, index: int, node: str, why: str, wanted: Wanted) -> bool:
        """Counts an agent that has ended; whether the last ones on its node all ended soon after their start."""
        short = bool(node) and time.monotonic() < self._started_at[index] + SHORT_S
        self._short[node] = self._short.get(node, 0) + 1 if short else 0
        if self._short[node] < MOST_SHORT:
            return False
        text = f"{MOST_SHORT} agents in a row ended at once on Ray's node {node}, the last with {why}"
        wanted.on_note(text)
        self._why_left = f"; {text}"
        return True

    def _give_back(self) -> None:
        """Ends the actors and the group."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._group, self._left_at = None, None
        for kept in (self._actors, self._ends, self._started_at):
            kept.clear()

    def close(self) -> None:
        """Ends the actors, and gives the nodes back."""
        if self._ends:
            self._ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=10.0)
        self._give_back()
        if self._began:
            self._ray.shutdown()
            self._began = False

    def leave(self, *, ok: bool) -> None:
        """Nothing waits."""


class RayNode:
    """The actor: it starts the agent as a process of its own, which ends with the planner, and with the actor."""

    def serve(self, planner: str, token: str, threads: str | None) -> tuple[int, str, str]:
        """Runs the agent; returns its exit code, Ray's name of the node, and the last line that the agent wrote.

        Args:
            planner, token: As `child_environment` takes them.
            threads: OMP_NUM_THREADS of the planner, if it is set there.
        """
        from ray import get_runtime_context

        environment = ray_environment(planner, token, threads)
        process = subprocess.Popen(_COMMAND, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        said: deque[str] = deque(maxlen=1)
        reader = threading.Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(1.0)  # what the agent left may still hold its end of the pipe
        return code, get_runtime_context().get_node_id(), "".join(said)


def _pass_on(lines: IO[bytes], said: deque[str]) -> None:
    """Writes the lines to stderr, which Ray keeps in a log of the node, and adds each that is not empty to `said`."""
    for line in lines:
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        if text.strip():
            said.append(text)


def _resources(having: dict[str, float]) -> str:
    return " and ".join(f"{having.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def ray_environment(planner: str, token: str, threads: str | None) -> dict[str, str]:
    """The environment of an agent that this process, an actor, starts.

    Ray sets OMP_NUM_THREADS to the cores that an actor asked for, 1 here. The ranks there would have one thread each,
    and those of the planner's node all cores. They get what the planner has.
    """
    environment = child_environment(planner, token) | {agent.PARENT_VARIABLE: str(os.getpid())}
    environment.pop(THREADS_VARIABLE, None)
    return environment if threads is None else environment | {THREADS_VARIABLE: threads}


def is_outside(launcher: str) -> bool:
    """Whether this machine is none of the nodes: with SLURM, outside of any allocation."""
    return launcher == "slurm" and "SLURM_JOB_ID" not in os.environ


ENGINES: dict[str, Callable[[int], Engine]] = {
    "elastic": Elastic,
    "slurm": lambda gpus_per_node: SlurmJob(gpus_per_node) if is_outside("slurm") else Slurm(gpus_per_node),
    "ray": Ray,
}
"""By their names in --launcher. Each is made with the number of GPUs on a node."""


def with_engine(launcher: str, gpus_per_node: int, work: Callable[[Engine], R], is_ok: Callable[[R], bool]) -> R:
    """Does some work with what starts agents on the other nodes, and tells these how it ended.

    Args:
        launcher: One of ENGINES.
        gpus_per_node: That an agent needs.
        work: Is given the engine.
        is_ok: Whether its result is a good end, after which torchrun starts nothing again.

    Raises:
        SystemExit: torchrun started this process as an agent, and what it was for has ended.
        AutoplanError: the engine is not installed, or this is no place where it can be used; or as the work does.
    """
    engine, ok = ENGINES[launcher](gpus_per_node), False
    if isinstance(engine, Elastic) and not engine.first:
        raise SystemExit(engine.serve())
    try:
        result = work(engine)
        ok = is_ok(result)
        return result
    finally:
        # of a bad end the cause is what the user is to see
        with contextlib.nullcontext() if ok else contextlib.suppress(AutoplanError):
            engine.leave(ok=ok)


def _is_early(started_at: float | None) -> bool:
    """Whether what was started then is not to be started again yet; None: it never was."""
    return started_at is not None and time.monotonic() < started_at + AGAIN_S

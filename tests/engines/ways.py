"""The ways to start a command on several nodes of this machine, each with the real engine. All nodes are 127.0.0.x.

A command is what Python is given: `["-m", "autoplan", "search", ...]`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.engines.cluster import free_port
from tests.engines.slurm import Slurm

ROOT = Path(__file__).parents[2]
TIME_S = 240.0
RUN = "AUTOPLAN_TEST_RUN"
os.environ[RUN] = secrets.token_hex(8)  # what is started here has it, on each node


class WayError(Exception):
    """The command failed; the text is what it said."""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {"AUTOPLAN_ADDRESS": "127.0.0.1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given, **more}


def ours(name: str = "autoplan.processes") -> list[psutil.Process]:
    """The agents, zygotes and ranks that were started from here and still run; or those with another text."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()) and process.environ().get(RUN) == os.environ[RUN]:
                found.append(process)
    return found


def are_gone(within_s: float = 30.0) -> bool:
    """Whether none of them is left after so long."""
    give_up_at = time.monotonic() + within_s
    while (left := bool(ours())) and time.monotonic() < give_up_at:
        time.sleep(0.5)
    return not left


def run_here(command: Sequence[str], *, time_s: float = TIME_S, **more: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], env=environment(**more), cwd=ROOT, timeout=time_s, capture_output=True, text=True
    )
    if done.returncode:
        raise WayError(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


def start_torchruns(
    folder: Path, command: Sequence[str], *, nodes: int = 2, restarts: int = 1
) -> list[subprocess.Popen[bytes]]:
    """A torchrun for each node, which starts again what failed, at most so often; each has a log in the folder."""
    port, running = free_port(), []
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
    torchrun += [
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=test",
    ]
    for number in range(1, nodes + 1):
        with (folder / f"torchrun{number}.log").open("ab") as log:
            one = [*torchrun, f"--local-addr=127.0.0.{number}", *command]
            running.append(subprocess.Popen(one, env=environment(), cwd=ROOT, stdout=log, stderr=log))
    return running


def run_torchruns(folder: Path, command: Sequence[str], *, time_s: float = TIME_S) -> list[int]:
    """The exit codes of the torchruns of two nodes."""
    running = start_torchruns(folder, command)
    try:
        return [process.wait(time_s) for process in running]
    finally:
        for process in running:
            process.terminate()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("torchrun*.log")))


def slurm_environment(slurm: Slurm) -> dict[str, str]:
    """As on a login node of it."""
    own = {name: slurm.environment[name] for name in ("PATH", "SLURM_CONF")}
    home = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(slurm.folder / "cache"))}
    return {name: text for name, text in environment(**own, **home).items() if not name.startswith("SLURM_JOB")}


def run_in_job(slurm: Slurm, text: str, *, time_s: float = TIME_S) -> None:
    """A line of a shell in an allocation of two nodes."""
    log = slurm.folder / "job.log"
    job = ["sbatch", "--wait", "--nodes=2", f"--output={log}", "--wrap", text]
    done = subprocess.run(job, env=slurm_environment(slurm), cwd=ROOT, timeout=time_s)
    if done.returncode:
        raise WayError(log.read_text()[-6000:] if log.exists() else f"sbatch ended with {done.returncode}")


def run_at_login(slurm: Slurm, text: str, *, time_s: float = TIME_S) -> None:
    """A line of a shell outside of any allocation."""
    done = subprocess.run(
        ["sh", "-c", text], env=slurm_environment(slurm), cwd=ROOT, timeout=time_s, capture_output=True, text=True
    )
    if done.returncode:
        raise WayError(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    if left := slurm.jobs():
        raise WayError(f"jobs are left: {left}")


def as_text(command: Sequence[str]) -> str:
    """For a shell."""
    return shlex.join([sys.executable, *command])


@contextlib.contextmanager
def ray_nodes(nodes: int) -> Iterator[Any]:
    """A cluster of Ray.

    Raises:
        ImportError: Ray is not installed.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[dict[str, str]]:
    """The environment of a command on the first node of a cluster of Ray.

    Raises:
        ImportError: Ray is not installed.
    """
    with ray_nodes(nodes) as cluster:
        yield {"RAY_ADDRESS": cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}

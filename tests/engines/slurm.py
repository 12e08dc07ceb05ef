"""A SLURM of two nodes on this machine, with its own folder, ports and key: slurmctld, two slurmd and munged."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.engines.cluster import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue", "scancel")


def missing_programs() -> list[str]:
    """Those of SLURM and munge that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


class Slurm:
    """Raises RuntimeError, with the reason, where SLURM is not installed or does not start; it needs root."""

    def __init__(self, folder: Path) -> None:
        if missing := missing_programs():
            raise RuntimeError(f"{missing[0]} is not installed here: apt-get install slurm-wlm")
        if os.geteuid() != 0:
            raise RuntimeError("slurmd and munged are started as root")
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()
        folder.chmod(0o755)
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        cpus, host, ports = os.cpu_count() or 1, platform.node(), [free_port() for _ in range(3)]
        lines = [
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\nSlurmUser=root",
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge\nCredType=cred/munge",
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmdPidFile={folder}/%n.pid",
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log",
            "ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nSelectType=select/cons_tres\nMpiDefault=none",
            "SwitchType=switch/none\nReturnToService=2\nSlurmdTimeout=30\nInactiveLimit=0\nKillWait=5",
            *(
                f"NodeName=n{one} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[one]} CPUs={cpus} RealMemory=1000"
                for one in (1, 2)
            ),
            "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        files = [f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        self._start("munged", "-F", "--force", f"--socket={folder}/munge", f"--key-file={folder}/key", *files)
        self._start("slurmctld", "-D")
        for one in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", one)
        give_up_at = time.monotonic() + 40.0
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != "2":
            if time.monotonic() > give_up_at:
                logs = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")))
                self.close()
                raise RuntimeError(f"SLURM does not start here:\n{logs}")
            time.sleep(0.5)

    def run(self, *command: str, check: bool = False, timeout_s: float = 30.0) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=check
        )
        return done.stdout

    def jobs(self, within_s: float = 20.0) -> str:
        """The jobs that still run or wait after so long; empty: none."""
        give_up_at = time.monotonic() + within_s
        while (found := self.run("squeue", "--noheader").strip()) and time.monotonic() < give_up_at:
            time.sleep(0.5)
        return found

    def close(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)
            process.kill()

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self.running)}.out.log").open("wb") as output:
            self.running.append(subprocess.Popen(command, env=self.environment, stdout=output, stderr=output))
        if command[0] == "munged":
            while not (self.folder / "munge").exists() and self.running[-1].poll() is None:
                time.sleep(0.05)


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    try:
        yield slurm
    finally:
        slurm.close()

"""A PostgreSQL server of its own, in a folder, on a free port of 127.0.0.1; and a proxy that can cut the network."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSWORD = "not-for-any-file-3141"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def find_postgresql() -> Path | None:
    """The folder of the server's programs: of Debian's newest package, on the PATH, or in the wheel pgserver."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if named := str(found[-1]) if found else shutil.which("initdb"):
        return Path(named).resolve().parent
    wheel = importlib.util.find_spec("pgserver")
    if wheel is None or wheel.origin is None:
        return None
    programs = Path(wheel.origin).parent / "pginstall" / "bin"
    return programs if (programs / "initdb").exists() else None


class Cluster:
    """A server that is started, stopped and killed at will; as root it runs as the user postgres or nobody.

    Args:
        folder: For its files.
        connections: At most.
        disk_mb: Of a disk of its own (a tmpfs, which needs root), which `fill_disk` fills; None: it has none.

    Raises:
        RuntimeError: PostgreSQL is not installed, or does not start; and why.
    """

    def __init__(self, folder: Path, *, connections: int = 200, disk_mb: int | None = None) -> None:
        self.folder, self.port = folder / "pg", free_port()
        programs = find_postgresql()
        if programs is None:
            raise RuntimeError("PostgreSQL is not installed here: apt-get install postgresql, or pip install pgserver")
        self.bin = programs
        self.user: dict[str, Any] = {}
        self.folder.mkdir()
        self.disk_mb = disk_mb
        if disk_mb is not None:
            asked = ["mount", "-t", "tmpfs", "-o", f"size={disk_mb}m", "tmpfs", str(self.folder)]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"a disk that can be full needs a tmpfs: {done.stderr.strip()}")
        if os.geteuid() == 0:  # initdb refuses root
            import pwd

            known = {entry.pw_name for entry in pwd.getpwall()}
            name = "postgres" if "postgres" in known else "nobody"
            self.user = {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}
            shutil.chown(self.folder, name)
            folder.chmod(0o711)
        (self.folder / "password").write_text(PASSWORD)
        (self.folder / "password").chmod(0o644)
        asked = ["-U", "planner", "-A", "scram-sha-256", f"--pwfile={self.folder / 'password'}", "--no-sync"]
        self._run("initdb", "-D", self.data, *asked)
        with open(self.data / "postgresql.conf", "a") as file:
            file.write(f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nmax_connections = {connections}\n")
            file.write("unix_socket_directories = ''\n")
            if disk_mb is not None:
                file.write("min_wal_size = 32MB\nmax_wal_size = 48MB\nwal_recycle = off\n")
        self.start()
        os.environ["PGPASSWORD"] = PASSWORD

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def url(self, name: str, port: int | None = None) -> str:
        return f"postgresql://planner@127.0.0.1:{port or self.port}/{name}"

    def start(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "start")

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-m", mode, "stop")

    @property
    def runs(self) -> bool:
        """Whether it answers."""
        with socket.socket() as tried:
            tried.settimeout(1.0)
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def fill_disk(self, seconds: float) -> None:
        """Has no byte left on its disk for so long; a server that does not bear that is started again."""
        path = self.folder / "filler"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(seconds)
        path.unlink()
        time.sleep(1.0)
        if not self.runs:
            with contextlib.suppress(RuntimeError):
                self.stop("immediate")
            self.start()

    def restart(self, mode: str = "immediate") -> None:
        self.stop(mode)
        self.start()

    def make(self, name: str) -> str:
        """The URL of a new database."""
        self.query("postgres", f'CREATE DATABASE "{name}"')
        return self.url(name)

    def query(self, database: str, text: str, *asked: Any) -> list[Any]:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(text, asked)
            return cursor.fetchall() if cursor.description is not None else []

    def terminate(self) -> int:
        """Ends the connections of all planners; returns how many there were: none while the server is away."""
        import psycopg

        text = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'autoplan'"
        try:
            return len(self.query("postgres", text))
        except psycopg.OperationalError:
            return 0

    def _run(self, name: str, *arguments: Any) -> None:
        command = [str(self.bin / name), *map(str, arguments)]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", timeout=120, **self.user
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()}")


@contextlib.contextmanager
def running_cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(folder, **options)
    try:
        yield cluster
    finally:
        cluster.stop("immediate")
        if cluster.disk_mb is not None:
            subprocess.run(["umount", "--lazy", str(cluster.folder)], check=True)


class Proxy:
    """Passes connections on to a server; while it is cut, nothing gets through, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._target, self._open = port, threading.Event()
        self._open.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._open.clear()
        time.sleep(seconds)
        self._open.set()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            self._open.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server is down
                client.close()
                continue
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

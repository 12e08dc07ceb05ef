"""Installs what `make test-engines` starts and this machine has not: PostgreSQL and SLURM.

    python -m tests.engines.install

As root both come from Debian's packages. Without root PostgreSQL comes from a wheel, and there is no SLURM. What could
not be installed is said here, and the tests that need it fail with their reason: the exit status is 0 all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.engines.cluster import find_postgresql
from tests.engines.slurm import missing_programs

WHEEL = "pgserver==0.1.4"
"""PostgreSQL 16 with initdb and pg_ctl, for Linux and macOS."""


def apt_install(*packages: str) -> str | None:
    """Why Debian's packages could not be installed; None: they were."""
    if os.geteuid() != 0:
        return "this is not root"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    asked = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    for command in (["apt-get", "update"], asked):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]


def main() -> None:
    if find_postgresql() is None and (why := apt_install("postgresql")) is not None:
        print(f"no PostgreSQL of Debian's ({why}): from a wheel", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WHEEL]
        if subprocess.run(command).returncode:
            print("PostgreSQL could not be installed: what needs it will fail", file=sys.stderr)
    if (missing := missing_programs()) and (why := apt_install("slurm-wlm")) is not None:
        print(f"SLURM ({missing[0]}) could not be installed ({why}): what needs it will fail", file=sys.stderr)


if __name__ == "__main__":
    main()

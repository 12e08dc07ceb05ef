"""The wheels for a GPU session on a machine without a network, and the calls that use them.

    python -m benchmarks.gpu.wheels wheels --python 3.12

It needs a network, and no Python of that version: pip downloads what was built for it. torch is not among them: the
machine has its own.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_session import NEEDED

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FIRST_PARTS = ("s", "b1", "l", "b2", "m")
"""In this order: what breaks; GPT-2 with a ledger of its search; the losses; by hand; what does not fit."""


def download_command(folder: Path, python: str) -> list[str]:
    """The command that downloads them, with what they need."""
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms),
        *sorted(NEEDED.values()),
    ]


def main() -> None:
    """Downloads them and prints the calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    given = parser.parse_args()
    subprocess.run(download_command(given.folder, given.python), check=True)
    print(f"{len(list(given.folder.glob('*.whl')))} wheels in {given.folder}. On the machine with the GPU, in order:")
    for part in FIRST_PARTS:
        call = ["python", "-m", "benchmarks.gpu_session", "--part", part, "--archive", "session.tar.gz"]
        print(shlex.join([*call, "--wheels", str(given.folder)]))


if __name__ == "__main__":
    main()

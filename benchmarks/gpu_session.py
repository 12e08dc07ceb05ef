"""Everything that needs a GPU, in parts that each fit one call of nine minutes, in one archive.

    python -m benchmarks.gpu_session --part s --archive session.tar.gz [--wheels DIR]
    python -m benchmarks.gpu_session --part a --archive try.tar.gz --device cpu --small     # to try it

Each call unpacks the archive, adds what its part finds, and packs it again after every step; so a call that is cut off
loses one step, and a part that is called again goes on. `python -m benchmarks.gpu.wheels` prints the first calls.

Parts, with the seconds that their steps are expected to take (and may take) on one H100:

    s   all that a user does, side by side: a look for what breaks, whose times mean nothing: the probes 25, then each
        value of each knob on two layers, the tests marked cuda, the losses, the doctor, the examples: 190 (240)
    a   the probes 40 (90), the driver's own report 5 (30), the tests marked cuda 60 (120), three trials 165 (270):
        eager bf16; compile=model; compile_mode=reduce-overhead at accumulation 1: 270 (510)
    b1  the search for GPT-2 124M, 524,288 tokens a step: a budget of 420, at most a tenth past it: 440 (490)
    m   what does not fit as it is, in 22 GiB: Llama 3.2 1B in fp32, a Llama of 7B with LoRA: 450 (525)
    l   the forms of the fused loss at the heads of three models: 60 (200)
    b2  the script by hand finds its micro-batch 70 (150), then rounds of it, the plan and the fp32 baseline, in an
        order that is drawn, while the time lasts: 85 each, three 255: 325 (510)
    c   predicted against measured memory and step time: 4 families, 5 configurations each: 4 x (start, trace 15;
        five trials 45; one of them compiles 25): 340 (520)
    d   the three largest micro-batches with and without expandable_segments 6 x 12; then knobs one by one from one
        setting: compile modes 40, 45, 130, 140, attention 3 x 10, the others 10 to 40 each: 500 (520); what is left is
        done when it is called again

summary.json in the archive has every step with its exit status and seconds, and the figures that documents quote. On a
machine without a network, --wheels is a folder that benchmarks/gpu/wheels.py has filled; what cannot be imported is
installed from there, for this session alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 9.0
LAST_S = 10.0
"""Kept at the end of a call for the archive."""

NEEDED = {  # what autoplan imports, besides torch, and the package that has it
    "cloudpickle": "cloudpickle",
    "filelock": "filelock",
    "numpy": "numpy",
    "optuna": "optuna",
    "platformdirs": "platformdirs",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "rich": "rich",
    "transformers": "transformers>=5.0",
    "typer": "typer",
    "yaml": "pyyaml",
}


class Session:
    """Runs the steps of one part within the time of a call, and keeps what they say.

    Args:
        archive: Where everything is kept; what it holds already is there again.
        seconds: Of this call.
        device: cuda, or cpu to try it.
        small: Tiny sizes.
        wheels: A folder of wheels, or None.
    """

    def __init__(self, archive: Path, seconds: float, device: str, *, small: bool, wheels: Path | None) -> None:
        self._ends = time.monotonic() + seconds
        self.archive, self.device, self.small = archive.resolve(), device, small
        self._one_writes = threading.Lock()
        # always the same place: plans and stores name the files of their models by it
        self.folder = Path(tempfile.gettempdir()) / f"autoplan-gpu-{self.archive.name.split('.')[0]}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.results = self.folder / "session"
        self.results.mkdir(parents=True)
        if self.archive.exists():
            with tarfile.open(self.archive) as packed:
                safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in each Python 3.11
                packed.extractall(self.folder, **safe)
        paths = [str(ROOT)]
        if wheels is not None:
            site = str(self._install(wheels))
            paths.append(site)
            sys.path.append(site)  # the parts import autoplan in this process too
            importlib.invalidate_caches()
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}

    @property
    def left_s(self) -> float:
        """Seconds left for steps."""
        return self._ends - time.monotonic() - LAST_S

    def path(self, name: str) -> Path:
        """A file or folder in the archive."""
        return self.results / name

    def keep(self, name: str, document: Any) -> Path:
        """Writes a JSON file into the archive."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path

    def run(
        self,
        name: str,
        command: list[str],
        *,
        limit_s: float,
        least_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> str | None:
        """Runs a command; gives what it wrote to stdout if it ended well. Without `least_s` left it is not begun."""
        seconds, began = min(self.left_s, limit_s), time.monotonic()
        status: int | str = "no time left"
        outputs = [self.path(f"{name}.{stream}") for stream in ("out", "err")]
        outputs[0].parent.mkdir(parents=True, exist_ok=True)
        if seconds > least_s:
            print(f"[{name}] {' '.join(command)}  (up to {seconds:.0f} s)", flush=True)
            with open(outputs[0], "w") as stdout, open(outputs[1], "w") as stderr:
                try:
                    status = subprocess.run(
                        command,
                        stdout=stdout,
                        stderr=stderr,
                        timeout=seconds,
                        cwd=folder,
                        env={**self.environment, **(environment or {})},
                        check=False,
                    ).returncode
                except subprocess.TimeoutExpired:
                    status = f"ended after {seconds:.0f} s"
                except OSError as error:
                    status = str(error)
        taken_s = round(time.monotonic() - began, 1)
        with self._one_writes:
            with open(self.path("steps.jsonl"), "a") as file:
                file.write(json.dumps({"name": name, "command": command, "status": status, "seconds": taken_s}) + "\n")
            print(f"[{name}] {status} after {taken_s} s", flush=True)
            self.pack()
        return outputs[0].read_text() if status == 0 else None

    def python(self, name: str, module: str, *arguments: str, **options: Any) -> str | None:
        """Runs a module of Python; the options are those of `run`."""
        return self.run(name, [sys.executable, "-m", module, *arguments], **options)

    def pack(self) -> None:
        """Writes the archive anew, in one move; without the folders of single trials."""
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        packed = self.archive.with_name(self.archive.name + ".new")
        with tarfile.open(packed, "w:gz") as file:
            file.add(self.results, arcname="session", filter=_without_scratch)
        packed.replace(self.archive)

    def close(self) -> None:
        """Removes the unpacked files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _install(self, wheels: Path) -> Path:
        """Installs what cannot be imported from a folder of wheels; returns where."""
        target = self.folder / "site"
        missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
        if missing:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
            subprocess.run([*command, "--target", str(target), *missing], check=True)
        return target


def _without_scratch(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts
    return None if "trials" in parts[2:] or member.size > 50 << 20 else member


def main() -> int:
    from benchmarks.gpu import parts
    from benchmarks.gpu.summary import summarise

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=tuple(parts.PARTS), help="which one")
    parser.add_argument("--archive", type=Path, required=True, help="the records of all parts: FILE.tar.gz")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time of this call")
    parser.add_argument("--wheels", type=Path, default=None, help="a folder of wheels for what is not installed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it")
    parser.add_argument("--small", action="store_true", help="tiny models and short searches: to try it")
    given = parser.parse_args()
    session = Session(given.archive, given.minutes * 60, given.device, small=given.small, wheels=given.wheels)
    try:
        parts.PARTS[given.part](session)
        session.keep("summary.json", summarise(session.results))
        session.pack()
        print(session.path("summary.json").read_text())
    finally:
        session.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

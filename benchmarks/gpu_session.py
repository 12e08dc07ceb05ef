"""Everything that needs a GPU, in one command.

    python -m benchmarks.gpu_session --out DIR [--part probe,search,modes,models,checks] [--minutes 9]

Each part runs commands of autoplan, one after another, within the minutes given. Their output goes to files in DIR.
DIR/summary.json has the figures that the documents quote: the speed of the plan against the plain baseline and the
expert's usual setting, and the predicted memory of each trial against the allocator's peak. If a part fails, that is
recorded and the next part runs. Parts:

    probe    the hardware profile, the output of nvidia-smi, the collectives over NCCL
    search   a search for GPT-2, with its plan and trial records
    modes    the modes of torch.compile with bf16
    models   one search each for GPT-2 large and Llama 3.2 1B
    checks   the tests marked cuda, the parity check of the plan, the exported PyTorch script

If the machine has no network, download the missing wheels elsewhere (`pip download --only-binary=:all:`) and install
them with `pip install --no-index` first. Copy DIR into benchmarks/results/ and commit it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("probe", "search", "modes", "models", "checks")
ROOT = Path(__file__).resolve().parent.parent


class Session:
    """Runs commands until the time is used up, and keeps their output.

    Args:
        out: The folder of the records.
        seconds: Time for all commands.
        device: cuda, or cpu to test this script.
    """

    def __init__(self, out: Path, seconds: float, device: str) -> None:
        self.out = out
        self.device = device
        self._ends = time.monotonic() + seconds
        self.steps: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._ends - time.monotonic()

    def run(self, name: str, command: list[str], *, limit_s: float | None = None) -> int | None:
        """Runs a command; its output goes to NAME.out and NAME.err. Returns its exit status; None: no time."""
        seconds = min(self.left_s - 5, limit_s or self.left_s)
        began = time.monotonic()
        status: int | None = None
        if seconds > 5:
            print(f"[{name}] {' '.join(command)}  (up to {seconds:.0f} s)", flush=True)
            with open(self.out / f"{name}.out", "w") as stdout, open(self.out / f"{name}.err", "w") as stderr:
                try:
                    status = subprocess.run(
                        command, stdout=stdout, stderr=stderr, timeout=seconds, cwd=ROOT, check=False
                    ).returncode
                except (subprocess.TimeoutExpired, OSError) as error:
                    print(f"[{name}] {error}", file=stderr)
        step = {"name": name, "command": command, "exit_status": status, "seconds": time.monotonic() - began}
        self.steps.append(step)
        print(f"[{name}] exit {status} after {step['seconds']:.1f} s", flush=True)
        return status

    def autoplan(self, name: str, *arguments: str, limit_s: float | None = None) -> int | None:
        """Runs a command of autoplan."""
        return self.run(name, [sys.executable, "-m", "autoplan", *arguments], limit_s=limit_s)

    def search(self, name: str, *arguments: str, seconds: float) -> None:
        """Runs a search with its own store in the folder of the records, and keeps its document and its plan."""
        budget_s = int(min(seconds, self.left_s - 30))
        if budget_s < 60:
            self.steps.append({"name": name, "exit_status": None, "skipped": "too little time left"})
            return
        self.autoplan(
            f"{name}.search",
            *("search", *arguments, "--device", self.device, "--budget", f"{budget_s}s", "--json"),
            *("--out", str(self.out / f"{name}.plan.json"), "--store", str(self.out / "stores" / name)),
            limit_s=budget_s * 1.2,
        )


def run_probe(session: Session) -> None:
    session.run("nvidia-smi", ["nvidia-smi", "-q"], limit_s=20)
    session.run("topology", ["nvidia-smi", "topo", "-m"], limit_s=20)
    session.autoplan("probe", "probe", "--fresh", "--json", limit_s=90)


def run_search(session: Session) -> None:
    session.search("gpt2", "--model", "gpt2", seconds=session.left_s - 20)


def run_modes(session: Session) -> None:
    fixed = ["--fix", "precision=bf16", "--fix", "attention=own", "--fix", "micro_batch=32"]
    session.search("modes", "--model", "gpt2", *fixed, "--fix", "compile=model", seconds=240)


def run_models(session: Session) -> None:
    half = session.left_s / 2
    session.search("gpt2-large", "--model", "gpt2-large", seconds=half)
    session.search("llama3.2-1b", "--model", "llama3.2-1b", "--seq-len", "2048", seconds=half)


def run_checks(session: Session) -> None:
    session.run("tests", [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"], limit_s=240)
    plan = next(iter(sorted(session.out.glob("*.plan.json"))), None)
    if plan is not None:
        session.autoplan("verify", "verify", str(plan), limit_s=180)
        script = session.out / "exported.py"
        session.autoplan("export", "export", str(plan), "--to", "pytorch", "--out", str(script), limit_s=60)
        session.run("exported", [sys.executable, str(script)], limit_s=180)


def summarise(session: Session) -> dict[str, Any]:
    """The figures that documents quote, from the documents of the searches in the folder of the records."""
    import torch

    searches = {}
    for path in sorted(session.out.glob("*.search.out")):
        try:
            document = json.loads(path.read_text())
        except ValueError:
            continue
        searches[path.name.removesuffix(".search.out")] = _figures(document)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "steps": session.steps,
        "searches": searches,
    }


def _figures(document: dict[str, Any]) -> dict[str, Any]:
    plan = document.get("plan") or {}
    rows = []
    for trial in document.get("trials", []):
        measured = trial.get("peak_memory") or {}
        predicted = trial.get("predicted_peak_memory_bytes")
        actual = measured.get("allocated_bytes") or trial.get("peak_memory_bytes")
        rows.append(
            {
                "number": trial.get("number"),
                "purpose": trial.get("purpose"),
                "config": trial.get("config"),
                "outcome": trial.get("outcome"),
                "tokens_per_s": trial.get("tokens_per_s"),
                "predicted_over_measured_memory": predicted / actual if predicted and actual else None,
                "predicted_over_measured_time": (
                    trial["predicted_step_time_s"] / trial["step_time_s"]["median"]
                    if trial.get("predicted_step_time_s") and trial.get("step_time_s")
                    else None
                ),
            }
        )
    return {
        "status": document.get("status"),
        "config": plan.get("config"),
        "speedup_over_plain_fp32": plan.get("speedup"),
        "alternatives": plan.get("alternatives"),
        "trials": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--part", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to test this script")
    options = parser.parse_args()
    unknown = set(options.part.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    session = Session(options.out.resolve(), options.minutes * 60, options.device)
    for part in PARTS:
        if part in options.part.split(","):
            globals()[f"run_{part}"](session)
    (session.out / "summary.json").write_text(json.dumps(summarise(session), indent=2) + "\n")
    print((session.out / "summary.json").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

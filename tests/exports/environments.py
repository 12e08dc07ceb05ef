"""Makes an environment for a tool that is not in the test extra: `python -m tests.exports.environments NAME...`.

An environment is `.venv-exports/NAME`: a virtual environment that sees the packages of the one that made it (through a
.pth file) and has what `tests/exports/environments/NAME.txt` asks for besides, at the versions of constraints.txt. So
torch is installed once. Without a name, the environments that there are files for are listed; `all` makes them all.

Tests ask for one with `needs_environment(NAME)`, which skips them where it is missing, and run its Python with
`run_python(NAME, ...)`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("AUTOPLAN_EXPORT_ENVIRONMENTS") or ROOT / ".venv-exports")
REQUIREMENTS = Path(__file__).with_name("environments")
CONSTRAINTS = ROOT / "constraints.txt"


def names() -> list[str]:
    """The environments that there are requirements for."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def python_of(name: str) -> Path:
    """The Python of an environment, whether it is there or not."""
    return FOLDER / name / "bin" / "python"


def why_missing(name: str) -> str | None:
    """Why an environment cannot be used; None: it can."""
    stamp = FOLDER / name / "stamp"
    if not python_of(name).exists() or not stamp.exists():
        return f"there is no environment {name}: python -m tests.exports.environments {name}"
    if stamp.read_text() != _stamp(name):
        return f"the environment {name} is of other requirements: python -m tests.exports.environments {name}"
    return None


def needs_environment(name: str) -> list[pytest.MarkDecorator]:
    """The marks of tests that need an environment: `pytestmark = needs_environment("trl")`."""
    reason = why_missing(name)
    return [pytest.mark.environment, pytest.mark.skipif(reason is not None, reason=reason or "")]


def make_environment(name: str) -> Path:
    """Makes an environment, or makes it again where its requirements changed; returns its Python."""
    if why_missing(name) is None:
        return python_of(name)
    folder = FOLDER / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = python_of(name)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(site) / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    own = REQUIREMENTS / f"{name}.txt"
    subprocess.run([*install, "-c", CONSTRAINTS, "-r", own], check=True, cwd=ROOT)
    (folder / "stamp").write_text(_stamp(name))
    return python


def run_python(
    name: str | None,
    arguments: Sequence[str | Path],
    *,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launcher: Sequence[str] = (),
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs the Python of an environment, with autoplan and the tests of this clone on its path.

    Args:
        name: The environment; None: the Python of the tests themselves.
        arguments: What follows `python`: `["-m", "accelerate.commands.launch", ...]`, `["script.py"]`.
        timeout_s: Seconds; its whole process group is ended then.
        env: Variables besides.
        cwd: The folder that it runs in; None: the clone.
        launcher: Words before `python`.
        check: Fail with the end of its output where it fails.
    """
    python = sys.executable if name is None else str(python_of(name))
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    if name is not None:
        variables["TORCH_EXTENSIONS_DIR"] = str(FOLDER / name / "extensions")  # what a tool compiles, it compiles once
    process = subprocess.Popen(
        [*launcher, python, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables | dict(env or {}),
        cwd=cwd or ROOT,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # launchers end their ranks at this signal, which are in sessions of their own
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        raise AssertionError(f"no end within {timeout_s} s\n{out[-2000:]}\n{err[-4000:]}") from None
    assert not check or process.returncode == 0, f"exit code {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _stamp(name: str) -> str:
    """What an environment was made of."""
    texts = (REQUIREMENTS / f"{name}.txt").read_text(), CONSTRAINTS.read_text(), sysconfig.get_path("purelib")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


if __name__ == "__main__":
    wanted = names() if sys.argv[1:] == ["all"] else sys.argv[1:]
    unknown = sorted(set(wanted) - set(names()))
    if unknown or not wanted:
        print(f"environments: {', '.join(names())}, or all", file=sys.stderr)
        raise SystemExit(2)
    for each in wanted:
        print(make_environment(each))

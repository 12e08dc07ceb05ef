"""A wheel, and a source distribution, installed in an environment of its own, import and answer from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cases import some
from tests.recorded import make_plan

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("autoplan", "planner", "probes", "strategies", "pyproject.toml", "README.md")

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its stderr is the failure's text."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=some(["wheel", "sdist"], ["sdist"]))  # whose wheel is built too
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds what was built, and of the test's own only the dependencies."""
    base = tmp_path_factory.mktemp(request.param)
    tree = base / "tree"
    tree.mkdir()
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tree / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tree / part)
    if request.param == "sdist":
        code = "import setuptools.build_meta, sys; setuptools.build_meta.build_sdist(sys.argv[1])"
        call(sys.executable, "-c", code, base, cwd=tree)
        (tree,) = base.glob("autoplan-*.tar.gz")
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", base, tree, cwd=base)
    (wheel,) = base.glob("autoplan-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", base / "env", cwd=base)
    python = base / "env" / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=base)
    # The dependencies come from the test's own environment. A .pth in a folder that a .pth names is not read, so an
    # editable autoplan there stays out of sight.
    (site,) = (base / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_imports_from_another_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import autoplan, autoplan.planner.plan.plan, autoplan.strategies.config, autoplan.probes.profile as p;"
        "print(autoplan.__file__); print(p.__file__)"
    )
    for line in call(installed / "python", "-c", code, cwd=tmp_path).splitlines():
        assert line.startswith(str(installed.parent)), "not the wheel's own copy"


def test_help_answers(installed: Path, tmp_path: Path) -> None:
    text = call(installed / "autoplan", "--help", cwd=tmp_path)
    assert "search" in text and "export" in text


def test_commands_answer(installed: Path, tmp_path: Path) -> None:
    make_plan().save(tmp_path / "plan.json")
    assert "3.20 times" in call(installed / "autoplan", "show", cwd=tmp_path)
    assert "precision" in call(installed / "autoplan", "knobs", cwd=tmp_path)
    layouts = call(installed / "autoplan", "estimate", "--model", "llama2-7b", "--cluster", "8xA100", cwd=tmp_path)
    assert "tokens/s" in layouts
    call(installed / "autoplan", "report", cwd=tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_every_module_and_data_file_is_inside(installed: Path) -> None:
    (inside,) = installed.parent.glob("lib/python*/site-packages/autoplan")
    missing = []
    for room, folder in (("", "autoplan"), ("planner", "planner"), ("probes", "probes"), ("strategies", "strategies")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".json", ".csv", ".html", ".typed"} and "__pycache__" not in path.parts:
                relative = Path(room) / path.relative_to(ROOT / folder)
                if not (inside / relative).is_file():
                    missing.append(str(relative))
    assert not missing


def test_bare_rooms_are_not_installed(installed: Path) -> None:
    (site,) = installed.parent.glob("lib/python*/site-packages")
    assert not [room for room in ("planner", "probes", "strategies", "tests") if (site / room).exists()]

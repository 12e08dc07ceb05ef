"""What a diagnosis does otherwise than the script says: it says so, and a fork of the script is no part of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan
from autoplan.errors import WorkloadError
from autoplan.planner.diagnose.landlock import can_restrict
from tests.planner.diagnose.test_diagnose import SCRIPTS


def test_a_module_with_forks_threads_and_commands_is_diagnosed_and_all_is_said(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "size.py").write_text("SIZE = 64\n")
    shutil.copyfile(SCRIPTS / "odd.py", package / "train.py")
    command = [sys.executable, "-m", "autoplan", "doctor", "--budget", "20s", "--json", "-m", "package.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--", "--name", "./x"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["headline"].startswith("package.train: ")
    notes = "\n".join(document["notes"])
    assert "torch was given OMP_NUM_THREADS=2 of the script" in notes
    if can_restrict():
        assert "something was refused (permission denied): a diagnosis lets no library in C" in notes
        assert not (tmp_path / "made_by_mkdir").exists()
    assert sorted(one.name for one in package.iterdir() if one.suffix) == ["__init__.py", "size.py", "train.py"]


def test_a_script_of_a_package_is_told_to_be_run_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    shutil.copyfile(SCRIPTS / "odd.py", tmp_path / "package" / "train.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match="attempted relative import") as caught:
        autoplan.diagnose("package/train.py", ["--name", "./x"], budget=30.0)
    assert "autoplan doctor -m package.train" in str(caught.value.hint)


@pytest.mark.skipif(not can_restrict(), reason="this kernel has no Landlock")
def test_a_script_that_a_refused_write_ends_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import subprocess\nsubprocess.run(['mkdir', 'out'], check=True)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match="CalledProcessError") as caught:
        autoplan.diagnose("train.py", budget=30.0)
    assert "your files stay as they are" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()

"""The files of a script in the sandbox are as it has left them, and nothing outside of it is changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autoplan.planner.diagnose.clock import Clock
from tests.planner.diagnose.test_diagnose import SCRIPTS

RUN = """
import os
import sys
from pathlib import Path
from autoplan.planner.diagnose.landlock import restrict_writes
from autoplan.planner.diagnose.sandbox import Sandbox
from autoplan.processes.script import run_as_main
sandbox = Sandbox(Path(sys.argv[1]))
sandbox.install()
os.environ["KERNEL"] = str(int(restrict_writes((*sandbox.free, "/dev", "/proc"))))
sys.path.insert(0, os.getcwd())
run_as_main(sys.argv[2])
"""

FILES = {"base.txt": "base", "shared.txt": "shared", "old/a.txt": "a", "old/deep/b.txt": "b", "kept/c.txt": "c"}


@pytest.mark.parametrize("script", ["files.py", "children.py", "in_c.py", "loggers.py"])
def test_what_a_script_makes_removes_and_renames_is_so_for_it_alone(tmp_path: Path, script: str) -> None:
    work = tmp_path / "work"
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "empty").mkdir()
    (work / "link").symlink_to("base.txt")

    def there() -> dict[str, tuple[str, int]]:
        found = sorted(work.rglob("*"))
        return {str(one): (one.read_text() if one.is_file() else "", one.lstat().st_mtime_ns) for one in found}

    before, shared = there(), set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as sandbox:  # a short path: sockets of multiprocessing have at most 107 letters
        command = [sys.executable, "-c", RUN, sandbox, str(SCRIPTS / script)]
        kept = dict(os.environ)
        kept.pop("TOKENIZERS_PARALLELISM", None)  # other tests of this process set it
        done = subprocess.run(command, cwd=work, env=kept, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert there() == before
    assert not {"autoplan_test.bin", "mp_autoplan_test"} & ({*os.listdir("/dev/shm")} - shared)


COPIED = """
import os, sys
from pathlib import Path
from autoplan.planner.diagnose.sandbox import Sandbox
Sandbox(Path(sys.argv[1])).install()
children = []
for _ in range(4):
    child = os.fork()
    if not child:
        with open("big.bin", "r+b") as file:
            os._exit(int(len(file.read()) != 1 << 26))
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""


def test_processes_that_change_one_file_at_once_each_have_the_whole_of_it(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(bytes(1 << 26))
    command = [sys.executable, "-c", COPIED, str(tmp_path / "sandbox")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_process_that_a_script_forks_is_not_the_script() -> None:
    clock = Clock()
    assert clock.here
    child = os.fork()
    if not child:
        os._exit(int(clock.here))
    assert os.waitpid(child, 0)[1] == 0 and clock.here


SAVED = """
import os, shutil, sys, tempfile
from pathlib import Path
import torch
from autoplan.planner.diagnose.clock import Clock
from autoplan.planner.diagnose.hooks import Hooks
from autoplan.planner.diagnose.sandbox import Sandbox
clock, sandbox = Clock(), Sandbox(Path(sys.argv[1]))
Hooks(clock, sandbox, lambda: None).install()
sandbox.install()

def save(value, name):
    torch.save(value, f"{name}.tmp")
    os.replace(src=f"{name}.tmp", dst=f"{name}.pt")

def check():
    clock.open()
    save(1, "last")
    Path("notes.txt").write_text("not a checkpoint")
    os.rename("notes.txt", "notes.old")
    assert clock.current == "loop"
    moved = clock._parts["saving"]
    os.rename("last.pt", "first.pt"), os.rename("first.pt", "last.pt")
    assert clock._parts["saving"] > moved
    moved = clock._parts["saving"]
    os.rename("notes.old", "notes.txt")
    assert clock._parts["saving"] == moved
    clock.skipped.add("saving")
    clock.acted = 0
    save(2, "last")
    save(3, "best")
    assert clock.acted == 2 and torch.load("last.pt") == 1 and os.path.getsize("best.pt") == 0
    assert not os.path.exists("last.tmp") and not os.path.exists("best.tmp")
    save(4, "best")
    shutil.move("best.pt", "kept.pt")
    os.remove("kept.pt")
    clock.skipped.clear()
    save(5, "last")
    save(6, "best")
    assert torch.load("last.pt") == 5 and torch.load("best.pt") == 6

check()
os.chdir(tempfile.mkdtemp())
check()
"""


def test_without_saving_a_checkpoint_can_still_be_renamed_and_the_last_one_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", SAVED, str(tmp_path / "sandbox")]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "work").iterdir())

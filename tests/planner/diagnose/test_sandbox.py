"""The files of a script in the sandbox are as it has left them, and nothing outside of it is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.planner.diagnose.test_diagnose import SCRIPTS

RUN = """
import sys
from pathlib import Path
from autoplan.planner.diagnose.sandbox import Sandbox
from autoplan.processes.script import run_as_main
Sandbox(Path(sys.argv[1])).install()
run_as_main(sys.argv[2])
"""

FILES = {"base.txt": "base", "shared.txt": "shared", "old/a.txt": "a", "old/deep/b.txt": "b", "kept/c.txt": "c"}


def test_what_a_script_makes_removes_and_renames_is_so_for_it_alone(tmp_path: Path) -> None:
    work, sandbox = tmp_path / "work", tmp_path / "sandbox"
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "empty").mkdir()
    (work / "link").symlink_to("base.txt")

    def there() -> dict[str, tuple[str, int]]:
        found = sorted(work.rglob("*"))
        return {str(one): (one.read_text() if one.is_file() else "", one.lstat().st_mtime_ns) for one in found}

    before = there()
    command = [sys.executable, "-c", RUN, str(sandbox), str(SCRIPTS / "files.py")]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert there() == before

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autoplan.processes import ProcessIdentity, folder_prefix, is_alive
from autoplan.processes.owner import sweep_folders


def test_this_process_is_alive_and_itself() -> None:
    assert is_alive(ProcessIdentity.current())
    assert ProcessIdentity.current() == ProcessIdentity.current()
    again = ProcessIdentity.model_validate_json(ProcessIdentity.current().model_dump_json())
    assert again == ProcessIdentity.current()


def test_a_process_that_ended_is_dead_even_before_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None and is_alive(identity)
    assert child.stdin is not None
    child.kill()
    # A zombie until the wait below: poll() would reap it.
    while is_alive(identity):
        pass
    assert child.returncode is None
    child.communicate()
    assert not is_alive(identity)


def test_a_reused_pid_or_another_boot_is_somebody_else() -> None:
    current = ProcessIdentity.current()
    assert not is_alive(current.model_copy(update={"start_time": current.start_time - 1}))
    assert not is_alive(current.model_copy(update={"boot_id": "another"}))


def test_temporary_folders_of_dead_owners_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Path(tempfile.mkdtemp(prefix=folder_prefix("task")))
    dead = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tempfile; from autoplan.processes import folder_prefix; "
            "print(tempfile.mkdtemp(prefix=folder_prefix('task')))",
        ],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    left = Path(dead.stdout.strip())
    (left / "rank0.stdout").write_text("x")
    elsewhere = tmp_path / left.name.replace(left.name.split("-")[2], "00000000")  # another machine's, in a shared /tmp
    elsewhere.mkdir()
    other = tmp_path / "autoplan-notes"
    other.mkdir()
    target = tmp_path / "kept"
    target.mkdir()
    link = tmp_path / (left.name + "x")
    link.symlink_to(target)
    assert sweep_folders() == 1
    assert not left.exists()
    assert own.exists() and elsewhere.exists() and other.exists() and target.exists() and link.exists()

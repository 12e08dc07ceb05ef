from __future__ import annotations

import subprocess
import sys

from autoplan.processes import ProcessIdentity, is_alive


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

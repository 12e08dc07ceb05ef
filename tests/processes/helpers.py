"""Finding what came of a test's zygote."""

from __future__ import annotations

import time
from collections.abc import Callable

from autoplan.processes import linux


def survivors(token: str) -> set[int]:
    """The processes that carry a test's mark."""
    return {pid for pid, value in linux.environments("PROCESS_TEST_TOKEN").items() if value == token}


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True

"""What all tests share: cache and state folders of their own, one probe of this machine, the order of the files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with searches come first, then those with many slow tests: two workers then end at about the same time.

    Both workers begin with a file of searches, so that one waits while the other probes the machine.
    """
    searches = {item.path for item in items if "probed_machine" in getattr(item, "fixturenames", ())}
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path not in searches, -slow[item.path]))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest that all its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def own_folders(shared_folder: Path) -> Iterator[None]:
    """The cache and the state of the user are neither read nor changed, also by the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
        patch.setenv("XDG_STATE_HOME", str(shared_folder / "state"))
        yield


@pytest.fixture(scope="session")
def probed_machine(shared_folder: Path, own_folders: None) -> None:
    """The profile of this machine is in the cache: searches find it, and the workers measure it once for all."""
    from autoplan.probes.run import run_probes

    with FileLock(shared_folder / "probe.lock"):
        run_probes(device="cpu")

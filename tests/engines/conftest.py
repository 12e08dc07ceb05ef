"""One server for all tests; where it cannot be started, each fails with the reason."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.cluster import Cluster, running_cluster

NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as found:  # pytest's are closed to it
        yield found


@pytest.fixture
def database(cluster: Cluster) -> str:
    """The URL of a database of its own."""
    return cluster.make(f"test{next(NUMBERS)}")

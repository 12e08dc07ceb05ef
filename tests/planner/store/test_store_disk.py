"""A store on a disk without room: the error is the store's, and says what to do."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autoplan.errors import StoreError
from autoplan.planner.store.optuna_study import SearchStudy, make_distributions
from autoplan.strategies.config import TrainingConfig

SPACES = make_distributions({"micro_batch": (1, 2, 4)})


@contextmanager
def room_for_files_of(size_bytes: int) -> Iterator[None]:
    """No file grows beyond the size: writes fail as they do without room (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_study_that_does_not_fit_on_the_disk_is_a_store_error(tmp_path: Path) -> None:
    with room_for_files_of(0), pytest.raises(StoreError, match="cannot be written") as caught:
        SearchStudy(tmp_path / "study.sqlite3", SPACES, ())
    assert caught.value.exit_code == 2
    assert "--store" in str(caught.value.flag_hint)


def test_a_disk_that_fills_up_during_the_search_is_a_store_error(tmp_path: Path) -> None:
    study = SearchStudy(tmp_path / "study.sqlite3", SPACES, ())
    with room_for_files_of(0), pytest.raises(StoreError, match="cannot be written"):
        for number in range(50):
            study.ask(number, TrainingConfig(micro_batch=1))

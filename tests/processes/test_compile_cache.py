"""Compiled code is loaded from a folder of the user's own, never from one that all users share."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest

from autoplan.processes import RankContext, Task, Zygote
from autoplan.processes.compile_cache import (
    CACHE_VARIABLE,
    HEADERS_VARIABLE,
    _temporary_folder,
    cache_folder,
    use_own_cache,
)
from tests.cases import some


@pytest.fixture(autouse=True)
def torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither a cache nor a name of one; a temporary folder that is shared, with torch's own choice planted in it."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    _temporary_folder.cache_clear()
    torchs = shared / f"torchinductor_{getpass.getuser()}"
    torchs.mkdir()
    return torchs


def give_to_somebody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_it_is_a_folder_that_nobody_else_can_enter(tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "autoplan" / "inductor"
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    cache_folder().chmod(0o777)
    assert cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["folder", "folder above", "link"])
def test_one_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder = cache_folder()
    if what == "link":
        folder.rename(tmp_path / "theirs")
        folder.symlink_to(tmp_path / "theirs")
    give_to_somebody(folder.parent if what == "folder above" else folder, monkeypatch)
    found = cache_folder()
    assert found.parent == tmp_path / "shared" and found.name.startswith("autoplan-compiled-")
    assert found.stat().st_mode & 0o777 == 0o700 and cache_folder() == found


def test_one_that_the_user_names_is_taken_and_one_that_torch_named_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cache_folder()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    for temporary in (tempfile.gettempdir(), "/tmp"):
        monkeypatch.setenv(CACHE_VARIABLE, f"{temporary}/torchinductor_{getpass.getuser()}")
        assert cache_folder() == own
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder() == own


def compile_here(context: RankContext) -> str:
    import torch

    assert torch.compile(lambda x: (x * 2).sin(), dynamic=False)(torch.zeros(8)).sum() == 0
    return os.environ[CACHE_VARIABLE]


@pytest.mark.parametrize("planted", some([False, True], [True]))
def test_a_rank_compiles_into_it(torchs: Path, monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """Headers that are compiled ahead stay in torch's own place: it is the user's alone, or they are not kept."""
    if planted:
        give_to_somebody(torchs, monkeypatch)
    with Zygote(preload=("torch",), env={"TMPDIR": tempfile.gettempdir()}) as zygote:
        (place,) = zygote.run(Task(target=compile_here, total_deadline_s=120.0)).check().results
    assert Path(place) == cache_folder() and any(cache_folder().rglob("*.so")), "it compiled"
    assert [path.name for path in torchs.iterdir()] == ([] if planted else ["precompiled_headers"])
    assert planted or torchs.stat().st_mode & 0o777 == 0o700


def test_what_torch_has_read_already_is_set_too(torchs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as settings

    monkeypatch.setattr(settings, "cpp_cache_precompile_headers", True)
    for name in (CACHE_VARIABLE, HEADERS_VARIABLE):
        monkeypatch.setenv(name, "")  # and as it was before, afterwards
    use_own_cache()
    assert os.environ[CACHE_VARIABLE] == str(cache_folder()) and settings.cpp_cache_precompile_headers
    give_to_somebody(torchs, monkeypatch)
    use_own_cache()
    assert not settings.cpp_cache_precompile_headers


def prepare_here(context: RankContext) -> str:
    """As in a user's program, to which nobody gave the variable."""
    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.prepare import prepare
    from benchmarks.soak_workload import workload

    os.environ.pop(CACHE_VARIABLE, None)
    prepare(workload(), TrainingConfig(micro_batch=8, compile="model"))
    return os.environ[CACHE_VARIABLE]


@pytest.fixture(scope="module")
def started_zygote(training_zygote: Zygote) -> Zygote:
    """In the environment of all tests, before one of them changes its own."""
    training_zygote.start()
    return training_zygote


def test_a_users_program_compiles_into_it_too(started_zygote: Zygote) -> None:
    environment = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    task = Task(target=prepare_here, env=environment, total_deadline_s=120.0)
    (place,) = started_zygote.run(task).check().results
    assert place == str(cache_folder())

"""How files are written: whole, never through somebody else's link, and for the user alone in the store."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from autoplan.errors import StoreError
from autoplan.planner.export.run import export_plan
from autoplan.planner.plan.surroundings import read_environment
from autoplan.planner.store.journal import RecordFile, write_atomically
from autoplan.planner.store.store import Store
from tests.recorded import make_plan

IDENTITY = "0123456789abcdef"


@pytest.fixture
def umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def bait(folder: Path, *names: str) -> Path:
    """A file of somebody's, and links to it under names that could be guessed."""
    victim = folder / "victim"
    victim.write_text("theirs")
    for name in names:
        (folder / name).symlink_to(victim)
    return victim


def test_no_temporary_name_is_followed_through_a_link(tmp_path: Path) -> None:
    victim = bait(tmp_path, "plan.json.tmp", "out.json.tmp", f".clock.json.{os.getpid()}", "record.jsonl")
    make_plan().save(tmp_path / "plan.json")
    export_plan(make_plan(), "json", tmp_path / "out.json")
    write_atomically(tmp_path / "clock.json", "{}")
    with pytest.raises(StoreError):
        RecordFile(tmp_path / "record.jsonl")
    assert victim.read_text() == "theirs"
    left = {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert left == {"victim", "plan.json", "out.json", "clock.json"}


def test_what_the_user_asks_for_follows_the_umask(tmp_path: Path, umask: None) -> None:
    plan = make_plan().save(tmp_path / "plan.json")
    (exported,) = export_plan(make_plan(), "yaml", tmp_path / "plan.yaml").paths
    assert mode(plan) == mode(exported) == 0o644
    os.umask(0o027)
    assert mode(make_plan().save(tmp_path / "again.json")) == 0o640


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    from autoplan.files import replace_file

    replace_file(pipe, "text")
    assert os.read(reader, 100) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_store_is_the_users_own(tmp_path: Path, umask: None) -> None:
    folder = tmp_path / "store" / IDENTITY
    with Store(folder, IDENTITY, summary={}):
        make_plan().save(folder / "plan.json", private=True)
        for path in (tmp_path / "store", folder, folder / "trials"):
            assert mode(path) == 0o700, path
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"record.jsonl", "lock.owner", "lock", "plan.json"}
        assert {path.name: oct(mode(path)) for path in files if mode(path) != 0o600} == {}


def test_a_store_that_was_open_to_others_is_closed(tmp_path: Path, umask: None) -> None:
    folder = tmp_path / IDENTITY
    folder.mkdir(mode=0o755)
    (folder / "record.jsonl").write_text("")
    (folder / "record.jsonl").chmod(0o644)
    tmp_path.chmod(0o755)
    with Store(folder, IDENTITY, summary={}):
        assert mode(folder) == 0o700 and mode(folder / "record.jsonl") == 0o600
    assert mode(tmp_path) == 0o755  # the user's own folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / IDENTITY
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(StoreError, match="12345"):
        Store(folder, IDENTITY, summary={})


def test_environment_variables_are_kept_by_name() -> None:
    secrets = {
        "TORCH_TOKEN": "s",
        "CUDA_SECRET": "s",
        "NCCL_PASSWORD": "s",
        "PYTORCH_KEY": "s",
        "OMP_X": "s",
        "TORCH": "s",
    }
    shown = {
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "NCCL_P2P_DISABLE": "1",
    }
    assert read_environment(secrets | shown).variables == shown


def test_an_export_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded folder may have a torch.py beside its plan."""
    for name in ("torch", "transformers", "autoplan", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\nraise SystemExit('ran')\n")
    monkeypatch.chdir(tmp_path)
    export_plan(make_plan(), "pytorch", tmp_path / "out.py")
    assert not (tmp_path / "MARK").exists()
    assert json.loads(make_plan().save(tmp_path / "plan.json").read_text())["study"] == "feedfacefeedface"

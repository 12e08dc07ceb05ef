"""The record and the store: nothing that finished is lost, one owner, clear errors."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import StoreBusyError, StoreError
from autoplan.planner.records.trials import Trial
from autoplan.planner.space.bounds import Bound
from autoplan.planner.store import journal as journal_module
from autoplan.planner.store.journal import RecordFile
from autoplan.planner.store.store import Store, study_folder, study_identity
from autoplan.planner.store.studies import list_studies
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests import recorded
from tests.planner.search.stand_in import verdict


def make_trial(number: int) -> Trial:
    return recorded.make_trial(number, TrainingConfig(micro_batch=1), 1.0, seconds_spent=2.0)


def open_store(folder: Path, identity: str = "abc", **options: bool) -> Store:
    return Store(folder, identity, summary={"model": "tiny"}, **options)


def test_a_torn_last_line_is_dropped_at_every_byte(tmp_path: Path):
    path = tmp_path / "record.jsonl"
    record = RecordFile(path)
    for number in range(3):
        record.append({"number": number, "text": "ä line"})
    record.close()
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        again = RecordFile(path)
        assert [d["number"] for d in again.documents] == [0, 1]
        again.append({"number": 9})
        again.close()
        final = RecordFile(path)
        assert [d["number"] for d in final.documents] == [0, 1, 9]
        final.close()


def test_a_last_line_of_zeros_is_dropped_too(tmp_path: Path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"number": 0}\n' + b"\0" * 20 + b"\n")
    record = RecordFile(path)
    assert record.documents == [{"number": 0}]
    record.close()


def test_damage_before_the_last_line_is_an_error(tmp_path: Path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"number": 0}\n{"num\n{"number": 2}\n')
    with pytest.raises(StoreError, match="line 2"):
        RecordFile(path)
    assert path.read_bytes().count(b"\n") == 3  # nothing was cut off


def test_a_full_disk_is_a_clear_error_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "record.jsonl"
    record = RecordFile(path)
    record.append({"number": 0})
    real_write = os.write

    def write_half(fd: int, data: bytes) -> int:
        if len(data) > 4:
            return real_write(fd, data[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module.os, "write", write_half)
    with pytest.raises(StoreError, match="disk is full") as caught:
        record.append({"number": 1})
    assert "--store" in (caught.value.flag_hint or "")
    monkeypatch.undo()
    assert path.read_text() == '{"number":0}\n'
    record.append({"number": 2})
    record.close()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize("during", ["write", "fsync"])
def test_a_line_that_is_interrupted_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
):
    path = tmp_path / "record.jsonl"
    record = RecordFile(path)
    record.append({"number": 0})
    do = getattr(os, during)

    def interrupted(*given: Any) -> None:
        do(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal_module.os, during, interrupted)
        record.append({"number": 1, "text": "longer than the next one"})
    record.append({"number": 2})
    record.close()
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert numbers == ([0, 1, 2] if during == "fsync" else [0, 2])


def test_a_really_full_disk(tmp_path: Path):
    """The same on a file system of 64 KiB, where one can be mounted."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        store = open_store(mount / "study")
        with pytest.raises(StoreError, match="disk is full"):
            for number in range(1000):
                store.add(make_trial(number))
        kept = len(store.trials)
        store.close()
        (mount / "study" / "clock.json").unlink(missing_ok=True)
        again = open_store(mount / "study")
        assert len(again.trials) == kept > 0
        again.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_what_was_added_is_there_again(tmp_path: Path):
    with open_store(tmp_path / "s") as store:
        store.set_budget(60.0)
        store.add(make_trial(0))
        store.add_parity(TrainingConfig(micro_batch=1), verdict(True))
    with open_store(tmp_path / "s") as store:
        assert [trial.number for trial in store.trials] == [0]
        assert store.trials[0].resumed
        assert store.take_number() == 1
        assert store.budget_s == 60.0
        assert store.parity_of(TrainingConfig(micro_batch=1)) == verdict(True)
        assert store.finished is None


def test_only_a_larger_budget_than_it_finished_with_opens_a_finished_search(tmp_path: Path):
    with open_store(tmp_path / "s") as store:
        store.set_budget(600.0)
        store.finish("plan_found", ended_by="time")
    for budget_s in (300.0, 600.0, 450.0):
        with open_store(tmp_path / "s") as store:
            store.set_budget(budget_s)
            assert store.finished == {"status": "plan_found", "ended_by": "time"}, budget_s
            assert store.finished_budget_s == 600.0
            store.finish("plan_found", ended_by="time")  # made again, for another loader
    with open_store(tmp_path / "s") as store:
        store.set_budget(660.0)
        assert store.finished is None
        store.finish("plan_found", ended_by="max_trials")
        store.open_again()  # more trials, within another budget
        store.set_budget(300.0)
        store.finish("plan_found", ended_by="time")
    with open_store(tmp_path / "s") as store:
        store.set_budget(400.0)
        assert store.finished is None


def test_an_ended_budget_leaves_the_plan_that_was_found(tmp_path: Path):
    with open_store(tmp_path / "s") as store:
        store.set_budget(60.0)
        store.finish("budget_ended", reason="slow", ended_by="time")
        assert not store.plan_was_found
        store.set_budget(120.0)
        store.finish("plan_found", ended_by="max_trials")
        store.set_budget(180.0)
        assert store.finished is None and store.plan_was_found
        store.finish("budget_ended", reason="slow", ended_by="time")
        assert store.finished == {"status": "plan_found", "ended_by": "time"}
    with open_store(tmp_path / "s") as store:
        assert store.finished == {"status": "plan_found", "ended_by": "time"}
        store.set_budget(240.0)
        store.finish("no_feasible_plan", reason="the winner failed", ended_by="time")
        assert not store.plan_was_found


def test_time_spent_adds_up_over_runs(tmp_path: Path):
    with open_store(tmp_path / "s") as store:
        store.start_clock()
        store.tick(force=True)
        first = store.spent_s
    clock = tmp_path / "s" / "clock.json"
    clock.write_text(json.dumps({"spent_s": first + 100.0}))  # the run went on for 100 s and was killed
    with open_store(tmp_path / "s") as store:
        assert store.spent_s >= first + 100.0
    clock.write_text("{")
    with open_store(tmp_path / "s") as store:
        assert store.spent_s < first + 100.0  # a torn clock: what the record says


@pytest.mark.parametrize("spent", ["1e309", "-5", "NaN", '"abc"', "[]", "1e12", "[" * 4000, "1" * 5000])
def test_a_clock_that_says_no_time_is_not_taken(tmp_path: Path, spent: str):
    with open_store(tmp_path / "s") as store:
        store.add(make_trial(0))
    (tmp_path / "s" / "clock.json").write_text(f'{{"spent_s": {spent}}}')
    with open_store(tmp_path / "s") as store:
        assert store.spent_s < 100.0
        store.add(make_trial(1))
    with open_store(tmp_path / "s") as store:
        assert store.spent_s < 100.0 and len(store.trials) == 2, "and nothing of it came into the record"


LINES = {
    "time": ('{"kind":"budget","budget_s":9,"spent_s":"abc"}', "abc"),
    "endless": ('{"kind":"budget","budget_s":9,"spent_s":1e309}', "finite"),
    "negative": ('{"kind":"budget","budget_s":9,"spent_s":-1}', "greater than or equal to 0"),
    "budget": ('{"kind":"budget","budget_s":"much"}', "much"),
    "budget list": ('{"kind":"budget","budget_s":[1]}', "number"),
    "no budget": ('{"kind":"budget"}', "budget_s"),
    "no kind": ('{"budget_s":1}', "kind"),
    "trial": ('{"kind":"trial","trial":[1]}', "list"),
    "trial text": ('{"kind":"trial","trial":"abc"}', "str"),
    "end": ('{"kind":"finished","status":["plan_found"]}', "plan_found"),
    "another end": ('{"kind":"finished","status":"won"}', "plan_found"),
    "no end": ('{"kind":"finished"}', "status"),
    "end budget": ('{"kind":"finished","status":"plan_found","budget_s":"x"}', "number"),
    "reason": ('{"kind":"finished","status":"plan_found","reason":{"a":1}}', "reason"),
    "parity": ('{"kind":"parity","config":1,"parity":2}', "Parity"),
}


@pytest.mark.parametrize(("line", "words"), LINES.values(), ids=LINES)
def test_a_line_with_a_value_of_no_search_is_said_with_its_number(tmp_path: Path, line: str, words: str):
    open_store(tmp_path / "s").close()
    with (tmp_path / "s" / "record.jsonl").open("a") as record:
        record.write(f"{line}\n")
    with pytest.raises(StoreError, match=r"line 2 of .*record\.jsonl") as caught:
        open_store(tmp_path / "s")
    assert words in caught.value.message and "--fresh" in (caught.value.flag_hint or "")
    open_store(tmp_path / "s", fresh=True).close()


@pytest.mark.parametrize("brackets", ["[" * 100_000, '{"a":' * 100_000])
def test_a_line_of_brackets_is_a_damaged_one(tmp_path: Path, brackets: str):
    open_store(tmp_path / "s").close()
    path = tmp_path / "s" / "record.jsonl"
    head = path.read_text()
    path.write_text(f"{head}{brackets}\n{head}")
    with pytest.raises(StoreError, match="line 2 .* is damaged"):
        open_store(tmp_path / "s")
    path.write_text(brackets)
    assert study_folder(tmp_path / "s", "abc") == tmp_path / "s" / "abc"


OPEN_EACH = """
import sys
from pathlib import Path
from autoplan.errors import StoreError
from autoplan.planner.store.store import Store

for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        Store(folder, "abc", summary={})
    except StoreError as error:
        print(error)
"""


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path):
    names = ["clock.json", "lock", "lock.owner", "plan.json", "record.jsonl"]
    for name in names:
        folder = tmp_path / name
        open_store(folder).close()
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    command = [sys.executable, "-c", OPEN_EACH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [f"{tmp_path / name} cannot be used: {name} in it is a pipe or a device" in done.stdout for name in names]
    assert said == [True] * len(names), done.stdout + done.stderr


def test_a_store_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    if os.geteuid() == 0:
        os.chown(shared, 12345, -1)
        owner = 12345
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=f"belongs to the user with the number {owner}, not to you"):
        open_store(study_folder(shared, "abc"))
    assert not list(shared.iterdir()), "nothing was made there"
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(StoreError, match="belongs to the user"):
        open_store(study_folder(tmp_path / "link", "abc"))


def test_another_search_in_the_folder_is_refused(tmp_path: Path):
    open_store(tmp_path / "s", "one").close()
    with pytest.raises(StoreError, match="is the record of another search"):
        open_store(tmp_path / "s", "two")
    open_store(tmp_path / "s", "one").close()  # the lock was given back


# Many studies in one store.


def test_a_store_holds_many_studies(tmp_path: Path):
    for identity in ("one", "two"):
        with Store(study_folder(tmp_path / "s", identity), identity, summary={}) as store:
            store.add(make_trial(0))
            assert store.folder == tmp_path / "s" / identity
    assert study_folder(tmp_path / "s", "one") == tmp_path / "s" / "one"
    assert len(open_store(tmp_path / "s" / "one", "one").trials) == 1


def test_without_a_store_studies_are_in_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert study_folder(None, "one") == tmp_path / "autoplan" / "studies" / "one"


def test_fresh_moves_a_studys_folder_and_no_other_and_deletes_nothing(tmp_path: Path):
    """Also several times within a second."""
    kept = set()
    open_store(tmp_path / "two", "two").close()
    with open_store(tmp_path / "one", "one") as store:
        store.add(make_trial(0))
    (tmp_path / "one" / "mine.txt").write_text("")
    for _ in range(3):
        with open_store(tmp_path / "one", "one", fresh=True) as store:
            assert store.folder == tmp_path / "one" and store.trials == ()
            kept.add(store.renamed_to)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", *(path.name for path in kept)}
    assert len(kept) == 3 and all(path.parent == tmp_path for path in kept)
    (first,) = (path for path in kept if (path / "mine.txt").exists())
    assert '"kind":"trial"' in (first / "record.jsonl").read_text()


def test_a_search_is_listed_with_the_end_that_it_is_answered_with(tmp_path: Path):
    def listed() -> str:
        (study,) = list_studies(tmp_path)
        return study.status

    with open_store(tmp_path / "abc") as store:
        store.set_budget(60.0)
        store.finish("plan_found", ended_by="time")
    with open_store(tmp_path / "abc") as store:
        store.set_budget(30.0)
    assert listed() == "plan_found", "less budget is answered from the record"
    with open_store(tmp_path / "abc") as store:
        store.set_budget(90.0)
    assert listed() == "stopped"
    with open_store(tmp_path / "abc") as store:
        store.finish("budget_ended", reason="slow", ended_by="time")
    assert listed() == "plan_found", "the earlier plan stays"
    with open_store(tmp_path / "abc") as store:
        store.add(make_trial(0))
    assert listed() == "plan_found", "what another planner still had to write"


def test_a_search_that_was_moved_aside_does_not_run(tmp_path: Path):
    open_store(tmp_path / "abc").close()
    with open_store(tmp_path / "abc", fresh=True) as store:
        assert {study.folder: study.status for study in list_studies(tmp_path)} == {
            store.folder: "running",
            store.renamed_to: "stopped",
        }


OWNER = """
import sys, time
from pathlib import Path
from autoplan.planner.store.store import Store
store = Store(Path(sys.argv[1]), "abc", summary={})
print("open", flush=True)
time.sleep(60)
"""


def test_a_second_search_is_told_who_has_it_and_a_dead_one_has_nothing(tmp_path: Path):
    folder = tmp_path / "s"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(StoreBusyError, match=str(owner.pid)):
            open_store(folder)
    finally:
        owner.kill()
        owner.wait()
    open_store(folder).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        open_store(tmp_path / "s")


def test_a_folder_under_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        open_store(tmp_path / "file" / "s")


def test_identity_changes_with_what_changes_the_search(tmp_path: Path):
    spec = WorkloadSpec(
        kind="model", reference="tiny", name="tiny", sequence_length=8, global_batch=4, identity="0" * 16
    )

    def identity(spec: WorkloadSpec = spec, hardware: str = "hw", **options: object) -> str:
        given: dict[str, object] = {
            "device": "cpu",
            "fix": {},
            "bound": {},
            "nproc": 1,
            "memory_limit_bytes": None,
        }
        return study_identity(spec, hardware, **(given | options))  # type: ignore[arg-type]

    variants = [
        identity(),
        identity(spec.model_copy(update={"identity": "1" * 16})),
        identity(hardware="other"),
        identity(device="cuda"),
        identity(fix={"precision": "fp32"}),
        identity(bound={"micro_batch": Bound(low=1, high=2)}),
        identity(nproc=2),
        identity(memory_limit_bytes=1 << 30),
        identity(numerics="lossy"),
        identity(objective={"name": "memory"}),
        identity(side_by_side=2),
    ]
    assert len(set(variants)) == len(variants)
    assert identity() == identity(numerics="kept", objective=None, side_by_side=1)

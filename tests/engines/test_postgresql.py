"""The record in PostgreSQL: claims, leases, lost connections, versions, secrets. With a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.errors import StoreBusyError, StoreError, UsageError
from autoplan.planner.store import database as database_module
from autoplan.planner.store.database import (
    MIGRATIONS,
    Database,
    SharedRecord,
    list_shared,
    read_record,
    remove_shared,
)
from autoplan.planner.store.journal import LeaseLostError
from tests.engines.cluster import PASSWORD, Cluster, Proxy

HEAD = {"kind": "study", "schema": 1, "identity": "one", "summary": {"model": "tiny"}}


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "LEASE_S", 2.0)
    monkeypatch.setattr(database_module, "BEAT_S", 0.3)
    monkeypatch.setattr(database_module, "RETRY_S", 30.0)


def join(url: str, **options: Any) -> SharedRecord:
    return SharedRecord(url, "one", HEAD, **options)


def die(record: SharedRecord) -> None:
    """Its planner says nothing any more; the lease runs out."""
    record._ended.set()
    record._heart.join()
    time.sleep(2.2)


def test_lines_are_seen_by_all_in_one_order_and_each_planner_reads_those_of_the_others(database: str):
    one, two = join(database), join(database)
    assert one.documents == two.documents == [HEAD]
    one.append({"kind": "a"})
    two.append({"kind": "b"})
    one.append({"kind": "c"})
    assert one.news() == [{"kind": "b"}] and one.news() == []
    assert two.news() == [{"kind": "a"}, {"kind": "c"}]
    assert join(database).documents == read_record(database, "one")
    assert [line["kind"] for line in read_record(database, "one")] == ["study", "a", "b", "c"]


def test_a_piece_of_work_has_one_planner_and_can_be_taken_again_only_by_who_has_read_of_it(database: str):
    one, two = join(database), join(database)
    assert one.claim("look x") and one.claim("look x"), "who has it may ask again"
    assert not two.claim("look x") and two.claim("look y")
    assert two.others() == {"look x": False}
    one.append({"kind": "trial"}, key="look x")
    one.release("look x")
    assert not two.claim("look x"), "it has not read of it"
    two.news()
    assert two.claim("look x")


def test_alone_means_that_nobody_else_has_work_and_that_all_is_read(database: str):
    one, two = join(database), join(database)
    assert one.claim("look x") and not two.claim("claim", alone=True)
    one.append({"kind": "trial"}, key="look x")
    one.release("look x")
    assert not two.claim("claim", alone=True), "there is a line that it has not read"
    two.news()
    assert two.claim("claim", alone=True)
    assert not one.claim("look z") and two.claim("look z"), "its own work does not keep it from more"


def test_the_work_of_a_dead_planner_is_done_by_another_and_what_it_still_writes_is_refused(database: str):
    one, two = join(database), join(database)
    assert one.claim("look x")
    time.sleep(2.5)
    assert not two.claim("look x"), "it lives: its heart beats while it works"
    die(one)
    assert two.claim("look x") and not two.others()
    with pytest.raises(LeaseLostError, match="look x"):
        one.append({"kind": "trial"}, key="look x")
    two.append({"kind": "trial", "by": "two"}, key="look x")
    assert [line.get("by") for line in read_record(database, "one")] == [None, "two"]


def test_the_clock_of_a_node_decides_nothing(database: str, monkeypatch: pytest.MonkeyPatch):
    one, two = join(database), join(database)
    assert one.claim("look x")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not two.claim("look x")


def test_planners_that_start_at_once_make_one_schema_and_one_study(database: str):
    records: list[SharedRecord] = []
    threads = [threading.Thread(target=lambda: records.append(join(database))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records) == 8 and read_record(database, "one") == [HEAD]
    numbers = [record.take_number(0) for record in records]
    assert sorted(numbers) == list(range(8))
    assert records[0].take_number(20) == 20


def test_backends_that_are_ended_and_a_server_that_is_killed_lose_and_repeat_nothing(cluster: Cluster, database: str):
    record, other = join(database), join(database)
    assert record.claim("look x")
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.05):
            cluster.terminate()

    thread = threading.Thread(target=disturb)
    thread.start()
    for number in range(100):
        record.append({"kind": "n", "number": number}, key="look x")
        if number == 50:
            cluster.restart("immediate")
    stop.set()
    thread.join()
    assert [line["number"] for line in read_record(database, "one")[1:]] == list(range(100))
    assert [line["number"] for line in other.news()] == list(range(100))


def test_a_minute_without_network_is_survived_by_the_planner_and_its_claim(
    cluster: Cluster, database: str, monkeypatch: pytest.MonkeyPatch
):
    """With the lease and the beat as they are in use."""
    for name, value in (("LEASE_S", 90.0), ("BEAT_S", 10.0), ("RETRY_S", 300.0)):
        monkeypatch.setattr(database_module, name, value)
    proxy = Proxy(cluster.port)
    record = SharedRecord(cluster.url(database.rpartition("/")[2], proxy.port), "one", HEAD)
    other = join(database)
    assert record.claim("look x")
    cut = threading.Thread(target=proxy.cut, args=(60.0,))
    cut.start()
    time.sleep(1.0)
    began = time.monotonic()
    record.append({"kind": "trial"}, key="look x")
    assert time.monotonic() - began > 50
    cut.join()
    assert not other.claim("look x"), "it is still the first planner's"
    assert len(read_record(database, "one")) == 2


def test_a_database_that_stays_away_is_an_error_that_says_what_to_do(
    cluster: Cluster, database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database_module, "RETRY_S", 1.0)
    record = join(database)
    cluster.stop()
    try:
        with pytest.raises(StoreError, match="cannot be used any more") as caught:
            record.append({"kind": "a"})
        assert "goes on" in (caught.value.hint or "")
        began = time.monotonic()
        record.close()
        assert time.monotonic() - began < 5, "it does not wait twice"
        with pytest.raises(StoreError, match="cannot be used: connection"):
            join(database)
    finally:
        cluster.start()


def test_another_version_is_refused_while_a_planner_lives(database: str, monkeypatch: pytest.MonkeyPatch):
    one = join(database)
    monkeypatch.setattr(database_module, "source_version", lambda: "9.9 (0123abcd)")
    with pytest.raises(StoreError, match=rf"this autoplan is 9\.9.*process {os.getpid()} on "):
        join(database)
    one.close()
    join(database).close()


def test_a_later_schema_is_refused_and_an_earlier_one_is_brought_up(database: str, monkeypatch: pytest.MonkeyPatch):
    join(database).close()
    later = (*MIGRATIONS, "ALTER TABLE autoplan.study ADD COLUMN note text NOT NULL DEFAULT 'none'")
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "MIGRATIONS", later)
        record = join(database)
        assert record.documents == [HEAD]
        assert record._database.fetch("SELECT note FROM autoplan.study") == [("none",)]
        record.close()
    with pytest.raises(StoreError, match="has version 2, and this autoplan knows 1"):
        Database(database)


def test_fresh_keeps_the_earlier_study_and_is_refused_while_a_planner_lives(database: str):
    one = join(database)
    one.append({"kind": "a"})
    with pytest.raises(StoreBusyError, match="1 planner.*process"):
        join(database, fresh=True)
    one.close()
    two = join(database, fresh=True)
    assert two.documents == [HEAD] and two.renamed_to is not None
    assert len(read_record(database, two.renamed_to)) == 2


def test_searches_are_listed_and_removed(database: str):
    one = join(database)
    one.append({"kind": "trial", "trial": {}})
    (study,) = list_shared(database)
    assert (study.name, study.status, study.trials, study.summary) == ("one", "running", 1, {"model": "tiny"})
    with pytest.raises(StoreBusyError, match="one runs: process"):
        remove_shared(database, "one")
    one.close()
    assert list_shared(database)[0].status == "stopped"
    two = join(database)
    two.append({"kind": "finished", "budget_s": 60.0, "status": "no_feasible_plan"})
    two.append({"kind": "work"})
    two.close()
    assert list_shared(database)[0].status == "no_feasible_plan", "also where another planner's line follows"
    command = [sys.executable, "-m", "autoplan", "clean", "--storage", database, "--yes", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["removed"] == ["one"] and list_shared(database) == []


def test_a_study_that_was_removed_is_said(database: str):
    one = join(database)
    one.append({"kind": "a"})
    Database(database).fetch("DELETE FROM autoplan.study")
    with pytest.raises(StoreError, match="was removed meanwhile"):
        one.append({"kind": "b"})


def test_the_record_is_an_optuna_study_in_any_storage(database: str):
    from tests.planner.store.test_store import make_trial

    one = join(database)
    one.append({"kind": "trial", "trial": make_trial(0).model_dump(mode="json")})
    kept = database.replace("postgresql:", "postgresql+psycopg:")
    study = autoplan.load_study(f"{database}#one", storage=kept)
    assert study.best_value == 1.0
    tables = {name for (name,) in Database(database).fetch("SELECT tablename FROM pg_tables")}
    assert "trials" in tables, "Optuna's own tables lie in the same database"


def test_a_password_is_taken_from_the_environment_and_is_nowhere_else(database: str, tmp_path: Path):
    from tests.engines.checks import Planner

    secret = database.replace("planner@", f"planner:{PASSWORD}@")
    for url in (secret, f"{database}?password={PASSWORD}", f"{database}?sslpassword={PASSWORD}"):
        with pytest.raises(UsageError, match="has a password") as caught:
            autoplan.search("gpt2", storage=url)
        assert PASSWORD not in str(caught.value) and "PGPASSWORD" in str(caught.value)
    planner = Planner(database, tmp_path / "p")
    assert planner.wait_for("look")
    listed = subprocess.run(["ps", "-ww", "-o", "args", "-p", str(planner.process.pid)], capture_output=True, text=True)
    assert database in listed.stdout and PASSWORD not in listed.stdout
    end = planner.end()
    everything = json.dumps(end) + "".join(str(row) for row in Database(database).fetch("TABLE autoplan.line"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "plan.json" for path in files)
    assert PASSWORD not in everything and not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_a_wrong_password_is_an_error_of_one_line(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PGPASSWORD", "wrong-one")
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        Database(database)
    assert "wrong-one" not in str(caught.value)

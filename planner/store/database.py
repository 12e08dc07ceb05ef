"""The record of a study in a PostgreSQL database, shared by the planners that work on it.

The lines are those of the record file (journal.py), numbered by the database. Beside them lies who works on what: a
planner claims a piece of work by its name before it begins. A claim holds as long as the database hears from the
planner, by the database's own clock; then another may take the work over. What the first planner writes about it
afterwards is refused, so that nothing is in the record twice.

Each call is one transaction and one round trip, made by a function in the database. A call whose connection is lost is
made again; a line that was written already is then recognised by the planner and its token.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from autoplan.errors import AutoplanError, MissingExtraError, StoreBusyError, StoreError, UsageError
from autoplan.files import source_version
from autoplan.planner.store.journal import LeaseLostError, read_end
from autoplan.planner.store.studies import Study

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

LEASE_S = 90.0
"""A planner that the database has not heard of for so long is taken for dead. More than a minute without network."""

BEAT_S = 10.0
"""Seconds between two signs of life."""

RETRY_S, PAUSE_S = 300.0, 0.5
"""A lost connection is tried again for so long, with so long between two attempts."""

SETTINGS: Mapping[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
    "application_name": "autoplan",
}
SESSION = "SET statement_timeout = '60s'; SET idle_in_transaction_session_timeout = '30s'; SET jit = off;"
SESSION += "SET default_transaction_isolation = 'read committed'"

SECRETS = ("password", "sslpassword", "oauth_client_secret")
HINT = (
    "Set PGPASSWORD, or name a service of ~/.pg_service.conf in the URL, postgresql:///?service=NAME (its password may "
    "be in ~/.pgpass)."
)

MIGRATIONS = (
    """
CREATE TABLE autoplan.study (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    lines bigint NOT NULL DEFAULT 0,
    trials bigint NOT NULL DEFAULT 0,
    written timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE autoplan.planner (
    id uuid PRIMARY KEY,
    study bigint NOT NULL REFERENCES autoplan.study ON DELETE CASCADE,
    version text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    spent_s double precision NOT NULL DEFAULT 0,
    beat timestamptz
);
CREATE INDEX ON autoplan.planner (study);
CREATE TABLE autoplan.line (
    study bigint NOT NULL REFERENCES autoplan.study ON DELETE CASCADE,
    number bigint NOT NULL,
    planner uuid NOT NULL,
    token bigint NOT NULL,
    document text NOT NULL,
    PRIMARY KEY (study, number),
    UNIQUE (planner, token)
);
CREATE TABLE autoplan.work (
    study bigint NOT NULL REFERENCES autoplan.study ON DELETE CASCADE,
    key text NOT NULL,
    planner uuid,
    alone boolean NOT NULL,
    line bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (study, key)
);
CREATE INDEX ON autoplan.work (study) WHERE planner IS NOT NULL;

-- The pieces of work that living planners have.
CREATE VIEW autoplan.taken AS
    SELECT work.study, work.key, work.alone, work.planner, planner.beat
    FROM autoplan.work JOIN autoplan.planner ON planner.id = work.planner;

-- Adds a line and returns its number; -1: the planner does not have the work any more, null: the study is gone.
CREATE FUNCTION autoplan.append(a_study bigint, a_planner uuid, a_token bigint, a_document text, a_key text)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE last bigint; made bigint;
BEGIN
    SELECT lines INTO last FROM autoplan.study WHERE id = a_study FOR UPDATE;
    IF NOT FOUND THEN RETURN NULL; END IF;
    SELECT number INTO made FROM autoplan.line WHERE planner = a_planner AND token = a_token;
    IF FOUND THEN RETURN made; END IF;
    IF a_key IS NOT NULL THEN
        UPDATE autoplan.work SET line = last + 1 WHERE study = a_study AND key = a_key AND planner = a_planner;
        IF NOT FOUND THEN RETURN -1; END IF;
    END IF;
    UPDATE autoplan.study SET lines = last + 1, written = clock_timestamp() WHERE id = a_study;
    INSERT INTO autoplan.line VALUES (a_study, last + 1, a_planner, a_token, a_document);
    RETURN last + 1;
END $$;

-- Claims a piece of work for a planner that has read the lines up to a_seen.
CREATE FUNCTION autoplan.claim(
    a_study bigint, a_planner uuid, a_key text, an_alone boolean, a_seen bigint, a_lease interval
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE last bigint;
BEGIN
    SELECT lines INTO last FROM autoplan.study WHERE id = a_study FOR UPDATE;
    IF NOT FOUND THEN RETURN NULL; END IF;
    IF an_alone AND last > a_seen THEN RETURN false; END IF;
    IF EXISTS (
        SELECT FROM autoplan.taken WHERE study = a_study AND planner <> a_planner AND beat > clock_timestamp() - a_lease
            AND (key = a_key OR alone OR an_alone)
    ) THEN RETURN false; END IF;
    INSERT INTO autoplan.work AS known (study, key, planner, alone) VALUES (a_study, a_key, a_planner, an_alone)
        ON CONFLICT (study, key) DO UPDATE SET planner = excluded.planner, alone = excluded.alone
        WHERE known.line <= a_seen;
    RETURN FOUND;
END $$;
""",
)
"""The versions of the schema, each made of the one before it. A version that was released is never changed."""


def check_storage(url: str) -> str:
    """The URL of a database, as `--storage` takes it; it is never shown in an error, since it may have a password.

    Raises:
        UsageError: it is no URL of PostgreSQL, or it has a password.
    """
    try:
        parts = urlsplit(url)
        given = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
        secret = parts.password is not None or bool(given & set(SECRETS))
    except ValueError:
        parts, secret = urlsplit(""), False
    if parts.scheme not in ("postgresql", "postgres"):
        raise UsageError("--storage is no URL of PostgreSQL", hint="It is like postgresql://user@host:5432/database.")
    if secret:
        raise UsageError("--storage has a password, which process lists and logs would show", hint=HINT)
    if parts.fragment:
        raise UsageError("--storage has a # in it", hint="Write it as %23 in a name.")
    return url


class Database:
    """One connection, which is made anew where it was lost. Not for use by two threads at once.

    Args:
        url: Of `check_storage`.

    Raises:
        MissingExtraError: psycopg is not installed.
        StoreError: it cannot be connected to, or its schema is of a later version.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtraError(
                f"--storage needs psycopg, which cannot be imported: {error}",
                hint="pip install 'autoplan[postgres]' (or 'psycopg[binary]')",
            ) from None
        self._url = url
        self._errors = (psycopg.OperationalError, psycopg.InterfaceError)
        self._connection: psycopg.Connection[Any] | None = None
        self._gave_up: StoreError | None = None
        try:
            self._connect()
        except self._errors as error:
            if self._connection is None:  # else it was lost, which `run` mends
                raise StoreError(f"--storage cannot be used: {_first_line(error)}", hint=HINT) from None
        self.run(self._migrate, whole=False)

    def fetch(self, query: str, asked: Sequence[Any] = (), *, retry_s: float | None = None) -> list[Any]:
        """The rows that one statement gives, in a transaction and a round trip of its own; it raises as `run` does."""

        def once(cursor: psycopg.Cursor[Any]) -> list[Any]:
            cursor.execute(query, asked)
            return cursor.fetchall() if cursor.description is not None else []

        return self.run(once, whole=False, retry_s=retry_s)

    def run(self, work: Callable[[psycopg.Cursor[Any]], T], *, whole: bool = True, retry_s: float | None = None) -> T:
        """Runs one transaction; again, as a whole, while the database cannot be reached.

        Args:
            work: What it does. It has to be right also where it is done twice: of a lost connection nobody knows
                whether its last transaction was made.
            whole: Its statements are one transaction; False: each by itself.
            retry_s: Seconds until it gives up; None: RETRY_S.

        Raises:
            StoreError: it cannot be reached for so long, or does not do what it is asked.
        """
        import psycopg

        if self._gave_up is not None:
            raise self._gave_up
        began = time.monotonic()
        while True:
            try:
                connection = self._connect()
                with connection.transaction() if whole else contextlib.nullcontext(), connection.cursor() as cursor:
                    return work(cursor)
            except self._errors as error:
                self.close()
                if time.monotonic() - began > (RETRY_S if retry_s is None else retry_s):
                    self._gave_up = StoreError(
                        f"--storage cannot be used any more: {_first_line(error)}",
                        hint="What finished is kept. When the database is back, the same command goes on.",
                    )
                    raise self._gave_up from None
                time.sleep(PAUSE_S)
            except psycopg.Error as error:
                raise StoreError(
                    f"--storage refuses: {_first_line(error)}",
                    hint="The user needs the right to create a schema in the database, or to use autoplan's.",
                ) from None

    def close(self) -> None:
        """Closes the connection; the next call makes another."""
        if self._connection is not None:
            with contextlib.suppress(*self._errors):
                self._connection.close()
            self._connection = None

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg

        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._url, autocommit=True, **SETTINGS)
            self._connection.execute(SESSION)
        return self._connection

    def _migrate(self, cursor: psycopg.Cursor[Any]) -> None:
        """Makes the schema, or brings it to this version; planners that start at once wait for each other.

        They wait before the transaction begins: one that has begun may not see what was made meanwhile.
        """
        version = _schema_version(cursor)
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the schema of --storage has version {version}, and this autoplan knows {len(MIGRATIONS)}",
                hint="A later autoplan made it: install that version here.",
            )
        if version == len(MIGRATIONS):
            return
        cursor.execute("SELECT pg_advisory_lock(hashtext('autoplan'))")
        with cursor.connection.transaction():
            version = _schema_version(cursor)
            if version == 0:
                cursor.execute("CREATE SCHEMA autoplan; CREATE TABLE autoplan.version (number integer NOT NULL)")
                cursor.execute("INSERT INTO autoplan.version VALUES (0)")
            for migration in MIGRATIONS[version:]:
                cursor.execute(migration)
            cursor.execute("UPDATE autoplan.version SET number = greatest(number, %s)", [len(MIGRATIONS)])
        cursor.execute("SELECT pg_advisory_unlock(hashtext('autoplan'))")


def _schema_version(cursor: psycopg.Cursor[Any]) -> int:
    cursor.execute("SELECT to_regclass('autoplan.version') IS NOT NULL")
    if not _row(cursor)[0]:
        return 0
    cursor.execute("SELECT number FROM autoplan.version")
    return int(_row(cursor)[0])


class SharedRecord:
    """The record of a study in a database, opened by one planner. `journal.RecordFile` says what its methods do.

    Args:
        url: Of the database.
        name: Of the study.
        head: Its first line, if there is none.
        fresh: Rename what is there of this study, and begin anew.

    `renamed_to` is the name that an earlier record was given; None: it was not.

    Raises:
        StoreBusyError: `fresh`, and a planner works on it.
        StoreError: the database cannot be used, or a living planner of the study is of another version.
    """

    shared = True

    def __init__(self, url: str, name: str, head: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.place = f"the study {name} in the database"
        self.renamed_to: str | None = None
        self.spent_s = 0.0
        self._planner = uuid.uuid4()
        self._tokens = itertools.count(1)
        self._seen = 0
        self._study = 0
        self._database = Database(url)
        self._ended = threading.Event()
        try:
            self._database.run(lambda cursor: self._join(cursor, name, head, fresh))
            self.documents = self._read(own=True)
        except BaseException:
            self._database.close()
            raise
        self._heart = threading.Thread(target=self._beat, args=(url,), name="autoplan-lease", daemon=True)
        self._heart.start()

    def _join(self, cursor: psycopg.Cursor[Any], name: str, head: Mapping[str, Any], fresh: bool) -> None:
        """Becomes a planner of the study, which is made if there is none."""
        version, me = source_version(), self._planner
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [name])
        cursor.execute("SELECT study FROM autoplan.planner WHERE id = %s", [me])
        if (joined := cursor.fetchone()) is not None:  # the connection was lost after that
            self._study = joined[0]
            return
        cursor.execute("SELECT id FROM autoplan.study WHERE name = %s", [name])
        found = cursor.fetchone()
        if found is not None:
            living = _living(cursor, found[0])
            if living and fresh:
                names = "; ".join(who for who, _ in living)
                raise StoreBusyError(
                    f"--fresh was given, and {len(living)} planner(s) work on {self.place}: {names}",
                    hint="End them first, or leave --fresh out: this one then works with them.",
                )
            others = [f"{who} has {theirs}" for who, theirs in living if theirs != version]
            if others:
                raise StoreError(
                    f"this autoplan is {version}, and another planner of {self.place}, {others[0]}",
                    hint="Planners of one study need the same version and sources of autoplan.",
                )
            if fresh:
                self.renamed_to = f"{name}.old-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{me.hex[:4]}"
                cursor.execute("UPDATE autoplan.study SET name = %s WHERE id = %s", [self.renamed_to, found[0]])
                found = None
        if found is None:
            cursor.execute("INSERT INTO autoplan.study (name) VALUES (%s) RETURNING id", [name])
            found = _row(cursor)
        self._study = found[0]
        cursor.execute(
            "INSERT INTO autoplan.planner (id, study, version, host, pid, beat) "
            "VALUES (%s, %s, %s, %s, %s, clock_timestamp())",
            [me, self._study, version, platform.node(), os.getpid()],
        )
        cursor.execute("SELECT lines FROM autoplan.study WHERE id = %s", [self._study])
        if _row(cursor)[0] == 0:
            cursor.execute("SELECT autoplan.append(%s, %s, 0, %s, NULL)", [self._study, me, json.dumps(head)])

    def append(self, document: Mapping[str, Any], *, key: str | None = None) -> None:
        """Adds a line, in one transaction."""
        token, text = next(self._tokens), json.dumps(document, separators=(",", ":"))
        asked = [self._study, self._planner, token, text, key]
        number = self._call("SELECT autoplan.append(%s, %s, %s, %s, %s)", asked)
        if number == -1:
            raise LeaseLostError(f"another planner has taken over: {key}")
        if number == self._seen + 1:
            self._seen = number

    def news(self) -> list[dict[str, Any]]:
        """The lines that other planners added since the last call."""
        return self._read(own=False)

    def others(self) -> dict[str, bool]:
        """What other living planners work on."""
        asked = [self._study, self._planner, LEASE_S]
        query = (
            "SELECT key, alone FROM autoplan.taken WHERE study = %s AND planner <> %s "
            "AND beat > clock_timestamp() - %s * interval '1 second'"
        )
        return dict(self._database.fetch(query, asked))

    def claim(self, key: str, *, alone: bool = False) -> bool:
        """Claims a piece of work."""
        asked = [self._study, self._planner, key, alone, self._seen, LEASE_S]
        return self._call("SELECT autoplan.claim(%s, %s, %s, %s, %s, %s * interval '1 second')", asked)

    def release(self, key: str) -> None:
        """Gives a piece of work back."""
        query = "UPDATE autoplan.work SET planner = NULL WHERE study = %s AND key = %s AND planner = %s"
        self._database.fetch(query, [self._study, key, self._planner])

    def take_number(self, least: int) -> int:
        """The number of the next trial, which no other planner has."""
        query = "UPDATE autoplan.study SET trials = greatest(trials, %s) + 1 WHERE id = %s RETURNING trials - 1"
        return self._call(query, [least, self._study])

    def keep_clock(self, spent_s: float) -> None:
        """Notes the seconds spent, which the next sign of life carries."""
        self.spent_s = spent_s

    def kept_clock(self) -> float:
        """The most seconds that any planner has noted."""
        return self._call("SELECT coalesce(max(spent_s), 0) FROM autoplan.planner WHERE study = %s", [self._study])

    def close(self) -> None:
        """Gives back all work, and leaves the study; closing twice is fine."""
        if self._ended.is_set():
            return
        self._ended.set()
        query = "UPDATE autoplan.planner SET beat = NULL, spent_s = greatest(spent_s, %s) WHERE id = %s"
        with contextlib.suppress(AutoplanError):  # its lease runs out
            self._database.fetch(query, [self.spent_s, self._planner], retry_s=5.0)
        self._database.close()
        self._heart.join(timeout=5.0)

    def _call(self, query: str, asked: list[Any]) -> Any:
        """The one value that a query gives; StoreError where the study is gone."""
        rows = self._database.fetch(query, asked)
        if not rows or rows[0][0] is None:
            raise StoreError(f"{self.place} was removed meanwhile", hint="The same command begins it anew.")
        return rows[0][0]

    def _read(self, *, own: bool) -> list[dict[str, Any]]:
        """The lines after those that were read; with or without those that this planner wrote."""
        query = "SELECT number, planner, document FROM autoplan.line WHERE study = %s AND number > %s ORDER BY number"
        rows = self._database.fetch(query, [self._study, self._seen])
        documents = [json.loads(text) for _, planner, text in rows if own or planner != self._planner]
        self._seen = max(self._seen, *(number for number, *_ in rows)) if rows else self._seen
        return documents

    def _beat(self, url: str) -> None:
        """Tells the database that this planner lives, until it is closed; in a thread and a connection of its own."""
        query = "UPDATE autoplan.planner SET beat = clock_timestamp(), spent_s = greatest(spent_s, %s) WHERE id = %s"
        query += " AND beat IS NOT NULL"  # it has not left
        while not self._ended.is_set():
            try:
                with contextlib.closing(Database(url)) as database:
                    while not self._ended.wait(BEAT_S):
                        database.fetch(query, [self.spent_s, self._planner], retry_s=0.0)
            except AutoplanError:  # the planner's own calls say what is wrong
                self._ended.wait(PAUSE_S)


def _living(cursor: psycopg.Cursor[Any], study: int) -> list[tuple[str, str]]:
    """The planners of a study that the database hears from: `process 12 on HOST`, and their version."""
    cursor.execute(
        "SELECT 'process ' || pid || ' on ' || host, version FROM autoplan.planner "
        "WHERE study = %s AND beat > clock_timestamp() - %s * interval '1 second' ORDER BY beat",
        [study, LEASE_S],
    )
    return cursor.fetchall()


def read_record(url: str, name: str) -> list[dict[str, Any]]:
    """The lines of a study in a database.

    Raises:
        StoreError: there is none of that name, or the database cannot be used.
    """
    query = "SELECT document FROM autoplan.line JOIN autoplan.study ON id = study WHERE name = %s ORDER BY number"
    with contextlib.closing(Database(check_storage(url))) as database:
        rows = database.fetch(query, [name])
    if not rows:
        raise StoreError(f"the database has no study {name}", hint="autoplan ls --storage URL lists them.")
    return [json.loads(text) for (text,) in rows]


def list_shared(url: str) -> list[Study]:
    """The studies of a database, the one that was written last first."""
    query = """
SELECT name, extract(epoch FROM clock_timestamp() - written)::float,
    (SELECT coalesce(sum(octet_length(document)), 0) FROM autoplan.line WHERE study = id)::bigint,
    (SELECT count(*) FROM autoplan.line WHERE study = id AND document LIKE '{"kind":"trial"%%'),
    (SELECT document FROM autoplan.line WHERE study = id AND number = 1),
    ARRAY(SELECT document FROM autoplan.line WHERE study = id
        AND (document LIKE '{"kind":"budget"%%' OR document LIKE '{"kind":"finished"%%') ORDER BY number),
    (SELECT document FROM autoplan.line WHERE study = id AND document LIKE '{"kind":"plan"%%'
        ORDER BY number DESC LIMIT 1),
    (SELECT count(*) FROM autoplan.planner AS one
        WHERE one.study = study.id AND beat > clock_timestamp() - %s * interval '1 second')
FROM autoplan.study WHERE lines > 0 ORDER BY written DESC"""
    with contextlib.closing(Database(check_storage(url))) as database:
        rows = database.fetch(query, [LEASE_S])
    studies = []
    for name, age_s, size_bytes, trials, head, ends, plan, living in rows:
        status = "running" if living else read_end(map(json.loads, ends)).status
        speedup = json.loads(json.loads(plan)["text"])["speedup"] if plan and status == "plan_found" else None
        studies.append(
            Study(
                folder=None,
                name=name,
                summary=json.loads(head).get("summary") or {},
                age_s=max(0.0, age_s),
                size_bytes=size_bytes,
                trials=trials,
                status=status,
                speedup=speedup,
            )
        )
    return studies


def remove_shared(url: str, name: str) -> None:
    """Removes a study of a database.

    Raises:
        StoreBusyError: planners work on it.
    """

    def remove(cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [name])
        cursor.execute("SELECT id FROM autoplan.study WHERE name = %s", [name])
        for (study,) in cursor.fetchall():
            if living := _living(cursor, study):
                raise StoreBusyError(f"{name} runs: {living[0][0]}", hint="End it first, or leave it out.")
            cursor.execute("DELETE FROM autoplan.study WHERE id = %s", [study])

    with contextlib.closing(Database(check_storage(url))) as database:
        database.run(remove)


def _row(cursor: psycopg.Cursor[Any]) -> Any:
    """The row that a query always gives."""
    row = cursor.fetchone()
    assert row is not None
    return row


def _first_line(error: Exception) -> str:
    """What libpq says, in a line; it never has a password."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""The record in a database, as far as no server is needed: the URL, the missing extra, the names of claims."""

import sys

import pytest

from autoplan.errors import MissingExtraError, UsageError
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.store.database import Database, check_storage, source_version
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_hardware


@pytest.mark.parametrize("url", ["postgresql://me@db:5432/name?sslmode=verify-full", "postgres:///?service=tuning"])
def test_a_url_without_a_password_is_taken_as_it_is(url: str):
    assert check_storage(url) == url
    assert SearchOptions(spec=make_spec(model="gpt2"), storage=url).storage == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://me:tops3cret@db/name", "has a password"),
        ("postgresql://me:@db/name", "has a password"),
        ("postgresql://me@db/name?password=tops3cret", "has a password"),
        ("postgresql://me@db/name?sslmode=require&sslpassword=tops3cret", "has a password"),
        ("me:tops3cret@db/name", "is no URL of PostgreSQL"),
        ("mysql://me:tops3cret@db/name", "is no URL of PostgreSQL"),
        ("host=db password=tops3cret", "is no URL of PostgreSQL"),
        ("postgresql://[me:tops3cret@db/name", "is no URL of PostgreSQL"),
        ("postgresql://me@db/name#0123", "has a # in it"),
    ],
)
def test_a_password_in_the_url_is_refused_and_never_shown(url: str, why: str):
    with pytest.raises(UsageError, match=f"storage {why}") as caught:
        SearchOptions(spec=make_spec(model="gpt2"), storage=url)
    assert "tops3cret" not in f"{caught.value} {caught.value.flag_message} {caught.value.flag_hint}"


def test_without_psycopg_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError) as caught:
        Database("postgresql://me@db/name")
    assert (
        caught.value.hint == "pip install 'autoplan[postgres]' (or 'psycopg[binary]')" and caught.value.exit_code == 2
    )


def test_the_look_at_a_configuration_has_one_name_whoever_wants_it():
    config = TrainingConfig(micro_batch=2)
    look = Work(kind="look", config=config)
    assert look.key == Work(kind="hand setting", config=config).key
    assert look.key is not None and look.key.startswith("look ")
    assert TrainingConfig.model_validate_json(look.key.partition(" ")[2]) == config
    assert Work(kind="parity", config=config).key not in (None, look.key)
    assert Work(kind="pair", config=config).key == "pair", "rounds are numbered one after the other"
    assert Work(kind="trace", config=config).key is None, "each planner does it for itself"


def test_machines_of_one_kind_share_a_study():
    """What a kernel or a balloon leaves of the memory is no other machine."""
    base = make_hardware()

    def machine(memory_bytes: float, cores: int = 2) -> HardwareProfile:
        memory = base.host.memory_total_bytes.model_copy(update={"value": memory_bytes})
        return base.model_copy(
            update={"host": base.host.model_copy(update={"memory_total_bytes": memory, "cores_usable": cores})}
        )

    one, other = machine(16 * 2**30), machine(16 * 2**30 + 4096)
    assert one.kind == other.kind and one.fingerprint == other.fingerprint
    assert len({one.kind, machine(16 * 2**30, cores=3).kind, machine(32 * 2**30).kind}) == 3


def test_the_version_names_the_sources():
    assert source_version() == source_version()
    assert source_version().startswith("0.1.0 (")

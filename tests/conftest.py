"""What all tests share: cache and state folders of their own, one probe of this machine, one zygote of a worker."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C reaches what the tests start, also where `make test &` in a script has its jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of those that -m has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with searches come first, then those with many slow tests: two workers then end at about the same time.

    The second file is the first one without a search: its worker need not wait while the other one probes the machine.
    """
    if importlib.util.find_spec("torchao") is None:
        for item in items:
            if item.get_closest_marker("torchao"):
                item.add_marker(pytest.mark.skip(reason="torchao is not installed: make test-torchao"))
    searches = {item.path for item in items if "probed_machine" in getattr(item, "fixturenames", ())}
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    files = sorted(dict.fromkeys(item.path for item in items), key=lambda path: (path not in searches, -slow[path]))
    if 1 < len(searches) < len(files):
        files.insert(1, files.pop(len(searches)))
    place = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest that all its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def own_folders(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache and the state of the user are neither read nor changed, also by the processes that tests start.

    Each worker has device locks of its own: the searches of two workers do not wait for each other.
    """
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
        patch.setenv("XDG_STATE_HOME", str(shared_folder / "state"))
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield


@pytest.fixture(scope="session")
def probed_machine(shared_folder: Path, training_zygote: Any) -> None:
    """The profile of this machine is in the cache: searches find it, and the workers measure it once for all.

    It is kept also where other tests were running meanwhile: a search that measured it again would use up its budget.
    """
    from autoplan.probes.merge import cache_path, save_cached
    from autoplan.probes.run import run_probes

    with FileLock(shared_folder / "probe.lock"):
        profile = run_probes(training_zygote, device="cpu").model_copy(update={"disturbed": None})
        path = cache_path(profile.fingerprint, "cpu")
        if not path.exists():
            save_cached(path, profile)


@pytest.fixture(scope="session")
def training_zygote(own_folders: None) -> Iterator[Any]:
    """For all tests whose ranks do no harm to it: what it has imported, each rank would import again.

    It starts with its first task.
    """
    from autoplan.planner.search.preload import MODELS, PRELOAD
    from autoplan.processes import Zygote

    models = [f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "qwen3")]
    more = ["torch.distributed.tensor", "torch.distributed.fsdp", "autoplan.planner.trials.loading"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    zygote = Zygote(preload=(*PRELOAD, MODELS, *models, *more), env=environment)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session", autouse=True)
def _exports_share_a_zygote(training_zygote: Any) -> Iterator[None]:
    """An export reads its files back in a process of its own, which would import torch and transformers each time."""
    from autoplan.planner.export import user_code
    from autoplan.processes import Zygote

    def share(*, env: Mapping[str, str] | None = None, **given: Any) -> Any:
        alike = env in (None, {"HF_HUB_OFFLINE": "1"})
        return nullcontext(training_zygote) if alike else Zygote(env=env, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_code, "Zygote", share)
        yield


@pytest.fixture
def quick_searches(probed_machine: None, training_zygote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live searches of this process take the time that shows that they work: see tests/time_box.py."""
    from autoplan.planner.search import nodes
    from tests.time_box import set_time_box

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(nodes, "Zygote", lambda **given: nullcontext(training_zygote))
    set_time_box(monkeypatch.setattr)


class Ended(NamedTuple):
    """An exit code, and what a command printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it printed, where that is JSON."""
        return json.loads(self.out)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command in this process, which has imported what each process of a command imports for seconds."""
    from autoplan.cli import app

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["autoplan", *map(str, arguments)])
        capfd.readouterr()
        code = app.run()
        return Ended(code, *capfd.readouterr())

    return run

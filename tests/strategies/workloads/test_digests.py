"""What identifies a study: a change of what is trained changes a digest, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import PlanError
from autoplan.planner.plan.prepare import refuse_changed_code
from autoplan.strategies.workloads.digests import Describer, digest
from autoplan.strategies.workloads.fingerprint import is_plain, plain
from autoplan.strategies.workloads.function_file import is_own_file, local_sources
from autoplan.strategies.workloads.objects import digests_of
from autoplan.strategies.workloads.sources import changed_parts, make_spec
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import Classifier, classifier

SCRIPT = """
import copy, dataclasses, functools, json
import torch
from torch import nn
import torch.nn.functional as F
import autoplan
import helper
from helper import shift
from autoplan.strategies.workloads.objects import digests_of

NAMES = {"b", "a", "c", "d"}
TABLE = torch.linspace(0, 1, 12)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return F.relu(self.linear(x)) * len(NAMES)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_batch(count, index):
    return {"x": torch.randn(count, 12) + TABLE, "y": torch.zeros(count).long()}


def loss(model, batch):
    logits = shift(model(batch["x"]))
    return autoplan.LossSum(F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))


def workload():
    return autoplan.Workload(
        name="net",
        build_model=lambda: Net(),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8,
    )


if __name__ == "__main__":
    built = workload()
    torch.manual_seed(0)
    model = Net()
    other = dataclasses.replace(built, build_model=functools.partial(copy.deepcopy, model))
    print("DIGESTS " + json.dumps([digests_of(built), digests_of(other)[0]]))
"""
HELPER = "from inner_helper import SCALE\n\n\ndef shift(x):\n    return x * SCALE + 1\n"
INNER_HELPER = "SCALE = 2\n"


def write_project(folder: Path) -> Path:
    (folder / "helper.py").write_text(HELPER)
    (folder / "inner_helper.py").write_text(INNER_HELPER)
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return path


ONE_AFTER_ANOTHER = """
import runpy, sys

for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    runpy.run_path(f"{folder}/script.py", run_name="__main__")
    sys.path.pop(0)
    for name in ("helper", "inner_helper"):
        del sys.modules[name]
"""


def run_digests(*command: str, seed: str = "0") -> list[Any]:
    """The digests that a process prints."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line.removeprefix("DIGESTS ")) for line in done.stdout.splitlines() if "DIGESTS" in line]


CHANGES = [
    ("script.py", "F.relu(self.linear(x))", "F.gelu(self.linear(x))", {"model"}),
    ("script.py", "linspace(0, 1, 12)", "linspace(0, 2, 12)", {"data"}),
    ("script.py", "lr=0.1", "lr=0.2", {"optimizer"}),
    ("helper.py", "x * SCALE + 1", "x * SCALE + 2", {"loss"}),
    ("inner_helper.py", "SCALE = 2", "SCALE = 3", {"loss"}),
    ("script.py", '"DIGESTS "', '"DIGESTS " ""', set()),  # code that trains nothing is not part of it
]


def test_digests_are_the_same_in_two_processes_and_see_changes(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    ((first, unhashed), trained) = run_digests(str(path), seed="1")[0]
    folders = []
    for number, (file, before, after, _) in enumerate(CHANGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_project(folder)
        text = (folder / file).read_text()
        assert before in text
        (folder / file).write_text(text.replace(before, after))
        folders.append(str(folder))
    same, *changed = run_digests("-c", ONE_AFTER_ANOTHER, str(tmp_path), *folders, seed="2")
    assert same == [[first, unhashed], trained] and unhashed == []
    for ((now, _), _), (*change, parts) in zip(changed, CHANGES, strict=True):
        assert {part for part in first if now[part] != first[part]} == parts, change


def parts_that_differ(one: Workload, other: Workload) -> set[str]:
    first, second = digests_of(one)[0], digests_of(other)[0]
    return {part for part in first if first[part] != second[part]}


def with_model(model: torch.nn.Module) -> Workload:
    import copy
    import dataclasses
    import functools

    return dataclasses.replace(classifier(), build_model=functools.partial(copy.deepcopy, model))


def test_weights_are_a_part_of_their_own() -> None:
    torch.manual_seed(0)
    model, same, frozen = Classifier(), Classifier(), Classifier()
    same.load_state_dict(model.state_dict())
    frozen.load_state_dict(model.state_dict())
    frozen.stem.requires_grad_(False)
    assert parts_that_differ(with_model(model), with_model(same)) == set()
    assert parts_that_differ(with_model(model), with_model(Classifier())) == {"weights"}
    assert parts_that_differ(with_model(model), with_model(frozen)) == {"model"}


def test_tensors_in_closures_count_and_large_ones_are_sampled() -> None:
    def closing_over(values: torch.Tensor) -> Workload:
        workload = classifier()
        inner = workload.make_batch
        workload.make_batch = lambda count, index: {**inner(count, index), "extra": values[:count]}
        return workload

    large = torch.zeros(50_000_000)
    other = torch.ones(50_000_000)
    began = time.process_time()
    assert parts_that_differ(closing_over(large), closing_over(other)) == {"data"}
    assert time.process_time() - began < 2.0
    assert parts_that_differ(closing_over(large), closing_over(large.clone())) == set()


def test_what_cannot_be_hashed_is_named_and_its_address_is_not_used() -> None:
    def closing_over(lock: Any) -> Workload:
        workload = classifier()
        inner = workload.make_batch
        workload.make_batch = lambda count, index: inner(count, index) if lock else {}
        return workload

    import threading

    locks = [threading.Lock(), threading.Lock()]
    first, second = (digests_of(closing_over(lock)) for lock in locks)
    assert first == second and first[1] == ("_thread.lock",)


def test_files_reached_by_imports_inside_packages(tmp_path: Path) -> None:
    for name, text in {
        "main.py": "from package.models import net\n",
        "package/__init__.py": "",
        "package/models/__init__.py": "from . import net\n",
        "package/models/net.py": "from ..common import act\nimport beside\n",
        "package/common.py": "act = 1\n",
        "beside.py": "import not_there\n",
        "unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = local_sources(tmp_path / "main.py")
    assert {"main.py", "package/common.py", "package/models/net.py", "beside.py"} <= set(found)
    assert "unused.py" not in found and not any("torch" in name for name in found)


@pytest.mark.parametrize("file", ["script.py", "inner_helper.py"])
def test_a_changed_file_is_another_study_and_a_plan_is_refused(file: str, tmp_path: Path) -> None:
    path = write_project(tmp_path)
    before = make_spec(model=f"{path}:workload", global_batch=8)
    assert changed_parts(before) == () and refuse_changed_code(before, changed_ok=False) is None
    with open(tmp_path / file, "a") as out:
        out.write("\nCHANGED = 1\n")
    assert make_spec(model=f"{path}:workload", global_batch=8).identity != before.identity
    with pytest.raises(PlanError, match="changed since the plan was found"):
        refuse_changed_code(before, changed_ok=False)
    assert "code" in str(refuse_changed_code(before, changed_ok=True))


def test_other_versions_are_said_not_refused() -> None:
    spec = make_spec(model="gpt2")
    old = spec.model_copy(update={"digests": spec.digests | {"versions": "0" * 16}})
    assert "versions" in str(refuse_changed_code(old, changed_ok=False))
    with pytest.raises(PlanError, match="model of gpt2 changed"):  # a missing digest is a changed one
        refuse_changed_code(spec.model_copy(update={"digests": {}}), changed_ok=False)


class WithMetadata(torch.nn.Linear):
    """As neuralop's models: the state has a dict beside its tensors."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().state_dict(*args, **options) | {"_metadata": {"sizes": (2, 2)}}


class Irrep(tuple[Any, ...]):
    """As e3nn's: a tuple that refuses len()."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("size", [2, 3])
def test_models_with_more_than_tensors_in_their_state_and_with_odd_tuples(size: int) -> None:
    model: Any = WithMetadata(2, size)
    model.irreps = Irrep((size, Irrep((1, -1))))
    described = Describer().describe(model)
    other: Any = WithMetadata(2, 2)
    other.irreps = Irrep((2, Irrep((1, -1))))
    assert (digest(described) == digest(Describer().describe(other))) is (size == 2)
    assert is_plain(model.irreps) and plain(model.irreps)[0] == 2


def test_a_package_that_pip_installed_beside_is_no_code_of_the_users(tmp_path, monkeypatch):
    """`pip install --target`, or a cluster's modules: with Lightning there, to describe a training took minutes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path.parent))  # the folder may lie in the user's own
    for name in ("library/inner.py", "train.py", "mine/model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    info = tmp_path / "library-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: library\nVersion: 1.0\n")
    (info / "RECORD").write_text("library/inner.py,,\nlibrary-1.0.dist-info/RECORD,,\n")
    assert not is_own_file(tmp_path / "library/inner.py")
    assert is_own_file(tmp_path / "train.py") and is_own_file(tmp_path / "mine/model.py")

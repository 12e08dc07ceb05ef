"""Code that changed between a search and `plan.prepare` is named and refused: what strangers bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.errors import PlanError
from autoplan.planner.records.changes import refuse_changed_parts
from autoplan.strategies.workloads.fingerprint import changed_names, fingerprints
from autoplan.strategies.workloads.objects import spec_from_objects
from tests.cases import some
from tests.strategies.tiny import Classifier, image_batch, image_loss, sgd

FILES = {
    "src/lab/__init__.py": "",
    "src/lab/settings.py": """
import dataclasses

@dataclasses.dataclass
class Settings:
    width: int = 8
    gain: float = 2.0
    def scaled(self, x):
        return x * self.gain
""",
    "src/lab/parts/__init__.py": "",
    "src/lab/parts/act.py": "import torch\ndef act(x):\n    return torch.relu(x)\n",
    "src/lab/parts/late.py": "SHIFT = 1.0\n",
    "src/lab/net.py": """
import torch
from torch import nn
from .parts.act import act
from .settings import Settings

class Net(nn.Module):
    class Block(nn.Module):
        def __init__(self, settings):
            super().__init__()
            self.settings = settings
            self.linear = nn.Linear(settings.width, settings.width)
        def forward(self, x):
            from .parts import late
            return self.settings.scaled(act(self.linear(x))) + late.SHIFT
    def __init__(self, settings):
        super().__init__()
        self.blocks = nn.ModuleList([Net.Block(settings) for _ in range(2)])
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        '''Applies the blocks.'''
        for block in self.blocks:
            x = block(x)
        return self.drop(x)
""",
    "train.py": """
import functools, json, sys
sys.path.insert(0, "src")
import torch
from lab.net import Net
from lab.settings import Settings
import autoplan
from autoplan.strategies.workloads.fingerprint import fingerprints
from autoplan.strategies.workloads.objects import spec_from_objects

TABLE = torch.arange(4.0)
SCALE = 0.5

def closing(power):
    weights = TABLE ** power
    def loss(model, batch, floor=1e-6):
        out = model(batch["x"])
        return autoplan.LossSum((out.square().sum() * SCALE + weights.sum() + floor), out.shape[0])
    return loss

def make_batch(count, index, *, spread):
    return {"x": torch.ones(count, 8) * spread}

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

torch.manual_seed(0)
parts = dict(
    model=Net(Settings()), loss=closing(2), optimizer=lambda p: make_optimizer(p),
    make_batch=functools.partial(make_batch, spread=2.0), schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
)
notebook = {}
exec('''
import torch
from torch import nn
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        return torch.relu(self.linear(x))
''', notebook)
spec = spec_from_objects(**parts, global_batch=4)
print("FOUND " + json.dumps([
    fingerprints(**parts), spec.identity, spec.digests, list(spec.unhashed), fingerprints(model=notebook["Cell"]),
    fingerprints(model=lambda: Net(Settings())),
]))
""",
}


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run_script(folder: Path, seed: str = "0") -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("FOUND "))


CHANGES = [
    ("src/lab/parts/act.py", "relu", "nn.functional.gelu", "model", ["act"]),
    ("src/lab/parts/late.py", "1.0", "3.0", "model", ["late.py"]),
    ("src/lab/settings.py", "gain: float = 2.0", "gain: float = 3.0", "model", ["attributes of Net.Block"]),
    ("src/lab/settings.py", "x * self.gain", "x + self.gain", "model", ["Settings.scaled"]),
    ("train.py", "TABLE ** power", "TABLE ** (power + 1)", "loss", ["weights in the loss"]),
    ("train.py", "SCALE = 0.5", "SCALE = 0.7", "loss", ["SCALE in the loss"]),
    ("train.py", "floor=1e-6", "floor=1e-5", "loss", ["default 1 of the loss"]),
    ("train.py", "out.square().sum()", "out.abs().sum()", "loss", ["the loss"]),
    ("train.py", "StepLR(o, 3)", "StepLR(o, 4)", "schedule", ["the schedule"]),
    ("train.py", "spread=2.0", "spread=2.5", "data", ["spread of make_batch"]),
    ("train.py", "torch.relu(self.linear(x))", "torch.tanh(self.linear(x))", "notebook", ["Cell.forward"]),
]


FEW = [CHANGES[number] for number in (0, 4, 8, 9, 10)]


@pytest.mark.parametrize("changes", some([FEW, CHANGES], [FEW]), ids=["few", "all"])
def test_what_strangers_bring_is_seen_by_name_and_the_same_in_two_processes(tmp_path: Path, changes: Any) -> None:
    write_files(tmp_path)
    first = run_script(tmp_path, "1")
    assert run_script(tmp_path, "2") == first
    assert first[3] == [], "nothing that could not be hashed"
    for file, before, after, part, names in changes:
        text = FILES[file]
        assert text.count(before) == 1, before
        (tmp_path / file).write_text(text.replace(before, after))
        now = run_script(tmp_path)
        (tmp_path / file).write_text(text)
        if part == "notebook":
            assert changed_names(first[4]["model"], now[4]["model"]) == names
            continue
        changed = {key: changed_names(first[0][key], now[0][key]) for key in first[0]}
        assert {key: found for key, found in changed.items() if found}.keys() == {part}, (before, changed)
        assert set(names) <= set(changed[part]), (before, changed)
        assert now[1] != first[1], f"{before}: another study"
        across = changed_names(first[5]["model"], now[0]["model"])  # a function in the search, an instance now
        assert bool(across) == (part == "model"), (before, across)
    (tmp_path / "train.py").write_text(FILES["train.py"].replace("def closing", "# a comment\n\ndef closing"))
    moved = run_script(tmp_path)
    assert all(changed_names(first[0][key], moved[0][key]) == [] for key in first[0]), "comments and lines do not count"


class Gelu(Classifier):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(super().forward(images))


def spec_of(model: Any) -> Any:
    return spec_from_objects(model=model, make_batch=image_batch, loss=image_loss, optimizer=sgd, global_batch=4)


def test_prepare_refuses_another_model_and_says_which_weights_changed() -> None:
    model = Classifier()
    spec = spec_of(model)
    assert refuse_changed_parts(spec, changed_ok=False, model=model, loss=image_loss) is None
    assert "the weights" in str(refuse_changed_parts(spec, changed_ok=False, model=Classifier()))
    frozen = Classifier()
    frozen.stem.requires_grad_(False)
    with pytest.raises(PlanError, match="what is frozen"):
        refuse_changed_parts(spec, changed_ok=False, model=frozen)
    with pytest.raises(PlanError, match="not what the search had"):
        refuse_changed_parts(spec, changed_ok=False, model=Gelu())
    with pytest.raises(PlanError, match="the loss"):
        refuse_changed_parts(spec, changed_ok=False, loss=lambda model, batch: image_loss(model, batch))
    assert "the modules" in str(refuse_changed_parts(spec, changed_ok=True, model=nn.Sequential(Classifier())))
    made = spec_of(Classifier)  # a function in the search: only what both have is compared
    assert refuse_changed_parts(made, changed_ok=False, model=model) is None
    old = spec.model_copy(update={"sources": {}})
    assert refuse_changed_parts(old, changed_ok=False, model=Gelu()) is None


def test_a_model_that_rests_in_eval_mode_is_the_same_training() -> None:
    then = fingerprints(model=Classifier())["model"]
    assert changed_names(then, fingerprints(model=Classifier().eval())["model"]) == []
    part = Classifier()
    part.stages.eval()
    assert changed_names(then, fingerprints(model=part)["model"]) == ["what is in eval mode"]


DATA = """
import torch, autoplan, torch.nn.functional as F
from pathlib import Path

HERE = Path(__file__).parent

class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.lines = (HERE / "data" / "numbers.txt").read_text().split()
    def __len__(self):
        return len(self.lines)
    def __getitem__(self, index):
        values = torch.from_file(str(HERE / "data" / "raw.bin"), size=4)
        return {"x": values + float(self.lines[index])}

def loss(model, batch):
    out = model(batch["x"])
    return autoplan.LossSum(out.square().sum(), out.numel())

def workload():
    return autoplan.Workload(
        name="numbers", build_model=lambda: torch.nn.Linear(4, 1), make_batch=autoplan.batches_from_dataset(Numbers()),
        loss=loss, build_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=4)
"""


def test_the_files_that_a_workload_reads_are_its_data(tmp_path: Path) -> None:
    from autoplan.planner.plan.prepare import refuse_changed_code
    from autoplan.strategies.inspect import inspect_workload
    from autoplan.strategies.workloads.sources import make_spec
    from tests.recorded import make_hardware

    (tmp_path / "data").mkdir()
    numbers, raw = tmp_path / "data" / "numbers.txt", tmp_path / "data" / "raw.bin"
    numbers.write_text("1 2 3 4 5 6 7 8")
    raw.write_bytes(torch.ones(4).numpy().tobytes())
    (tmp_path / "numbers_workload.py").write_text(DATA)
    spec = inspect_workload(make_spec(model=f"{tmp_path}/numbers_workload.py:workload"), make_hardware(), "cpu").spec
    assert str(numbers) in spec.sources["data files"], spec.sources["data files"]
    assert spec.unit == "samples" and "data" in spec.digests
    assert refuse_changed_code(spec, changed_ok=False) is None
    numbers.write_text("1 2 3 4 5 6 7 8 9")
    said = refuse_changed_code(spec, changed_ok=False)
    assert said is not None and "data" in said and "numbers.txt" in said, "a warning, not a refusal"
    numbers.unlink()
    assert refuse_changed_code(spec, changed_ok=False) is None, "it may be elsewhere"
    with open(tmp_path / "numbers_workload.py", "a") as out:
        out.write("\nCHANGED = 1\n")
    with pytest.raises(PlanError, match=r"\(numbers_workload.py\)"):
        refuse_changed_code(spec, changed_ok=False)

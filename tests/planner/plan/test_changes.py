"""Code that changed between a search and `plan.prepare` is named and refused: what strangers bring."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.errors import PlanError, WorkloadError
from autoplan.planner.plan.prepare import refuse_changed_parts
from autoplan.processes import Task, Zygote
from autoplan.strategies.workloads.fingerprint import changed_names, fingerprints
from autoplan.strategies.workloads.loops.loop import read_loop
from autoplan.strategies.workloads.objects import spec_from_objects
from tests.cases import some
from tests.strategies.loops import Points, Regressor
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


def run_script(folder: Path, seed: str) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("FOUND "))


def run_in_rank(context: object, folder: str) -> Any:
    """The script in a process that has imported torch: none of its own modules is there yet."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("train.py", run_name="__main__")
    return json.loads(printed.getvalue().splitlines()[-1].removeprefix("FOUND "))


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
def test_what_strangers_bring_is_seen_by_name_and_the_same_in_all_processes(
    tmp_path: Path, changes: Any, training_zygote: Zygote
) -> None:
    def run() -> Any:
        task = Task(target=run_in_rank, args=(str(tmp_path),), total_deadline_s=60.0)
        return training_zygote.run(task).check().results[0]

    write_files(tmp_path)
    first = run_script(tmp_path, "1")
    assert first == run(), "whose hash seed is another"
    if changes is CHANGES:
        assert run_script(tmp_path, "2") == first
    assert first[3] == [], "nothing that could not be hashed"
    for file, before, after, part, names in changes:
        text = FILES[file]
        assert text.count(before) == 1, before
        (tmp_path / file).write_text(text.replace(before, after))
        now = run()
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
    moved = run()
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


def tripled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*given: Any) -> Any:
        return function(*given) * 3

    return wrapper


def quadrupled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*given: Any) -> Any:
        return function(*given) * 4

    return wrapper


class Plain(nn.Module):
    """A small model of the user's own, whose parts are replaced on the instance."""

    squash: Any = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.act: Any = nn.functional.relu
        self.then: Any = lambda x: x * 2
        self.part: Any = functools.partial(nn.functional.gelu, approximate="tanh")
        self._scale = 0.5
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.part(self.act(self.linear(x) * self.mask))) * self._scale


class Tripled(Plain):
    forward = tripled(Plain.forward)


class Quadrupled(Plain):
    forward = quadrupled(Plain.forward)


Quadrupled.__qualname__, Quadrupled.__name__ = Tripled.__qualname__, Tripled.__name__


def own_gelu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x)


def printing(module: Any, given: Any, result: Any = None) -> Any:
    return result


def with_attribute(name: str, value: Any) -> Any:
    model = Plain()
    setattr(model, name, value)
    return model


def hooked(register: str) -> Any:
    model = Plain()
    getattr(model.linear, register)(printing)
    return model


def with_gradient_hook(kind: str) -> Any:
    model = Plain()
    getattr(model.linear.weight, kind)(lambda one: None)
    return model


def with_mask() -> Any:
    model = Plain()
    model.mask = torch.zeros(4)
    return model


@pytest.mark.parametrize(
    ("then", "now", "name"),
    [
        (Plain, lambda: with_attribute("act", nn.functional.gelu), "act of Plain"),
        (Plain, lambda: with_attribute("act", torch.tanh), "act of Plain"),
        (Plain, lambda: with_attribute("act", own_gelu), "act of Plain"),
        (Plain, lambda: with_attribute("then", lambda x: x * 3), "<lambda>"),
        (Plain, lambda: with_attribute("part", functools.partial(nn.functional.gelu)), "part of Plain"),
        (Plain, lambda: with_attribute("_scale", 0.25), "attributes of Plain"),
        (
            lambda: with_attribute("forward", lambda x: x),
            lambda: with_attribute("forward", lambda x: x * 3),
            "<lambda>",
        ),
        (Plain, lambda: with_attribute("forward", lambda x: x), "attributes of Plain"),
        (Plain, lambda: hooked("register_forward_hook"), "the hooks"),
        (Plain, lambda: hooked("register_forward_pre_hook"), "the hooks"),
        (Plain, lambda: hooked("register_full_backward_hook"), "the hooks"),
        (Plain, lambda: with_gradient_hook("register_hook"), "the hooks"),
        (Plain, lambda: with_gradient_hook("register_post_accumulate_grad_hook"), "the hooks"),
        (Tripled, Quadrupled, "Plain.forward"),
    ],
)
def test_what_an_instance_has_of_its_own_is_seen(then: Any, now: Any, name: str) -> None:
    spec = spec_of(then())
    assert refuse_changed_parts(spec, changed_ok=False, model=then()) is None
    with pytest.raises(PlanError) as error:
        refuse_changed_parts(spec, changed_ok=False, model=now())
    assert name in str(error.value), str(error.value)
    assert spec_of(now()).identity != spec.identity, "another study"


def test_unsaved_buffers_count_as_weights_do() -> None:
    spec = spec_of(Plain())
    assert "the buffers that no checkpoint has" in str(refuse_changed_parts(spec, changed_ok=False, model=with_mask()))
    assert spec_of(with_mask()).identity != spec.identity


class Switched(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.environ.get("SWITCHED_SCALE", "1"))


def test_variables_and_the_default_dtype_that_change_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Switched()
    spec = spec_of(model)
    monkeypatch.setenv("OTHER_SCALE", "2")
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    said = refuse_changed_parts(spec, changed_ok=False, model=model)
    assert said == "changed since the plan was found: $ONEDNN_DEFAULT_FPMATH_MODE"
    assert spec_of(model).identity == spec.identity
    monkeypatch.setenv("SWITCHED_SCALE", "2")
    with pytest.raises(PlanError, match=r"\$SWITCHED_SCALE in Switched.forward"):
        refuse_changed_parts(spec, changed_ok=False, model=model)
    assert spec_of(model).identity != spec.identity
    monkeypatch.delenv("SWITCHED_SCALE")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(PlanError, match="the default dtype"):
            refuse_changed_parts(spec, changed_ok=False, model=model)
        with pytest.raises(WorkloadError, match="default dtype is torch.float64 here, and trials"):
            spec_of(model)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("then", "now", "name"),
    [
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), "attributes of CrossEntropyLoss"),
        (
            lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
            lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]) * 2,
            "<lambda>",
        ),
    ],
)
def test_the_loss_of_a_loop_is_looked_into(then: Any, now: Any, name: str) -> None:
    torch.manual_seed(0)
    model = Regressor()
    loader: Any = torch.utils.data.DataLoader(Points(16), batch_size=8)
    found = [read_loop(model, torch.optim.SGD(model.parameters()), loader, loss).loss for loss in (then, now)]
    spec = spec_from_objects(model=model, make_batch=image_batch, loss=found[0], optimizer=sgd, global_batch=4)
    assert refuse_changed_parts(spec, changed_ok=False, model=model, loss=found[0]) is None
    with pytest.raises(PlanError) as error:
        refuse_changed_parts(spec, changed_ok=False, model=model, loss=found[1])
    assert name in str(error.value), str(error.value)


class Counting(nn.Module):
    """Counts its calls, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(12, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.linear(x)
        return self.last


def test_reading_a_loop_leaves_what_its_modules_count() -> None:
    model = Counting()
    loader: Any = torch.utils.data.DataLoader(Points(16), batch_size=8)
    read_loop(model, torch.optim.SGD(model.parameters()), loader, nn.CrossEntropyLoss())
    assert model.calls == 0 and not hasattr(model, "last")


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

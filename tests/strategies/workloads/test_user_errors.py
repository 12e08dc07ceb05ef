"""What a user reads where a function of theirs is wrong: its own error first, which call it was, what is expected."""

from pathlib import Path

import pytest
import torch

from autoplan.errors import WorkloadError
from autoplan.probes.host import read_host
from autoplan.probes.run import read_host_profile
from autoplan.strategies.analysis.facts import WorkloadFacts
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.workloads import objects
from autoplan.strategies.workloads.sources import load_workload, make_spec

MINE = """
import autoplan, torch
from torch import nn

DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
    def forward(self, rows, mask):
        return self.layer(rows * mask)

def workload():
    return autoplan.Workload(
        name="mine", build_model=build_model, make_batch=make_batch, loss=loss, build_optimizer=build_optimizer,
        global_batch=8,
    )

def build_model():
    return Model()

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def make_batch(num_samples, index):
    rows = DATA[torch.arange(index * num_samples, (index + 1) * num_samples) % 40]
    return {"rows": rows, "mask": torch.ones_like(rows)}

def loss(model, batch):
    found = model(batch["rows"], batch["mask"]).square()
    return autoplan.LossSum(found.sum(), len(found))
"""


def inspect(folder: Path, old: str = "", new: str = "") -> WorkloadFacts:
    """The facts of MINE with a change."""
    assert old in MINE
    file = folder / "mine.py"
    file.write_text(MINE.replace(old, new))
    return inspect_workload(make_spec(model=f"{file}:workload"), read_host_profile(), "cpu")


def refusal(folder: Path, old: str, new: str) -> WorkloadError:
    """The error of MINE with a change."""
    with pytest.raises(WorkloadError) as raised:
        inspect(folder, old, new)
    return raised.value


def test_a_workload_without_a_fault_is_fine(tmp_path):
    assert inspect(tmp_path).knob("micro_batch").values == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("old", "new", "first", "call"),
    [
        (
            'model(batch["rows"], batch["mask"])',
            'model(batch["rows"])',
            "TypeError: Model.forward() missing 1 required positional argument: 'mask'",
            "raised by loss(model, batch) of mine on make_batch(2, 0), in mine.py, line 31",
        ),
        (
            'batch["mask"])',
            'batch["attention_mask"])',
            "KeyError: 'attention_mask'",
            "raised by loss(model, batch) of mine on make_batch(2, 0), in mine.py, line 31",
        ),
        (
            "rows = DATA[",
            "rows = open('shard-7')[",
            "FileNotFoundError: [Errno 2] No such file or directory: 'shard-7'",
            "raised by make_batch(2, 0) of mine, in mine.py, line 27",
        ),
        (
            "return Model()",
            "return Model(width=3)",
            "TypeError: Model.__init__() got an unexpected keyword argument 'width'",
            "raised by build_model() of mine, in mine.py, line 21",
        ),
        (
            "torch.optim.SGD(parameters, lr=0.1)",
            "torch.optim.SGD(parameters, rate=0.1)",
            "TypeError: SGD.__init__() got an unexpected keyword argument 'rate'",
            "raised by build_optimizer(parameters) of mine, in mine.py, line 24",
        ),
    ],
)
def test_the_functions_own_error_comes_first(tmp_path, old, new, first, call):
    error = refusal(tmp_path, old, new)
    assert error.message.splitlines()[:2] == [first, call]
    assert error.hint


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("rows = DATA[:32]", "make_batch(2, 0) of mine gave 32 samples, not 2"),
        ("rows = [1, 2]; return rows", "make_batch(2, 0) of mine: the batch has no tensor"),
    ],
)
def test_a_batch_of_another_size(tmp_path, new, says):
    old = "rows = DATA[torch.arange(index * num_samples, (index + 1) * num_samples) % 40]"
    error = refusal(tmp_path, old, new)
    assert says in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("rows = DATA[index * num_samples : (index + 1) * num_samples]", "make_batch(16, 2) of mine gave 8 samples"),
        ("rows = torch.stack([DATA[index * num_samples + n] for n in range(num_samples)])", "IndexError: index 40 is"),
    ],
)
def test_a_dataset_that_ends_says_so_where_it_ends(tmp_path, new, says):
    old = "rows = DATA[torch.arange(index * num_samples, (index + 1) * num_samples) % 40]"
    inspect(tmp_path, old, new)
    workload = load_workload(make_spec(model=f"{tmp_path}/mine.py:workload"))
    workload.make_batch(16, 1)
    with pytest.raises(WorkloadError) as raised:
        workload.make_batch(16, 2)
    assert says in raised.value.message
    assert "make_batch(16, 2) of mine" in raised.value.message
    assert "where the data ends, it begins again" in str(raised.value.hint)


def test_a_mean_is_told_from_other_losses(tmp_path):
    mean = inspect(tmp_path, "LossSum(found.sum(), len(found))", "LossSum(found.mean(), 1)")
    why = mean.micro_batch_dependent[0].why
    assert "that is a mean" in why and "LossSum(mean * count, count)" in why
    contrastive = "LossSum((found @ found.T).softmax(-1).log().diagonal().neg().sum() + found.sum(), len(found))"
    other = inspect(tmp_path, "LossSum(found.sum(), len(found))", contrastive)
    assert "contrastive" in other.micro_batch_dependent[0].why


def test_a_loss_that_is_no_loss_sum(tmp_path):
    error = refusal(tmp_path, "return autoplan.LossSum(found.sum(), len(found))", "return found.sum()")
    assert "the loss of mine gave Tensor" in error.message
    assert "LossSum(sum of the losses, number of items)" in str(error.hint)


def test_the_other_lines_of_an_error_come_last():
    from autoplan.strategies.workloads.user_errors import user_error

    error = user_error(RuntimeError("shapes differ\n  while loading head.weight"), "build_model() of mine", "Do it.")
    assert error.message.splitlines() == [
        "RuntimeError: shapes differ",
        "raised by build_model() of mine",
        "  while loading head.weight",
    ]
    assert user_error(KeyboardInterrupt(), "loss", "").message.startswith("KeyboardInterrupt\n")


def test_a_model_that_is_too_large_to_be_sent_to_each_rank_is_refused_before_it_is(monkeypatch: pytest.MonkeyPatch):
    given = {"make_batch": lambda number, index: {}, "loss": print, "optimizer": torch.optim.SGD, "global_batch": 2}
    model = torch.nn.Linear(1200, 1024, bias=False)  # 4.69 MiB
    host = read_host()

    def free(number: int):
        reading = host.memory_available_bytes.model_copy(update={"value": number})
        monkeypatch.setattr(objects, "read_host", lambda: host.model_copy(update={"memory_available_bytes": reading}))

    free(9 << 20)
    with pytest.raises(WorkloadError, match=r"4.69 MiB of tensors.* takes 9.38 MiB; 9.00 MiB of the host's") as caught:
        objects.spec_from_objects(model=model, **given)
    assert "--trainer FILE.py:FUNCTION" in (caught.value.hint or "")
    with torch.device("meta"):
        objects.check_size(objects.workload_from_objects(model=torch.nn.Linear(1200, 1024), **given))
    free(10 << 20)
    objects.check_size(objects.workload_from_objects(model=model, **given))


def test_what_has_no_shape_yet_is_asked_to_run_once(tmp_path: Path) -> None:
    error = refusal(tmp_path, "self.layer = nn.Linear(8, 1)", "self.layer = nn.LazyLinear(1)")
    assert "no shape before its first forward: layer.weight" in error.message
    assert "Run it once" in str(error.hint)


@pytest.mark.parametrize("compiled", ["torch.compile(nn.Linear(8, 1))", "nn.Linear(8, 1); self.layer.compile()"])
def test_a_model_that_is_compiled_already_is_refused(compiled: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, "self.layer = nn.Linear(8, 1)", f"self.layer = {compiled}")
    assert "build_model of mine returned a model that torch.compile has compiled" in error.message
    assert "give compile=model as the baseline" in str(error.hint)


def test_several_optimizers_are_refused_before_anything_else(tmp_path: Path) -> None:
    error = refusal(tmp_path, "return torch.optim.SGD(parameters, lr=0.1)", "return [torch.optim.SGD(parameters)] * 2")
    assert "build_optimizer(parameters) of mine gives is a list of 2 optimizers" in error.message

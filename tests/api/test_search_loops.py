"""Searches of trainings as they stand, and their plans applied: a loop with Accelerate, a step, a plain loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autoplan
from autoplan import api
from autoplan.planner.plan.plan import Plan
from autoplan.probes.run import read_host_profile
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from tests.recorded import make_plan
from tests.strategies.loops import Sentences, groups, loader_of, pad, parameters_of, tiny_gpt2, worst_difference
from tests.strategies.tiny import Classifier, image_batch, image_loss
from tests.strategies.tiny_trainers import llama_trainer
from tests.strategies.workloads.loops.test_step import make_step, plain_losses

CLIP = 0.05
STEPS = 3


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def loop_of(accelerator: Any) -> tuple[Any, ...]:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return tuple(accelerator.prepare(model, optimizer, loader_of(Sentences(), 8, collate_fn=pad), schedule))


def from_records(parts: tuple[Any, ...], **how: Any) -> Plan:
    """The plan that a search could have found, as another process reads it."""
    workload = autoplan.from_loop(*parts, **how)
    assert any("the loss is a mean over the tokens of labels" in note for note in workload.notes)
    facts = read_training_facts(workload, workload.build_model())
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec_from_objects(workload), training=facts)
    return Plan.model_validate_json(plan.model_dump_json())


def test_the_plan_of_an_accelerate_loop_trains_what_the_loop_trains() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader, schedule = loop_of(accelerator)
    plan = from_records((model, optimizer, loader), schedule=schedule, max_grad_norm=CLIP)
    assert plan.parity.passed and plan.workload.global_batch == 8 and plan.workload.taken_from == "training loop"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, batches = plan.apply_to(model, optimizer, loader, schedule=schedule, max_grad_norm=CLIP)
    assert batches.collate_fn.keywords["micro_batch"] == 4, "each micro-batch is padded by itself"
    for _, batch in zip(range(STEPS), batches, strict=False):
        assert float(run.step(batch).grad_norm) > CLIP
    got = parameters_of(run.model)
    model, optimizer, loader, schedule = loop_of(accelerator)  # the stranger's own loop, from the same start
    for _, batch in zip(range(STEPS), loader, strict=False):
        accelerator.backward(own_loss(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert worst_difference(got, parameters_of(accelerator.unwrap_model(model))) < 5e-4


@pytest.mark.slow
def test_a_step_is_searched_and_its_plan_runs_the_step(quick_searches: None, tmp_path: Path) -> None:
    plan = autoplan.search(step=make_step, global_batch=16, budget=60, device="cpu", store=tmp_path, quiet=True)
    assert plan.parity.passed
    if plan.config != plan.baseline.config:  # a plan that is the plain run is compared with nothing
        assert {check.name for check in plan.parity.checks} == {"losses", "losses of two plain runs"}
    assert any("parity compares the losses of some steps and nothing else" in note for note in plan.notes)
    assert plan.config.precision == "fp32" and plan.config.micro_batch == 16 and plan.training is None
    threads = torch.get_num_threads()
    try:
        torch.manual_seed(0)  # as plain_losses does: under a plan nothing else seeds the step
        planned = plan.apply_to(make_step)
        assert [planned(index) for index in range(4)] == pytest.approx(plain_losses(4), rel=1e-5)
    finally:
        torch.set_num_threads(threads)


def test_parts_that_do_not_go_together_are_named() -> None:
    model = tiny_gpt2()
    loader = loader_of(Sentences(), 8, collate_fn=pad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(autoplan.UsageError, match="after a model comes its optimizer"):
        autoplan.search(model, loader)
    with pytest.raises(autoplan.UsageError, match="trainer was given too"):
        autoplan.search(model, optimizer, loader, trainer=object())
    with pytest.raises(autoplan.UsageError, match="make_batch was given too"):
        autoplan.search(model, optimizer, loader, make_batch=lambda count, index: None)
    with pytest.raises(autoplan.UsageError, match="loss_mean was given too"):
        autoplan.search(model=model, optimizer=optimizer, make_batch=lambda count, index: None, loss_mean="tokens")
    with pytest.raises(autoplan.UsageError, match="schedule_interval was given too"):
        make = {"make_batch": lambda count, index: None}
        autoplan.search(model=model, optimizer=optimizer, **make, schedule_interval="epoch")
    with pytest.raises(autoplan.UsageError, match="dataloader was given too"):
        autoplan.search("gpt2", dataloader=loader)
    with pytest.raises(autoplan.UsageError, match="no dataloader"):
        autoplan.from_loop(model, optimizer)


def test_natural_calls_are_taken_or_told_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []

    def begin(options: Any, **how: Any) -> Any:
        specs.append(options.spec)
        raise autoplan.DeviceError("it would begin here")

    monkeypatch.setattr(api, "run", begin)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = {"make_batch": image_batch, "global_batch": 8}
    for parts, named in (
        ((), {"trainer": llama_trainer(tmp_path)}),
        ((model, optimizer), {"loss": image_loss, **batches}),
        ((), {"model": model, "optimizer": optimizer, "loss": image_loss, **batches}),
    ):
        with pytest.raises(autoplan.DeviceError, match="would begin"):
            autoplan.search(*parts, **named)
    trainer, first, by_name = specs
    assert trainer.taken_from == "Trainer" and first.identity == by_name.identity
    with pytest.raises(autoplan.WorkloadError, match=r"the loop lacks dataloader\n"):
        autoplan.search(model, optimizer)


FILE = """
import torch
import autoplan
from torch.utils.data import DataLoader, TensorDataset


def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoplan.from_loop(model, optimizer, data, torch.nn.CrossEntropyLoss(), max_grad_norm=1.0)


def one_step():
    def make_step():
        weight = torch.zeros(4, requires_grad=True)

        def step(index):
            loss = (weight - 1).square().sum()
            loss.backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
                weight.grad = None
            return loss

        return step

    return autoplan.from_step(make_step, precisions=("bf16",))
"""


def test_a_file_makes_a_loop_and_a_step_known_to_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FILE)
    hardware = read_host_profile()
    loop = inspect_workload(make_spec(model=f"{path}:training"), hardware, "cpu")
    assert loop.spec.global_batch == 8 and loop.spec.taken_from == "training loop" and loop.step_s is None
    assert loop.training is not None and loop.training.max_grad_norm == 1.0
    step = inspect_workload(make_spec(model=f"{path}:one_step"), hardware, "cpu")
    assert step.spec.taken_from == "step function" and step.step_s is not None
    assert step.knob("precision").values == ("fp32", "bf16")

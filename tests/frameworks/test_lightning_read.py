"""LightningModules are read so that a TrainingRun trains what a real lightning.Trainer trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import autoplan
from autoplan.errors import WorkloadError
from autoplan.frameworks.lightning.apply import rescaled_counts
from autoplan.frameworks.lightning.read import read_module
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.objects import spec_from_objects, unpack
from autoplan.trainings import read_parts
from tests.strategies.loops import (
    Points,
    Regressor,
    Sentences,
    loader_of,
    pad,
    parameters_of,
    tiny_gpt2,
    worst_difference,
)

L = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: tests/exports/environments.py lightning"
)

CLIP = 0.05
STEPS = 4


class Module(L.LightningModule):
    """A classifier that logs, reads its trainer, and warms up by optimizer steps."""

    def __init__(self, schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Regressor()
        self.schedule = schedule
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"epoch": float(self.current_epoch), "step": float(self.trainer.global_step)})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        if self.schedule == "none":
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        if self.schedule == "epoch":
            return [optimizer], [schedule]
        options = {"frequency": 2 if self.schedule == "batches" else 1}  # which Lightning counts in batches
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"} | options}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))


class Data(L.LightningDataModule):
    def __init__(self, samples: int = 96, shuffle: bool = True) -> None:
        super().__init__()
        self.samples, self.shuffle = samples, shuffle

    def setup(self, stage: str) -> None:
        self.points = Points(self.samples)

    def train_dataloader(self) -> Any:
        return loader_of(self.points, 8) if self.shuffle else DataLoader(self.points, batch_size=8)


class Language(L.LightningModule):
    """A language model whose step returns a dict with the model's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_gpt2()

    def training_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(**batch).loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def make_trainer(**options: Any) -> Any:
    return L.Trainer(accelerator="cpu", devices=1, **QUIET, **options)


def run_plan(workload: Any, micro_batch: int) -> dict[str, torch.Tensor]:
    run = prepare(workload, TrainingConfig(micro_batch=micro_batch))
    order = [0, *range(2, STEPS + 1)] if workload.make_batch.largest else range(STEPS)  # batch 1 is the largest
    for index in order:
        result = run.step(workload.make_batch(workload.global_batch, index))
        assert result.grad_norm is None or float(result.grad_norm) > CLIP
    return parameters_of(run.model)


@pytest.mark.parametrize("schedule", ["step", "batches", "epoch", "none"])
def test_a_trainer_with_accumulation_and_clipping_trains_the_same(schedule: str) -> None:
    module = Module(schedule)
    trainer = make_trainer(max_steps=STEPS, max_epochs=9, accumulate_grad_batches=2, gradient_clip_val=CLIP)
    before = copy.deepcopy(module.state_dict())
    # where the schedule goes by epochs there are two of them, in one order
    data = Data(32, shuffle=False) if schedule == "epoch" else Data()
    workload = unpack(spec_from_objects(read_module(module, data, trainer=trainer).workload))  # as trials get it
    assert workload.global_batch == 16 and workload.max_grad_norm == CLIP
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    got = {micro: run_plan(workload, micro) for micro in (16, 4)}
    trainer.fit(module, data)
    assert trainer.global_step == STEPS and min(module.norms) > CLIP
    wanted = parameters_of(module)
    assert worst_difference(wanted, parameters_of(Module())) > 1e-3, "it trained"
    for micro, parameters in got.items():
        assert worst_difference(parameters, wanted) < 2e-5, micro


def test_a_language_model_that_returns_a_dict_trains_the_same() -> None:
    module = Language()
    loader = loader_of(Sentences(), 8, collate_fn=pad)
    workload = read_module(module, loader).workload
    assert any("labels that are not -100, without the first" in note for note in workload.notes)
    got = {micro: run_plan(workload, micro) for micro in (8, 2)}
    make_trainer(max_steps=STEPS).fit(module, loader)
    for micro, parameters in got.items():
        assert worst_difference(parameters, parameters_of(module)) < 2e-5, micro


@pytest.mark.slow
def test_a_module_is_searched_and_its_plan_is_trained_by_a_trainer(quick_searches: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": STEPS}
    plain = make_trainer(**options, accumulate_grad_batches=2, gradient_clip_val=CLIP)
    plan = autoplan.search(
        Module(),
        Data(),
        trainer=plain,
        fix={"precision": "fp32", "compile": "off"},
        budget=60,
        max_trials=3,
        device="cpu",
        store=tmp_path,
        quiet=True,
    )
    assert plan.parity.passed and plan.workload.taken_from == "LightningModule"
    module = Module()
    settings = plan.apply_to(module, Data())
    assert settings.batch_size * settings.trainer_arguments["accumulate_grad_batches"] == 16
    assert settings.trainer_arguments["gradient_clip_val"] == CLIP
    trainer = L.Trainer(**settings.trainer_arguments, **options, **QUIET)
    trainer.fit(module, loader_of(Points(96), settings.batch_size))
    own = Module()
    plain.fit(own, Data())
    assert worst_difference(parameters_of(module), parameters_of(own)) < 2e-5


def test_the_length_of_the_training_is_known_where_it_is_configured() -> None:
    class Long(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = make_trainer(max_epochs=4, accumulate_grad_batches=2)
    workload = read_module(Long(), Data(), trainer=trainer).workload
    optimizer = workload.build_optimizer(workload.build_model().parameters())
    schedule = workload.build_schedule(optimizer)
    assert schedule.total_iters == 24  # 4 epochs of 12 batches, 2 a step


def test_an_epoch_of_fewer_batches_is_read_and_is_that_long_under_the_plan() -> None:
    limits = {"max_epochs": 1, "limit_train_batches": 6, "accumulate_grad_batches": 2}
    trainer, module, data = make_trainer(**limits), Module(), Data()
    source = read_module(module, data, trainer=trainer)
    assert read_module(module, data, trainer=trainer).workload.build_model().trainer.estimated_stepping_batches == 3
    arguments, said = rescaled_counts(source, trainer, TrainingConfig(micro_batch=4))
    assert arguments == {"limit_train_batches": 12} and not said
    planned = make_trainer(**(limits | arguments | {"accumulate_grad_batches": 4}))
    for one, size in ((trainer, 8), (planned, 4)):
        one.fit(Module(), loader_of(Points(96), size))
        assert one.global_step == 3


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.net.parameters(), lr=0.2)]


class OwnStep(Module):
    def optimizer_step(self, *args: Any, **options: Any) -> None: ...


class Reads(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.trainer.callback_metrics["x"]


class Sums(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(batch[0])


class Nothing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "trainer", "words"),
    [
        (Manual, {}, "optimizes manually"),
        (Two, {}, "gives 2 optimizers"),
        (OwnStep, {}, "optimizer_step of its own"),
        (Reads, {}, "self.trainer.callback_metrics"),
        (Nothing, {}, "of the type NoneType"),
        (Sums, {}, "a sum over samples, and Lightning divides it"),
        (Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips gradients by value"),
        (Module, {"accumulate_grad_batches": 13}, "a global batch takes 104"),
    ],
)
def test_what_no_plan_can_keep_is_refused(module: type[Any], trainer: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_module(module(), Data(), trainer=make_trainer(max_epochs=1, **trainer))
    if module is Module:
        with pytest.raises(WorkloadError, match="no train_dataloader"):
            read_module(module())


def test_the_other_package_of_lightning_is_known_too() -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Plain(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regressor()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    workload = read_parts(Plain(), optimizer=loader_of(Points(), 8))
    assert workload is not None and workload.taken_from == "LightningModule" and workload.global_batch == 8

"""Trains with an exported module and a real Trainer or Fabric, as a user would, and records the six steps.

    python tests/exports/train_lightning.py trainer|fabric MODULE.py PLAN.json OUT.pt [contiguous|interleaved] [mean]

Lightning starts the other ranks itself, by this command again. `mean` leaves `global_mean` out.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from autoplan.planner.plan.plan import Plan
from tests.exports.six_steps import SixSteps, function_of, samples, tensors_of
from tests.exports.train_export import load_module


class Share:
    """The micro-batches of one rank as plan.prepare deals them out: a contiguous share of each global batch."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __iter__(self) -> Iterator[list[int]]:
        micro, each = self.plan.config.micro_batch, self.plan.workload.global_batch // self.plan.config.dp
        for start in range(0, len(samples(self.plan)), self.plan.workload.global_batch):
            first = start + self.rank * each
            yield from (list(range(at, at + micro)) for at in range(first, first + each, micro))

    def __len__(self) -> int:
        return len(samples(self.plan)) // self.plan.config.dp // self.plan.config.micro_batch


def norm_of(parameters: Any) -> float:
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))


class Module(LightningModule):
    def __init__(self, plan: Plan, exported: Any, mean: bool) -> None:
        super().__init__()
        self.exported, self.workload, self.mean = exported, function_of(plan), mean
        self.model = exported.prepare_module(self.workload.build_model())
        self.sums: list[Any] = []

    def configure_model(self) -> None:
        if hasattr(self.exported, "shard"):
            self.exported.shard(self.model, self.device_mesh)

    def configure_optimizers(self) -> Any:
        return self.exported.optimizers(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total, count = self.workload.loss(self.model, batch)
        self.sums.append((float(total.detach()), float(count), torch.get_num_threads()))
        return total / count if self.mean else self.exported.global_mean(self, total, count)


class Recorder(Callback):
    """Comes after PlanCallback: the gradients are whole, and not yet clipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        sums = torch.tensor([sum(s[0] for s in module.sums), sum(s[1] for s in module.sums)])
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
        self.losses.append(float(sums[0] / sums[1]))
        self.norms.append(norm_of(module.parameters()))
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        module.threads = [s[2] for s in module.sums]
        module.sums = []


def train_with_trainer(exported: Any, plan: Plan, dealt: str, mean: bool) -> tuple[SixSteps, bool]:
    lightning.seed_everything(exported.SEED)
    module, recorder = Module(plan, exported, mean), Recorder()
    more = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    more |= {"enable_model_summary": False, "callbacks": recorder}
    if dealt == "contiguous":
        trainer = exported.make_trainer(use_distributed_sampler=False, **more)
        loader = DataLoader(samples(plan), batch_sampler=Share(plan, trainer.global_rank))
    else:
        trainer = exported.make_trainer(**more)
        loader = DataLoader(samples(plan), **exported.loader_arguments(), shuffle=False)
    trainer.fit(module, loader)
    threads = plan.config.threads
    assert threads is None or set(module.threads) == {threads}, module.threads
    found = SixSteps(
        losses=recorder.losses,
        grad_norms=recorder.norms,
        learning_rates=recorder.rates,
        **tensors_of(module.model),
    )
    return found, trainer.is_global_zero


def train_with_fabric(exported: Any, plan: Plan, dealt: str) -> tuple[SixSteps, bool]:
    fabric = exported.make_fabric()
    fabric.launch()
    lightning.seed_everything(exported.SEED)
    workload = function_of(plan)
    inner = exported.prepare_module(workload.build_model())
    model = fabric.setup(inner)
    optimizer, schedule = exported.make_optimizers(inner)
    optimizer = fabric.setup_optimizers(optimizer)
    if dealt == "contiguous":
        loader = DataLoader(samples(plan), batch_sampler=Share(plan, fabric.global_rank))
        loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    else:
        loader = fabric.setup_dataloaders(DataLoader(samples(plan), **exported.loader_arguments(), shuffle=False))
    losses, norms, rates = [], [], []
    micro_batches = iter(loader)
    for _ in range(len(loader) // exported.ACCUMULATION):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        ahead = itertools.islice(micro_batches, exported.ACCUMULATION)
        loss, norm = exported.train_step(fabric, model, optimizer, schedule, ahead, workload.loss)
        losses.append(float(loss))
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    assert plan.config.threads in (None, torch.get_num_threads())
    return SixSteps(losses=losses, grad_norms=norms, learning_rates=rates, **tensors_of(inner)), fabric.is_global_zero


if __name__ == "__main__":
    kind, path, plan_path, out, *options = sys.argv[1:]
    one_plan, module_path = Plan.load(plan_path), load_module(path)
    how = "interleaved" if "interleaved" in options else "contiguous"
    if kind == "trainer":
        recorded, first = train_with_trainer(module_path, one_plan, how, "mean" in options)
    else:
        recorded, first = train_with_fabric(module_path, one_plan, how)
    if first:
        recorded.save(Path(out))

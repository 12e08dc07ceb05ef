"""plan.apply_to(trainer) of a plan for several ranks: a step is that of the Trainer on one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

import autoplan
from autoplan.errors import PlanError
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.tiny_trainers import MeanOfEach, OwnLoss, llama_trainer, summed_loss, t5_trainer

PLAIN_STEP: dict[str, Any] = {
    "optim": "sgd",
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}
"""The change of a parameter is then its gradient times the rate."""


class TimesRanks(OwnLoss):
    """Multiplies by the number of processes by itself, as torch says it."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options) * (dist.get_world_size() if dist.is_initialized() else 1)


class MeanWithinRanks(Trainer):
    """Adds a mean of its own to the divided loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        divided, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = divided + 100 * outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss


class ItemsOfOwn(Trainer):
    """Divides by items that it adds up over the ranks, and has the number of processes in it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        items = (inputs["labels"][:, 1:] != -100).sum()
        mean = model(**inputs).loss
        return mean * items / self.accelerator.gather(items).sum() * self.accelerator.num_processes


def not_scaled(folder: Path, **changes: Any) -> Any:
    """The Trainer divides by accumulation, and still multiplies by the number of processes."""
    trainer = llama_trainer(folder, OneMean, **changes)
    trainer.loss_is_scaled_for_ga = False
    return trainer


def without_items(folder: Path, **changes: Any) -> Any:
    """The same, of a model that is not asked to divide: nothing is counted."""
    trainer = llama_trainer(folder, OneMean, **changes)
    trainer.model_accepts_loss_kwargs = False
    return trainer


def of_a_rank(folder: Path, **changes: Any) -> Any:
    """With the arguments of a rank, which has its share of the global batch; its one step is a share of an epoch."""
    share = changes["per_device_train_batch_size"] // (dist.get_world_size() if dist.is_initialized() else 1)
    epochs = {"max_steps": -1, "num_train_epochs": 1 / 8}
    return llama_trainer(folder, **changes | epochs | {"per_device_train_batch_size": share})


class OneMean(Trainer):
    """Its model's loss is a mean over samples, each of one label, and no item is divided by."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(input_ids=inputs["input_ids"]).logits[:, 0].float().square().mean()
        return loss * self.accelerator.num_processes


KINDS: dict[str, Callable[..., Any]] = {
    "stock": llama_trainer,
    "mean": lambda folder, **changes: llama_trainer(folder, MeanOfEach, **changes),
    "sum over items": lambda folder, **changes: llama_trainer(folder, OwnLoss, **changes),
    "compute_loss_func": lambda folder, **changes: llama_trainer(folder, compute_loss_func=summed_loss, **changes),
    "t5": lambda folder, **changes: t5_trainer(folder, **_without_batch(changes)),
    "by itself": lambda folder, **changes: llama_trainer(folder, TimesRanks, **changes),
    "of the rank alone": lambda folder, **changes: llama_trainer(
        folder, **changes, average_tokens_across_devices=False
    ),
    "means of samples": not_scaled,
    "means without items": without_items,
    "arguments of a rank": of_a_rank,
    "a part": lambda folder, **changes: llama_trainer(folder, MeanWithinRanks, **changes),
    "items of its own": lambda folder, **changes: llama_trainer(folder, ItemsOfOwn, **changes),
}
REFUSED = {"a part": "divides only a part", "items of its own": "does not add up to that of one process"}
CORRECTED = {"mean": "2", "sum over items": "2", "means of samples": "0.5", "means without items": "0.5"}
OF_ONE_PART = ("means of samples", "means without items", "items of its own")
"""Kinds whose rank has one micro-batch a step."""


def _without_batch(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if not name.endswith(("batch_size", "accumulation_steps"))}


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def in_rank(context: RankContext, folder: Path) -> None:
    """What each rank runs: for each kind, the plan is applied, and one step is trained."""
    context.init_process_group("gloo", 60.0)
    found: dict[str, Any] = {}
    for kind, make in KINDS.items():
        trainer = make(folder / "output", **PLAIN_STEP)
        plan = Plan.load(folder / f"{kind}.json")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made = plan.apply_to(trainer)
            except PlanError as error:
                found[kind] = {"refused": str(error), "hint": error.hint}
                continue
        made.train()
        texts = [str(item.message) for item in said]
        found[kind] = {"after": parameters(made), "said": texts}
        found[kind]["loss"] = next(entry["loss"] for entry in made.state.log_history if "loss" in entry)
    if os.environ["RANK"] == "0":
        torch.save(found, folder / "found.pt")


@pytest.fixture(scope="module")
def on_two_ranks(training_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    for kind, make in KINDS.items():
        spec = spec_from_objects(autoplan.from_trainer(make(folder / "output", **PLAIN_STEP)))
        config = TrainingConfig(micro_batch=4 if kind in OF_ONE_PART else 2, dp_replicate=2)
        make_plan(config, workload=spec, training=None).save(folder / f"{kind}.json")
    name = "tests.frameworks.test_transformers_ranks:in_rank"
    training_zygote.run(Task(target=name, args=(folder,), ranks=2, total_deadline_s=150.0)).check()
    return dict(torch.load(folder / "found.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_a_step_on_two_ranks_is_that_of_one_process(kind: str, on_two_ranks: dict[str, Any], tmp_path: Path) -> None:
    found = on_two_ranks[kind]
    assert "after" in found, found
    alone = KINDS[kind](tmp_path, **PLAIN_STEP)
    before = parameters(alone)
    alone.train()
    after = parameters(alone)
    scale = max(float((after[name] - before[name]).norm()) for name in before)
    assert scale > 1e-4
    for name, start in before.items():
        wanted = after[name] - start
        off = float((found["after"][name] - start - wanted).norm())
        assert off < 1e-3 * float(wanted.norm()) + 1e-4 * scale, (name, off, float(wanted.norm()))
    loss = next(entry["loss"] for entry in alone.state.log_history if "loss" in entry)
    assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-3)
    corrected = [text for text in found["said"] if "multiplies the loss by" in text]
    assert [text.rpartition(" ")[2] for text in corrected] == ([CORRECTED[kind]] if kind in CORRECTED else [])
    if kind == "of the rank alone":
        assert any("average_tokens_across_devices is on" in text for text in found["said"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_that_is_not_the_ranks_share_is_refused(kind: str, on_two_ranks: dict[str, Any]) -> None:
    assert REFUSED[kind] in on_two_ranks[kind]["refused"], on_two_ranks[kind]
    assert "num_items_in_batch" in on_two_ranks[kind]["hint"]


def _given(folder: Path, *, schedule: bool = False) -> Any:
    trainer = llama_trainer(folder)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    if not schedule:
        trainer.optimizer = optimizer
        return trainer
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    return trainer


@pytest.mark.parametrize(("schedule", "what"), [(False, "the optimizer SGD"), (True, "the schedule ExponentialLR")])
def test_shards_for_a_trainer_with_a_given_optimizer_are_refused(schedule: bool, what: str, tmp_path: Path) -> None:
    trainer = _given(tmp_path, schedule=schedule)
    spec = spec_from_objects(autoplan.from_trainer(trainer))
    plan = make_plan(TrainingConfig(micro_batch=2, dp_shard=2), workload=spec, training=None)
    with pytest.raises(PlanError, match=f"was given {what};") as raised:
        plan.apply_to(trainer)
    assert "create_optimizer" in raised.value.hint and "fix={'dp_shard': 1}" in raised.value.hint


def test_an_optimizer_that_the_trainer_made_is_not_given(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    spec = spec_from_objects(autoplan.from_trainer(trainer))
    plan = make_plan(TrainingConfig(micro_batch=2, dp_shard=2), workload=spec, training=None)
    trainer.create_optimizer_and_scheduler(3)
    with pytest.raises(PlanError, match="the plan is for 2 process"):
        plan.apply_to(trainer)

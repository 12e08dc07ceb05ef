"""plan.apply_to(trainer): each part of the training is kept, refused or named."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer, TrainerCallback

import autoplan
from autoplan.errors import PlanError, WorkloadError
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.tiny_trainers import OwnLoss, llama_trainer


def searched(trainer: Trainer, micro_batch: int = 2, **knobs: Any) -> Plan:
    """A plan of a Trainer, with what its search saw of the training, as another process reads it."""
    workload = autoplan.from_trainer(trainer)
    facts = read_training_facts(workload, workload.build_model())
    config = TrainingConfig.model_validate({"micro_batch": micro_batch} | knobs)
    plan = make_plan(config, workload=spec_from_objects(workload), training=facts)
    return Plan.model_validate_json(plan.model_dump_json())


def apply(plan: Plan, trainer: Trainer, **options: Any) -> tuple[Any, list[str]]:
    """The new Trainer, and what was said, without the sentence on other hardware."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = plan.apply_to(trainer, **options)
    texts = [str(item.message) for item in said if item.category is UserWarning]
    return made, [text for text in texts if "found on other hardware" not in text]


def with_average(folder: Path) -> tuple[Any, list[torch.Tensor]]:
    """A Trainer that was given an optimizer with a moving average of the weights in a hook, and a schedule."""
    trainer = llama_trainer(folder, max_steps=6)
    averages = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    def average(*given: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(averages, trainer.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)

    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = StepLR(trainer.optimizer, 2, gamma=0.5)
    trainer.optimizer.register_step_post_hook(average)
    return trainer, averages


def test_a_moving_average_in_a_hook_runs_at_each_step(tmp_path: Path) -> None:
    alone, wanted = with_average(tmp_path)
    alone.train()
    trainer, averages = with_average(tmp_path)
    before = copy.deepcopy(averages)
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    plan = searched(trainer)
    assert any("hooks on the optimizer's step (average)" in note for note in plan.workload.notes)
    made, _ = apply(plan, trainer)
    made.train()
    for mean, same, start in zip(averages, wanted, before, strict=True):
        torch.testing.assert_close(mean, same, rtol=1e-4, atol=1e-5)
        assert not torch.equal(mean, start)
    assert schedule.get_last_lr() == made.lr_scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.0125]
    with pytest.raises(WorkloadError, match=r"since the plan was applied, trainer.train\(\) takes its steps"):
        optimizer.step()


class SmallTerm(Trainer):
    """Adds a small mean that nothing divides."""

    share = 0.004

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + self.share * outputs.logits.float().logsumexp(-1).mean()  # as large as the loss, times share
        return (loss, outputs) if return_outputs else loss


class Nothing(SmallTerm):
    """Its undivided term is 0 at the start, and its gradient is not."""

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        loss = super().compute_loss(*given, **options)
        first = next(self.model.parameters())
        return loss + 0.01 * (first - first.detach()).sum() if isinstance(loss, torch.Tensor) else loss


@pytest.mark.parametrize(("kind", "share"), [(SmallTerm, 0.004), (SmallTerm, 0.5), (Nothing, 0.0)])
def test_a_small_term_that_nothing_divides_is_refused(kind: Any, share: float, tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path, kind, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    trainer.share = share
    with pytest.raises(PlanError, match="divides only a part by num_items_in_batch"):
        apply(searched(trainer), trainer)
    apply(searched(trainer, micro_batch=8), trainer)
    trainer = llama_trainer(tmp_path, kind, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer.share = share
    workload: Any = autoplan.from_trainer(trainer)
    with pytest.raises(WorkloadError, match="divides only a part by num_items_in_batch"):
        workload.loss.check(workload.build_model().train(), workload.make_batch(2, 0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler_type": "cosine"}, "the schedule is _get_cosine"),
        ({"warmup_steps": 1}, "the schedule is .*num_warmup_steps=1"),
        ({"lr_scheduler_type": "constant"}, "the schedule is"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "the schedule is none"),
        ({"max_grad_norm": 1.0}, "clipped to a norm of 1 .* clipped to a norm of 0.5"),
        ({"max_grad_norm": 0.0}, "gradients are not clipped"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor of the arguments"),
        ({"max_steps": 9}, "steps of the schedule"),
        ({"weight_decay": 0.2}, "weight_decay"),
    ],
)
def test_arguments_that_train_otherwise_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    plan = searched(llama_trainer(tmp_path))
    trainer = llama_trainer(tmp_path, **changes) if "eval_strategy" not in changes else plateau_trainer(tmp_path)
    with pytest.raises(PlanError, match=words):
        apply(plan, trainer)


def plateau_trainer(folder: Path) -> Any:
    trainer = llama_trainer(folder)
    trainer.args.lr_scheduler_type = "reduce_lr_on_plateau"
    return trainer


class OtherLoss(OwnLoss):
    def compute_loss(self, *given: Any, **options: Any) -> Any:
        return super().compute_loss(*given, **options) * 2


def with_share(folder: Path) -> Any:
    trainer = llama_trainer(folder, OwnLoss)
    trainer.share = 0.25
    return trainer


def test_another_loss_of_the_trainers_class_or_instance_is_refused(tmp_path: Path) -> None:
    OtherLoss.__name__ = OtherLoss.__qualname__ = "OwnLoss"
    OtherLoss.compute_loss.__qualname__ = "OwnLoss.compute_loss"
    plan = searched(llama_trainer(tmp_path, OwnLoss))
    apply(plan, llama_trainer(tmp_path, OwnLoss))
    with pytest.raises(PlanError, match="OwnLoss.compute_loss"):
        apply(plan, llama_trainer(tmp_path, OtherLoss))
    with pytest.raises(PlanError, match="share of the Trainer"):
        apply(plan, with_share(tmp_path))


def test_other_samples_and_another_seed_are_named(tmp_path: Path) -> None:
    plan = searched(llama_trainer(tmp_path))
    _, said = apply(plan, llama_trainer(tmp_path, samples=48, seed=5))
    assert any("samples of the DataLoader (data)" in text for text in said), said
    assert any("the seed is 5; the search had 42" in text for text in said), said
    _, said = apply(plan, llama_trainer(tmp_path))
    assert not said


def test_the_generators_are_left_as_they_were(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    plan = searched(trainer)
    torch.manual_seed(7)
    random.seed(7)
    wanted = float(torch.rand(())), random.random()
    torch.manual_seed(7)
    random.seed(7)
    apply(plan, trainer)
    assert (float(torch.rand(())), random.random()) == wanted


def test_callbacks_of_micro_batches_are_named(tmp_path: Path) -> None:
    class EachPart(TrainerCallback):
        def on_substep_end(self, *given: Any, **options: Any) -> None: ...

    trainer = llama_trainer(tmp_path, callbacks=[EachPart()])
    _, said = apply(searched(trainer), trainer)
    assert any("on_substep_end of EachPart is called 3 times in a step; the old Trainer did 1" in one for one in said)

"""plan.apply_to(trainer): the new Trainer trains what the old one would have; each part is kept, refused or named."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from transformers import Trainer, TrainerCallback, TrainingArguments

import autoplan
from autoplan.errors import PlanError, WorkloadError
from autoplan.frameworks.transformers.apply import _prepare_model, own_accelerator_config
from autoplan.planner.plan.key_tables import pick_table
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import compiles_in_place, plan_values
from autoplan.planner.records.loading import Loading
from autoplan.report.facts import headline
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.tiny_trainers import OwnLoss, arguments, llama_trainer, summed_loss, t5_trainer, vit_trainer

ROOT = Path(__file__).resolve().parents[2]
FP32 = 5e-5


def plan_for(trainer: Trainer, **knobs: Any) -> Plan:
    """A plan of a Trainer's own workload, without a search."""
    config = TrainingConfig.model_validate({"micro_batch": 2} | knobs)
    return make_plan(config, workload=spec_from_objects(autoplan.from_trainer(trainer)), training=None)


def apply(plan: Plan, trainer: Trainer, **options: Any) -> tuple[Any, list[str]]:
    """The new Trainer, and what was said, without the sentence on other hardware."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = plan.apply_to(trainer, **options)
    texts = [str(item.message) for item in said if item.category is UserWarning]
    return made, [text for text in texts if "found on other hardware" not in text]


def trained(trainer: Trainer) -> list[torch.Tensor]:
    trainer.train()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        t5_trainer,
        lambda folder: vit_trainer(folder, optim="sgd"),
        llama_trainer,
        lambda folder: llama_trainer(folder, OwnLoss),
        lambda folder: llama_trainer(folder, compute_loss_func=summed_loss),
    ],
    ids=["t5", "vit", "llama", "compute_loss", "compute_loss_func"],
)
def test_the_new_trainer_trains_the_same(make: Callable[[Path], Any], tmp_path: Path) -> None:
    as_it_was = trained(make(tmp_path))
    trainer = make(tmp_path)
    made, said = apply(plan_for(trainer), trainer)
    assert type(made) is type(trainer) and made.train_dataset is trainer.train_dataset
    assert (made.args.per_device_train_batch_size, made.args.gradient_accumulation_steps) == (2, 4)
    divided = any("the new Trainer divides it" in text for text in said)
    assert divided == (make is t5_trainer), said
    pairs = zip(as_it_was, trained(made), strict=True)
    assert max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) for a, b in pairs) < FP32


class Net(nn.Module):
    """Its batches have no labels that the Trainer can count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.BatchNorm1d(3).eval(), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        off = self.layer(x)[:, 0] - y
        return {"loss": off.square().mean(), "off": off}


class Divided(Trainer):
    """Says that its loss is divided."""

    loss_is_scaled_for_ga = True


class DividesItself(Divided):
    """And divides it."""

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        return super().compute_loss(*given, **options) / self.current_gradient_accumulation_steps


def squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs["off"].square().mean()


def with_boxes(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """As for the detection of objects: labels are a list."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
    return {**batch, "labels": [{"boxes": torch.zeros(1, 4)} for _ in samples]}


def unlabelled(folder: Path, kind: Any = Trainer, accumulation: int = 1, **parts: Any) -> Any:
    """One step of 8 samples by SGD."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 4, generator=generator)
    return kind(
        model=Net(),
        args=arguments(
            folder,
            optim="sgd",
            max_steps=1,
            max_grad_norm=0.0,
            warmup_steps=0,
            weight_decay=0.0,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
        ),
        train_dataset=[{"x": row[:3], "y": row[3]} for row in rows],
        **parts,
    )


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, False),
        ({"compute_loss_func": squares}, True),
        ({"compute_loss_func": squares, "data_collator": with_boxes}, True),
        ({"kind": Divided}, True),
        ({"kind": DividesItself}, False),
    ],
    ids=["by the Trainer", "compute_loss_func", "labels in a list", "by nobody", "by itself"],
)
def test_a_loss_without_items_does_not_grow_with_accumulation(parts: Any, said: bool, tmp_path: Path) -> None:
    as_it_was = trained(unlabelled(tmp_path, **parts))
    trainer = unlabelled(tmp_path, **parts)
    made, texts = apply(plan_for(trainer), trainer)
    assert made.args.gradient_accumulation_steps == 4
    assert any("loss_is_scaled_for_ga = False" in text for text in texts) == said, texts
    for now, before in zip(trained(made), as_it_was, strict=True):
        torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-6)


def test_a_loss_without_items_that_nothing_can_divide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload: Any = autoplan.from_trainer(unlabelled(tmp_path, accumulation=2, compute_loss_func=squares))
    with pytest.raises(WorkloadError, match="gradients are up to 2 times"):
        workload.loss.check(workload.build_model(), workload.make_batch(2, 0))
    trainer = unlabelled(tmp_path, compute_loss_func=squares)
    plan = plan_for(trainer)
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga")  # as older ones are
    with pytest.raises(PlanError, match="nothing divides the loss of Trainer") as raised:
        apply(plan, trainer)
    assert "fix={'micro_batch': 8}" in raised.value.hint


def test_batch_norm_over_ranks_in_a_model_that_comes_in_evaluation_mode(tmp_path: Path) -> None:
    trainer = unlabelled(tmp_path)
    workload = autoplan.from_trainer(trainer)
    config = TrainingConfig(micro_batch=4, dp_replicate=2, batch_norm="sync")
    plan = make_plan(config, workload=spec_from_objects(workload), training=None, device="cuda")
    _prepare_model(plan, trainer, workload)
    assert type(trainer.model.norm) is nn.SyncBatchNorm and trainer.model.norm.training


def test_callbacks_and_arguments_are_carried_over(tmp_path: Path) -> None:
    class Counting(TrainerCallback):
        steps = 0

        def on_step_end(self, *args: Any, **options: Any) -> None:
            self.steps += 1

    mine = Counting()
    trainer = llama_trainer(tmp_path, callbacks=[mine], logging_steps=2, gradient_checkpointing=True)
    plan = plan_for(trainer, micro_batch=4, precision="bf16", checkpointing="none", optimizer_step="for_loop")
    made, _ = apply(plan, trainer)
    assert made.callback_handler.callbacks == trainer.callback_handler.callbacks
    assert made.args.bf16 and not trainer.args.bf16
    assert not getattr(made.args, "activation_checkpointing", made.args.gradient_checkpointing)
    assert made.args.logging_steps == 2 and made.args.learning_rate == trainer.args.learning_rate
    assert made.optimizer.defaults["foreach"] is False and len(made.optimizer.param_groups) == 2
    made.train()
    assert mine.steps == 3 and made.state.global_step == 3 and made.accelerator.mixed_precision == "bf16"


def test_who_holds_the_trainer_gets_the_new_one(tmp_path: Path) -> None:
    class Logging(TrainerCallback):
        def __init__(self, trainer: Trainer) -> None:
            self.trainer, self.log, self.name = trainer, trainer.log, "mine"

        def on_step_end(self, *args: Any, **options: Any) -> None:
            self.trainer.log({"by_trainer": 1.0})
            self.log({"by_method": 1.0})

    trainer = llama_trainer(tmp_path)
    trainer.add_callback(Logging(trainer))
    trainer.itself = trainer
    made, _ = apply(plan_for(trainer), trainer)
    assert made.itself is made and trainer.itself is trainer
    made.train()
    for name in ("by_trainer", "by_method"):
        assert [sum(name in entry for entry in one.state.log_history) for one in (trainer, made)] == [0, 3]


def test_a_termination_signal_saves_and_ends_the_training(tmp_path: Path) -> None:
    class Terminated(TrainerCallback):
        def on_step_end(self, *given: Any, **options: Any) -> None:
            signal.raise_signal(signal.SIGTERM)
            deadline = time.monotonic() + 2.0
            while not jit.jit_manager.is_checkpoint_requested and time.monotonic() < deadline:
                time.sleep(0.01)

    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = llama_trainer(tmp_path, enable_jit_checkpoint=True, callbacks=[Terminated()])
        jit: Any = next(one for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        jit.jit_manager.kill_wait = 0
        made, _ = apply(plan_for(trainer), trainer)
        made.train()
        assert made.state.global_step == 1 and (tmp_path / "checkpoint-1" / "trainer_state.json").exists()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_users_accelerator_config_is_kept(tmp_path: Path) -> None:
    options = {"even_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": False}}
    trainer = llama_trainer(tmp_path, accelerator_config=options)
    made, _ = apply(plan_for(trainer), trainer)
    assert made.args.accelerator_config.even_batches is False
    made.train()
    assert made.state.global_step == 3
    values = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    every = own_accelerator_config(made.args.accelerator_config, values)
    assert every.even_batches is False and every.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert made.args.accelerator_config.gradient_accumulation_kwargs["sync_each_batch"] is False


def test_what_a_launcher_left_in_the_environment_is_not_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = llama_trainer(tmp_path)
    plan = plan_for(trainer)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    made, _ = apply(plan, trainer)
    assert made.accelerator.mixed_precision == "no" and not made.is_fsdp_enabled
    assert "ACCELERATE_USE_FSDP" not in os.environ


def test_a_loader_without_workers_takes_the_place_of_one_with_workers(tmp_path: Path) -> None:
    trainer = llama_trainer(
        tmp_path, dataloader_num_workers=2, dataloader_prefetch_factor=4, dataloader_persistent_workers=True
    )
    measured = Loading(
        source="list", identity="0" * 16, setting=LoaderSetting(workers=0), waiting_share=0.0, samples_per_s=800.0
    )
    made, _ = apply(plan_for(trainer).model_copy(update={"loading": measured}), trainer)
    loader = made.get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    made.train()
    assert made.state.global_step == 3


class InOrder(torch.optim.lr_scheduler.SequentialLR):
    """A warm-up and a decay."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        schedules = torch.optim.lr_scheduler
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=1), schedules.ExponentialLR(optimizer, 0.5)]
        super().__init__(optimizer, parts, milestones=[1])


@pytest.mark.parametrize("kind", [InOrder, torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_schedules_of_the_users_own(kind: Any, tmp_path: Path) -> None:
    def given() -> Any:
        trainer = llama_trainer(tmp_path)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.lr_scheduler = kind(trainer.optimizer)
        return trainer

    alone = given()
    as_it_was = trained(alone)
    trainer = given()
    made, _ = apply(plan_for(trainer), trainer)
    assert made.lr_scheduler.optimizer is made.optimizer is not trainer.optimizer
    assert all(torch.allclose(a, b, atol=FP32) for a, b in zip(as_it_was, trained(made), strict=True))
    rates = [[entry["learning_rate"] for entry in one.state.log_history if "loss" in entry] for one in (alone, made)]
    assert len(rates[0]) == 3 and rates[0] == rates[1]


def test_what_the_trainer_cannot_carry_is_said(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    made, said = apply(plan_for(trainer, checkpointing="selective"), trainer)
    assert any("checkpointing=selective: every block" in text for text in said), said
    assert getattr(made.args, "activation_checkpointing", made.args.gradient_checkpointing)


def test_refusals(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    plan = plan_for(trainer)
    with pytest.raises(PlanError, match="the plan is for 2 process"):
        apply(make_plan(TrainingConfig(micro_batch=2, dp_replicate=2), workload=plan.workload), trainer)
    with pytest.raises(PlanError, match="the plan is of a Trainer, and this is a OwnLoss"):
        apply(plan, llama_trainer(tmp_path, OwnLoss))
    with pytest.raises(WorkloadError, match="the loop lacks optimizer, dataloader"):
        apply(plan, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="leaves fp16 out on a CPU") as raised:
        apply(plan_for(trainer, precision="fp16"), trainer)
    assert "plan.prepare()" in raised.value.hint
    trainer.train()
    with pytest.raises(WorkloadError, match=r"train\(\) of this Trainer has begun"):
        apply(plan, trainer)


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    plan = plan_for(llama_trainer(tmp_path))
    trainer = llama_trainer(tmp_path, gradient_accumulation_steps=4)
    with pytest.raises(PlanError, match="for a global batch of 8, and this Trainer trains 16 samples a step"):
        apply(plan, trainer)
    made, _ = apply(plan, trainer, changed_ok=True)
    assert made.args.per_device_train_batch_size * made.args.gradient_accumulation_steps == 8


def test_several_gpus_without_torchrun_are_refused(tmp_path: Path) -> None:
    """The Trainer would split each micro-batch over them; the arguments of a machine with two are put together here."""

    class OfTwo(TrainingArguments):
        n_gpu = property(lambda self: 2)  # type: ignore[assignment]

    trainer = llama_trainer(tmp_path)
    plans = [plan_for(trainer, dp_replicate=ranks) for ranks in (1, 2)]
    trainer.args.__class__ = OfTwo
    for plan, hint in zip(plans, ("CUDA_VISIBLE_DEVICES", "torchrun --nproc-per-node 2"), strict=True):
        with pytest.raises(PlanError, match="sees 2 GPUs") as raised:
            apply(plan, trainer)
        assert hint in raised.value.hint


def test_a_loader_that_ignores_the_plans_micro_batch_is_refused(tmp_path: Path) -> None:
    class Fixed(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    class Follows(Trainer):
        def get_train_dataloader(self) -> Any:
            size = self._train_batch_size
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=size, collate_fn=self.data_collator)

    trainer = llama_trainer(tmp_path, Fixed)
    with pytest.raises(WorkloadError, match="Fixed gives batches of 4 samples where the arguments ask for 2") as raised:
        apply(plan_for(trainer), trainer)
    assert trainer.get_train_dataloader().batch_size == 4, "it is left as it was"
    assert "self._train_batch_size" in raised.value.hint
    made, _ = apply(plan_for(trainer, micro_batch=4), trainer)
    assert made.state.global_step == 0
    trainer = llama_trainer(tmp_path, Follows)
    made, _ = apply(plan_for(trainer), trainer)
    assert made.get_train_dataloader().batch_size == 2


def test_a_plan_that_is_the_users_setting_gives_the_users_arguments(tmp_path: Path) -> None:
    own: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "per_device_train_batch_size": 2}
    trainer = llama_trainer(tmp_path, **own)
    read = autoplan.from_trainer(trainer).own_setting
    assert read == TrainingConfig(micro_batch=2, precision="bf16", checkpointing="full")
    made, said = apply(plan_for(trainer, **read.knobs_off_default()), trainer)
    assert {name: getattr(made.args, name) for name in own} == own
    assert made.args.gradient_accumulation_steps == trainer.args.gradient_accumulation_steps == 2
    assert made.accelerator.mixed_precision == "bf16" and said == []


@pytest.mark.slow
def test_a_search_starts_from_the_trainers_own_setting(quick_searches: None, tmp_path: Path) -> None:
    """A real one, which has no time for more than that setting and a look."""
    own: dict[str, Any] = {"gradient_checkpointing": True, "per_device_train_batch_size": 2}
    trainer = llama_trainer(tmp_path, **own)
    given: dict[str, Any] = {"device": "cpu", "store": tmp_path / "store", "quiet": True, "fix": {"compile": "off"}}
    plan = autoplan.search(trainer, budget=60, max_trials=2, **given)
    assert plan.baseline.config == plan.workload.own_setting == TrainingConfig(micro_batch=2, checkpointing="full")
    assert plan.has_own_baseline and plan.hand is None and plan.evidence[0].purpose == "baseline"
    assert f"your setting ({plan.baseline.config.describe()})" in headline(plan)
    as_it_was = plan.model_copy(update={"config": plan.baseline.config, "accumulation": 2}).sealed()
    made, _ = apply(as_it_was, trainer)
    assert {name: getattr(made.args, name) for name in own} == own and made.args.gradient_accumulation_steps == 2


SCRIPT = """
import argparse, pathlib, sys
sys.path.insert(0, {root!r})
from tests.strategies.tiny_trainers import llama_trainer

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
options = parser.parse_args()


def make_trainer():
    return llama_trainer(pathlib.Path("out"), per_device_train_batch_size=options.batch)
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("probed_machine")
def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(ROOT)))
    command = [sys.executable, "-m", "autoplan", "search", "--trainer", "train.py:make_trainer", "--budget", "60s"]
    command += ["--max-trials", "2", "--fix", "compile=off", "--device", "cpu", "--json", "--", "--batch", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    plan = json.loads(done.stdout)["plan"]
    assert plan["workload"]["arguments"] == ["--batch", "8"]
    assert plan["workload"]["global_batch"] == 16
    assert any("callbacks do not run" in note for note in plan["notes"])
    shown = subprocess.run([*command[:3], "verify"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr[-3000:]


def test_a_whole_model_in_fp32_on_cuda_is_compiled_in_place() -> None:
    """By the argument torch_compile, accelerate switches TF32 on; of CUDA only the arguments are looked at here."""
    keys = pick_table("transformers", None)["keys"]
    fp32 = TrainingConfig.model_validate({"micro_batch": 1, "compile": "model"})
    bf16 = fp32.model_copy(update={"precision": "bf16"})
    for config, device, by_argument in ((fp32, "cuda", False), (bf16, "cuda", True), (fp32, "cpu", True)):
        values, _ = plan_values(config, accumulation=1, device=device, keys=keys)
        assert values["compile"] is by_argument and compiles_in_place(config, device) is not by_argument


# What is kept, refused or named.


def searched(trainer: Trainer, micro_batch: int = 2, **knobs: Any) -> Plan:
    """A plan of a Trainer, with what its search saw of the training, as another process reads it."""
    workload = autoplan.from_trainer(trainer)
    facts = read_training_facts(workload, workload.build_model())
    config = TrainingConfig.model_validate({"micro_batch": micro_batch} | knobs)
    plan = make_plan(config, workload=spec_from_objects(workload), training=facts)
    return Plan.model_validate_json(plan.model_dump_json())


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


@pytest.fixture(scope="module")
def plan_of_llama(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return searched(llama_trainer(tmp_path_factory.mktemp("searched")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler_type": "cosine"}, "the schedule is _get_cosine"),
        ({"warmup_steps": 1}, "the schedule is .*num_warmup_steps=1"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "the schedule is none"),
        ({"max_grad_norm": 1.0}, "clipped to a norm of 1 .* clipped to a norm of 0.5"),
        ({"max_grad_norm": 0.0}, "gradients are not clipped"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor of the arguments"),
        ({"max_steps": 9}, "steps of the schedule"),
        ({"weight_decay": 0.2}, "weight_decay"),
    ],
)
def test_arguments_that_train_otherwise_are_refused(
    changes: dict[str, Any], words: str, plan_of_llama: Plan, tmp_path: Path
) -> None:
    trainer = llama_trainer(tmp_path, **changes) if "eval_strategy" not in changes else plateau_trainer(tmp_path)
    with pytest.raises(PlanError, match=words):
        apply(plan_of_llama, trainer)


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

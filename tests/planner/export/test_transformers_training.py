"""The exported arguments train as the workload does: a real Trainer beside a plain loop."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.planner.export import transformers
from autoplan.planner.export.run import export_plan
from autoplan.planner.export.transformers import TransformersTarget, read_back_arguments
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.analysis.training_facts import TrainingFacts, read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import build_on_meta
from autoplan.strategies.workloads.objects import workload_from_objects
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.sources import spec_from_objects
from autoplan.strategies.workloads.workload import Workload
from tests.exports.train_export import load_module
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2, classifier, language

STEPS, GLOBAL_BATCH, LENGTH = 3, 4, 32
NO_DROPOUT = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tiny_gpt2() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    from autoplan.strategies.workloads.language_model import make_config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(NO_DROPOUT))


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """The usual decay and no-decay groups, with betas and epsilon that are not the defaults."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.002},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-4)


def linear_warmup(optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=STEPS)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


# A large epsilon where gradients are not clipped: with a small one Adam makes rounding noise as large as a step.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.0),
    "decay_everywhere": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5),
    "two_groups": two_groups,
    "sgd": functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
}
CASES = [
    ("adamw", linear_warmup, 0.05),
    ("adamw", step_lr, None),
    ("decay_everywhere", linear_warmup, 0.05),
    ("two_groups", step_lr, 0.05),
    ("sgd", None, 0.05),
    ("nadam", linear_warmup, None),
]


def make_workload(optimizer: str, schedule: Any, norm: float | None) -> Workload:
    return workload_from_objects(
        model=tiny_gpt2,
        make_batch=language(NO_DROPOUT, length=LENGTH, global_batch=GLOBAL_BATCH).make_batch,
        loss=None,
        optimizer=OPTIMIZERS[optimizer],
        global_batch=GLOBAL_BATCH,
        schedule=schedule,
        max_grad_norm=norm,
        sequence_length=LENGTH,
        seed=7,
    )


def plan_of(workload: Workload) -> Plan:
    facts = read_training_facts(workload, build_on_meta(workload))
    spec = spec_from_objects(workload)
    return make_plan(TrainingConfig(micro_batch=2), workload=spec, accumulation=2, training=facts)


def plain_loop(workload: Workload) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters after some steps of a loop that knows nothing of autoplan's, and the gradient norms."""
    model = workload.build_model().train()
    optimizer = workload.build_optimizer(trainable(model))
    schedule = None if workload.build_schedule is None else workload.build_schedule(optimizer)
    norms = []
    for index in range(STEPS):
        batch = workload.make_batch(GLOBAL_BATCH, index)
        items = int((batch["labels"][:, 1:] != -100).sum())
        for start in range(0, GLOBAL_BATCH, 2):  # in the plan's micro-batches: another order would round otherwise
            micro = {key: value[start : start + 2] for key, value in batch.items()}
            (workload.loss(model, micro).total / items).backward()
        limit = workload.max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if limit is None else limit)))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def run_trainers(context: RankContext, folder: Path) -> None:
    """Trains each case with a real Trainer from its exported files, and saves the parameters."""
    from transformers import Trainer

    os.chdir(folder)  # where the arguments have their output_dir

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    for number, case in enumerate(CASES):
        workload = make_workload(*case)
        batches = [workload.make_batch(GLOBAL_BATCH, index) for index in range(STEPS)]
        rows = [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(GLOBAL_BATCH)]
        companion = load_module(folder / f"case{number}_companion.py")
        model, arguments = companion.prepare_model(tiny_gpt2()), companion.load_arguments()
        arguments.num_train_epochs, arguments.save_strategy, arguments.report_to = 1, "no", []
        given = {"optimizers": companion.make_optimizers(model)} if hasattr(companion, "make_optimizers") else {}
        trainer: Any = InOrder(model=model, args=arguments, train_dataset=rows, **given)
        trainer.train()
        parameters = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
        torch.save(parameters, folder / f"case{number}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, training_zygote: Zygote) -> Path:
    """A folder with the parameters of each case, trained in a process of its own (the class sets variables)."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainers")
    for number, case in enumerate(CASES):
        export_plan(plan_of(make_workload(*case)), "transformers", folder / f"case{number}.json")
    training_zygote.run(Task(target=run_trainers, args=(folder,), total_deadline_s=300.0)).check()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_real_trainer_trains_as_a_plain_loop_does(number: int, trained: Path) -> None:
    workload = make_workload(*CASES[number])
    wanted, norms = plain_loop(workload)
    if workload.max_grad_norm is not None:
        assert min(norms) > 2 * workload.max_grad_norm, "clipping would change nothing"
    found = torch.load(trained / f"case{number}.pt")
    before = {name: parameter.detach() for name, parameter in tiny_gpt2().named_parameters()}
    for name, parameter in wanted.items():
        moved = float((parameter - before[name]).norm())
        assert float((found[name] - parameter).norm()) <= 1e-4 * moved + 1e-7, name
    assert any(float((found[name] - before[name]).norm()) > 1e-3 for name in wanted)


@pytest.mark.slow
def test_the_real_class_reads_what_the_workload_has() -> None:
    arguments, _, not_carried = arguments_of(plan_of(make_workload("adamw", linear_warmup, 0.05)))
    real = read_back_arguments(json.dumps(arguments), "transformers")
    wanted = {
        "max_grad_norm": 0.05,
        "learning_rate": 0.01,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-3,
        "warmup_steps": 2,
        "max_steps": STEPS,
        "seed": 7,
    }
    assert {key: real[key] for key in wanted} == wanted and "linear" in real["lr_scheduler_type"].lower()
    assert not_carried == ""


def arguments_of(plan: Plan) -> tuple[dict[str, Any], str, str]:
    """The arguments, the companion, and what is not carried in one text."""
    export = TransformersTarget().render(plan, "args")
    text, module = export.files.values()
    return json.loads(text), module, " ".join(export.not_carried)


def test_no_clipping_is_written_as_none_only_where_the_workload_has_none() -> None:
    assert arguments_of(plan_of(make_workload("adamw", None, None)))[0]["max_grad_norm"] == 0.0
    assert arguments_of(plan_of(make_workload("adamw", None, 1.5)))[0]["max_grad_norm"] == 1.5


def test_a_schedule_of_the_users_own_is_named() -> None:
    def mine(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    arguments, module, not_carried = arguments_of(plan_of(make_workload("adamw", mine, 1.0)))
    assert "the schedule LambdaLR" in not_carried and "0.01, 0.005" in not_carried
    assert "make_optimizers" not in module and "NOT CARRIED: the schedule LambdaLR" in " ".join(module.split("\n#  "))
    assert arguments["lr_scheduler_type"] == "constant" and arguments["max_grad_norm"] == 1.0


class Mine(torch.optim.SGD):
    """An optimizer that no Trainer knows."""


def test_an_optimizer_of_the_users_own_is_named() -> None:
    workload = dataclasses.replace(
        make_workload("adamw", None, 1.0), build_optimizer=functools.partial(Mine, lr=0.25, momentum=0.5)
    )
    arguments, module, not_carried = arguments_of(plan_of(workload))
    assert "the optimizer Mine" in not_carried and "is not torch's" in not_carried
    assert "optim" not in arguments and "make_optimizers" not in module and arguments["learning_rate"] == 0.25


def test_a_plan_that_does_not_know_says_so() -> None:
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier()), accumulation=4)
    arguments, _, not_carried = arguments_of(plan)
    assert "which this plan does not know" in not_carried and not {"max_grad_norm", "learning_rate"} & set(arguments)


@pytest.mark.parametrize("parts", [(slice(-4, None),), (slice(-4, None), slice(-8, -4))], ids=["one", "two"])
def test_parameters_that_the_optimizer_leaves_out_are_left_out(parts: tuple[slice, ...], tmp_path: Path) -> None:
    """They have the names of those that train, with another number."""

    def partly(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.AdamW([{"params": parameters[part]} for part in parts], lr=0.01, weight_decay=0.0)

    workload = dataclasses.replace(make_workload("adamw", None, 1.0), build_optimizer=partly)
    _, module, not_carried = arguments_of(plan_of(workload))
    assert "make_optimizers(model) makes it" in not_carried
    path = tmp_path / "companion.py"
    path.write_text(module)
    companion, model = load_module(path), tiny_gpt2()
    (made, _), wanted = companion.make_optimizers(model), partly(trainable(model))
    found, held = ([[id(p) for p in group["params"]] for group in one.param_groups] for one in (made, wanted))
    assert found == held
    with pytest.raises(ValueError, match="no parameter group for"):
        companion.make_optimizers(torch.nn.Linear(2, 2))


def test_options_that_an_earlier_trainer_drops_are_in_the_companion(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(make_workload("sgd", None, 0.05))
    arguments, module, _ = arguments_of(plan)
    assert "nesterov=True" in arguments["optim_args"] and "make_optimizers" not in module
    monkeypatch.setattr(transformers, "installed_version", lambda _: "5.0.0")
    arguments, module, not_carried = arguments_of(plan)
    assert "optim_args" not in arguments and "'nesterov': True" in module
    assert "the options of the optimizer SGD, by the arguments alone" in not_carried


def said_by_arguments(context: RankContext, companion: str, gpus: int) -> str:
    """What a companion says in a plain process, which sees so many GPUs."""
    from transformers import TrainingArguments

    TrainingArguments.n_gpu = property(lambda _: gpus)  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as error:
        load_module(companion).load_arguments()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "gpus", "words"), [(2, 0, "the plan is for 2 ranks, and 1 were started"), (1, 4, "sees 4 GPUs")]
)
def test_another_number_of_ranks_is_refused(
    ranks: int, gpus: int, words: str, tmp_path: Path, training_zygote: Zygote
) -> None:
    pytest.importorskip("accelerate")
    plan = make_plan(TrainingConfig(micro_batch=2, dp_replicate=ranks))
    for name, text in TransformersTarget().render(plan, "args").files.items():
        (tmp_path / name).write_text(text)
    task = Task(target=said_by_arguments, args=(str(tmp_path / "args_companion.py"), gpus), total_deadline_s=60.0)
    (said,) = training_zygote.run(task).check().results
    assert words in said and f"torchrun --nproc-per-node {ranks}" in said


def test_facts_are_data_that_load_again() -> None:
    facts = read_training_facts(make_workload("two_groups", linear_warmup, 0.1), build_on_meta(language(NO_DROPOUT)))
    assert TrainingFacts.model_validate_json(facts.model_dump_json()) == facts
    decayed, rest = facts.groups
    assert "transformer.h.*.attn.c_attn.weight" in decayed.names and rest.options["weight_decay"] == 0.0
    assert facts.schedule is not None and facts.schedule.options == {"num_warmup_steps": 2, "num_training_steps": STEPS}
    assert facts.schedule.learning_rates[1] == (0.005, 0.001)
    assert read_training_facts(language(GPT2), build_on_meta(language(GPT2))).dropout == {"0.1": 10}


def test_the_module_of_a_companion_loads(tmp_path: Path) -> None:
    _, module, _ = arguments_of(plan_of(make_workload("two_groups", step_lr, 0.1)))
    path = tmp_path / "companion.py"
    path.write_text(module)
    companion = load_module(path)
    optimizer, schedule = companion.make_optimizers(tiny_gpt2())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.002] and schedule.gamma == 0.5
    with pytest.raises(ValueError, match="no parameter group for"):
        companion.make_optimizers(torch.nn.Linear(2, 2))

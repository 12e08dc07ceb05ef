"""plan.prepare: the plan on the user's own parts, and what it says where they do not fit the plan."""

import copy
import dataclasses
import functools
import warnings

import pytest
import torch

import autoplan
from autoplan.errors import ConfigError, DeviceError, PlanError, WorkloadError
from autoplan.planner.plan.hardware import found_elsewhere
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.prepare import _give_state
from autoplan.strategies.analysis.training_facts import optimizer_differences, read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.workloads.language_model import make_config
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from autoplan.strategies.workloads.workload import LossSum
from tests.recorded import make_hardware, make_plan
from tests.strategies.loops import Points, Regressor
from tests.strategies.tiny import GPT2, Classifier, classifier, image_batch, image_loss, language, sgd

CONFIG = TrainingConfig(micro_batch=2, checkpointing="full", optimizer_step="foreach")

pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")


@pytest.fixture
def plan(tmp_path):
    """Of a tiny GPT-2 in a config.json."""
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=4, options={"max_grad_norm": 0.5})
    return make_plan(CONFIG, workload=spec, accumulation=2)


def image_plan(config=None, **fields):
    return make_plan(config or TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier(**fields)))


def tiny_gpt2():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(make_config(GPT2))


def test_the_workload_of_the_search_by_itself(plan):
    run = plan.prepare()
    assert (run.local_batch, run.accumulation) == (4, 2)
    assert run.workload.max_grad_norm == 0.5
    result = run.step(run.workload.make_batch(run.local_batch, 0))
    assert torch.isfinite(result.loss)
    assert run.optimizer.defaults["foreach"] is True


def test_a_model_and_optimizer_of_the_users_own(plan):
    model = tiny_gpt2()
    weight = model.transformer.h[0].attn.c_attn.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.123, weight_decay=0.4)
    run = plan.prepare(model, optimizer)
    assert run.model is model
    assert run.optimizer.param_groups[0]["lr"] == 0.123 and run.optimizer.param_groups[0]["weight_decay"] == 0.4
    assert any(parameter is weight for parameter in run.optimizer.param_groups[0]["params"])
    before = weight.detach().clone()
    run.step(language().make_batch(4, 0))
    assert not torch.equal(weight, before)


def test_factories_and_a_schedule(plan):
    run = plan.prepare(
        tiny_gpt2,
        functools.partial(torch.optim.AdamW, lr=0.5),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
        max_grad_norm=None,
    )
    assert run.workload.max_grad_norm is None
    result = run.step(language().make_batch(4, 0))
    assert result.grad_norm is None
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_an_optimizer_that_has_stepped_keeps_its_state(plan):
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    workload = language()
    total, count = workload.loss(model, workload.make_batch(4, 0))
    (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = {parameter: state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    run = plan.prepare(model, optimizer)
    assert len(run.optimizer.state) == len(moments)
    for parameter, moment in moments.items():
        assert torch.equal(run.optimizer.state[parameter]["exp_avg"], moment)
    run.step(workload.make_batch(4, 1))
    assert {state["step"].item() for state in run.optimizer.state.values()} == {2.0}


def test_an_optimizer_that_stepped_before_a_layer_was_frozen_is_taken_over(plan):
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    workload = language()
    total, count = workload.loss(model, workload.make_batch(4, 0))
    (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()
    frozen = model.transformer.wpe.weight.requires_grad_(False)
    before, states = frozen.clone(), len(optimizer.state)
    run = plan.prepare(model, optimizer)
    assert len(run.optimizer.state) == states - 1 and frozen not in run.optimizer.state
    run.step(workload.make_batch(4, 1))
    assert torch.equal(frozen, before)


def test_a_state_that_nobody_trains_is_refused_with_its_own_reason():
    one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    for on_ranks, words in ((False, "not all that it stepped is trained here"), (True, "over ranks")):
        with pytest.raises(WorkloadError, match=words):
            _give_state(torch.optim.Adam([one]), {other: {}}, torch.device("cpu"), on_ranks=on_ranks)


def test_the_count_of_a_plain_step_stays_on_the_host_and_that_of_a_kernel_goes_to_the_device():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    given = {parameter: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    for flags, place in (({}, "cpu"), ({"capturable": True}, "meta")):
        optimizer = torch.optim.Adam([parameter], **flags)
        _give_state(optimizer, given, torch.device("meta"))
        state = optimizer.state[parameter]
        assert (state["step"].device.type, state["exp_avg"].device.type) == (place, "meta")


def test_python_objects_are_handed_in_again():
    plan = image_plan()
    with pytest.raises(WorkloadError, match="does not carry"):
        type(plan).model_validate_json(plan.model_dump_json()).prepare()
    loaded = type(plan).model_validate_json(plan.model_dump_json())
    run = loaded.prepare(Classifier(), sgd, image_loss)
    assert torch.isfinite(run.step(image_batch(8, 0)).loss)


def test_another_loss_replaces_the_searched_one(plan):
    def doubled(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits
        return LossSum(2 * logits.square().sum(), logits.numel())

    run = plan.prepare(loss=doubled)
    assert run.workload.head is None and run.workload.count is None
    assert torch.isfinite(run.step(language().make_batch(4, 0)).loss)


def test_saved_and_restored(plan, tmp_path):
    run = plan.prepare()
    run.step(run.workload.make_batch(4, 0))
    torch.save(run.state_dict(), tmp_path / "state.pt")
    batch = run.workload.make_batch(4, 1)
    expected = run.step(batch).loss.item()
    other = plan.prepare()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert other.step(batch).loss.item() == expected


def test_other_hardware_is_said_not_refused(plan):
    with pytest.warns(UserWarning, match="other hardware.*Test CPU"):
        plan.prepare()


def test_what_is_not_the_same_is_said_of_other_hardware(monkeypatch):
    """After a new driver, or with a GiB more of memory, it said 'found on X; this is X'."""
    plan, then = make_plan(), make_hardware()
    size = then.host.memory_total_bytes.model_copy(update={"value": then.host.memory_total_bytes.value + 2**30})
    for changes, words in (
        ({"memory_total_bytes": size}, "other hardware: its parts have the same names, and a size, a limit or"),
        ({"driver": "580.1", "torch": "2.12.0"}, "driver 580.1 here, none then; torch 2.12.0 here, 2.13.0 then"),
    ):
        here = then.model_copy(update={"host": then.host.model_copy(update=changes)})
        monkeypatch.setattr("autoplan.probes.run.read_host_profile", lambda here=here: here)
        said = found_elsewhere(plan)
        assert said is not None and words in said and then.host.cpu_model not in said
    monkeypatch.setattr("autoplan.probes.run.read_host_profile", lambda: then)
    assert found_elsewhere(plan) is None


def test_the_same_hardware_is_not_remarked_on(plan):
    from autoplan.probes.run import read_host_profile

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.model_copy(update={"hardware": read_host_profile()}).prepare()


def test_the_global_batch_is_the_plans(plan):
    with pytest.raises(PlanError, match="global batch of 4, and 8"):
        plan.prepare(global_batch=8)
    plan.prepare(global_batch=4)


def test_a_plan_for_more_ranks_than_run(plan):
    wide = plan.model_copy(update={"config": TrainingConfig(micro_batch=1, dp_replicate=2)})
    with pytest.raises(ConfigError, match="2 rank"):
        wide.prepare()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_plan_without_cuda(plan):
    with pytest.raises(DeviceError, match="no CUDA device"):
        plan.model_copy(update={"device": "cuda"}).prepare()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"model": Classifier, "optimizer": sgd(Classifier().parameters()), "loss": image_loss}, "instance"),
        ({"model": Classifier(), "optimizer": sgd(Classifier().parameters()), "loss": image_loss}, "not the model's"),
        ({"model": Classifier(), "optimizer": sgd}, "no loss was given"),
    ],
)
def test_parts_that_do_not_belong_together(parts, says):
    with pytest.raises(WorkloadError, match=says):
        plan = image_plan()
        type(plan).model_validate_json(plan.model_dump_json()).prepare(**parts)


def test_a_fixed_micro_batch_is_the_plans():
    """That of --fix, and the workload's own, which the inspection of a search writes into the plan."""
    spec = spec_from_objects(classifier(norm=True))
    spec = spec.model_copy(update={"options": {"fixed_micro_batch": 4}})
    own = spec_from_objects(classifier(norm=True, fixed_micro_batch=4))
    for workload in (spec, inspect_workload(own, make_hardware(), "cpu", parallel=False).spec):
        plan = make_plan(TrainingConfig(micro_batch=4), workload=workload)
        loaded = type(plan).model_validate_json(plan.model_dump_json())
        run = loaded.prepare(functools.partial(Classifier, True), sgd, image_loss)
        assert torch.isfinite(run.step(image_batch(8, 0)).loss)


def test_what_a_workload_says_of_parameters_without_a_gradient_is_the_plans():
    """A few batches may leave one out, which no trace sees."""
    own = spec_from_objects(dataclasses.replace(classifier(), find_unused_parameters=True))
    assert inspect_workload(own, make_hardware(), "cpu", parallel=False).spec.find_unused_parameters


def test_a_model_of_the_users_is_split_as_the_workload_says():
    split = {"stages.*.*.first": "colwise", "stages.*.*.second": "rowwise"}
    plan = image_plan(tensor_plan=split)
    assert plan.prepare(Classifier()).workload.tensor_plan == plan.prepare().workload.tensor_plan == split


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def grouped(parameters, decay=0.1, lr=0.05, decayed_dim=2):
    """The usual decay and no-decay groups, by the number of dims."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.dim() >= decayed_dim]
    rest = [parameter for parameter in parameters if all(parameter is not other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def searched_plan(**fields):
    """A plan as another process reads it: of Python objects, with what the search saw of the training."""
    workload = dataclasses.replace(classifier(), **fields)
    facts = read_training_facts(workload, workload.build_model())
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(workload), training=facts)
    return Plan.model_validate_json(plan.model_dump_json())


def test_a_schedule_that_was_made_already_does_not_change_the_rate_of_the_search():
    def warmed(parameters):
        optimizer = sgd(parameters)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return optimizer

    workload = dataclasses.replace(classifier(), build_optimizer=warmed)
    model = workload.build_model()
    facts, plain = read_training_facts(workload, model), sgd(model.parameters())
    assert facts.groups[0].options["lr"] == plain.param_groups[0]["lr"]
    assert optimizer_differences(facts, plain) == optimizer_differences(facts, warmed(model.parameters())) == []


def test_clipping_and_seed_are_those_of_the_search():
    plan = searched_plan(max_grad_norm=0.25, seed=11)
    run = plan.prepare(Classifier(), sgd, image_loss)
    assert run.workload.max_grad_norm == 0.25 and run.workload.seed == 11
    run.optimizer.zero_grad()
    result = run.step(image_batch(8, 0))
    assert float(result.grad_norm) > 0.25, "clipping would change nothing"
    assert plan.prepare(Classifier(), sgd, image_loss, max_grad_norm=None).workload.max_grad_norm is None


def test_the_run_of_a_loaded_plan_trains_as_a_plain_loop_with_clipping_and_schedule():
    plan = searched_plan(max_grad_norm=0.25, build_schedule=halving, build_optimizer=grouped)
    torch.manual_seed(5)
    model = Classifier()
    plain = copy.deepcopy(model)
    run = plan.prepare(model, grouped, image_loss, schedule=halving)
    optimizer = grouped(plain.parameters())
    schedule = halving(optimizer)
    for index in range(3):
        run.step(image_batch(8, index))
        total, count = image_loss(plain, image_batch(8, index))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for (name, wanted), found in zip(plain.named_parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, msg=name)


def test_a_schedule_of_the_search_is_not_dropped_in_silence():
    plan = searched_plan(build_schedule=halving)
    with pytest.raises(PlanError, match=r"StepLR \(learning rates 0.1, 0.05") as error:
        plan.prepare(Classifier(), sgd, image_loss)
    assert "schedule=None" in error.value.hint
    assert plan.prepare(Classifier(), sgd, image_loss, schedule=None).schedule is None
    assert plan.prepare(Classifier(), sgd, image_loss, schedule=halving).schedule.gamma == 0.5


def test_the_objects_of_the_same_process_keep_their_schedule():
    workload = classifier(build_schedule=halving, max_grad_norm=0.5, seed=3)
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(workload))
    for run in (plan.prepare(), plan.prepare(Classifier(), sgd, image_loss)):
        assert run.schedule.gamma == 0.5 and (run.workload.max_grad_norm, run.workload.seed) == (0.5, 3)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1), r"1 parameter group\(s\), not 2"),
        (functools.partial(grouped, decay=0.0), "weight_decay in group 0 is 0.0, not 0.1"),
        (functools.partial(grouped, lr=0.01), "lr in group 0 is 0.01, not 0.05"),
        (functools.partial(torch.optim.SGD, lr=0.05), "torch.optim.sgd.SGD, not torch.optim.adamw.AdamW"),
        (functools.partial(grouped, decayed_dim=3), "group 0 has"),
    ],
)
def test_an_optimizer_that_trains_otherwise_is_refused(optimizer, says):
    plan = searched_plan(build_optimizer=grouped)
    for model in (Classifier(), Classifier):
        with pytest.raises(PlanError, match=says):
            plan.prepare(model, optimizer, image_loss)
    run = plan.prepare(Classifier(), optimizer, image_loss, changed_ok=True)
    assert torch.isfinite(run.step(image_batch(8, 0)).loss)


def test_an_optimizer_with_a_schedule_attached_counts_with_its_first_rate():
    plan = searched_plan(build_optimizer=grouped, build_schedule=halving)
    model = Classifier()
    optimizer = grouped(model.parameters())
    halving(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0125
    assert plan.prepare(model, optimizer, image_loss, schedule=None).optimizer.param_groups[0]["lr"] == 0.0125


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)


def test_a_schedule_that_sets_rate_and_momentum_when_it_is_made_is_that_of_the_search():
    """OneCycleLR changes lr, initial_lr and momentum: the optimizer is compared as it is without a schedule."""
    plan = searched_plan(build_schedule=one_cycle)
    run = plan.prepare(Classifier, sgd, image_loss, schedule=one_cycle)
    group = run.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (pytest.approx(4e-5), 0.95)
    with pytest.raises(PlanError, match="lr is 0.2, not 0.1"):
        plan.prepare(Classifier, functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9), image_loss, schedule=None)


def test_other_dropout_rates_are_said():
    plan = searched_plan()
    model = torch.nn.Sequential(Classifier(), torch.nn.Dropout(0.3))
    with pytest.warns(UserWarning, match="dropout rates .'0.3': 1.*search had 0"):
        plan.prepare(model, sgd, image_loss)


def test_a_plan_of_before_says_what_it_does_not_know():
    plan = Plan.model_validate_json(image_plan().model_dump_json())
    with pytest.warns(UserWarning, match="does not know the max_grad_norm and schedule"):
        plan.prepare(Classifier(), sgd, image_loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this plan does not know")
        plan.prepare(Classifier(), sgd, image_loss, schedule=None, max_grad_norm=1.0)


def test_a_wrong_keyword_is_refused_by_name(plan):
    with pytest.raises(TypeError, match="optimiser"):
        plan.prepare(optimiser=None)


class Flagged(Classifier):
    """A model whose own checkpointing is switched on, as gradient_checkpointing_enable() of transformers leaves it."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True


def test_prepare_says_that_the_knob_governs_the_models_own_checkpointing():
    with pytest.warns(UserWarning, match="checkpointing=none decides what is recomputed"):
        run = searched_plan().prepare(Flagged(), sgd, image_loss)
    run.step(image_batch(8, 0))
    assert run.model.gradient_checkpointing


def test_a_loop_whose_schedule_goes_by_epochs_is_applied_with_the_interval_of_the_search():
    model, loss = Regressor(), torch.nn.CrossEntropyLoss()
    data = torch.utils.data.DataLoader(Points(32), batch_size=8)
    parts = (model, sgd(model.parameters()), data, loss)
    searched = autoplan.from_loop(*parts, schedule=halving, schedule_interval="epoch")
    facts = read_training_facts(searched, searched.build_model())
    found = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(searched), training=facts)
    with pytest.raises(PlanError, match="the schedule is StepLR.*, and the search had _EverySteps") as error:
        found.apply_to(*parts, schedule=halving)
    assert "schedule_interval=" in error.value.hint
    run, loader = found.apply_to(*parts, schedule=halving, schedule_interval="epoch")
    first = run.optimizer.param_groups[0]["lr"]
    rates = [run.step(batch) and run.optimizer.param_groups[0]["lr"] for batch in loader]
    assert rates == [first, first, first, first / 2]

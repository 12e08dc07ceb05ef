"""plan.prepare: the plan on the user's own parts, and what it says where they do not fit the plan."""

import functools
import inspect
import warnings

import pytest
import torch

from autoplan.errors import ConfigError, DeviceError, PlanError, WorkloadError
from autoplan.planner.apply import prepare_plan
from autoplan.planner.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.language_model import make_config
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from autoplan.strategies.workloads.workload import LossSum
from tests.recorded import make_plan
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


def test_python_objects_are_handed_in_again():
    plan = image_plan()
    with pytest.raises(WorkloadError, match="does not carry|lacks"):
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
    spec = spec_from_objects(classifier(norm=True))
    spec = spec.model_copy(update={"options": {"fixed_micro_batch": 4}})
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec)
    loaded = type(plan).model_validate_json(plan.model_dump_json())
    run = loaded.prepare(functools.partial(Classifier, True), sgd, image_loss)
    assert torch.isfinite(run.step(image_batch(8, 0)).loss)


def test_plan_prepare_and_what_it_calls_have_one_signature():
    given = [list(inspect.signature(function).parameters.values())[1:] for function in (Plan.prepare, prepare_plan)]
    assert given[0] == given[1] and len(given[0]) == 9
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in given[0])
    returns = [inspect.signature(function).return_annotation for function in (Plan.prepare, prepare_plan)]
    assert returns[0] == returns[1] == "TrainingRun"
    assert "max_grad_norm: 'float | None' = AS_SEARCHED" in str(inspect.signature(Plan.prepare))


def test_a_wrong_keyword_is_refused_by_name(plan):
    with pytest.raises(TypeError, match="optimiser"):
        plan.prepare(optimiser=None)

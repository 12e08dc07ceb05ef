"""TrainingRun: state across configs, bit-for-bit resuming, clipping, schedule, frozen parameters, refusals."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from autoplan.errors import ConfigError, WorkloadError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.state import place_steps
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.samples import batches_from_dataset
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.strategies.tiny import GPT2, Classifier, Pair, classifier, image_loss, language, sgd

NO_DROPOUT = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PLAIN = TrainingConfig(micro_batch=2)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)


def steps(run, first, last):
    return [run.step(run.workload.make_batch(run.local_batch, index)).loss for index in range(first, last)]


@pytest.mark.parametrize("knobs", [{}, {"precision": "fp16"}, {"checkpointing": "full", "loss": "fused"}], ids=str)
def test_resuming_is_bit_for_bit(knobs, tmp_path):
    """With dropout on: the random state is part of what is saved."""
    workload = language(GPT2)
    workload.build_schedule = warm_up
    config = PLAIN.model_copy(update=knobs)
    run = prepare(workload, config)
    steps(run, 0, 2)
    torch.save(run.state_dict(), tmp_path / "state.pt")
    expected = steps(run, 2, 4)
    resumed = prepare(workload, config)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert resumed.steps == 2
    assert [loss.item() for loss in steps(resumed, 2, 4)] == [loss.item() for loss in expected]
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert resumed.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    if run.scaler is not None:
        assert resumed.scaler.state_dict() == run.scaler.state_dict()


def with_adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1)


def with_nadam(parameters):
    return torch.optim.NAdam(parameters, lr=1e-3)


def with_damped_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1)


def with_adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=1e-2)


@pytest.mark.parametrize("build_optimizer", [with_adam, with_nadam, with_damped_sgd, with_adagrad])
def test_a_state_before_the_first_step_changes_no_later_step(build_optimizer, tmp_path):
    """torch makes a step without gradients to see what an optimizer keeps; Adam would go on with a count of 1."""
    workload = language(NO_DROPOUT)
    workload.build_optimizer = build_optimizer
    expected = [loss.item() for loss in steps(prepare(workload, PLAIN), 0, 3)]
    run = prepare(workload, PLAIN)
    torch.save(run.state_dict(), tmp_path / "state.pt")
    assert not run.optimizer.state or build_optimizer is with_adagrad, "Adagrad makes its state at once"
    assert [loss.item() for loss in steps(run, 0, 3)] == expected
    again = prepare(workload, PLAIN)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert [loss.item() for loss in steps(again, 0, 3)] == expected


class Heavy(torch.optim.Optimizer):
    """Keeps its momentum in an attribute of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.momentum[parameter] = 0.9 * self.momentum.get(parameter, 0.0) + parameter.grad
                    parameter.sub_(group["lr"] * self.momentum[parameter])


@pytest.mark.parametrize(("build_optimizer", "before"), [(Pair, 0), (Pair, 2), (Heavy, 2)])
def test_saving_takes_no_step_of_an_optimizer_that_keeps_its_state_elsewhere(build_optimizer, before):
    workload = language(NO_DROPOUT)
    workload.build_optimizer = build_optimizer
    run, saved = (prepare(workload, PLAIN) for _ in range(2))
    steps(run, 0, before + 2)
    steps(saved, 0, before)
    saved.state_dict()
    steps(saved, before, before + 2)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, saved.model.state_dict()[name]), name


def test_loading_takes_no_step_of_an_optimizer_that_keeps_its_state_elsewhere():
    workload = language(NO_DROPOUT)
    workload.build_optimizer = Pair
    run, loaded, fresh = (prepare(workload, PLAIN) for _ in range(3))
    steps(run, 0, 1)
    loaded.load_state_dict(run.state_dict())
    fresh.model.load_state_dict(run.model.state_dict())
    steps(loaded, 1, 3)
    steps(fresh, 1, 3)
    for name, tensor in fresh.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name


class OneUnused(nn.Module):
    """Without biases; no backward reaches the second layer."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.used(x)


def numbers(build_optimizer):
    return Workload(
        name="numbers",
        build_model=OneUnused,
        make_batch=lambda count, index: torch.randn(count, 4, generator=torch.Generator().manual_seed(index)),
        loss=lambda model, batch: LossSum((model(batch) - 1).square().sum(), len(batch)),
        build_optimizer=build_optimizer,
        global_batch=4,
    )


def with_an_empty_group(parameters):
    given = list(parameters)
    biases = {"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([biases, {"params": [p for p in given if p.dim() > 1], "lr": 0.1}])


def with_muon(parameters):
    return torch.optim.Muon(parameters, lr=0.1)


class CountsInGroups(torch.optim.Optimizer):
    """As timm's Lamb: its groups count steps, from the first on."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["calls"] += 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                total = self.state[parameter].setdefault("total", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.sub_(total, alpha=group["lr"] / group["step"])


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("build_optimizer", [with_an_empty_group, with_muon, with_adagrad, CountsInGroups])
def test_a_resumed_run_trains_as_one_that_went_on(build_optimizer, before):
    workload = numbers(build_optimizer)
    run, resumed = prepare(workload, PLAIN), prepare(workload, PLAIN)
    steps(run, 0, before)
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    kept = [one.model.unused.weight in one.optimizer.state for one in (run, resumed)]
    assert kept == [build_optimizer is with_adagrad] * 2
    assert torch.equal(torch.stack(steps(run, before, 4)), torch.stack(steps(resumed, before, 4)))
    for one, two in zip(run.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert {**one, "params": len(one["params"])} == {**two, "params": len(two["params"])}


def test_saving_and_loading_take_no_step_that_shows():
    """torch makes one to see what state an optimizer will have."""
    run, other = (prepare(numbers(CountsInGroups), PLAIN) for _ in range(2))
    called = []
    for one in (run, other):
        one.optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
        one.optimizer.register_step_post_hook(lambda *_: called.append("post"))
    saved = run.state_dict()
    other.load_state_dict(copy.deepcopy(saved))
    for one in (run, other):
        assert one.optimizer.param_groups[0]["calls"] == 0 and "step" not in one.optimizer.param_groups[0]
    assert saved["optimizer"]["param_groups.used.weight.calls"] == 0
    assert saved["optimizer"]["param_groups.used.weight.step"] == 0, "a loader of checkpoints looks for these keys"
    assert called == []
    steps(run, 0, 1)
    assert called == ["pre", "post"]


@pytest.mark.parametrize(
    "other",
    [
        {"checkpointing": "selective", "loss": "fused", "optimizer_step": "fused"},
        {"precision": "fp16", "optimizer_step": "foreach", "micro_batch": 4},
        {"compile": "block", "checkpointing": "every_2"},
        {"compile": "model"},
    ],
    ids=str,
)
def test_a_state_loads_under_another_config(other, graphs_alone):
    workload = language(NO_DROPOUT)
    workload.build_schedule = warm_up
    plain = prepare(workload, PLAIN)
    steps(plain, 0, 2)
    state = copy.deepcopy(plain.state_dict())
    assert set(state["model"]) == set(workload.build_model().state_dict())

    changed = prepare(workload, PLAIN.model_copy(update=other))
    changed.load_state_dict(copy.deepcopy(state))
    back = prepare(workload, PLAIN)
    back.load_state_dict(copy.deepcopy(changed.state_dict()))
    assert set(changed.state_dict()["model"]) == set(state["model"])
    assert [loss.item() for loss in steps(back, 2, 4)] == [loss.item() for loss in steps(plain, 2, 4)]
    losses = steps(changed, 2, 4)
    assert torch.allclose(torch.stack(losses), torch.stack(steps(prepare_from(workload, state), 2, 4)), rtol=1e-3)


def prepare_from(workload, state):
    run = prepare(workload, PLAIN)
    run.load_state_dict(copy.deepcopy(state))
    return run


@pytest.mark.parametrize("flag", ["fused", "capturable"])
def test_counts_of_steps_lie_where_the_form_of_the_step_reads_them(flag):
    """A kernel that steps reads the count on the device; any other form reads it as a number, on the host."""
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    count = torch.tensor(3.0)
    optimizer.state[parameter] = {"step": count, "exp_avg": torch.zeros(2, device="meta")}
    place_steps(optimizer)
    assert optimizer.state[parameter]["step"] is count
    optimizer.param_groups[0][flag] = True
    place_steps(optimizer)
    assert optimizer.state[parameter]["step"].device.type == "meta"
    own = torch.optim.Adafactor([parameter])
    own.state[parameter] = {"step": count}
    place_steps(own)
    assert own.state[parameter]["step"] is count


def test_a_state_of_a_plain_step_loads_as_the_fused_kernel_wants_it():
    plain = prepare(language(NO_DROPOUT), PLAIN)
    steps(plain, 0, 1)
    for state in plain.optimizer.state.values():
        state["step"] = state["step"].double()  # as where torch's default is float64; the kernel takes fp32 alone
    fused = prepare(language(NO_DROPOUT), PLAIN.model_copy(update={"optimizer_step": "fused"}))
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert {state["step"].dtype for state in fused.optimizer.state.values()} == {torch.float32}
    steps(fused, 1, 2)
    assert {state["step"].item() for state in fused.optimizer.state.values()} == {2.0}


def test_frozen_parameters_stay_and_stay_out_of_the_optimizer():
    workload = language(NO_DROPOUT)
    build = workload.build_model

    def frozen():
        model = build()
        for parameter in model.transformer.h[0].parameters():
            parameter.requires_grad_(False)
        return model

    workload.build_model = frozen
    run = prepare(workload, PLAIN.model_copy(update={"checkpointing": "full", "optimizer_step": "foreach"}))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    steps(run, 0, 2)
    held = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in run.model.named_parameters():
        clean = name.replace("_checkpoint_wrapped_module.", "")
        frozen_block = clean.startswith("transformer.h.0.")
        assert (id(parameter) in held) is not frozen_block
        assert torch.equal(parameter, before[clean]) is frozen_block, name


def frozen_stem():
    model = Classifier()
    model.stem.requires_grad_(False)
    return model


def twice_the_count(model, batch):
    total, count = image_loss(model, batch)
    return LossSum(total, 2 * count)


def test_parameters_that_are_unfrozen_train_as_in_a_plain_loop_once_the_optimizer_has_them():
    """The count is not known ahead: gradients are multiplied once more, and clipped."""
    workload = classifier(max_grad_norm=0.1)
    workload.build_model, workload.loss = frozen_stem, twice_the_count
    run = prepare(workload, PLAIN)
    model = copy.deepcopy(run.model)
    optimizer = sgd(trainable(model))
    for index in range(3):
        batch = workload.make_batch(8, index)
        if index == 1:
            for one in (run.model, model):
                one.stem.requires_grad_(True)
            with pytest.raises(
                WorkloadError, match=r"2 parameter\(s\) were unfrozen.*: stem.weight, stem.bias"
            ) as raised:
                run.step(batch)
            assert "add_param_group" in raised.value.hint and run.model.stem.weight.grad is None
            for one, over in ((run.model, run.optimizer), (model, optimizer)):
                over.add_param_group({"params": list(one.stem.parameters())})
        result = run.step(batch)
        total, count = twice_the_count(model, batch)
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 0.1 and torch.isclose(result.grad_norm, norm, rtol=1e-4)
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_what_is_unfrozen_in_a_run_that_rounds_parameters_needs_a_new_run():
    workload = classifier()
    workload.build_model = frozen_stem
    run = prepare(workload, PLAIN.model_copy(update={"parameters": "bf16", "precision": "bf16"}))
    run.model.stem.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.model.stem.parameters())})
    with pytest.raises(WorkloadError, match="were unfrozen") as raised:
        run.step(workload.make_batch(8, 0))
    assert "new run" in raised.value.hint


def test_clipping_and_schedule_are_those_of_a_plain_loop():
    workload = language(NO_DROPOUT, max_grad_norm=0.05)
    workload.build_schedule = warm_up
    run = prepare(workload, TrainingConfig(micro_batch=1))
    torch.manual_seed(workload.seed)
    model = workload.build_model().train()
    optimizer = workload.build_optimizer(model.parameters())
    schedule = warm_up(optimizer)
    for index in range(3):
        batch = workload.make_batch(4, index)
        total, count = workload.loss(model, batch)
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result = run.step(batch)
        assert torch.isclose(result.grad_norm, norm, rtol=1e-4)
        assert torch.isclose(result.loss, total / count, rtol=1e-5)
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("counted_ahead", [True, False])
def test_padded_batches_are_divided_by_the_count_of_the_whole_batch(counted_ahead):
    workload = language(NO_DROPOUT, max_grad_norm=None)
    batch = workload.make_batch(4, 0)
    batch["labels"][2:, :28] = -100
    if not counted_ahead:
        workload.count = None
    whole = prepare(workload, TrainingConfig(micro_batch=4)).step(batch)
    parts_run = prepare(workload, TrainingConfig(micro_batch=1))
    seen = []
    parts_run.observe_gradients(lambda: seen.extend(p.grad.clone() for p in parts_run.parameters))
    parts = parts_run.step(batch)
    assert torch.isclose(whole.loss, parts.loss, rtol=1e-5)
    model = prepare(workload, TrainingConfig(micro_batch=4)).model
    total, count = workload.loss(model, batch)
    (total / count).backward()
    for mine, parameter in zip(seen, model.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, rtol=1e-3, atol=1e-7)


def test_a_skipped_fp16_step_moves_neither_schedule_nor_parameters():
    workload = language(NO_DROPOUT)
    workload.build_schedule = warm_up
    run = prepare(workload, PLAIN.model_copy(update={"precision": "fp16"}))
    run.scaler._init_scale = 2.0**60
    run.scaler._scale = None
    before = copy.deepcopy(run.model.state_dict())
    result = run.step(workload.make_batch(4, 0))
    assert result.skipped
    assert run.schedule.last_epoch == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_step_that_did_not_end_is_no_part_of_the_next(precision, where):
    """Ctrl-C, or out of memory, which a program catches and goes on with its next batch."""
    runs = [prepare(classifier(), PLAIN.model_copy(update={"precision": precision})) for _ in range(2)]
    calls = []

    def interrupt():
        calls.append(where)
        if len(calls) == 3:
            raise KeyboardInterrupt

    if where == "backward":
        runs[0].before_micro_steps(interrupt)
    else:
        calls += [where] * 2
        runs[0].observe_gradients(interrupt)
    with pytest.raises(KeyboardInterrupt):
        runs[0].step(runs[0].workload.make_batch(8, 0))
    losses = [[loss.item() for loss in steps(run, 1, 3)] for run in runs]
    assert losses[0] == losses[1] and runs[0].steps == runs[1].steps == 2
    assert all(torch.equal(one, two) for one, two in zip(runs[0].parameters, runs[1].parameters, strict=True))


def test_micro_batches_of_batch_norm_are_refused_unless_fixed():
    with pytest.raises(WorkloadError, match="BatchNorm2d") as raised:
        prepare(classifier(norm=True), PLAIN)
    assert 'fix={"micro_batch": N}' in str(raised.value) and "--fix micro_batch=N" in raised.value.flag_hint
    with pytest.raises(WorkloadError, match="fixed to 4"):
        prepare(classifier(norm=True, fixed_micro_batch=4), PLAIN)
    run = prepare(classifier(norm=True, fixed_micro_batch=4), TrainingConfig(micro_batch=4))
    assert torch.isfinite(run.step(run.workload.make_batch(8, 0)).loss)


def test_a_real_dataset_with_padding():
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 131, (length,), generator=generator) for length in (5, 30, 9, 17, 3, 24, 12, 8)]

    def collate(samples):
        width = max(len(sample) for sample in samples)
        ids = torch.stack([nn.functional.pad(sample, (0, width - len(sample))) for sample in samples])
        labels = torch.stack([nn.functional.pad(sample, (0, width - len(sample)), value=-100) for sample in samples])
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    workload = language(NO_DROPOUT)
    workload.make_batch = batches_from_dataset(texts, collate)
    assert workload.make_batch(2, 0)["input_ids"].shape == (2, 30)
    losses = [
        prepare(workload, TrainingConfig(micro_batch=size, loss=loss)).step(workload.make_batch(4, 0)).loss.item()
        for size, loss in ((1, "full"), (4, "full"), (2, "fused"))
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    with pytest.raises(WorkloadError, match="empty"):
        batches_from_dataset([])


def test_wrong_batches_and_losses():
    run = prepare(language(), PLAIN)
    with pytest.raises(WorkloadError, match="takes 4"):
        run.step(run.workload.make_batch(3, 0))
    workload = classifier()
    workload.loss = lambda model, batch: model(batch["image"]).sum()
    with pytest.raises(WorkloadError, match="a sum and a count"):
        prepare(workload, PLAIN).step(workload.make_batch(8, 0))


@pytest.mark.parametrize(
    ("knobs", "workload", "says"),
    [
        ({"micro_batch": 3}, language, "global batch"),
        ({"precision": "tf32"}, language, "CUDA"),
        ({"loss": "fused"}, classifier, "head"),
        ({"attention": "eager"}, classifier, "transformers"),
        ({"compile": "model", "compile_mode": "reduce-overhead"}, language, "CUDA"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_configs_that_do_not_apply(knobs, workload, says):
    with pytest.raises(ConfigError, match=says) as raised:
        prepare(workload(), TrainingConfig.model_validate({"micro_batch": 2} | knobs))
    assert raised.value.hint


def test_nothing_to_train_and_no_optimizer():
    workload = classifier()
    build = workload.build_model
    workload.build_model = lambda: build().requires_grad_(False)
    with pytest.raises(WorkloadError, match="frozen"):
        prepare(workload, PLAIN)
    workload = classifier()
    workload.build_optimizer = lambda parameters: None
    with pytest.raises(WorkloadError, match="NoneType"):
        prepare(workload, PLAIN)


class Drawn(nn.Linear):
    """Weights from NumPy's generator and Python's."""

    def __init__(self):
        super().__init__(8, 5)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.randn(5, 8)))
            self.bias.copy_(torch.tensor([random.random() for _ in range(5)]))


def test_weights_from_other_generators_are_seeded_too_and_these_stay_the_programs():
    workload = classifier()
    workload.build_model = Drawn
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    one, other = (prepare(workload, PLAIN).model for _ in range(2))
    assert torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)
    assert (random.random(), np.random.rand()) == expected

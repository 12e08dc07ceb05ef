"""What each technique does to a model: kernels of the fused loss, checkpointing, compile, optimizer forms, threads."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from autoplan.errors import ConfigError, WorkloadError
from autoplan.processes import Task
from autoplan.strategies.analysis.facts import read_inspection
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import build_on_meta, inspect_workload, run_inspect_rank
from autoplan.strategies.prepare import STRATEGIES, prepare
from autoplan.strategies.techniques import allocator, checkpointing, compilation
from autoplan.strategies.techniques.allocator import AllocatorStrategy
from autoplan.strategies.techniques.deferred_logits import DeferredLoss
from autoplan.strategies.techniques.degrees import reason_against as reason_against_degrees
from autoplan.strategies.techniques.loss import FusedLoss, make_fused_loss, prove_fused_loss
from autoplan.strategies.techniques.loss_kernels import (
    choose_kernel,
    chunk_rows,
    precomputed_cross_entropy,
    recomputed_cross_entropy,
)
from autoplan.strategies.techniques.optimizer import OptimizerStrategy, reason_against
from autoplan.strategies.techniques.precision import PrecisionStrategy
from autoplan.strategies.workloads.optimizers import rebuild, step_form
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from autoplan.strategies.workloads.workload import LossSum
from tests.recorded import make_hardware
from tests.strategies.tiny import classifier, image_loss, language

PLAIN = TrainingConfig(micro_batch=2)


def head_case(rows=37, size=16, vocabulary=50, bias=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[::5] = -100
    return normal(rows, size), normal(vocabulary, size), normal(vocabulary) if bias else None, targets


KERNELS = {
    "torch or ours, fp32": choose_kernel("fp32", compiled=False),
    "inside compile": choose_kernel("fp32", compiled=True),
    "recomputed": recomputed_cross_entropy,
    "precomputed": lambda *case: precomputed_cross_entropy(*case, dtype=torch.float32),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_fused_loss_is_the_full_loss(kernel, bias, monkeypatch):
    monkeypatch.setattr("autoplan.strategies.techniques.loss_kernels.chunk_rows", lambda vocabulary: 8)
    hidden, weight, bias_tensor, targets = case = head_case(bias=bias)
    inputs = [tensor for tensor in (hidden, weight, bias_tensor) if tensor is not None]
    expected = F.cross_entropy(F.linear(hidden, weight, bias_tensor), targets, ignore_index=-100, reduction="sum")
    expected_gradients = torch.autograd.grad(expected / 7, inputs)
    got = kernel(*case)
    gradients = torch.autograd.grad(got / 7, inputs)
    assert torch.isclose(got, expected, rtol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-4, atol=1e-6)


def test_bf16_fused_loss_keeps_its_sum_in_fp32():
    """torch's own operation gives the sum in bf16, eight bits: that is why it is not used there."""
    case = head_case(rows=512, vocabulary=300)
    expected = F.cross_entropy(F.linear(*case[:3]), case[3], reduction="sum")
    got = choose_kernel("bf16", compiled=False)(*case)
    assert got.dtype == torch.float32
    assert torch.isclose(got, expected, rtol=2e-3)
    gradient = torch.autograd.grad(got, case[1])[0]
    exact = torch.autograd.grad(expected, case[1])[0]
    assert gradient.dtype == torch.float32
    assert (gradient - exact).norm() < 1e-2 * exact.norm()


def test_the_divisor_of_a_loss_is_not_rounded_to_bf16():
    """1/267 in bf16 is 0.18 % off, and so was the whole gradient below the head of a model in bf16."""
    hidden, weight, bias, targets = (None if t is None else t.detach() for t in head_case(rows=1024, vocabulary=300))
    low = hidden.to(torch.bfloat16).requires_grad_(), weight.to(torch.bfloat16).requires_grad_()
    total = precomputed_cross_entropy(*low, bias, targets, dtype=torch.bfloat16)
    whole = torch.autograd.grad(total, low, retain_graph=True)
    shared = torch.autograd.grad(total / 267, low)
    for one, part in zip(whole, shared, strict=True):
        ratio = float((one.double() * part.double()).sum() / one.double().square().sum())
        assert ratio * 267 == pytest.approx(1, abs=5e-4)


def test_all_positions_ignored_gives_zero():
    hidden, weight, bias, targets = head_case()
    for kernel in KERNELS.values():
        total = kernel(hidden, weight, bias, torch.full_like(targets, -100))
        assert total.item() == 0.0
        assert torch.autograd.grad(total, weight)[0].abs().max() == 0


@pytest.mark.parametrize("vocabulary", [32, 50257, 262144])
def test_chunks_are_bounded(vocabulary):
    rows = chunk_rows(vocabulary)
    assert rows >= 256 and (rows * vocabulary <= 2**27 or rows == 256)


@pytest.mark.parametrize(
    ("value", "wrapped"), [("full", [0, 1, 2]), ("every_2", [0, 2]), ("selective", [0, 1, 2]), ("none", [])]
)
def test_checkpointing_wraps_the_chosen_blocks(value, wrapped):
    run = prepare(language(), PLAIN.model_copy(update={"checkpointing": value}))
    found = [i for i in range(3) if "CheckpointWrapper" in type(run.model.transformer.h[i]).__name__]
    assert found == wrapped


@pytest.mark.parametrize("value", ["full", "selective"])
def test_recomputation_leaves_running_statistics_alone(value):
    config = TrainingConfig(micro_batch=4)
    plain, recomputed = (
        prepare(classifier(norm=True, fixed_micro_batch=4), config.model_copy(update={"checkpointing": choice}))
        for choice in ("none", value)
    )
    for run in (plain, recomputed):
        run.step(run.workload.make_batch(8, 0))
    buffers = dict(plain.model.named_buffers())
    assert buffers
    for name, buffer in recomputed.state_dict()["model"].items():
        if name in buffers:
            assert torch.allclose(buffer, buffers[name]), name


class CountMatmuls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.matmuls = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.matmuls += 1
        elif func is torch.ops.aten.tanh.default:
            self.others += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_everything_but_matmuls():
    counts = {}
    for value in ("none", "selective", "full"):
        run = prepare(language(), PLAIN.model_copy(update={"checkpointing": value}))
        batch = run.workload.make_batch(2, 0)
        with CountMatmuls() as count:
            run.micro_step(batch, torch.tensor(1.0), sync=True)
        counts[value] = (count.matmuls, count.others)
    assert counts["selective"][0] == counts["none"][0] < counts["full"][0]
    assert counts["none"][1] < counts["selective"][1] == counts["full"][1]


@torch.library.custom_op("autoplan_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As a GPU's fused attention does, it draws dropout inside."""
    mask = (torch.rand_like(x) >= dropout_p).to(x.dtype) if dropout_p else torch.ones_like(x)
    return x * mask, mask


noisy.register_autograd(
    lambda context, gradient, _: (gradient * context.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class DropsTwice(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.weight = rate, nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(noisy(x * self.weight, self.rate)[0] * self.weight, 0.5)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention_that_draws_dropout_is_computed_again_by_the_selective_policy(rate, monkeypatch):
    """What is kept draws nothing in the recomputation, and the dropout after it would have another mask."""
    operation = torch.ops.autoplan_tests.noisy.default
    monkeypatch.setattr(checkpointing, "kept_operations", lambda: frozenset({operation}))
    plain, block = DropsTwice(rate), DropsTwice(rate)
    for module in (plain, checkpointing.wrap(block, selective=True, compiled=False)):
        torch.manual_seed(3)
        module(torch.ones(8, 64, requires_grad=True)).sum().backward()
    assert torch.equal(plain.weight.grad, block.weight.grad)
    policy = checkpointing._policy(None, operation, torch.ones(1), rate)
    assert (policy is CheckpointPolicy.MUST_SAVE) == (rate == 0), "what draws nothing is kept"
    assert checkpointing._policy(None, operation, torch.ones(1), dropout_p=rate) is policy


@pytest.mark.parametrize("value", ["full", "selective"])
def test_checkpointing_keeps_dropout(value):
    """The recomputation draws the same dropout mask: the gradient is that of the loss that was computed."""
    runs = [
        prepare(language(max_grad_norm=None), PLAIN.model_copy(update={"checkpointing": v})) for v in ("none", value)
    ]
    batch = runs[0].workload.make_batch(2, 0)
    gradients = []
    for run in runs:
        torch.manual_seed(5)
        run.micro_step(batch, torch.tensor(1.0), sync=True)
        gradients.append([parameter.grad for parameter in run.parameters])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_blocks_share_their_code_and_keep_dropout(checkpointing, graphs_alone):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = PLAIN.model_copy(update={"compile": "block", "checkpointing": checkpointing})
    run = prepare(language(max_grad_norm=None), config)
    batch = run.workload.make_batch(2, 0)
    direction = [torch.randn_like(parameter) for parameter in run.parameters]

    def loss_at(step):
        with torch.no_grad():
            torch._foreach_add_(run.parameters, direction, alpha=step)
        torch.manual_seed(5)
        total, _ = run.micro_step(batch, torch.tensor(1.0), sync=True)
        with torch.no_grad():
            torch._foreach_sub_(run.parameters, direction, alpha=step)
        return total.item()

    loss_at(0.0)
    slope = sum((parameter.grad * way).sum().item() for parameter, way in zip(run.parameters, direction, strict=True))
    assert counters["stats"]["unique_graphs"] == 1, "three blocks of one class, one graph"
    difference = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    assert difference == pytest.approx(slope, rel=0.05)


def test_no_compiler_is_a_reason(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler()

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    compilation.reason_against_compiling.cache_clear()
    try:
        workload = language()
        structure = find_structure(workload.build_model())
        choices = compilation.CompilationStrategy().choices(workload, structure, make_hardware(), "cpu")
        assert choices.values == ("off",)
        assert "g++" in choices.left_out[0].reason
    finally:
        compilation.reason_against_compiling.cache_clear()


def test_optimizer_forms_keep_groups_and_hyper_parameters():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "betas": (0.5, 0.6)}], lr=0.25
    )
    for flags in ({"foreach": True, "fused": False}, {"foreach": False, "fused": True}):
        made = rebuild(optimizer, flags)
        assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.01]
        assert made.param_groups[1]["betas"] == (0.5, 0.6)
        assert all(group[name] == value for group in made.param_groups for name, value in flags.items())
        assert made.param_groups[0]["params"][0] is model.weight


def test_optimizer_forms_keep_hooks():
    """Those of the user; the hook that a constructor registers is that of the new object alone."""
    calls, handles = [], []

    class CountsItself(torch.optim.AdamW):
        def __init__(self, params, lr=0.1, foreach=None):
            super().__init__(params, lr=lr, foreach=foreach)
            self.steps_taken = 0
            self.register_step_post_hook(self.count)

        def count(self, *_):
            self.steps_taken += 1

    def build(parameters):
        optimizer = CountsItself(parameters)
        handles.append(optimizer.register_step_post_hook(lambda *_: calls.append("step")))
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
        return optimizer

    workload = classifier(global_batch=2)
    workload.build_optimizer = build
    run = prepare(workload, PLAIN.model_copy(update={"optimizer_step": "foreach"}))
    run.step(workload.make_batch(2, 0))
    run.optimizer.state_dict()
    assert calls == ["step", "state"] and run.optimizer.steps_taken == 1
    handles[-1].remove()
    run.step(workload.make_batch(2, 1))
    assert calls == ["step", "state"] and run.optimizer.steps_taken == 2


def test_a_step_that_was_replaced_has_no_other_form():
    def build(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        own = optimizer.step
        optimizer.step = lambda closure=None: own(closure)
        return optimizer

    workload = classifier(global_batch=2)
    workload.build_optimizer = build
    found = next(strategy for strategy in STRATEGIES if strategy.name == "optimizer_step").choices(
        workload, find_structure(workload.build_model()), make_hardware(), "cpu"
    )
    assert found.values == ("own",) and "replaced on the instance" in found.left_out[0].reason
    with pytest.raises(WorkloadError, match="was replaced on this instance"):
        prepare(workload, PLAIN.model_copy(update={"optimizer_step": "foreach"}))


def test_optimizers_without_the_flag_say_so():
    assert "fused" in (reason_against(torch.optim.Adadelta, "fused", "cpu") or "")
    assert reason_against(torch.optim.Adadelta, "foreach", "cpu") is None
    assert reason_against(torch.optim.SparseAdam, "for_loop", "cpu") is not None


def test_without_flags_torchs_optimizers_step_in_the_form_foreach_on_an_only_gpu():
    """Of shards on several GPUs they do not; where it is said not to be fused, the loop is what is left."""
    offered = {}
    adam, tensor = torch.optim.AdamW, {"lr": torch.tensor(1e-3)}
    cases = {
        "one": (adam, {}, 1), "several": (adam, {}, 2), "said": (adam, {"fused": False}, 1),
        "tensor": (adam, tensor, 1), "other": (torch.optim.Adafactor, {}, 1),
    }  # fmt: skip
    for name, (make, flags, gpus) in cases.items():
        workload = dataclasses.replace(language(), build_optimizer=partial(make, **({"lr": 1e-3} | flags)))
        gpu = make_hardware().devices[0].model_copy(update={"type": "cuda"})
        hardware = make_hardware().model_copy(
            update={"devices": tuple(gpu.model_copy(update={"index": index}) for index in range(gpus))}
        )
        structure = find_structure(workload.build_model())
        offered[name] = set(OptimizerStrategy().choices(workload, structure, hardware, "cuda").values)
    assert offered["one"] == offered["several"] - {"foreach"}
    assert all("foreach" in offered[name] for name in ("several", "said", "tensor", "other"))


@pytest.mark.parametrize(
    ("flags", "on_cpu", "on_cuda"),
    [
        ({}, "for_loop", None),
        ({"fused": True}, "fused", "fused"),
        ({"foreach": True}, "foreach", "foreach"),
        ({"foreach": False}, "for_loop", "for_loop"),
        ({"foreach": False, "fused": False}, "for_loop", "for_loop"),
    ],
)
def test_the_form_that_an_optimizer_has_already_is_not_offered_again(flags, on_cpu, on_cuda):
    """A look at it would measure the plain run once more."""
    workload = dataclasses.replace(
        language(), build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **flags)
    )
    structure = find_structure(workload.build_model())
    for device, same in (("cpu", on_cpu), ("cuda", on_cuda)):
        choices = OptimizerStrategy().choices(workload, structure, make_hardware(), device)
        assert set(choices.values) == {"own", "for_loop", "foreach", "fused"} - {same}
        assert [(one.value, "own stands for it" in one.reason) for one in choices.left_out] == [(same, True)] * bool(
            same
        )


def test_groups_with_other_forms_are_in_none():
    def mixed(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "foreach": True}, {"params": rest}], lr=0.1)

    assert step_form(mixed(nn.Linear(2, 2).parameters())) is None
    workload = dataclasses.replace(language(), build_optimizer=mixed)
    choices = OptimizerStrategy().choices(workload, find_structure(workload.build_model()), make_hardware(), "cpu")
    assert "for_loop" in choices.values


def test_threads_are_set_for_the_process():
    prepare(language(), PLAIN.model_copy(update={"threads": 2}))
    assert torch.get_num_threads() == 2


def test_the_allocator_keeps_memory_on_a_cpu_alone():
    """What that does to page faults is shown in tests/planner/trace/test_op_benchmark.py."""
    run = prepare(language(), PLAIN.model_copy(update={"allocator": "keep"}))
    assert run.config.allocator == "keep"
    elsewhere = SimpleNamespace(config=PLAIN.model_copy(update={"allocator": "keep"}), device=torch.device("meta"))
    with pytest.raises(ConfigError, match="needs a CPU and glibc"):
        AllocatorStrategy().apply(elsewhere)


def test_segments_grow_before_the_model_is_built(monkeypatch):
    """The order alone, without a GPU: the driver's part is noted, and the build ends with the model."""
    order = []

    class BuiltError(Exception):
        pass

    def build_model():
        order.append("model")
        raise BuiltError

    monkeypatch.setattr(allocator, "expand_segments", lambda: order.append("segments"))
    config = PLAIN.model_copy(update={"allocator": "expandable"})
    with pytest.raises(BuiltError):
        prepare(dataclasses.replace(language(), build_model=build_model), config, device="cuda")
    assert order == ["segments", "model"]


def test_expandable_segments_are_a_setting_of_cuda_that_torch_takes_while_it_runs(training_zygote):
    """Without a GPU: which device has them, and that torch's own parser takes the text."""
    structure = find_structure(language().build_model())
    offered = {
        device: AllocatorStrategy().choices(language(), structure, make_hardware(), device).values
        for device in ("cpu", "cuda")
    }
    assert "expandable" not in offered["cpu"] and offered["cuda"] == ("own", "expandable")
    with pytest.raises(ConfigError, match="setting of torch's CUDA allocator; this run is on cpu"):
        prepare(language(), PLAIN.model_copy(update={"allocator": "expandable"}))

    def expanded(context) -> str:
        allocator.expand_segments()
        return torch._C._accelerator_getAllocatorSettings()

    (settings,) = training_zygote.run(Task(target=expanded, total_deadline_s=60.0)).check().results
    assert "expandable_segments:True" in settings


def test_tf32_is_for_models_with_parameters_in_fp32(monkeypatch):
    monkeypatch.setattr("autoplan.strategies.techniques.precision.compute_capability", lambda hardware: (9, 0))
    workload, hardware = language(), make_hardware(gpu=True)
    for dtype, offered in ((torch.float32, True), (torch.bfloat16, False)):
        structure = find_structure(workload.build_model().to(dtype))
        assert ("tf32" in PrecisionStrategy().choices(workload, structure, hardware, "cuda").values) is offered


@pytest.mark.parametrize(("knobs", "precision", "told"), [(None, "fp32", 1), ({}, "fp32", 0), ({}, "bf16", 1)])
def test_a_step_of_its_own_keeps_its_format_of_products(knobs, precision, told, monkeypatch):
    seen = []
    monkeypatch.setattr("autoplan.strategies.techniques.precision.set_matmul_tf32", seen.append)
    build = SimpleNamespace(
        workload=SimpleNamespace(knobs=knobs),
        config=TrainingConfig(micro_batch=1, precision=precision),
        device=torch.device("cpu"),
        hooks=SimpleNamespace(),
    )
    PrecisionStrategy().apply(build)
    assert seen == [False] * told


def test_tf32_is_set_so_that_compile_can_still_ask(monkeypatch):
    from autoplan.strategies.techniques.precision import set_matmul_tf32

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        for enabled in (True, False):
            set_matmul_tf32(enabled)
            assert torch.backends.cuda.matmul.allow_tf32 is enabled
            assert torch.backends.cudnn.allow_tf32 is enabled
            assert torch.get_float32_matmul_precision() == ("high" if enabled else "highest")
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if enabled else "ieee")
    finally:
        set_matmul_tf32(False)


def test_scaled_logits_are_deferred_with_their_scale():
    """The formula of the named head has no scale or cap; the model's own forward has, and keeps it."""
    workload = language()
    model = workload.build_model()
    loss = next(strategy for strategy in STRATEGIES if strategy.name == "loss")
    kernel = choose_kernel("fp32", compiled=False)
    assert isinstance(make_fused_loss(workload, find_structure(model), kernel), FusedLoss)
    model.config.final_logit_softcapping = 30.0
    assert loss.choices(workload, find_structure(model), make_hardware(), "cpu").values == ("full", "fused")
    assert isinstance(make_fused_loss(workload, find_structure(model), kernel), DeferredLoss)


OTHER_LOSSES = {
    "a penalty on the logits": lambda logits, labels: 1e-5 * logits.float().square().sum(),
    "twice the weight on one class": lambda logits, labels: F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )[labels[:, 1:].flatten() < 3].sum(),
    "a penalty that has a gradient and no value": lambda logits, labels: of_no_value(logits.float().square().sum()),
}


def of_no_value(term):
    return term - term.detach()


@pytest.mark.parametrize("term", OTHER_LOSSES)
def test_a_loss_with_another_term_is_not_fused(term):
    """The head says where the logits come from; what else the user's loss does with them would be lost."""
    workload = language()

    def loss(model, batch):
        total, count = workload.loss(model, batch)
        logits = model(input_ids=batch["input_ids"]).logits
        return LossSum(total + OTHER_LOSSES[term](logits, batch["labels"]), count)

    model = build_on_meta(workload)
    loss_strategy = next(strategy for strategy in STRATEGIES if strategy.name == "loss")

    def left_out(workload):
        return loss_strategy.choices(workload, find_structure(model), make_hardware(), "cpu").left_out

    assert left_out(workload) == ()
    (found,) = left_out(dataclasses.replace(workload, loss=loss))
    what = "the gradient of your loss is not that" if "no value" in term else "your loss is not the cross-entropy"
    assert found.value == "fused" and what in found.reason and "differs by" in found.reason


def test_a_loss_that_counts_otherwise_is_not_fused():
    workload = language()
    counted = dataclasses.replace(
        workload, loss=lambda model, batch: LossSum(workload.loss(model, batch).total, batch["labels"].numel())
    )
    reason = prove_fused_loss(counted, build_on_meta(workload), torch.device("cpu"))
    assert reason is not None and "your loss counts 64 items of a batch, and the fused one 62" in reason


def test_the_fused_loss_of_a_model_in_bf16_is_proved_in_fp32():
    workload = language()
    halved = dataclasses.replace(workload, build_model=lambda: workload.build_model().bfloat16())
    assert prove_fused_loss(halved, build_on_meta(workload), torch.device("cpu")) is None


def test_facts_of_gpt2_without_allocating_it():
    facts = inspect_workload(make_spec(model="gpt2-xl"), make_hardware(), "cpu")
    assert (facts.parameters, facts.num_blocks) == (1_557_611_200, 48)
    assert (facts.hidden_size, facts.num_heads) == (1600, 25)
    assert facts.logits_per_sample == 1024 * 50257
    assert facts.optimizer == "AdamW" and facts.optimizer_states == 2
    assert facts.parameter_bytes == 4 * facts.parameters
    assert facts.tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert facts.knob("micro_batch").values == (1, 2, 4, 8, 16, 32)
    assert facts.knob("loss").values == ("full", "fused")
    assert type(facts).model_validate_json(facts.model_dump_json()) == facts


def test_facts_of_a_function_fill_the_spec_in():
    workload = classifier(norm=True)
    facts = read_inspection(run_inspect_rank(None, spec_from_objects(workload), make_hardware(), "cpu"))
    assert facts.spec.global_batch == 8 and facts.spec.unit == "samples" and not facts.spec.open_fields
    assert facts.knob("micro_batch").values == ()
    assert "BatchNorm2d" in facts.knob("micro_batch").left_out[0].reason
    assert len(facts.micro_batch_dependent) == 4
    assert facts.optimizer_states == 1


def test_the_users_errors_come_back_as_such():
    workload = classifier()
    workload.make_batch = lambda count, index: {"image": torch.zeros(1, 3, 8, 8), "label": torch.zeros(1).long()}
    answer = run_inspect_rank(None, spec_from_objects(workload), make_hardware(), "cpu")
    with pytest.raises(WorkloadError, match="gave 1 samples"):
        read_inspection(answer.model_dump(mode="json"))


def test_losses_that_are_no_sum_over_samples_are_found_before_the_search():
    def contrastive(model, batch):
        features = model(batch["image"])
        return LossSum(F.cross_entropy(features @ features.t(), torch.arange(len(features)), reduction="sum"), 1)

    workload = classifier()
    assert not inspect_workload(spec_from_objects(workload), make_hardware(), "cpu").micro_batch_dependent
    workload.loss = contrastive
    facts = inspect_workload(spec_from_objects(workload), make_hardware(), "cpu")
    assert facts.knob("micro_batch").values == ()
    assert "not their sum" in facts.micro_batch_dependent[0].why
    fixed = spec_from_objects(workload).model_copy(update={"options": {"fixed_micro_batch": 4}})
    assert inspect_workload(fixed, make_hardware(), "cpu").knob("micro_batch").values == (4,)


def test_a_fixed_micro_batch_is_the_only_one() -> None:
    """Also where no dependence is found: it is the user's word for what is trained."""
    from autoplan.strategies.techniques.micro_batch import MicroBatchStrategy

    workload = language(fixed_micro_batch=2)
    structure = find_structure(workload.build_model())
    choices = MicroBatchStrategy().choices(workload, structure, None, "cpu")
    assert choices.values == (2,)
    assert "fixes the micro-batch to 2" in choices.left_out[0].reason
    with pytest.raises(WorkloadError, match="fixes the micro-batch to 2, and the config has 4"):
        prepare(workload, TrainingConfig(micro_batch=4))


def masked(model, batch):
    kept = torch.rand(len(batch["label"])) < 0.5
    losses = F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
    return LossSum((losses * kept).sum(), len(kept))


def scaled(model, batch):
    """Adds up: one number is drawn for all samples."""
    return LossSum(image_loss(model, batch).total * torch.rand(()), len(batch["label"]))


@pytest.mark.parametrize(
    ("loss", "dropout", "draws"), [(masked, False, True), (scaled, False, True), (image_loss, True, False)]
)
def test_ranks_that_share_a_model_are_for_losses_that_draw_nothing(loss, dropout, draws):
    workload = classifier()
    workload.loss = loss
    if dropout:
        workload.build_model = lambda: nn.Sequential(nn.Dropout(0.5), classifier().build_model())
    facts = inspect_workload(spec_from_objects(workload), make_hardware(), "cpu")
    for degrees in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}):
        reason = reason_against_degrees(facts, ranks_per_node=4, **({"tp": 1, "pp": 1, "dp": 1} | degrees))
        assert ("draws random numbers" in reason.by) is draws
    assert reason_against_degrees(facts, tp=1, pp=1, dp=2, ranks_per_node=4) is None

"""The fused loss of any loss function: what stays deferred, and that the result is that of the full logits."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import build_on_meta
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.deferred_logits import FUSED, DeferredLoss
from autoplan.strategies.techniques.loss import LossStrategy, output_linear
from autoplan.strategies.techniques.loss_kernels import choose_kernel
from autoplan.strategies.workloads.language_model import CausalHead
from autoplan.strategies.workloads.workload import LossSum
from tests.recorded import make_hardware
from tests.strategies.tiny import BERT, GPT2, LLAMA, T5, classifier, language

VOCABULARY, SIZE = 50, 8
LABELS = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
LABELS[0, 1] = -100
BIAS = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
POSITIVE = LABELS.clamp(min=0)


def shifted(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), LABELS[:, 1:].flatten(), reduction="sum")


FUSED_LOSSES = {
    "shifted and summed": shifted,
    "a mean": lambda x: nn.CrossEntropyLoss()(x.view(-1, VOCABULARY), LABELS.view(-1)) * 7,
    "contiguous, last index": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.size(-1)), LABELS[..., 1:].reshape(-1)
    ),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, reduction="sum"),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS),
    "picked by a mask": lambda x: F.cross_entropy(x[LABELS != -100], LABELS[LABELS != -100], reduction="sum"),
    "another index ignored": lambda x: F.cross_entropy(x.reshape(-1, VOCABULARY), POSITIVE.reshape(-1), ignore_index=3),
    "weighted rows": lambda x: (
        F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none") * torch.arange(10.0)
    ).sum(),
    "log-probabilities gathered": lambda x: (
        x[:, :-1].float().log_softmax(-1).gather(-1, POSITIVE[:, 1:, None])[..., 0].square().sum()
    ),
    "nll_loss": lambda x: F.nll_loss(
        F.log_softmax(x.view(-1, VOCABULARY), dim=-1), LABELS.view(-1), ignore_index=-100, reduction="sum"
    ),
    "scaled": lambda x: shifted(x * 0.25),
    "divided": lambda x: shifted(x / 4.0),
    "capped": lambda x: shifted(torch.tanh(x / 3.0) * 3.0),
    "a bias added": lambda x: shifted(x + BIAS),
}
FULL_LOSSES = {
    "z-loss": lambda x: shifted(x) + 1e-2 * x.float().logsumexp(-1).square().sum(),
    "label smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "class weights": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.linspace(1, 2, 50)),
    "probabilities as targets": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((10, VOCABULARY), 1 / 50)),
    "another tensor added": lambda x: shifted(x + torch.ones(2, 5, VOCABULARY)),
    "part of the vocabulary": lambda x: F.cross_entropy(x[..., :49].flatten(0, 1), LABELS.flatten().clamp(max=48)),
    "subtracted": lambda x: shifted(1.0 - x),
    "an argmax": lambda x: shifted(x) + 0 * x.argmax(-1).float().mean(),
    "a factor behind the mean": lambda x: (x.log_softmax(-1) * 2.0).gather(-1, POSITIVE[..., None]).sum(),
    "a function of torch": lambda x: torch.logsumexp(x, -1).sum() + shifted(x),
}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, VOCABULARY)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def loss_and_gradients(of_logits, *, deferred: bool):
    model = Tiny()
    x = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(3))
    loss = lambda model, batch: LossSum(of_logits(model(batch)), 1)  # noqa: E731
    watched: list[str] = []
    if deferred:
        loss = DeferredLoss(loss, model.head, choose_kernel("fp32", compiled=False))
        loss.watch = watched
    total = loss(model, x).total
    return total, torch.autograd.grad(total, list(model.parameters())), watched


@pytest.mark.parametrize("name", [*FUSED_LOSSES, *FULL_LOSSES])
def test_a_deferred_loss_is_the_loss(name, monkeypatch):
    monkeypatch.setattr("autoplan.strategies.techniques.loss_kernels.chunk_rows", lambda vocabulary: 3)
    of_logits = (FUSED_LOSSES | FULL_LOSSES)[name]
    wanted, gradients, _ = loss_and_gradients(of_logits, deferred=False)
    got, others, watched = loss_and_gradients(of_logits, deferred=True)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-5)
    assert (set(watched) == {FUSED}) == (name in FUSED_LOSSES), watched


def test_outside_the_loss_function_the_head_gives_logits():
    model = Tiny()
    before = model(torch.ones(1, SIZE))
    loss = DeferredLoss(
        lambda model, batch: LossSum(model(batch).sum(), 1), model.head, choose_kernel("fp32", compiled=False)
    )
    assert torch.equal(model(torch.ones(1, SIZE)), before)
    with torch.no_grad():
        assert isinstance(model(torch.ones(1, SIZE)), torch.Tensor)
        assert float(loss(model, torch.ones(1, SIZE)).total) == pytest.approx(float(before.detach().sum()), rel=1e-6)


def model_loss(model, batch):
    """As transformers users write it: the mean that the model gives, times what it counts."""
    shifts = "Causal" in type(model).__name__ or "GPT2" in type(model).__name__
    count = ((batch["labels"][:, 1:] if shifts else batch["labels"]) != -100).sum()
    return LossSum(model(**batch).loss * count, count)


@pytest.mark.parametrize("fields", [GPT2, BERT, T5], ids=lambda fields: fields["model_type"])
def test_a_strangers_language_model_trains_the_same(fields):
    workload = dataclasses.replace(language(fields, length=16), loss=model_loss, head=None, count=None)
    structure = find_structure(build_on_meta(workload))
    assert LossStrategy().choices(workload, structure, make_hardware(), "cpu").values == ("full", "fused")
    losses = {}
    for value in ("full", "fused"):
        run = prepare(workload, TrainingConfig(micro_batch=2, loss=value, checkpointing="full"))
        losses[value] = [float(run.step(workload.make_batch(4, index)).loss) for index in range(3)]
    assert losses["fused"] == pytest.approx(losses["full"], rel=1e-6)


class Adapted(nn.Module):
    """A head of which a copy trains, as peft's modules_to_save keeps it."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original_module = original.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(original.in_features, original.out_features)})

    def forward(self, x):
        return self.modules_to_save["default"](x)


def test_the_head_is_the_copy_that_trains():
    model = language(LLAMA).build_model()
    model.lm_head = Adapted(model.lm_head)
    assert output_linear(find_structure(model)) is model.lm_head.modules_to_save["default"]


class Forwards(nn.Module):
    """As peft's PeftModel and the LoraModel inside of it: what it lacks is asked of the model inside."""

    def __init__(self, name, inside):
        super().__init__()
        self.inside = name
        setattr(self, name, inside)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.__dict__["inside"]), name)

    def forward(self, *given, **options):
        return getattr(self, self.__dict__["inside"])(*given, **options)


def test_the_base_model_of_a_wrapper_is_the_whole_model_and_its_logits_are_deferred():
    plain = language(LLAMA, length=16)

    def build():
        return Forwards("base_model", Forwards("model", plain.build_model()))

    workload = dataclasses.replace(plain, build_model=build)
    offered = LossStrategy().choices(workload, find_structure(build_on_meta(workload)), make_hardware(), "cpu")
    assert offered.values == ("full", "fused")
    losses = []
    for found, loss in ((plain, "full"), (workload, "fused")):
        run = prepare(found, TrainingConfig(micro_batch=2, loss=loss))
        losses.append([run.step(found.make_batch(4, index)).loss.item() for index in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_logits_that_a_model_multiplies_are_not_those_of_its_head():
    model = build_on_meta(language(LLAMA))
    assert CausalHead().reason_against(model) is None
    model.config.lm_head_multiplier = 0.04  # of Falcon-H1
    assert "lm_head_multiplier" in CausalHead().reason_against(model)


def test_few_classes_are_not_worth_it():
    workload = classifier()
    (found,) = LossStrategy().choices(workload, find_structure(workload.build_model()), make_hardware(), "cpu").left_out
    assert "5 classes for a hidden size of 8" in found.reason


def test_a_large_model_is_looked_at_without_running_it(monkeypatch):
    monkeypatch.setattr("autoplan.strategies.techniques.loss.LARGEST_PROVED_PARAMETERS", 1000)
    workload = dataclasses.replace(language(length=16), loss=model_loss, head=None, count=None)

    def left_out(workload):
        structure = find_structure(build_on_meta(workload))
        return [found.reason for found in LossStrategy().choices(workload, structure, make_hardware(), "cpu").left_out]

    def smoothed(model, batch):
        logits = model(batch["input_ids"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1, reduction="sum")
        return LossSum(total, batch["labels"].numel())

    assert left_out(workload) == []
    (reason,) = left_out(dataclasses.replace(workload, loss=smoothed))
    assert "more than a plain cross-entropy" in reason


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_padded_rows_change_nothing(precision, cap, monkeypatch):
    """On CUDA the head has a multiple of 64 rows inside the loss; 50 become 64 here."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((11, SIZE), (VOCABULARY, SIZE), (VOCABULARY,))
    ]
    targets = torch.randint(0, VOCABULARY, (11,), generator=generator)
    options = {} if cap is None else {"cap": cap}
    kernel = choose_kernel(precision, compiled=False)
    results = []
    for multiple in (1, 64):
        monkeypatch.setattr("autoplan.strategies.techniques.loss_kernels.ROW_MULTIPLE", {"cpu": multiple})
        total = kernel(parts[0], parts[1], parts[2], targets, **options)
        results.append((total.detach(), torch.autograd.grad(total, parts)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    for padded, plain in zip(results[1][1], results[0][1], strict=True):
        assert padded.shape == plain.shape
        torch.testing.assert_close(padded, plain, rtol=1e-3, atol=1e-5)


def test_a_compiled_model_defers_its_logits_in_one_graph(graphs_alone):
    workload = dataclasses.replace(language(LLAMA, length=16), loss=model_loss, head=None, count=None)
    losses = {}
    for value in ("full", "fused"):
        run = prepare(workload, TrainingConfig(micro_batch=2, loss=value, compile="model"))
        called = []
        loss = run._build.training_module.loss
        if isinstance(loss, DeferredLoss):
            own = loss.kernel
            loss.kernel = lambda *args, own=own, called=called, **kwargs: (called.append(1), own(*args, **kwargs))[1]
        torch._dynamo.utils.counters.clear()
        losses[value] = [float(run.step(workload.make_batch(4, index)).loss) for index in range(2)]
        assert not torch._dynamo.utils.counters["graph_break"]
        assert bool(called) == (value == "fused")
    assert losses["fused"] == pytest.approx(losses["full"], rel=1e-5)

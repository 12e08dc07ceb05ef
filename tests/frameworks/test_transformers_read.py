"""A Trainer's training is taken over: some real steps of its own loop give the parameters that a TrainingRun gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import lr_scheduler as schedules
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import autoplan
from autoplan.errors import UsageError, WorkloadError
from autoplan.strategies.analysis.additivity import measure_additivity
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.batch import batch_size, slice_batch
from autoplan.strategies.workloads.frameworks import framework_of
from autoplan.strategies.workloads.samples import SampleBatch
from autoplan.strategies.workloads.sources import load_workload, spec_from_objects
from tests.strategies.tiny_trainers import (
    MeanOfEach,
    OwnLoss,
    arguments,
    llama_trainer,
    summed_loss,
    t5_trainer,
    vit_trainer,
)

STEPS = 3
FP32 = 2e-5


def batch_of_step(workload: autoplan.Workload, step: int) -> Any:
    """The batch of a step of the Trainer; batch 1 is the one of the largest samples, where there is one."""
    largest = workload.make_batch.largest  # type: ignore[attr-defined]
    return workload.make_batch(workload.global_batch, step if not largest or step == 0 else step + 1)


def differences(trainer: Trainer, micro_batch: int) -> dict[str, float]:
    """How far our steps are from the Trainer's own, relatively: losses, gradient norms, rates, parameters."""
    spec = spec_from_objects(autoplan.from_trainer(trainer))
    workload = load_workload(spec)  # as a trial gets it
    plain = autoplan.from_trainer(trainer)
    run = prepare(workload, TrainingConfig(micro_batch=micro_batch), device="cpu")
    ours: dict[str, list[float]] = {"loss": [], "grad_norm": [], "learning_rate": []}
    for step in range(STEPS):
        ours["learning_rate"].append(run.optimizer.param_groups[0]["lr"])
        result = run.step(batch_of_step(plain, step))
        ours["loss"].append(float(result.loss))
        ours["grad_norm"].append(float(result.grad_norm))  # type: ignore[arg-type]
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == STEPS
    found = {}
    for name, values in ours.items():
        theirs = [float(entry[name]) for entry in logged]
        found[name] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, theirs, strict=True))
    pairs = zip(run.model.parameters(), trainer.model.parameters(), strict=True)
    found["parameters"] = max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-6)) for a, b in pairs
    )
    return found


STRANGERS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "t5, padded pairs, one micro-batch": (t5_trainer, 2),
    # with SGD: the gradients of its key biases are rounding alone, of which Adam makes whole steps
    "vit, unused column": (lambda folder: vit_trainer(folder, optim="sgd"), 1),
    "llama, padded": (llama_trainer, 1),
    "llama, label smoothing": (lambda folder: llama_trainer(folder, label_smoothing_factor=0.1), 8),
    "llama, compute_loss_func": (lambda folder: llama_trainer(folder, compute_loss_func=summed_loss), 2),
    "llama, compute_loss of a subclass": (lambda folder: llama_trainer(folder, OwnLoss), 4),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_steps_are_those_of_the_trainers_own_loop(name: str, tmp_path: Path) -> None:
    make, micro_batch = STRANGERS[name]
    trainer = make(tmp_path)
    found = differences(trainer, micro_batch)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert max(logged) > trainer.args.max_grad_norm or name.startswith("llama, compute_loss of"), "clipping is active"
    assert max(found.values()) < FP32, found


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=1), schedules.ExponentialLR(optimizer, 0.5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[1])


def nested(optimizer: torch.optim.Optimizer) -> Any:
    return schedules.ChainedScheduler([sequential(optimizer), schedules.StepLR(optimizer, 2, gamma=0.5)], optimizer)


def by_function(optimizer: torch.optim.Optimizer) -> Any:
    return schedules.LambdaLR(optimizer, lambda step: (step + 1) / 4)


@pytest.mark.parametrize("make", [by_function, sequential, nested])
def test_the_users_own_optimizer_and_schedule(make: Callable[[Any], Any], tmp_path: Path) -> None:
    def trainer(**parts: Any) -> Any:
        return llama_trainer(tmp_path, **parts)

    model = trainer().model
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.5}, {"params": others, "momentum": 0.9}], lr=0.1)
    made = Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=trainer().train_dataset,
        data_collator=trainer().data_collator,
        optimizers=(optimizer, make(optimizer)),
    )
    found = differences(made, 4)
    assert max(found["parameters"], found["loss"], found["learning_rate"]) < FP32, found


class OwnRoot(nn.Module):
    """Around a backbone in evaluation mode, as from_pretrained gives it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval()
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.head(self.backbone(x))[:, 0] - y).square().mean()}


def test_parts_in_evaluation_mode_train_as_in_each_step_of_the_trainer(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    trainer = Trainer(
        model=OwnRoot(),
        args=arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, optim="sgd"),
        train_dataset=[{"x": torch.randn(4, generator=generator), "y": float(k % 3)} for k in range(32)],
    )
    workload = autoplan.from_trainer(trainer)
    with pytest.raises(WorkloadError, match=r"backbone.1 \(BatchNorm1d\) normalises"):
        prepare(workload, TrainingConfig(micro_batch=2))
    run = prepare(dataclasses.replace(workload, fixed_micro_batch=8), TrainingConfig(micro_batch=8))
    for step in range(STEPS):
        run.step(batch_of_step(workload, step))
    assert not trainer.model.backbone.training, "it is left as it was"
    trainer.train()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_an_optimizer_that_is_set_and_not_returned(tmp_path: Path) -> None:
    class Sets(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    trainer = llama_trainer(tmp_path, Sets)
    workload = autoplan.from_trainer(trainer)
    optimizer = workload.build_optimizer(workload.build_model().parameters())
    assert isinstance(optimizer, torch.optim.SGD) and trainer.optimizer is None


def test_what_it_takes_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    attributes = {name: id(value) for name, value in vars(trainer).items()}
    workload = autoplan.from_trainer(trainer)
    run = prepare(workload, TrainingConfig(micro_batch=2), device="cpu")
    run.step(batch_of_step(workload, 0))
    assert attributes == {name: id(value) for name, value in vars(trainer).items()}
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert trainer.optimizer is None and trainer.lr_scheduler is None and trainer.accelerator._dataloaders == []


def test_reading_draws_no_random_numbers(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    before = torch.get_rng_state()
    autoplan.from_trainer(trainer)
    assert torch.equal(before, torch.get_rng_state())


def test_no_callback_runs_and_that_is_said(tmp_path: Path) -> None:
    class Telltale(TrainerCallback):
        calls = 0

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            type(self).calls += 1

    workload = autoplan.from_trainer(llama_trainer(tmp_path, callbacks=[Telltale()]))
    run = prepare(workload, TrainingConfig(micro_batch=2), device="cpu")
    run.step(batch_of_step(workload, 0))
    assert Telltale.calls == 0
    assert any("callbacks do not run in trials (Telltale" in note for note in workload.notes)


def test_micro_batches_are_padded_by_themselves(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    workload = autoplan.from_trainer(trainer)
    whole = batch_of_step(workload, 0)
    assert isinstance(whole, SampleBatch) and batch_size(whole) == 8
    for start in range(0, 8, 2):
        part = slice_batch(whole, start, start + 2)
        longest = max(len(sample["input_ids"]) for sample in whole.samples[start : start + 2])
        assert part["input_ids"].shape == (2, longest)
    longest = max(len(sample["input_ids"]) for sample in trainer.train_dataset)
    assert workload.make_batch(2, 1)["input_ids"].shape[1] == longest, "batch 1 is the worst that training meets"


def test_the_same_trainer_is_the_same_search(tmp_path: Path) -> None:
    def identity(folder: str, **changes: Any) -> str:
        return spec_from_objects(autoplan.from_trainer(llama_trainer(tmp_path / folder, **changes))).identity

    first = identity("a")
    assert identity("b", logging_steps=7, report_to=[]) == first, "where results go is not what is trained"
    others = [identity("a", learning_rate=0.02), identity("a", samples=72), identity("a", max_grad_norm=1.0)]
    others += [identity("a", kind=OwnLoss), identity("a", label_smoothing_factor=0.1)]
    assert len({first, *others}) == 6


def test_what_a_trainer_is_made_of_is_hashed(tmp_path: Path) -> None:
    for make in (t5_trainer, vit_trainer, llama_trainer):
        unhashed = set(spec_from_objects(autoplan.from_trainer(make(tmp_path))).unhashed)
        assert unhashed <= {"builtins.builtin_function_or_method"}, "which activations of a model may be"


def test_copies_without_numbers(tmp_path: Path) -> None:
    workload = autoplan.from_trainer(t5_trainer(tmp_path))  # whose embeddings are tied
    plain = workload.build_model()
    with torch.device("meta"):
        meta = workload.build_model()
    with FakeTensorMode():
        fake = workload.build_model()
    for copied in (meta, fake):
        names = [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in copied.named_parameters()] == names, "tied parameters stay tied"
        assert [p.shape for p in copied.parameters()] == [p.shape for p in plain.parameters()]
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert all(isinstance(parameter, FakeTensor) for parameter in fake.parameters())


def test_samples_grouped_by_length_stay_together(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path, train_sampling_strategy="group_by_length")
    lengths = [len(sample["input_ids"]) for sample in trainer.train_dataset]
    batches = autoplan.from_trainer(trainer).make_batch
    order = batches.order  # type: ignore[attr-defined]
    assert sorted(order) == list(range(64))
    spread = [abs(lengths[a] - lengths[b]) for a, b in zip(order[::2], order[1::2], strict=True)]
    assert sum(spread) / len(spread) < 2, "neighbours are of one length; at random they would differ by 5"


def test_steps_are_cut_from_the_samplers_order(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    workload = autoplan.from_trainer(trainer)
    seen: list[torch.Tensor] = []

    class Watching(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
            seen.append(inputs["input_ids"])
            return super().training_step(model, inputs, *args, **options)

    watching = llama_trainer(tmp_path, Watching)
    watching.train()
    ours = [slice_batch(batch_of_step(workload, step), k, k + 4) for step in range(STEPS) for k in (0, 4)]
    assert len(seen) == len(ours)
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(seen, ours, strict=True))


# Bad input.


def test_means_that_nothing_divides_are_refused(tmp_path: Path) -> None:
    for trainer in (
        t5_trainer(tmp_path, micro_batch=4, accumulation=2),
        llama_trainer(tmp_path, MeanOfEach),
    ):
        workload = autoplan.from_trainer(trainer)
        model = workload.build_model().train()
        with pytest.raises(WorkloadError, match="gradients are up to 2 times") as raised:
            workload.loss.check(model, workload.make_batch(2, 0))  # type: ignore[attr-defined]
        assert "loss_is_scaled_for_ga = False" in str(raised.value.hint)


def test_a_mean_of_means_depends_on_the_micro_batch(tmp_path: Path) -> None:
    trainer = t5_trainer(tmp_path, micro_batch=4, accumulation=2)
    trainer.loss_is_scaled_for_ga = False
    workload = autoplan.from_trainer(trainer)
    found = measure_additivity(workload, workload.build_model().train(), torch.device("cpu"))
    assert not found.additive
    assert "compute_loss of Seq2SeqTrainer depends on" in workload.loss.describe_dependence(found.describe())  # type: ignore[attr-defined]


class Stream(IterableDataset[Any]):
    """Samples without a number of them."""

    def __iter__(self) -> Any:
        while True:
            yield {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


def _with(trainer: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: llama_trainer(folder, samples=7), "has 7 samples, and a global batch 8"),
        (lambda folder: _with(llama_trainer(folder), train_dataset=None), "no train_dataset"),
        (lambda folder: _with(llama_trainer(folder), train_dataset=Stream()), "a stream without a length"),
    ],
)
def test_datasets_that_do_not_do(make: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=text):
        autoplan.from_trainer(make(tmp_path))


def test_a_loader_of_another_batch_size_than_the_arguments_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=self.sampler)

    for sampler in ([[0, 1], [2, 3]], torch.utils.data.BatchSampler(range(64), 2, drop_last=True)):
        with pytest.raises(WorkloadError, match="Own gives batches of 2 samples where the arguments ask for 4"):
            autoplan.from_trainer(_with(llama_trainer(tmp_path, Own), sampler=sampler))


def test_a_trainer_that_trained_is_refused(tmp_path: Path) -> None:
    trainer = llama_trainer(tmp_path)
    trainer.train()
    with pytest.raises(WorkloadError, match="has begun: it is at step 3"):
        autoplan.from_trainer(trainer)


def test_a_training_step_of_its_own_is_refused(tmp_path: Path) -> None:
    class Twice(Trainer):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            return 2 * super().training_step(*args, **options)

    with pytest.raises(WorkloadError, match=r"Twice has a training_step\(\) of its own"):
        autoplan.from_trainer(llama_trainer(tmp_path, Twice))


def test_a_loss_that_reads_the_optimizer_says_so(tmp_path: Path) -> None:
    class Curious(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
            return model(**inputs).loss * len(self.callback_handler.callbacks)

    workload = autoplan.from_trainer(llama_trainer(tmp_path, Curious))
    with pytest.raises(AttributeError, match="reads self.callback_handler, which trials do not have"):
        workload.loss(workload.build_model(), workload.make_batch(2, 0))


def test_a_quantised_model_that_cannot_be_copied(tmp_path: Path) -> None:
    class Packed(nn.Parameter):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("packed weights live on one device")

    trainer = llama_trainer(tmp_path)
    trainer.model.quantization_method = "4-bit"
    assert any("quantised (4-bit); trials copy them" in note for note in autoplan.from_trainer(trainer).notes)
    trainer.model.lm_head.weight = Packed(trainer.model.lm_head.weight.detach())
    with pytest.raises(WorkloadError, match=r"quantised \(4-bit\), and cannot be copied: RuntimeError: packed"):
        autoplan.from_trainer(trainer)


def test_several_gpus_of_one_process_are_said(tmp_path: Path) -> None:
    """The Trainer's batches are those of all GPUs that it sees; the arguments of two are put together here."""

    class OfTwo(TrainingArguments):
        n_gpu = property(lambda self: 2)  # type: ignore[assignment]

    trainer = _with(llama_trainer(tmp_path), _train_batch_size=8)
    trainer.args.__class__ = OfTwo
    workload = autoplan.from_trainer(trainer)
    assert workload.global_batch == 16
    assert any("sees 2 GPUs" in note and "global batch of 16" in note for note in workload.notes), workload.notes


def test_what_the_plan_decides_is_said(tmp_path: Path) -> None:
    notes = autoplan.from_trainer(llama_trainer(tmp_path, bf16=True, gradient_checkpointing=True)).notes
    assert any("the plan decides bf16=True, gradient_checkpointing=True; your setting" in note for note in notes), notes
    assert any(note.endswith("; your setting has them") for note in notes), notes
    notes = autoplan.from_trainer(llama_trainer(tmp_path, auto_find_batch_size=True)).notes
    assert any("auto_find_batch_size=True; no knobs say your setting: baseline= does" in note for note in notes), notes


def test_other_objects_are_no_trainers() -> None:
    assert framework_of(object()) is None and framework_of(nn.Linear(1, 1)) is None
    with pytest.raises(UsageError, match="no Trainer"):
        autoplan.from_trainer(nn.Linear(1, 1))


def test_a_trainer_with_parts_of_a_workload(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_grad_norm too"):
        autoplan.search(llama_trainer(tmp_path), max_grad_norm=1.0)

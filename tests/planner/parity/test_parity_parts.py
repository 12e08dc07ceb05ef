"""Parts of the parity check by themselves: masked labels, the replay, tolerances, near-zero gradients, time limits."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.planner.parity import compare as parity_run
from autoplan.planner.parity import reference as reference_module
from autoplan.planner.parity.batches import can_mask_labels, mask_labels
from autoplan.planner.parity.candidate import run_candidate
from autoplan.planner.parity.compare import Samples, compare
from autoplan.planner.parity.records import AGAIN, CHECK_STEPS, step_part
from autoplan.planner.parity.reference import TimeLimit, run_reference
from autoplan.planner.parity.tolerances import tolerance_of
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload
from tests.contracts.parity_contract import candidate, check_parity, check_parity_of, make_check, reference
from tests.planner.parity import planted
from tests.strategies.tiny import BERT, LLAMA, T5, Pair, classifier, language

PLAIN = TrainingConfig(micro_batch=2)


# Labels.


def labelled(loss):
    """The image classifier with its labels under `labels`."""
    workload = classifier()
    images = workload.make_batch
    workload.make_batch = lambda size, index: {
        "image": images(size, index)["image"],
        "labels": images(size, index)["label"],
    }
    workload.loss = loss
    return workload


def ignoring_loss(model, batch):
    labels = batch["labels"]
    total = F.cross_entropy(model(batch["image"]), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return LossSum(total, (labels != IGNORE_INDEX).sum())


def indexing_loss(model, batch):
    """A loss that cannot take IGNORE_INDEX: one-hot of -100 raises."""
    wanted = F.one_hot(batch["labels"], 5).float()
    return LossSum(((model(batch["image"]) - wanted) ** 2).sum(), len(wanted))


@pytest.mark.parametrize(("loss", "masked"), [(ignoring_loss, True), (indexing_loss, False)])
def test_labels_are_masked_where_the_loss_leaves_them_out(loss, masked):
    plain = reference(labelled(loss), PLAIN)
    assert plain.measurement.has_labels and plain.measurement.labels_masked is masked
    parity = compare(plain, [candidate(labelled(loss), PLAIN, plain)], PLAIN)
    assert parity.passed, parity.failures
    assert ("counting the same" in parity.note) is not masked


def test_labels_of_a_language_model_are_masked_whether_it_counts_ahead_or_not():
    workload = language(T5)
    model = workload.build_model()
    assert can_mask_labels(workload, model, torch.device("cpu"), 2)
    workload.count = None
    assert can_mask_labels(workload, model, torch.device("cpu"), 2)


def test_masks_of_every_shape():
    sequences = mask_labels({"labels": torch.ones(6, 10, dtype=torch.long)}, 2)["labels"]
    assert [int((row == IGNORE_INDEX).sum()) for row in sequences] == [0, 1, 2, 4, 5, 7]
    images = mask_labels({"labels": torch.ones(6, 4, 4, dtype=torch.long)}, 2)["labels"]
    assert int((images[5] == IGNORE_INDEX).sum()) == 11
    classes = mask_labels({"labels": torch.ones(6, dtype=torch.long)}, 2)["labels"]
    assert classes.tolist() == [1, IGNORE_INDEX, 1, 1, 1, 1]
    padded = torch.full((2, 10), IGNORE_INDEX)
    padded[1, 0] = 1
    assert torch.equal(mask_labels({"labels": padded}, 2)["labels"], padded), "the only label of a sample stays"
    short = mask_labels({"labels": torch.ones(2, 40, dtype=torch.long)}, 2)["labels"][:, :20]
    assert bool((short[:, 1:] != IGNORE_INDEX).any(1).all()), "a part of a sample keeps labels too"
    regression = {"labels": torch.ones(6, 3)}
    assert mask_labels(regression, 2) is regression


# What a forward changes.


class Teacher(nn.Module):
    """A student, and a frozen teacher that each forward moves towards it, as MoCo v3 does."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, inputs):
        with torch.no_grad():
            for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(parameter, 0.2)
        return self.student(inputs) - self.teacher(-inputs)


def taught(**fields):
    return Workload(
        name="taught",
        build_model=Teacher,
        make_batch=lambda count, index: torch.randn(count, 6, generator=torch.Generator().manual_seed(index)),
        loss=lambda model, batch: LossSum(model(batch).pow(2).sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        global_batch=8,
        **fields,
    )


def test_frozen_parameters_that_the_forward_moves_are_compared():
    """The plain loop moves them once in a step, the candidate in each of its micro-batches."""
    assert "frozen parameters that the forward moves" in planted.failed(check_parity(taught(), PLAIN))


def test_frozen_parameters_that_each_forward_moves_alike_are_no_alarm():
    """They are put back before the plain steps are made again: else the training would look too sensitive."""
    config = TrainingConfig(micro_batch=2, precision="bf16")
    parity = check_parity(taught(fixed_micro_batch=2), config)
    assert parity.passed, parity.failures
    assert "too sensitive" not in parity.note


class Makes(nn.Module):
    """Makes a buffer in its first forward."""

    def forward(self, images):
        if not hasattr(self, "factors"):
            self.register_buffer("factors", torch.ones(images.shape[1:]))
        return images * self.factors


class Replaces(nn.Module):
    """Has an empty buffer, in whose place the first forward puts a larger one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.empty(0))

    def forward(self, images):
        if not len(self.factors):
            self.factors = torch.ones(images.shape[1:])
        return images * self.factors


class Expands(nn.Module):
    """Has a buffer whose elements are one number in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.ones(1).expand(8))

    def forward(self, images):
        return images * self.factors


@pytest.mark.parametrize("kind", [Makes, Replaces, Expands])
def test_buffers_that_cannot_be_copied_in_place_are_no_alarm(kind):
    workload = labelled(ignoring_loss)
    build = workload.build_model
    workload.build_model = lambda: nn.Sequential(kind(), build())
    parity = check_parity(workload, PLAIN)
    assert parity.passed, parity.failures


# The optimizer.


@pytest.fixture
def small_samples(monkeypatch):
    """Tensors of more than 32 elements are sampled."""
    from autoplan.planner.parity import recorder, replay

    monkeypatch.setattr(recorder, "SAMPLED_ELEMENTS", 32)
    monkeypatch.setattr(replay, "SAMPLED_ELEMENTS", 32)


def method_of(workload, config=PLAIN):
    plain = reference(workload, config)
    ours = candidate(workload, config, plain)
    parity = compare(plain, [ours], config)
    assert parity.passed, parity.failures
    return ours.measurement.replay.method, parity


def test_small_tensors_are_replayed_whole():
    assert method_of(classifier())[0] == "whole"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_elementwise_optimizer_is_replayed_on_a_sample(small_samples, kind):
    workload = classifier()
    workload.build_optimizer = lambda parameters: kind(parameters, lr=1e-3, weight_decay=0.1)
    assert method_of(workload)[0] == "sampled"


def test_another_optimizer_is_compared_by_the_norms_of_its_changes(small_samples):
    workload = classifier()
    workload.build_optimizer = torch.optim.Adafactor
    method, parity = method_of(workload)
    assert method == "norms"
    assert any("treats the elements of a tensor together" in text for text in parity.not_checked)
    assert parity.not_checked[0] in parity.note


def test_optimizers_inside_an_optimizer_are_compared_by_the_norms_of_their_changes(small_samples):
    """They step the tensors that they were made over, and no samples in the place of these."""
    workload = classifier()
    workload.build_optimizer = Pair
    assert method_of(workload)[0] == "norms"


def halving_the_gradients(groups):
    """Makes an optimizer whose hook halves gradients: those of its groups, or of the tensors that it was made over."""

    def build(parameters):
        held = list(parameters)
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)

        def halve(optimizer, *_):
            of_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter in of_groups if groups else held:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return optimizer

    return build


@pytest.mark.parametrize(("groups", "method"), [(True, "sampled"), (False, "norms")])
def test_a_hook_before_the_optimizers_step_is_replayed_once(small_samples, groups, method):
    workload = classifier()
    workload.build_optimizer = halving_the_gradients(groups)
    assert method_of(workload)[0] == method


def test_a_hook_that_is_lost_is_found(monkeypatch):
    workload = classifier()
    workload.build_optimizer = halving_the_gradients(True)
    planted.plant(monkeypatch, lambda run: run.optimizer._optimizer_step_pre_hooks.clear())
    assert planted.OPTIMIZER in planted.failed(check_parity(workload, PLAIN))


def test_groups_by_shape_are_those_of_the_whole_tensors(small_samples, monkeypatch):
    """Groups are made by shapes, which samples do not have; and weight decay lost in a sampled group is seen."""

    def by_shape(parameters):
        parameters = list(parameters)
        large = [parameter for parameter in parameters if parameter.numel() > 100]
        rest = [parameter for parameter in parameters if parameter.numel() <= 100]
        return torch.optim.AdamW([{"params": large, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}])

    workload = classifier()
    workload.build_optimizer = by_shape
    assert method_of(workload)[0] == "sampled"
    planted.plant(monkeypatch, planted.weight_decay_lost_inside_the_step)
    parity = check_parity(workload, PLAIN)
    assert not parity.passed and parity.worst_update_difference > 1e-4


def test_a_parameter_that_no_optimizer_holds_is_no_alarm():
    """Nobody clears its gradient, in the plain loop neither."""
    workload = classifier()
    workload.build_optimizer = lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1)
    parity = check_parity(workload, PLAIN)
    assert parity.passed, parity.failures


# Precision.


def test_tolerances_follow_the_parameters_dtype_too():
    bf16 = TrainingConfig(micro_batch=2, precision="bf16")
    assert tolerance_of(PLAIN, {"float32"}).vector < tolerance_of(PLAIN, {"bfloat16"}).vector
    assert tolerance_of(bf16, {"float32"}).optimizer < tolerance_of(bf16, {"bfloat16"}).optimizer
    assert tolerance_of(PLAIN, {"float32", "bfloat16"}) == tolerance_of(PLAIN, {"bfloat16"})


def in_bf16():
    workload = language(LLAMA, max_grad_norm=1.0, learning_rate=1e-3)
    build = workload.build_model
    workload.build_model = lambda: build().to(torch.bfloat16)
    return workload


def test_a_bf16_model_passes_and_a_wrong_scale_in_it_does_not(monkeypatch):
    parity = check_parity_of(in_bf16, PLAIN)
    assert parity.passed and parity.worst_gradient_error > 1e-3, "the tolerance of fp32 would be wrong"
    planted.plant(monkeypatch, planted.gradients_too_large)
    assert not check_parity_of(in_bf16, PLAIN).passed


def normed():
    return classifier(norm=True, fixed_micro_batch=4)


def test_gradients_that_cancel_raise_no_alarm_in_fp16():
    """In fp32 and bf16 the parity contract runs both (tests/contracts)."""
    parity = check_parity(language(BERT), TrainingConfig(micro_batch=2, precision="fp16"))
    assert parity.passed, parity.failures
    parity = check_parity_of(normed, TrainingConfig(micro_batch=4, precision="fp16"))
    assert parity.passed, parity.failures


def test_steps_that_loss_scaling_skips_leave_running_statistics_alone(monkeypatch):
    """The forward of a skipped step has moved them; the step is made again on the same batch."""
    skipped = []

    def scale_high(run):
        if run.scaler is None:  # the same knobs in fp32
            return
        run.scaler._init_scale = 2.0**30
        honest = run.optimizer_step

        def optimizer_step(*given):
            result = honest(*given)
            skipped.append(result.skipped)
            return result

        run.optimizer_step = optimizer_step

    planted.plant(monkeypatch, scale_high)
    parity = check_parity_of(normed, TrainingConfig(micro_batch=4, precision="fp16"))
    assert skipped[0] and not all(skipped)
    assert "buffers" in {check.name for check in parity.checks}
    assert parity.passed, parity.failures


# Time, and what is kept.


def test_what_there_was_no_time_for_is_named():
    workload = language({**LLAMA, "attention_dropout": 0.1, "max_position_embeddings": 256}, length=192)
    plain = reference(workload, PLAIN)
    assert plain.measurement.own_length is not None and plain.measurement.dropout

    def verdict(time_s):
        check = dataclasses.replace(make_check(workload, PLAIN), limit=TimeLimit(time_s))
        measurement = run_candidate(check, plain.measurement)
        return compare(plain, [Samples(measurement, check.recorder.samples())], PLAIN)

    assert verdict(600.0).not_checked == ()
    parity = verdict(0.0)
    assert parity.passed, parity.failures
    assert parity.not_checked == (
        "steps 3 to 12: there was no time",
        "a forward and backward at its own 192 tokens: there was no time",
        "dropout: there was no time",
    )
    assert all(text in parity.note for text in parity.not_checked)


def test_what_a_sample_of_the_own_length_takes_is_not_in_proportion_to_a_short_one():
    """A short sample waits for the weights: 64 times its time was never there for the pass of a GPT-2."""
    check = make_check(language(LLAMA), PLAIN)
    assert check.own_length_s(0.8, 64.0) == 64 * 0.8
    known = dataclasses.replace(check, sample_s=17.0)
    assert known.own_length_s(0.8, 64.0) == 17.0
    assert known.own_length_s(0.1, 64.0) == pytest.approx(6.4)
    assert known.own_length_s(20.0, 64.0) == 20.0, "no shorter than a short one"


def test_a_torn_reference_is_made_again(tmp_path):
    """The planner may be killed, or the disk full, while a reference is written: then it counts as not there."""
    check = make_check(language(LLAMA), PLAIN)
    measurement = run_reference(check)
    check.recorder.save_samples(tmp_path / "elements.0.npz")
    (tmp_path / "measurements.json").write_text(json.dumps([measurement.model_dump(mode="json")]))
    assert len(parity_run._load(tmp_path, 1)) == 1
    for name in ("elements.0.npz", "measurements.json"):
        path = tmp_path / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        torn = [whole[:cut] for cut in (0, 1, 30, middle, len(whole) - 30, len(whole) - 1)]
        torn += [whole[:middle] + b"\0" * 4096 + whole[middle + 4096 :], b"\0" * len(whole), b"[null]", b"{}", b"7"]
        for content in torn:
            path.write_bytes(content)
            assert parity_run._load(tmp_path, 1) == [], (name, len(content))
        path.write_bytes(whole)


def test_a_plain_run_with_nan_gradients_is_named_before_anything_else():
    """sqrt(0) has no gradient: the candidate differs by as much as can be, and it is not to blame."""

    def rooted(model, batch):
        total = (model(batch["image"]) * 0.0).pow(2).sum().sqrt()
        return LossSum(total, len(batch["image"]))

    workload = classifier()
    workload.loss = rooted
    parity = check_parity(workload, PLAIN)
    assert not parity.passed
    assert parity.failures[0].startswith("the plain run itself has gradients that are no numbers (their norm is nan")


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_shapes_of_training_may_be_micro_batches_of_any_size(micro_batch):
    """The plain run takes few samples at once; an odd number of them in a step is no reason to stop."""
    config = TrainingConfig(micro_batch=micro_batch)
    assert check_parity(classifier(global_batch=3), config, own_shapes=True).passed


def test_the_second_plain_run_takes_as_many_steps_as_the_first(monkeypatch):
    """Also where the machine has become slower: else the later steps would not be compared."""
    honest = reference_module._Reference.steps_again

    def on_a_slower_machine(*given):
        monkeypatch.setattr(reference_module, "MOST_STEPS_S", 0.0)
        honest(*given)

    monkeypatch.setattr(reference_module._Reference, "steps_again", on_a_slower_machine)
    plain = reference(classifier(), PLAIN)
    assert plain.measurement.trained == CHECK_STEPS
    assert plain.part(AGAIN + step_part(CHECK_STEPS - 1))

"""Bugs planted into the training run: each must fail the parity check, in the precision with the widest tolerance too.

They are planted here by patching; the product has no switches for them.
"""

import pytest
import torch
from torch import nn

from autoplan.planner.parity.compare import compare
from autoplan.strategies import run as run_module
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.workloads.workload import LossSum
from tests.cases import some
from tests.contracts.parity_contract import candidate, check_parity, check_parity_of, plain_beside, reference
from tests.planner.parity import planted
from tests.planner.parity.planted import OPTIMIZER, clipped, decaying, failed, seen
from tests.strategies.tiny import LLAMA, classifier, language


@pytest.fixture(params=some(["fp32", "bf16"], ["bf16"]))  # what the wider tolerance sees, the narrower sees too
def config(request):
    config = TrainingConfig(micro_batch=2, precision=request.param)
    for build in (language, clipped):
        plain_beside(build, config)  # before anything is planted
    return config


def test_nothing_planted_passes(config):
    parity = check_parity_of(clipped, config)
    assert parity.passed, parity.failures
    assert not parity.failures and not failed(parity)


def test_the_shapes_of_training_are_checked_as_well(config, monkeypatch):
    """Micro-batches of 4 and all 160 tokens, where a check would else take 2 and 128: a compiled trial's own shapes."""
    wide = config.model_copy(update={"micro_batch": 4})
    workload = decaying(fields=LLAMA, length=160, global_batch=8, max_grad_norm=0.3)
    plain = reference(workload, wide, own_shapes=True)
    ours = candidate(workload, wide, plain, own_shapes=True)
    assert (plain.measurement.global_batch, plain.measurement.length) == (20, 160)
    assert ours.measurement.micro_batch == 4 and ours.measurement.own_length is None
    assert compare(plain, [ours], wide).passed, compare(plain, [ours], wide).failures
    for change in (planted.clipping_never_applied, planted.gradients_too_large, planted.momentum_lost):
        with monkeypatch.context() as patched:
            planted.plant(patched, change)
            assert not compare(plain, [candidate(workload, wide, plain, own_shapes=True)], wide).passed, change.__name__


@pytest.mark.parametrize(
    ("change", "seen_in"),
    [
        *planted.IN_ANY_RUN,
        (planted.other_betas, "parameter groups"),
        (planted.weight_decay_lost_inside_the_step, OPTIMIZER),
        (planted.evaluation_mode, "noise of dropout in the gradient"),
        (planted.dropout_halved, "dropout rates"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_in_the_run(monkeypatch, config, change, seen_in):
    planted.plant(monkeypatch, change)
    parity = check_parity_of(clipped, config)
    assert not parity.passed and parity.failures[0] in parity.note
    assert seen_in is None or seen_in in seen(parity), parity.failures


def loosely_clipped():
    return language(max_grad_norm=1e3)


def test_clipping_that_does_not_bind_is_checked_on_scaled_gradients(monkeypatch):
    config = TrainingConfig(micro_batch=2)
    parity = check_parity_of(loosely_clipped, config)
    assert parity.passed and "clipping did not bind by itself" in parity.note
    planted.plant(monkeypatch, planted.clipping_never_applied)
    parity = check_parity_of(loosely_clipped, config)
    assert "gradients after clipping" in failed(parity)


def test_gradients_left_behind_are_seen_where_clipping_makes_them_small(monkeypatch):
    planted.plant(monkeypatch, planted.gradients_never_cleared)
    parity = check_parity(language(max_grad_norm=1e-4), TrainingConfig(micro_batch=2, precision="bf16"))
    assert "gradients are left in the parameters after step 1" in parity.failures


def test_a_schedule_that_does_not_move_in_the_first_steps(monkeypatch):
    """Its rates are those of one that is never stepped: the count of its steps shows it."""
    workload = language()
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    planted.plant(monkeypatch, planted.schedule_never_stepped)
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.failures == ("the schedule was stepped 0 times, not 12",)


def llama():
    return language(LLAMA)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_the_first_chunk_of_the_fused_loss(monkeypatch, precision):
    config = TrainingConfig(micro_batch=2, loss="fused", precision=precision)
    parity = check_parity_of(llama, config)
    assert parity.passed and "in chunks of 21 rows" in parity.note
    planted.first_chunk_alone(monkeypatch)
    assert not check_parity_of(llama, config).passed


def test_only_the_first_chunk_at_the_own_length(monkeypatch):
    """Where a pass at the workload's own length is made, it is the one with several chunks."""

    def long():
        return language({**LLAMA, "max_position_embeddings": 256}, length=192)

    config = TrainingConfig(micro_batch=2, loss="fused", precision="bf16")
    parity = check_parity_of(long, config)
    assert parity.passed and "in chunks of 64 rows" in parity.note
    assert "10 samples of 128 tokens" in parity.note and "one forward and backward at 192 tokens" in parity.note
    assert {"whole gradient, own length", "gradient scale, own length"} <= {check.name for check in parity.checks}
    assert parity.not_checked == ()
    planted.first_chunk_alone(monkeypatch)
    assert "gradient scale, own length" in failed(check_parity_of(long, config))


def test_clipping_does_not_reach_what_was_recorded():
    """Recorded before clipping: the whole gradient's norm is far above the norm that it is clipped to."""
    config = TrainingConfig(micro_batch=2)
    plain = reference(language(max_grad_norm=0.01), config)
    for samples in (plain, candidate(language(max_grad_norm=0.01), config, plain)):
        sampled = sum(float((values**2).sum()) for values in samples.part("step0").values()) ** 0.5
        assert sampled == pytest.approx(samples.measurement.steps[0].gradient_norm, rel=1e-5) and sampled > 0.1


def test_slightly_wrong_scale(monkeypatch, config):
    """A mean of the micro-batches' means, where the micro-batches count differently."""
    monkeypatch.setattr(TrainingRun, "micro_step", mean_of_means)
    parity = check_parity_of(language, config)
    assert not parity.passed


def mean_of_means(self, micro, divisor, *, sync):
    total, count = self._build.module(micro)
    (total / count / self.accumulation).backward()
    return total.detach(), count.detach().float()


def uncounted():
    workload = language()
    workload.count = None
    return workload


def test_mean_of_means_of_a_workload_that_does_not_count_ahead(monkeypatch):
    config = TrainingConfig(micro_batch=2)
    assert check_parity_of(uncounted, config).passed

    def micro_step(self, micro, divisor, *, sync):
        total, count = self._build.module(micro)
        (total / count / self.accumulation * self._uniform / divisor).backward()
        return total.detach(), count.detach().float()

    monkeypatch.setattr(TrainingRun, "_uniform", 6 * 31, raising=False)
    monkeypatch.setattr(TrainingRun, "micro_step", micro_step)
    assert not check_parity_of(uncounted, config).passed


def test_later_micro_batches_dropped(monkeypatch, config):
    whole = run_module.device_micro_batches
    monkeypatch.setattr(run_module, "device_micro_batches", lambda *given: list(whole(*given))[:2])
    parity = check_parity_of(language, config)
    assert {"whole gradient, step 1", "gradient scale, step 1"} <= failed(parity)


def test_untied_weight(config):
    build = language().build_model

    def untied():
        model = build()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    plain = plain_beside(language, config)
    wrong = language()
    wrong.build_model = untied
    parity = compare(plain, [candidate(wrong, config, plain)], config)
    assert not parity.passed
    assert "lm_head" in parity.note


def test_another_start(config):
    """Weights from another seed: the gradients may be alike, the start is not."""
    plain = plain_beside(language, config)
    parity = compare(plain, [candidate(language(seed=1), config, plain)], config)
    assert "start" in failed(parity)


def test_frozen_parameter_that_trains(monkeypatch):
    from autoplan.strategies import prepare as prepare_module

    workload = language()
    build = workload.build_model

    def frozen():
        model = build()
        model.transformer.wpe.weight.requires_grad_(False)
        return model

    workload.build_model = frozen
    config = TrainingConfig(micro_batch=2)
    assert check_parity(workload, config).passed

    find = prepare_module.find_structure

    def thaw(model):
        model.transformer.wpe.weight.requires_grad_(True)
        return find(model)

    monkeypatch.setattr(prepare_module, "find_structure", thaw)
    parity = check_parity(workload, config)
    assert not parity.passed
    assert "wpe" in parity.note


def test_missing_loss_scale_of_fp16(monkeypatch):
    """Gradients that still hold the loss scale when they are clipped and stepped."""
    unscale = torch.amp.GradScaler.unscale_

    def forgetful(self, optimizer):
        unscale(self, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.get_scale())

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", forgetful)
    assert not check_parity_of(language, TrainingConfig(micro_batch=2, precision="fp16")).passed


def test_wrong_learning_rate_of_a_rebuilt_optimizer(monkeypatch):
    from autoplan.strategies.techniques import optimizer as optimizer_module

    rebuild = optimizer_module.rebuild

    def slower(optimizer, flags):
        made = rebuild(optimizer, flags)
        made.param_groups[0]["lr"] *= 0.9
        return made

    monkeypatch.setattr(optimizer_module, "rebuild", slower)
    parity = check_parity_of(language, TrainingConfig(micro_batch=2, optimizer_step="foreach"))
    assert not parity.passed
    assert parity.worst_gradient_difference < parity.tolerance
    assert {"parameter groups", OPTIMIZER} <= failed(parity)


def test_recomputation_that_draws_other_masks(monkeypatch):
    """Checkpointing that does not keep the random state: the backward belongs to another forward."""
    from autoplan.strategies.techniques import checkpointing as module

    honest = module.checkpoint_wrapper
    config = TrainingConfig(micro_batch=2, checkpointing="full")
    assert check_parity_of(language, config).passed
    monkeypatch.setattr(
        module, "checkpoint_wrapper", lambda *args, **rest: honest(*args, **{**rest, "preserve_rng_state": False})
    )
    assert failed(check_parity_of(language, config)) == {"gradients, dropout on"}


def test_a_schedule_that_starts_at_zero_is_stepped_until_something_changes():
    workload = language()
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed, parity.failures
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert "no parameter changed" in parity.note


def test_nonfinite_loss_fails():
    workload = classifier()
    fine = workload.loss

    def loss(model, batch):
        total, count = fine(model, batch)
        return LossSum(total * float("nan") if batch["image"].shape[0] == 2 else total, count)

    workload.loss = loss
    assert not check_parity(workload, TrainingConfig(micro_batch=2)).passed


def test_contrastive_loss_is_not_additive():
    def loss(model, batch):
        features = model(batch["image"])
        similarity = features @ features.t()
        labels = torch.arange(len(features))
        return LossSum(nn.functional.cross_entropy(similarity, labels, reduction="sum"), len(features))

    workload = classifier()
    workload.loss = loss
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert not parity.passed
    assert "not the sum" in parity.note
    workload.fixed_micro_batch = 4
    assert check_parity(workload, TrainingConfig(micro_batch=4)).passed

"""Bugs planted into the training run: each must fail the parity check, in the precision with the widest tolerance too.

They are planted here by patching; autoplan itself has no switches for them.
"""

import pytest
import torch
from torch import nn

from autoplan.strategies import run as run_module
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.workloads.workload import LossSum
from tests.contracts.parity_contract import check_parity
from tests.strategies.tiny import GPT2, classifier, language


@pytest.fixture(params=["fp32", "bf16"])
def config(request):
    return TrainingConfig(micro_batch=2, precision=request.param)


def test_nothing_planted_passes(config):
    assert check_parity(language(), config).passed


def test_clipping_does_not_reach_what_was_recorded():
    """Recorded before clipping: the whole gradient's norm is far above the norm that it is clipped to."""
    from tests.contracts.parity_contract import candidate, reference

    config = TrainingConfig(micro_batch=2)
    for take in (reference, candidate):
        samples = take(language(max_grad_norm=0.01), config)
        sampled = sum(float((values**2).sum()) for values in samples.gradients.values()) ** 0.5
        whole = sum(module.gradient_norm**2 for module in samples.measurement.modules.values()) ** 0.5
        assert sampled == pytest.approx(whole, rel=1e-5) and whole > 0.1


def test_wrong_scale(monkeypatch, config):
    """The 1/A of gradient accumulation is missing. Adam and clipping hide it from the update; the gradient shows it."""
    monkeypatch.setattr(TrainingRun, "_loss_scale", lambda self, divisor: self.accumulation / divisor)
    parity = check_parity(language(), config)
    assert not parity.passed
    assert parity.worst_gradient_difference > 0.5


def test_slightly_wrong_scale(monkeypatch, config):
    """A mean of the micro-batches' means, where the micro-batches count differently."""

    def micro_step(self, micro, divisor, *, sync):
        total, count = self._build.module(micro)
        (total / count / self.accumulation).backward()
        return total.detach(), count.detach().float()

    monkeypatch.setattr(TrainingRun, "micro_step", micro_step)
    parity = check_parity(language(), config)
    assert not parity.passed


def test_dropped_micro_batch(monkeypatch, config):
    whole = run_module.split_batch
    monkeypatch.setattr(run_module, "split_batch", lambda batch, size: list(whole(batch, size))[:-1])
    parity = check_parity(language(), config)
    assert not parity.passed
    assert parity.worst_gradient_difference > parity.tolerance


def test_missing_step(monkeypatch, config):
    monkeypatch.setattr(TrainingRun, "_step_optimizer", lambda self: False)
    parity = check_parity(language(), config)
    assert not parity.passed
    assert parity.worst_update_difference == pytest.approx(1.0)


def test_untied_weight(monkeypatch, config):
    workload = language()
    build = workload.build_model

    def untied():
        model = build()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    from tests.contracts import parity_contract

    unchanged = parity_contract.reference
    monkeypatch.setattr(parity_contract, "reference", lambda _, config: unchanged(workload, config))
    planted = language()
    planted.build_model = untied
    parity = parity_contract.check_parity(planted, config)
    assert not parity.passed
    assert "lm_head" in parity.note


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
    assert "wpe" in parity.note or "wpe" in parity.worst_group


def test_missing_loss_scale_of_fp16(monkeypatch):
    """Gradients that still hold the loss scale when they are clipped and stepped."""
    unscale = torch.amp.GradScaler.unscale_

    def forgetful(self, optimizer):
        unscale(self, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.get_scale())

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", forgetful)
    assert not check_parity(language(), TrainingConfig(micro_batch=2, precision="fp16")).passed


def test_wrong_learning_rate(monkeypatch):
    """A change of the optimizer's hyper-parameters shows in the update only."""

    from autoplan.strategies.techniques import optimizer as optimizer_module

    rebuild = optimizer_module.rebuild

    def slower(optimizer, flags):
        made = rebuild(optimizer, flags)
        made.param_groups[0]["lr"] *= 0.9
        return made

    monkeypatch.setattr(optimizer_module, "rebuild", slower)
    parity = check_parity(language(), TrainingConfig(micro_batch=2, optimizer_step="foreach"))
    assert not parity.passed
    assert parity.worst_gradient_difference < parity.tolerance < parity.worst_update_difference


def test_a_schedule_that_starts_at_zero_is_stepped_until_something_changes():
    workload = language()
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed
    assert "2 step(s)" in parity.note


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


def test_counts_differ_between_micro_batches():
    parity = check_parity(language(GPT2), TrainingConfig(micro_batch=2))
    assert "count the same" not in parity.note

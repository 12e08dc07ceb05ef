"""Right trainings with parts that are unlike torch's own: none of them is refused."""

import functools
import random

import numpy as np
import pytest
import torch

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.step import OwnGradients
from tests.contracts.parity_contract import check_parity, check_parity_of
from tests.strategies.tiny import Pair, classifier, language


class SignSGD(torch.optim.Optimizer):
    """An optimizer without state, whose step takes no closure."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class OnlyStep:
    """A schedule with nothing but `step`."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


@functools.cache
def language_with(make):
    """What makes a language model with this optimizer; the same function each time."""

    def build():
        workload = language()
        workload.build_optimizer = lambda parameters: make(parameters, lr=1e-3)
        return workload

    return build


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [SignSGD, torch.optim.Rprop, torch.optim.Adadelta], ids=lambda make: make.__name__)
def test_an_optimizer_that_hides_nan_in_the_plain_loop_too(make, precision):
    parity = check_parity_of(language_with(make), TrainingConfig(micro_batch=2, precision=precision))
    assert parity.passed, parity.failures


def test_a_schedule_without_a_state():
    workload = language()
    workload.build_schedule = OnlyStep
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed, parity.failures
    assert "saving and loading" in " ".join(parity.not_checked)


class Secretive(torch.optim.SGD):
    """An optimizer whose state nobody can save."""

    def state_dict(self):
        raise RuntimeError("ask the server")


def test_a_state_that_cannot_be_saved_is_said():
    workload = language()
    workload.build_optimizer = lambda parameters: Secretive(parameters, lr=1e-2, momentum=0.9)
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed, parity.failures
    assert "the state cannot be saved: RuntimeError: ask the server" in " ".join(parity.not_checked)


def test_optimizers_inside_an_optimizer_pass_and_are_said_not_to_be_saved():
    workload = language()
    workload.build_optimizer = Pair
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed, parity.failures
    assert "the optimizer holds others, whose state is no part of its own" in " ".join(parity.not_checked)


def sensitive():
    workload = classifier()
    workload.build_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.95)
    return workload


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_too_sensitive_for_twelve_steps_is_told_so(precision):
    """What fp32 rounds away is far above what passes in bf16: later steps say nothing of that candidate."""
    parity = check_parity_of(sensitive, TrainingConfig(micro_batch=2, precision=precision))
    assert parity.passed, parity.failures
    told = "beside the plain run: the training is too sensitive" in " ".join(parity.not_checked)
    assert told == (precision == "bf16"), parity.not_checked


def test_moments_are_loaded_beside_gradients_that_stay():
    """Gradients of CUDA graphs are cleared in place. With them there, torch loaded no moments, and said nothing."""
    config = TrainingConfig(micro_batch=2)
    workload = language()
    run, fresh = (prepare(workload, config, device="cpu") for _ in range(2))
    run.step(workload.make_batch(workload.global_batch, 0))
    OwnGradients(list(fresh.parameters), fresh.optimizer).attach()
    fresh.load_state_dict(run.state_dict())
    kept, loaded = (
        [state["exp_avg"] for state in one.optimizer.state.values() if "exp_avg" in state] for one in (run, fresh)
    )
    assert kept and len(kept) == len(loaded)
    assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))


class Drawn(torch.nn.Linear):
    """Weights from NumPy's generator and Python's."""

    def __init__(self):
        super().__init__(8, 5)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.randn(5, 8)))
            self.bias.fill_(random.random())

    def forward(self, images):
        return super().forward(images.mean((1, 2)))


def test_weights_from_other_generators_than_torchs():
    random.seed(7)
    np.random.seed(7)
    workload = classifier()
    workload.build_model = Drawn
    parity = check_parity(workload, TrainingConfig(micro_batch=2))
    assert parity.passed, parity.failures

"""Gradients for CUDA graphs: of their own memory, the same training as gradients that begin as None.

The graphs themselves need a GPU; what autograd does with gradients that are there already is the same on a CPU.
"""

import torch
from torch import nn

from autoplan.planner.export.pytorch import PytorchTarget
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.step import OwnGradients
from autoplan.strategies.workloads.workload import LossSum, Workload
from tests.recorded import make_plan


class Net(nn.Module):
    """A used layer, one that only some steps use, one that nothing uses, and one that the optimizer doesn't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.unused, self.beside = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.beside(self.used(x))
        return y + self.sometimes(x) if float(x[0, 0]) > 0 else y


def workload() -> Workload:
    def make_batch(count: int, index: int) -> torch.Tensor:
        batch = torch.randn(count, 4, generator=torch.Generator().manual_seed(index))
        batch[:, 0] = 1.0 if index == 0 else -1.0
        return batch

    return Workload(
        name="net",
        build_model=Net,
        make_batch=make_batch,
        loss=lambda model, batch: LossSum(model(batch).square().sum(), len(batch)),
        build_optimizer=lambda parameters: torch.optim.AdamW(list(parameters)[:6], lr=0.1, weight_decay=0.5),
        global_batch=6,
        max_grad_norm=1.0,
    )


def train(*, own: bool) -> tuple[dict[str, torch.Tensor], list[set[int]]]:
    run = prepare(workload(), TrainingConfig(micro_batch=2))
    if own:  # what the run has under compile_mode=reduce-overhead
        run._own_gradients = OwnGradients(run.parameters, run.optimizer)
    addresses = []
    for index in range(3):
        run.step(run.workload.make_batch(6, index))
        addresses.append({p.grad.data_ptr() for p in run.model.used.parameters() if p.grad is not None})
    return run.model.state_dict(), addresses


def test_the_training_is_that_of_gradients_that_begin_as_none() -> None:
    plain, _ = train(own=False)
    found, addresses = train(own=True)
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
    assert addresses[0] and addresses[0] == addresses[1] == addresses[2], "cleared in place, never allocated anew"


def test_runs_without_graphs_have_none_of_it() -> None:
    assert prepare(workload(), TrainingConfig(micro_batch=2))._own_gradients is None


def test_the_script_of_a_plan_with_graphs_has_it() -> None:
    graphs = TrainingConfig(micro_batch=2, compile="model", compile_mode="reduce-overhead")
    (text,) = PytorchTarget().render(make_plan(graphs, device="cuda", accumulation=4), "plan").files.values()
    assert "own_gradients = OwnGradients(trainable(model), optimizer)" in text
    one = make_plan(graphs, device="cuda", accumulation=1)
    (text,) = PytorchTarget().render(one, "plan").files.values()
    assert "class OwnGradients" not in text

"""A function of one training step as a workload: a program of its own, of which no part is known.

In: make_step, which sets everything up and returns step(index) -> loss. Out: a Workload whose model is a stand-in with
one number: its loss runs the user's step. Only knobs that go through the step's environment or a context around it are
offered (`Workload.knobs`): threads, the allocator, and precision where the user allows it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.spec import STEP_FUNCTION
from autoplan.strategies.workloads.user_errors import user_error, users_call
from autoplan.strategies.workloads.workload import LossSum, Workload

Step = Callable[[int], Any]

STEP_RULE = (
    "make_step() builds model, data and optimizer, and returns step(index), which trains on batch number index, "
    "counted from 0, and returns its loss as a number or a scalar tensor."
)

PRECISIONS = ("tf32", "bf16")
"""Those that a step may be allowed. fp16 is none: its loss scale belongs between the step's backward and optimizer."""


class StepModel(nn.Module):
    """Stands for the model of a step: one parameter, which no optimizer changes, and the user's step.

    Args:
        step: None on the meta device, where nothing is set up.
    """

    def __init__(self, step: Step | None) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.ones(()))
        self._step = (step,)  # in a tuple: a step that is a module is none of this one's

    def run(self, index: int) -> torch.Tensor:
        """Runs the user's step; its loss as a scalar on this model's device, without a gradient.

        Raises:
            WorkloadError: it is no number.
        """
        (step,) = self._step
        assert step is not None, "a step runs where it was set up"
        loss = step(index)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss.detach().reshape(()).to(self.anchor.device, torch.float32)
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return torch.full((), float(loss), device=self.anchor.device)
        raise WorkloadError(f"step({index}) returned {type(loss).__name__}; it returns its loss", hint=STEP_RULE)


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """`build_model` of a step's workload: sets the training up with seeded generators.

    Attributes:
        make_step: The user's.
        seed: Of the generators.
    """

    make_step: Callable[[], Step]
    seed: int

    def __call__(self) -> StepModel:
        return build_step_model(self.make_step, self.seed)

    def compared(self) -> dict[str, Any]:
        """Where a plan is applied no seed is set, so the user's function alone is compared with the search's."""
        return {"make_step": self.make_step, "the type of make_step": type(self.make_step)}


def read_step(
    make_step: Callable[[], Step],
    *,
    global_batch: int = 1,
    precisions: Sequence[str] = (),
    name: str | None = None,
    seed: int = 0,
) -> Workload:
    """The workload of a step.

    Args:
        make_step: Sets up the training and returns step(index). It is called once in each process that runs steps.
        global_batch: Samples of a step, for samples/s; no plan changes it.
        precisions: Number formats that may be tried besides fp32: tf32, and bf16 by autocast around the step.
        name: For screens and plans; None: make_step's own.
        seed: torch's, Python's and NumPy's generators are seeded with it before make_step is called.

    Raises:
        WorkloadError: make_step is no function, or a precision is none of PRECISIONS.
    """
    if not callable(make_step) or isinstance(make_step, nn.Module | torch.optim.Optimizer):
        raise WorkloadError(f"step is {type(make_step).__name__}; it is a function", hint=STEP_RULE)
    unknown = sorted(set(precisions) - {"fp32", *PRECISIONS})
    if unknown:
        raise WorkloadError(
            f"a step cannot run in {', '.join(unknown)}",
            hint=f"Around a step can be {' and '.join(PRECISIONS)}; fp16 needs its loss scale inside of the step.",
        )
    allowed = ", ".join(precisions) if precisions else "not"
    return Workload(
        name=name or str(getattr(make_step, "__name__", "step")),
        build_model=StepBuilder(make_step, seed),
        make_batch=step_batch,
        loss=step_loss,
        build_optimizer=functools.partial(torch.optim.SGD, lr=0.0),  # the step has its own
        global_batch=global_batch,
        count=batch_size,
        fixed_micro_batch=global_batch,
        knobs={"threads": None, "allocator": None, "precision": ("fp32", *precisions)},
        seed=seed,
        taken_from=STEP_FUNCTION,
        notes=(
            "the step is a program of its own: micro-batch, accumulation, checkpointing, compilation, attention, the "
            f"optimizer's form and parallelism are its own; threads and the allocator are tried, precision {allowed} "
            + ("" if precisions else "(bound={'precision': ['fp32', 'bf16']} allows autocast around it)"),
            "parity compares the losses of some steps and nothing else: gradients and optimizer are inside of the step",
            *(("throughput counts steps, unless global_batch= says their samples",) if global_batch == 1 else ()),
        ),
    )


def build_step_model(make_step: Callable[[], Step], seed: int | None = None) -> StepModel:
    """Sets the training up; on the meta device nothing.

    Args:
        make_step: The user's.
        seed: Of the random generators; None: they are as they are.

    Raises:
        WorkloadError: make_step fails, or returns no function.
    """
    if torch.get_default_device().type == "meta":
        return StepModel(None)
    if seed is not None:
        seed_generators(seed)
    try:
        with torch.device("cpu"):  # as in the user's own program: tensors go where it puts them
            step = make_step()
    except Exception as error:
        raise user_error(error, "make_step()", STEP_RULE) from error
    if not callable(step):
        raise WorkloadError(f"make_step() returned {type(step).__name__}; it returns step(index)", hint=STEP_RULE)
    return StepModel(step)


def step_batch(num_samples: int, index: int) -> Batch:
    """A batch that says only which one it is: the step has its own data."""
    return {"rows": torch.zeros(num_samples, 1), "index": index}


def step_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Runs the step, and gives its loss as that of all samples of the batch."""
    assert isinstance(model, StepModel), "the workload of a step builds one"
    samples = batch_size(batch)
    return LossSum(model.anchor * model.run(batch["index"]) * samples, samples)


def time_step(workload: Workload) -> float:
    """Seconds of the second step of a training that is set up for it.

    Raises:
        WorkloadError: the setup or the step fails.
    """
    model = workload.build_model()
    assert isinstance(model, StepModel)
    began = 0.0
    for index in range(2):
        began = time.perf_counter()
        with users_call(f"step({index})", STEP_RULE):
            loss = float(model.run(index))  # waits for a GPU
    return max(time.perf_counter() - began, 1e-6) + 0.0 * loss

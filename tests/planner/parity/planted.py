"""Bugs to plant into a candidate. Each changes one TrainingRun after prepare() made it; the product has no such switch.

A plant never reaches the reference: it is given to `planted_prepare`, which only the candidate calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from autoplan.planner.parity import candidate as candidate_module
from autoplan.planner.parity.judge import excess
from autoplan.planner.parity.records import CHECK_STEPS
from autoplan.planner.records.trials import Parity
from autoplan.strategies.analysis.structure import disable_dropout
from autoplan.strategies.techniques import loss_kernels
from autoplan.strategies.workloads.workload import Workload
from tests.cases import some
from tests.strategies.tiny import GPT2, language

Plant = Callable[[Any], None]
OPTIMIZER = "parameters after the optimizer's steps"


def decaying(fields: dict[str, Any] = GPT2, **options: Any) -> Workload:
    """A language model whose learning rate falls at every step."""
    workload = language(fields, **options)
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step)
    )
    return workload


def clipped() -> Workload:
    """One whose gradients are clipped, and whose weights decay."""
    return decaying(max_grad_norm=0.3, weight_decay=0.01)


def failed(parity: Parity) -> set[str]:
    """The names of the comparisons that failed."""
    return {check.name for check in parity.checks if excess(check) > 1}


def plant(monkeypatch: Any, change: Plant) -> None:
    """Has every run of the candidate changed by `change` right after prepare()."""
    honest = candidate_module.prepare

    def planted_prepare(*args: Any, **kwargs: Any) -> Any:
        run = honest(*args, **kwargs)
        change(run)
        return run

    monkeypatch.setattr(candidate_module, "prepare", planted_prepare)


def seen(parity: Parity) -> set[str]:
    """The names of the comparisons that failed, and all failures in words."""
    return failed(parity) | set(parity.failures)


def change_calls(owner: Any, name: str, change: Callable[[int, Any], Any]) -> None:
    """Has each call of a method go through `change`, which gets its number from 1, and the call as a partial."""
    honest, calls = getattr(owner, name), []

    @functools.wraps(honest)
    def changed(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return change(len(calls), functools.partial(honest, *given, **named))

    setattr(owner, name, changed)


def around_step(run: Any, before: Callable[[], Any], after: Callable[[Any], None] = lambda kept: None) -> None:
    """Has something done before and after each step of the optimizer."""
    honest = run.optimizer.step

    @functools.wraps(honest)
    def step(*args: Any, **kwargs: Any) -> Any:
        kept = before()
        result = honest(*args, **kwargs)
        after(kept)
        return result

    run.optimizer.step = step


def each_group(run: Any, **options: Any) -> None:
    for group in run.optimizer.param_groups:
        group.update(options)


# Clipping, clearing, schedule.


def clipping_never_applied(run: Any) -> None:
    run._build.gradients.clip = lambda parameters, limit: torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )


def clipping_to_another_norm(run: Any) -> None:
    honest = run._build.gradients.clip
    run._build.gradients.clip = lambda parameters, limit: honest(parameters, 1.1 * limit)


def gradients_never_cleared(run: Any) -> None:
    run.optimizer.zero_grad = lambda set_to_none=True: None


def schedule_never_stepped(run: Any) -> None:
    run.schedule.step = lambda: None


# The optimizer.


def other_betas(run: Any) -> None:
    each_group(run, betas=(0.8, 0.95))


def momentum_lost(run: Any) -> None:
    around_step(run, run.optimizer.state.clear)


def biases_never_stepped(run: Any) -> None:
    for group in run.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() > 1]


def weight_decay_lost(run: Any) -> None:
    each_group(run, weight_decay=0.0)


def weight_decay_lost_inside_the_step(run: Any) -> None:
    """The groups show the right weight decay; the step does not use it."""

    def before() -> list[tuple[Any, torch.Tensor, float]]:
        return [
            (parameter, parameter.detach().clone(), group["lr"] * group["weight_decay"])
            for group in run.optimizer.param_groups
            for parameter in group["params"]
        ]

    def give_back(kept: list[tuple[Any, torch.Tensor, float]]) -> None:
        with torch.no_grad():
            for parameter, old, decay in kept:
                parameter.add_(old, alpha=decay)

    around_step(run, before, give_back)


def learning_rate_a_tenth_lower(run: Any) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.9


def in_the_last_step(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """For `around_step`: something done after the last step of the check alone."""
    taken: list[None] = []

    def after(kept: Any) -> None:
        taken.append(None)
        if len(taken) == CHECK_STEPS:
            with torch.no_grad():
                change(kept)

    return after


def nan_after_the_last_step(run: Any) -> None:
    """No later forward sees it: only the parameters show it."""

    def spoil(_: Any) -> None:
        first_parameter(run).view(-1)[0] = float("nan")

    around_step(run, lambda: None, in_the_last_step(spoil))


def first_parameter(run: Any) -> torch.Tensor:
    parameter: torch.Tensor = run.optimizer.param_groups[0]["params"][0]
    return parameter


# The gradient.


def gradients_too_large(run: Any, factor: float = 1.045) -> None:
    honest = run._loss_scale
    run._loss_scale = lambda divisor: factor * honest(divisor)


def accumulation_factor_missing(run: Any) -> None:
    """1/A. Adam and clipping hide it from the update; the gradient shows it."""
    change_calls(run, "loss_divisor", lambda _, call: call() / run.accumulation)


def last_micro_batch_dropped(run: Any) -> None:
    change_calls(run, "micro_batches", lambda _, call: list(call())[:-1])


def steps_never_taken(run: Any) -> None:
    run._step_optimizer = lambda: False


def dropout_switched_off(run: Any) -> None:
    disable_dropout(run.model)


def evaluation_mode(run: Any) -> None:
    run.model.eval()


def dropout_halved(run: Any) -> None:
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p *= 0.5


def first_chunk_alone(monkeypatch: Any) -> None:
    """The rows of the fused loss after the first chunk count for nothing."""
    for name in ("precomputed_cross_entropy", "recomputed_cross_entropy", "_torch_kernel"):
        honest = getattr(loss_kernels, name)

        def first_chunk(hidden: Any, weight: Any, bias: Any, targets: Any, *, honest: Any = honest, **rest: Any) -> Any:
            rows = loss_kernels.chunk_rows(weight.shape[0])
            return honest(hidden[:rows], weight, bias, targets[:rows], **rest)

        monkeypatch.setattr(loss_kernels, name, first_chunk)


IN_ANY_RUN: tuple[tuple[Plant, str | None], ...] = (
    (clipping_never_applied, "gradients after clipping"),
    (clipping_to_another_norm, "gradients after clipping"),
    (gradients_never_cleared, "gradient scale, later steps"),
    (schedule_never_stepped, "parameter groups"),
    (other_betas, OPTIMIZER),
    (momentum_lost, OPTIMIZER),
    (biases_never_stepped, OPTIMIZER),
    (weight_decay_lost, "parameter groups"),
    (learning_rate_a_tenth_lower, OPTIMIZER),
    (gradients_too_large, "gradient scale, step 1"),
    (accumulation_factor_missing, "gradient scale, step 1"),
    (dropout_switched_off, "noise of dropout in the gradient"),
    (last_micro_batch_dropped, None),
    (steps_never_taken, "the optimizer was stepped 0 times in step 1"),
)
"""Bugs of any run, and what `seen` has of each; None: something."""

NO_ROUNDING_HIDES = (
    clipping_never_applied,  # while clipping to another norm is seen
    schedule_never_stepped,
    weight_decay_lost,
    dropout_switched_off,
    steps_never_taken,
)


def beside_rounding(*left_out: Plant) -> list[Any]:
    """The bugs of any run but for some, for runs that round more than bf16: `make test` has those this could hide."""
    rows = [row for row in IN_ANY_RUN if row[0] not in left_out]
    return some(rows, [row for row in rows if row[0] not in NO_ROUNDING_HIDES])

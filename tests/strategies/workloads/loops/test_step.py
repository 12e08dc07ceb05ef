"""A step function as a workload: it runs as it is, and only what is around it can change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoplan
from autoplan.errors import WorkloadError
from autoplan.planner.parity.check import compare_losses
from autoplan.probes.run import read_host_profile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.inspect import inspect_workload
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.loops.step import read_step
from autoplan.strategies.workloads.objects import spec_from_objects, unpack
from autoplan.trainings import allowed_precisions, read_parts
from tests.strategies.loops import Points, Regressor


def make_step(dtypes: list[torch.dtype] | None = None) -> Callable[[int], float]:
    """A stranger's training: its own batches, accumulation, clipping and optimizer."""
    model, points = Regressor(), Points()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(index: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for half in range(2):
            x, y = points[(index * 16 + half * 8) % 96 : (index * 16 + half * 8) % 96 + 8]
            output = model(x)
            if dtypes is not None:
                dtypes.append(output.dtype)
            loss = F.cross_entropy(output, y) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return total

    return step


def plain_losses(steps: int, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    step = make_step()
    return [step(index) for index in range(steps)]


def test_a_step_runs_as_its_own_program() -> None:
    workload = unpack(spec_from_objects(read_step(make_step, global_batch=16)))
    threads = torch.get_num_threads()
    try:
        run = prepare(workload, TrainingConfig(micro_batch=16, threads=1, allocator="keep"))
        got = [float(run.step(workload.make_batch(16, index)).loss) for index in range(5)]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert got == pytest.approx(plain_losses(5), rel=1e-6)


def test_autocast_is_around_the_whole_step() -> None:
    dtypes: list[torch.dtype] = []
    workload = read_step(functools.partial(make_step, dtypes), precisions=("bf16",))
    run = prepare(workload, TrainingConfig(micro_batch=1, precision="bf16"))
    run.step(workload.make_batch(1, 0))
    assert set(dtypes) == {torch.bfloat16}


def test_only_what_is_around_a_step_is_offered() -> None:
    for precisions, wanted in (((), ("fp32",)), (("bf16",), ("fp32", "bf16"))):
        workload = read_parts(None, step=make_step, precisions=precisions, global_batch=16, name="mine", seed=0)
        assert workload is not None and workload.taken_from == "step function"
        facts = inspect_workload(spec_from_objects(workload), read_host_profile(), "cpu")
        free = {choice.knob: choice.values for choice in facts.choices if len(choice.values) > 1}
        assert facts.knob("precision").values == wanted
        assert {"allocator"} <= free.keys() <= {"threads", "allocator", "precision"}
        assert facts.knob("micro_batch").values == (16,)
        assert facts.step_s is not None and facts.step_s > 0 and facts.training is None
        assert {left.knob for left in facts.knob("optimizer_step").left_out} == {"optimizer_step"}


@pytest.mark.parametrize("bound", ["fp32, bf16", ["fp32", "bf16"], autoplan.Bound(values=("fp32", "bf16"))])
def test_the_precisions_that_a_bound_names_are_allowed(bound: Any) -> None:
    assert allowed_precisions(None, {"precision": bound}) == ("bf16",)


def test_parity_of_a_step_compares_losses_and_says_that_it_sees_no_more() -> None:
    losses = plain_losses(5)
    fp32, bf16 = TrainingConfig(micro_batch=1, threads=1), TrainingConfig(micro_batch=1, precision="bf16")
    passed = compare_losses(fp32, losses, losses, [loss * (1 + 1e-6) for loss in losses])
    assert passed.passed and "gradients" in passed.not_checked[0]
    planted = compare_losses(fp32, losses, losses, plain_losses(5, seed=1))
    assert not planted.passed and "losses differ" in planted.failures[0]
    skipped = compare_losses(fp32, losses, losses, losses[:1] * 5)
    assert not skipped.passed
    assert not compare_losses(fp32, losses, losses, [*losses[:4], float("nan")]).passed
    unseeded = compare_losses(fp32, losses, plain_losses(5, seed=2), losses)
    assert not unseeded.passed and "Seed everything" in unseeded.failures[0]
    assert not compare_losses(bf16, [1.0] * 5, [1.0] * 5, [1.0] * 5).passed


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda: None, r"make_step\(\) returned NoneType"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: lambda index: "done", r"step\(0\) returned str"),
        (lambda: lambda index: [][index], r"IndexError.*\n.*step\(0\)"),
    ],
)
def test_a_step_that_is_none_is_refused(step: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=f"(?s){words}"):
        inspect_workload(spec_from_objects(read_step(step)), read_host_profile(), "cpu")
    with pytest.raises(WorkloadError, match="fp16"):
        read_step(step, precisions=("fp16",))
    with pytest.raises(WorkloadError, match="optimizer was given too, and a step has them itself"):
        read_parts(None, step=step, optimizer=torch.optim.SGD, seed=0)

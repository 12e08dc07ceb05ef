"""Every fault of a trial is an outcome with a reason. The faults are in the workload; the product has no switches."""

import math
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trials.measure import ToBeat
from autoplan.planner.trials.runner import PHASE_DEADLINES_S, TrialOrder, TrialRunner, classify_exception
from autoplan.processes import Zygote, cause
from autoplan.strategies.config import TrainingConfig
from tests.planner.trials.runs import make_runner

HANG_DEADLINE_S = 1.0


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a trial that something outside ended is run again."""
    monkeypatch.setattr(cause, "PAUSE_S", 0.05)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(preload=("torch", "autoplan.planner.trials.worker", "autoplan.strategies.prepare")) as zygote:
        assert zygote.preload_errors == {}
        yield zygote


@pytest.fixture
def runner(zygote: Zygote, tmp_path: Path) -> TrialRunner:
    return make_runner(zygote, tmp_path)


def measure(runner: TrialRunner, number: int, **options: object) -> Trial:
    values: dict[str, object] = {
        "number": number,
        "purpose": "search",
        "config": TrainingConfig(micro_batch=128),
        "prediction": None,
        "deadline_s": 300.0,
    }
    return runner.run(TrialOrder(**(values | options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("micro_batch", "outcome", "detail", "words"),
    [
        (12, Outcome.CRASHED, None, "planted"),
        (192, Outcome.INTERRUPTED, "SIGKILL", "signal 9"),
        (384, Outcome.CRASHED, "SIGSEGV", "signal 11"),
        (8, Outcome.TIMEOUT, "warmup", f"deadline of {HANG_DEADLINE_S:.0f} s"),
        (16, Outcome.CRASHED, "exit status 3", "exit status 3"),
        (96, Outcome.CRASHED, "exit status 3", "exit status 3"),
        (32, Outcome.NONFINITE, None, "loss is nan"),
        (64, Outcome.CRASHED, "no result", "without a result"),
        (3, Outcome.OUT_OF_MEMORY, "host", "GiB"),
        (24, Outcome.CRASHED, "workload", "the loss is broken"),
    ],
)
def test_each_fault_has_its_own_outcome_and_the_next_trial_runs(
    runner: TrialRunner, micro_batch: int, outcome: Outcome, detail: str | None, words: str
):
    if outcome is Outcome.TIMEOUT:  # the hang alone is to end by its deadline
        runner.phase_deadlines_s = dict(PHASE_DEADLINES_S) | {"warmup": HANG_DEADLINE_S}
    trial = measure(runner, 0, config=TrainingConfig(micro_batch=micro_batch))
    runner.phase_deadlines_s = PHASE_DEADLINES_S
    assert (trial.outcome, trial.detail) == (outcome, detail), trial.reason
    assert words in (trial.reason or "")
    assert trial.step_time_s is None
    if outcome in (Outcome.INTERRUPTED, Outcome.TIMEOUT) or micro_batch in (3, 384):  # ends that are not its own
        after = measure(runner, 1)
        assert after.outcome is Outcome.OK, after.reason


def test_a_good_trial_records_all_its_measurements(runner: TrialRunner):
    trial = measure(runner, 0)
    assert trial.outcome is Outcome.OK, trial.reason
    assert trial.reason is None
    assert trial.step_time_s is not None
    assert trial.tokens_per_s is not None
    assert trial.step_time_s.low <= trial.step_time_s.median <= trial.step_time_s.high
    assert trial.tokens_per_s.median == pytest.approx(384 / trial.step_time_s.median)
    assert trial.method == "whole_steps"
    assert 50 << 20 < (trial.peak_memory_bytes or 0) < 1 << 30
    assert trial.loss is not None
    assert set(trial.phase_seconds) >= {"init", "build", "warmup", "measure", "done"}
    assert trial.model_validate_json(trial.model_dump_json()) == trial


def test_a_trial_that_is_slower_than_the_best_is_stopped_early(runner: TrialRunner):
    trial = measure(runner, 0, to_beat=ToBeat(log_s=math.log(1e-6), sd=0.03, level=0.01))
    assert trial.step_time_s is not None
    if trial.disturbed is not None:
        assert (trial.outcome, trial.at_least_s) == (Outcome.OK, None), "a disturbed look is no lost race"
        return
    assert trial.outcome is Outcome.PRUNED
    assert "stopped early" in (trial.reason or "")
    assert 1e-6 < (trial.at_least_s or 0.0) < trial.step_time_s.median
    assert trial.samples_s["step"]


def test_a_trial_says_whether_the_budgets_end_ended_it_and_not_a_phases_deadline(runner: TrialRunner):
    hangs = TrainingConfig(micro_batch=8)
    for of_budget in (False, True):
        late = measure(runner, 0, config=hangs, deadline_s=0.3 if of_budget else 1.0, deadline_of_budget=of_budget)
        assert (late.outcome, late.budget_ended) == (Outcome.TIMEOUT, of_budget)
    runner.phase_deadlines_s = dict.fromkeys(PHASE_DEADLINES_S, 0.5)
    stuck = measure(runner, 1, config=hangs, deadline_s=30.0, deadline_of_budget=True)
    assert (stuck.outcome, stuck.budget_ended) == (Outcome.TIMEOUT, False)
    assert "compiling" not in (late.reason or "") + (stuck.reason or "")
    runner.phase_deadlines_s = dict(PHASE_DEADLINES_S) | {"compile": 1.0}
    compiled = measure(runner, 2, config=TrainingConfig(micro_batch=8, compile="model"))
    assert compiled.detail == "compile" and re.search(r"; compiling took [\d.]+ s of it$", compiled.reason or "")


def test_a_trial_can_be_asked_to_time_parts_of_a_step(runner: TrialRunner):
    trial = measure(runner, 0, method="parts")
    assert trial.outcome is Outcome.OK, trial.reason
    assert trial.method == "parts"
    assert trial.step_time_s is not None
    assert trial.parts_s.keys() == {"first_micro_step", "second_micro_step", "micro_step", "optimizer_step"}
    assert trial.step_time_s.median == pytest.approx(sum(trial.parts_s.values()))  # three micro-steps at this size


def test_memory_comes_before_the_compilers_wrapper():
    wrapped = ("torch._dynamo.exc.BackendCompilerFailed", "torch._dynamo.exc.TorchDynamoException", "RuntimeError")
    assert classify_exception(wrapped, "backend='inductor' raised: oops")[0] is Outcome.UNSUPPORTED
    assert classify_exception(wrapped, "raised: CUDA out of memory. Tried")[0] is Outcome.OUT_OF_MEMORY
    assert classify_exception(("torch.OutOfMemoryError", "builtins.RuntimeError"), "") == (
        Outcome.OUT_OF_MEMORY,
        "device",
    )
    assert classify_exception(("builtins.MemoryError",), "") == (Outcome.OUT_OF_MEMORY, "host")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "device"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "host"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "device"),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "device",
        ),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'", "device"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate", "host"),
        ("Triton Error [CUDA]: out of memory", "device"),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "device"),
    ],
)
def test_texts_of_libraries_that_ran_out_of_memory(message: str, where: str):
    assert classify_exception(("builtins.RuntimeError",), message) == (Outcome.OUT_OF_MEMORY, where)


def test_page_locked_memory_is_the_hosts():
    def pin(pin_memory: bool) -> None:
        raise RuntimeError("CUDA error: out of memory")

    def on_device(*, then: bool) -> None:
        if then:
            on_device(then=False)
        raise RuntimeError("CUDA error: out of memory")

    def train(pin_memory: bool) -> None:
        on_device(then=True)

    for raises, where in ((lambda: pin(pin_memory=True), "host"), (lambda: train(pin_memory=True), "device")):
        with pytest.raises(RuntimeError) as caught:
            raises()
        written = "".join(traceback.format_exception(caught.value))
        assert classify_exception(("builtins.RuntimeError",), str(caught.value), written)[1] == where
    in_thread = "Caught RuntimeError in pin memory thread for device 0.\nRuntimeError: CUDA error: out of memory"
    assert classify_exception(("builtins.RuntimeError",), in_thread)[1] == "host"


def test_a_kernel_that_does_not_take_the_shape_is_not_a_crash():
    query, pair = torch.zeros(1, 4, 16, 32), torch.zeros(1, 2, 16, 32)
    with pytest.raises(RuntimeError) as caught, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        F.scaled_dot_product_attention(query, pair, pair, enable_gqa=True)
    assert classify_exception(("builtins.RuntimeError",), str(caught.value)) == (Outcome.UNSUPPORTED, None)
    on_cuda = "No available kernel.  Aborting execution."
    assert classify_exception(("builtins.RuntimeError",), on_cuda) == (Outcome.UNSUPPORTED, None)
    assert classify_exception(("builtins.NotImplementedError",), "no such kernel") == (Outcome.UNSUPPORTED, None)

"""Which kernel loss=fused takes on CUDA, and what the compiled form computes, here in C++ in place of Triton."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import loss, loss_kernels
from autoplan.strategies.techniques.loss import kernel_on
from autoplan.strategies.techniques.loss_kernels import (
    FastestKernel,
    agrees,
    choose_kernel,
    compiled_cross_entropy,
    loss_and_gradients,
    precomputed_cross_entropy,
    random_case,
)
from tests.strategies.tiny import language

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "compiled"), [("fp16", False), ("bf16", True)])
def test_fp16_and_compiled_runs_keep_torchs_operations(precision: str, compiled: bool) -> None:
    assert isinstance(kernel_on(torch.device("cuda"), "bf16", compiled=False), FastestKernel)
    assert not isinstance(kernel_on(torch.device("cuda"), precision, compiled=compiled), FastestKernel)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran: the compiled one, for which torch's operations stand in here."""
    names: list[str] = []

    def stand_in(name: str, *case: Any, dtype: torch.dtype, cap: float | None = None) -> torch.Tensor:
        names.append(name)
        return precomputed_cross_entropy(*case, dtype=dtype, cap=cap)

    monkeypatch.setattr(loss_kernels, "compiled_cross_entropy", functools.partial(stand_in, "compiled"))
    monkeypatch.setattr(loss_kernels, "_AGREED", {})
    monkeypatch.setattr(loss_kernels, "_FASTEST", {})
    monkeypatch.setattr(loss_kernels, "_COMPILED", {})
    return names


def name_of(kernel: Any) -> str:
    while isinstance(kernel, functools.partial):
        kernel = kernel.args[0] if kernel.args else kernel.func
    return kernel if isinstance(kernel, str) else "torch"


@pytest.mark.parametrize("fastest", ["torch", "compiled"])
def test_a_head_gets_the_kernel_that_took_the_least_time(
    fastest: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def seconds_of(kernel: Any, case: Any) -> float:
        timed.append(name_of(kernel))
        return 1.0 if name_of(kernel) == fastest else 2.0

    monkeypatch.setattr(loss_kernels, "seconds_of", seconds_of)
    kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
    hidden, weight, bias, targets = random_case(12, 40, 8, True, torch.float32, CPU)
    plain = kernel.plain(hidden, weight, bias, targets)
    kernel.choose(weight, bias, 12)
    assert sorted(timed) == ["compiled", "torch"]
    called.clear()
    assert float(kernel(hidden, weight, bias, targets).detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert called == ([] if fastest == "torch" else [fastest])
    assert len(timed) == 2, "a head is timed once"
    kernel(hidden, weight, None, targets)
    assert len(timed) == 4, "another head is timed too"
    chosen: Any = kernel.choose(weight.to(torch.bfloat16), None, 12)
    assert fastest == "torch" or chosen.keywords == {"dtype": torch.bfloat16}, "a model in bf16 multiplies in bf16"


def test_a_trace_takes_torchs_operations(called: list[str]) -> None:
    kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = random_case(12, 40, 8, False, torch.float32, CPU)
        kernel(*fake)
    assert kernel.choose(fake[1], None, 12) is kernel.plain
    assert not called and not loss_kernels._AGREED and not loss_kernels._FASTEST


def test_a_cap_is_compared_by_itself(called: list[str]) -> None:
    honest = loss_kernels.compiled_cross_entropy

    def forgets_the_cap(*case: Any, cap: float | None = None, **options: Any) -> torch.Tensor:
        return honest(*case, **options)

    case = random_case(12, 40, 8, False, torch.float32, CPU)
    for compiled, wrong in ((honest, False), (forgets_the_cap, True)):
        loss_kernels._AGREED.clear()
        kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
        loss_kernels._FASTEST[(40, 8), False, torch.float32, CPU] = functools.partial(compiled, dtype=torch.float32)
        called.clear()
        loss, expected = kernel(*case, cap=3.0).detach(), kernel.plain(*case, cap=3.0).detach()
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert len(called) == (1 if wrong else 2), "compared once, and taken where it agreed"


def test_a_kernel_that_is_wrong_or_fails_is_not_taken(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this chip")

    def counts_what_is_ignored(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> torch.Tensor:
        return precomputed_cross_entropy(hidden, weight, bias, targets.clamp(min=0), **options)

    def first_chunk_alone(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> torch.Tensor:
        return precomputed_cross_entropy(hidden[:16], weight, bias, targets[:16], **options)

    for wrong in (fails, counts_what_is_ignored, first_chunk_alone):
        assert not agrees(functools.partial(wrong, dtype=torch.float32), torch.float32, CPU)
        monkeypatch.setattr(loss_kernels, "compiled_cross_entropy", wrong)
        kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
        _, weight, bias, _ = random_case(1, 40, 8, True, torch.float32, CPU)
        assert kernel.choose(weight, bias, 12) is kernel.plain
        loss_kernels._FASTEST.clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of logits that Inductor compiled for; here heads are padded as on CUDA, and chunks are of 16 rows."""
    compile_graph, shapes = torch._inductor.compile, []

    def counted(graph: Any, inputs: Any, *options: Any) -> Any:
        shapes.append(tuple(inputs[0].shape))
        return compile_graph(graph, inputs, *options)

    monkeypatch.setattr(torch._inductor, "compile", counted)
    monkeypatch.setattr(loss_kernels, "ROW_MULTIPLE", {"cpu": 64})
    monkeypatch.setattr(loss_kernels, "_COMPILED", {})
    monkeypatch.setattr(loss_kernels, "_most_rows", 16)
    return shapes


CASES = [(torch.float32, True, None), (torch.bfloat16, False, 3.0), (torch.bfloat16, True, None)]


@pytest.mark.parametrize(("dtype", "bias", "cap"), CASES)
def test_the_compiled_form_is_the_full_loss(dtype: Any, bias: bool, cap: Any, compilations: list[Any]) -> None:
    """Several chunks, labels that are not counted, padded classes; and once compiled, for chunks of any size."""
    counters["stats"]["unique_graphs"] += 0
    before, generator = copy.deepcopy(counters), torch.get_rng_state()
    for rows in (37, 16, 3, 64):
        case = hidden, weight, own_bias, targets = random_case(rows, 100, 24, bias, torch.float32, CPU)
        logits = nn.functional.linear(hidden, weight, own_bias)
        logits = logits if cap is None else cap * torch.tanh(logits)
        exact = nn.functional.cross_entropy(logits, targets, reduction="sum")
        loss = compiled_cross_entropy(*case, dtype=dtype, cap=cap)
        assert loss.dtype == torch.float32
        tolerance = 2e-6 if dtype is torch.float32 else 1e-2
        assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=tolerance)
        leaves = [leaf for leaf in case[:3] if leaf is not None]
        pairs = zip(torch.autograd.grad(loss * 0.37, leaves), torch.autograd.grad(exact * 0.37, leaves), strict=True)
        assert all((mine - theirs).norm() <= 2 * tolerance * theirs.norm() for mine, theirs in pairs)
    assert compilations == [(16, 128)]
    assert counters == before, "what a trial reads of compilations"
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_run_compiles_before_its_first_step(compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by prepare, where there are no activations; its steps compile nothing, and train as without."""
    monkeypatch.setattr(loss_kernels, "_AGREED", {})
    monkeypatch.setattr(loss_kernels, "_FASTEST", {})
    timed = loss_kernels.seconds_of
    own = functools.partial(precomputed_cross_entropy, dtype=torch.float32)
    monkeypatch.setattr(loss_kernels, "seconds_of", lambda one, case: (one is own, timed(one, case)))
    config = TrainingConfig(micro_batch=2, loss="fused")
    losses = []
    for kernel in (own, FastestKernel(own, torch.float32)):
        monkeypatch.setattr(loss, "kernel_on", lambda *_, kernel=kernel, **__: kernel)
        run = prepare(language(), config)
        before = list(compilations)
        losses.append([float(run.step(run.workload.make_batch(4, number)).loss) for number in range(2)])
        assert compilations == before and len(before) == (0 if kernel is own else 2)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_compiler_that_fails_leaves_torchs_operations(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fails(graph: Any, inputs: Any, *options: Any) -> Any:
        asked.append(graph)
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor, "compile", fails)
    monkeypatch.setattr(loss_kernels, "compiled_cross_entropy", compiled_cross_entropy)
    case = random_case(37, 100, 24, True, torch.float32, CPU)
    kernel = FastestKernel(choose_kernel("fp32", compiled=False), torch.float32)
    assert kernel.choose(case[1], case[2], 37) is kernel.plain and len(asked) == 1
    plain = loss_and_gradients(functools.partial(precomputed_cross_entropy, dtype=torch.float32), case)
    found = loss_and_gradients(functools.partial(compiled_cross_entropy, dtype=torch.float32), case)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True)) and len(asked) == 1


@pytest.mark.parametrize("interface", ["older", "newer"])
def test_kernels_are_compared_without_tf32_which_is_put_back(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    seen = []

    def kernel(*args: object, **options: object) -> torch.Tensor:
        seen.append((torch.get_float32_matmul_precision(), matmul.fp32_precision, matmul.allow_tf32))
        return precomputed_cross_entropy(*args, **options, dtype=torch.float32)  # type: ignore[arg-type]

    monkeypatch.setattr(loss_kernels, "_AGREED", {})
    try:
        if interface == "older":
            torch.set_float32_matmul_precision("high")
        else:
            matmul.fp32_precision = "tf32"
        assert agrees(kernel, torch.float32, CPU)
        assert seen == [("highest", "ieee", False)] and matmul.fp32_precision == "tf32"
        if interface == "older":
            assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)

"""Summed cross-entropy of a linear head without all logits at once: torch's own operation, and two of ours.

torch's chunked linear_cross_entropy (2.13) is used in fp32. In bf16 it returns the sum itself in bf16, which is off
by up to 0.4 % (measured), so this file has the same algorithm with an fp32 sum and an fp32 weight gradient. All
take the gradients of a chunk while its logits are there: three matmuls, as the full loss has. In fp16 the gradients
must see the loss scale, which the forward does not know: chunks with recomputation, four matmuls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import checkpoint

from autoplan.strategies.workloads.workload import IGNORE_INDEX

_LOG = logging.getLogger(__name__)

Kernel = Callable[..., torch.Tensor]
"""(hidden (rows, size), weight (vocabulary, size), bias or None, targets (rows,)) -> the summed loss in fp32.

With `cap=c`, the logits are c * tanh(hidden weight^T + bias), as Gemma 2 caps them."""

_CHUNK_ELEMENTS = 2**27  # logits held at once: 512 MiB in fp32, enough rows for matmuls at full rate


def choose_kernel(precision: str, *, compiled: bool) -> Kernel:
    """The kernel for a precision; `compiled`: it runs inside torch.compile."""
    if precision == "fp16":
        return recomputed_cross_entropy
    if precision == "bf16":
        return functools.partial(precomputed_cross_entropy, dtype=torch.bfloat16)
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):  # torch's chunked one
        return functools.partial(_torch_kernel, keep_graph=compiled)
    return functools.partial(precomputed_cross_entropy, dtype=torch.float32)


ROW_MULTIPLE = {"cpu": 1, "cuda": 64}
"""By device type: the head's rows are padded to a multiple of this inside the loss, with logits of minus infinity.

Tensor cores want sizes that are multiples of 128 bytes (64 numbers of bf16): NVIDIA, Matrix Multiplication Background
User's Guide, section 4; nanoGPT pads 50,257 to 50,304 for it. Parameter and gradient keep their shape."""


def padded_rows(vocabulary: int, device: str) -> int:
    """The rows of a padded head."""
    multiple = ROW_MULTIPLE.get(device, 1)
    return -(-vocabulary // multiple) * multiple


@contextlib.contextmanager
def padded_as_on_cuda() -> Iterator[None]:
    """Has a trace on a CPU pad the head as CUDA does."""
    before = ROW_MULTIPLE["cpu"]
    ROW_MULTIPLE["cpu"] = ROW_MULTIPLE["cuda"]
    try:
        yield
    finally:
        ROW_MULTIPLE["cpu"] = before


def chunk_rows(vocabulary: int) -> int:
    """Rows of logits held at once: a power of two, at least 256; no more than `limit_chunk_rows` allows."""
    return limited_rows(max(256, 1 << (_CHUNK_ELEMENTS // vocabulary).bit_length() - 1))


def limited_rows(rows: int) -> int:
    """The number of rows, or what `limit_chunk_rows` allows where that is less."""
    return rows if _most_rows is None else min(rows, _most_rows)


_most_rows: int | None = None


@contextlib.contextmanager
def limit_chunk_rows(rows: int | None) -> Iterator[None]:
    """Has every fused loss of this process take at most so many rows at once; None: no limit.

    The parity check uses it: its batches are small, and a mistake in a later chunk needs several chunks to show.
    """
    global _most_rows
    before, _most_rows = _most_rows, rows
    try:
        yield
    finally:
        _most_rows = before


def _torch_kernel(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    keep_graph: bool,
    cap: float | None = None,
) -> torch.Tensor:
    # keep_graph: torch forces it under compile, with a warning, since its guard against a second backward is lost
    # chunks of our size: torch's own choice, 16 rows for GPT-2 at 1 x 1024, is three times slower (measured on a CPU)
    rows_at_once = min(hidden.shape[0], chunk_rows(weight.shape[0]))
    options = nn.LinearCrossEntropyOptions(
        allow_retain_graph=keep_graph, batch_chunk_size=rows_at_once, chunking_method=None
    )
    # neither does torch's operation cap logits, nor does it keep the sum of a bf16 model in fp32
    if cap is not None or weight.dtype != torch.float32:
        return precomputed_cross_entropy(hidden, weight, bias, targets, dtype=weight.dtype, cap=cap)
    missing = padded_rows(weight.shape[0], weight.device.type) - weight.shape[0]
    if missing:
        bias = F.pad(weight.new_zeros(weight.shape[0]) if bias is None else bias, (0, missing), value=-torch.inf)
        weight = F.pad(weight, (0, 0, 0, missing))
    return F.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=IGNORE_INDEX, options=options
    )


def recomputed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    cap: float | None = None,
) -> torch.Tensor:
    """Chunk by chunk, logits computed again in the backward; the matmul follows autocast like any linear layer."""
    vocabulary = weight.shape[0]
    missing = padded_rows(vocabulary, weight.device.type) - vocabulary
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    rows_at_once = chunk_rows(vocabulary)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for rows, classes in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True):
        total = total + checkpoint(_chunk_loss, rows, weight, bias, classes, vocabulary, cap, use_reentrant=False)
    return total


def rows_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    cap: float | None = None,
) -> torch.Tensor:
    """The cross-entropy of each row in fp32, (rows,), 0 where it is not counted.

    What multiplies a row's gradient is known in the backward alone, so logits are computed again there.
    """
    rows_at_once = chunk_rows(weight.shape[0])
    losses = [
        checkpoint(_chunk_loss, rows, weight, bias, classes, weight.shape[0], cap, "none", use_reentrant=False)
        for rows, classes in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True)
    ]
    return torch.cat(losses)


def _chunk_loss(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor,
    vocabulary: int,
    cap: float | None,
    reduction: str = "sum",
) -> torch.Tensor:
    logits = F.linear(rows, weight, bias).float()
    if cap is not None:
        logits = cap * torch.tanh(logits)
    if logits.shape[1] > vocabulary:
        logits[:, vocabulary:] = -torch.inf
    return F.cross_entropy(logits, classes, ignore_index=IGNORE_INDEX, reduction=reduction)


def precomputed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dtype: torch.dtype,
    cap: float | None = None,
    compiles: bool = False,
) -> torch.Tensor:
    """Chunk by chunk, gradients taken in the forward; matmuls in `dtype`, everything summed in fp32.

    `compiles`: what lies between the matmuls is compiled; where that fails, it is not.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _Precomputed.apply(hidden, weight, bias, targets, dtype, cap, weight.requires_grad, compiles)


compiled_cross_entropy: Kernel = functools.partial(precomputed_cross_entropy, compiles=True)


def loss_of_logits(
    logits: torch.Tensor, classes: torch.Tensor, vocabulary: int, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of logits (rows, at least vocabulary) in fp32, and its gradient by them, in fp32."""
    logits = logits.float()
    capped = None if cap is None else torch.tanh(logits)
    logits = logits if cap is None or capped is None else cap * capped
    if logits.shape[1] > vocabulary:
        logits[:, vocabulary:] = -torch.inf
    counted = (classes != IGNORE_INDEX).unsqueeze(1)
    picked = classes.clamp(min=0).unsqueeze(1)
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    total = ((log_sum - logits.gather(1, picked)) * counted).sum()
    gradient = torch.exp(logits - log_sum)
    gradient = gradient.scatter_add(1, picked, torch.full_like(log_sum, -1.0)) * counted
    if cap is not None and capped is not None:  # d/dx of cap * tanh(x)
        gradient = gradient * (cap * (1 - capped.square()))
    return total, gradient


_watch: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


@contextlib.contextmanager
def watch_loss_of_logits(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Has this process call `around(loss_of_logits)` in place of `loss_of_logits`: a trace marks what is in it."""
    global _watch
    before, _watch = _watch, around(loss_of_logits)
    try:
        yield
    finally:
        _watch = before


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to a total in fp32, in place.

    A product of 16-bit matrices is added by the matmul itself where it can (`addmm` with out_dtype, CUDA): nothing is
    rounded to 16 bits between, and of the total's size nothing is written but the total. Elsewhere the product is
    rounded once, and added.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif (
        total.device.type == "cuda"
        and not torch.compiler.is_compiling()
        and detect_fake_mode() is None  # a trace: nothing runs
        and _adds_in_fp32(total.device)
    ):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += (left @ right).float()


@functools.cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether this torch and this device add a product of bf16 matrices to an fp32 matrix; tried once."""
    total, ones = (torch.ones(16, 16, dtype=kind, device=device) for kind in (torch.float32, torch.bfloat16))
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        return bool((total == 17).all())
    except (RuntimeError, TypeError):  # an older torch, or a device without
        return False


class _Precomputed(torch.autograd.Function):
    """The gradient of a summed cross-entropy by its logits is softmax - one-hot, known as soon as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        cap: float | None,
        head_trains: bool,
        compiles: bool,
    ) -> torch.Tensor:
        vocabulary = weight.shape[0]
        missing = padded_rows(vocabulary, weight.device.type) - vocabulary
        low_weight, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if missing:
            low_weight = F.pad(low_weight, (0, 0, 0, missing))
            low_bias = None if low_bias is None else F.pad(low_bias, (0, missing))
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradients = []
        shape = weight.shape if head_trains else (0, 0)
        weight_gradient = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        bias_gradient = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=weight.device)
        rows_at_once = min(chunk_rows(vocabulary), TIMED_ROWS) if compiles else chunk_rows(vocabulary)
        needed = min(rows_at_once, hidden.shape[0])
        size, part = compiled_part(needed, low_weight, vocabulary, cap) if compiles else (0, None)
        logits = low_weight.new_empty(size, low_weight.shape[0])
        for rows, classes in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True):
            rows = rows.to(dtype)
            if part is None:
                chunk_logits = F.linear(rows, low_weight, low_bias)
                loss, gradient = (loss_of_logits if _watch is None else _watch)(chunk_logits, classes, vocabulary, cap)
                del chunk_logits
            else:
                head = (rows, low_weight.t()) if low_bias is None else (low_bias, rows, low_weight.t())
                (torch.mm if low_bias is None else torch.addmm)(*head, out=logits[: len(rows)])
                loss, gradient = part(logits, F.pad(classes.long(), (0, size - len(rows)), value=IGNORE_INDEX))
                gradient = gradient[: len(rows)]
            total = total + loss
            low_gradient = gradient.to(dtype)
            hidden_gradients.append((low_gradient @ low_weight).to(hidden.dtype))
            if head_trains:
                add_product(weight_gradient, low_gradient.t()[:vocabulary], rows)
            if bias_gradient is not None:
                bias_gradient += gradient[:, :vocabulary].sum(0, dtype=torch.float32)
            del gradient, low_gradient  # before the next chunk has its own
        saved = (torch.cat(hidden_gradients), weight_gradient.to(weight.dtype))
        ctx.save_for_backward(*saved, *(() if bias_gradient is None else (bias_gradient,)))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = gradients
        hidden, weight, *bias = ctx.saved_tensors
        # In fp32, and then rounded: a scale of one over a count is off by up to 0.4 % where it is bf16 itself.
        return (
            (hidden.float() * scale).to(hidden.dtype) if ctx.needs_input_grad[0] else None,
            (weight.float() * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            bias[0] * scale if bias and ctx.needs_input_grad[2] else None,
            *(None,) * 5,
        )


# On CUDA: torch's operations, or what lies between the matmuls compiled, as timed there. On an H100 in bf16 GPT-2's
# head took 15.3 ms for 8,192 rows by torch's operations, of which matmuls are 2.7 ms; all logits at once 22.6 ms, and
# compiled 4.6 ms; Liger's fused loss 28.5 ms, and at each head measured it was slower than torch's operations.


def loss_and_low_gradient(
    logits: torch.Tensor, classes: torch.Tensor, *, vocabulary: int, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`loss_of_logits` in the form that fuses: no scatter, nothing in place; the gradient in the logits' dtype.

    Rows that are not counted may hold anything.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    numbers = logits.float()
    slope = None
    if cap is not None:
        numbers = torch.tanh(numbers)
        slope, numbers = cap * (1 - numbers.square()), cap * numbers
    if logits.shape[1] > vocabulary:
        numbers = torch.where(columns < vocabulary, numbers, -torch.inf)
    counted = (classes != IGNORE_INDEX).unsqueeze(1)
    picked = classes.clamp(min=0).unsqueeze(1)
    largest = numbers.amax(1, keepdim=True)  # these two Inductor finds in one pass; it does not for logsumexp
    total = (numbers - largest).exp().sum(1, keepdim=True)
    losses = total.log() + largest - numbers.gather(1, picked)
    gradient = (numbers - largest).exp() / total - (columns == picked).float()
    gradient = gradient if slope is None else gradient * slope
    return torch.where(counted, losses, 0.0).sum(), torch.where(counted, gradient, 0.0).to(logits.dtype)


_COMPILED: dict[Any, Any] = {}


def compiled_part(rows: int, weight: torch.Tensor, vocabulary: int, cap: float | None) -> tuple[int, Any]:
    """`loss_and_low_gradient` compiled for logits of a number of rows, at least so many, and that number.

    A power of two; where a larger one is there already, that one, so that a last chunk or a shorter batch compiles
    nothing. (0, None) once a compilation has failed in this process.

    Args:
        rows: That are needed.
        weight: The padded head, in the dtype of the matmuls.
        vocabulary, cap: As in `loss_of_logits`.
    """
    case = weight.shape[0], vocabulary, cap, weight.dtype, weight.device
    size = min((size for size, *rest in _COMPILED if tuple(rest) == case and size >= rows), default=0)
    if not size and can_compile():
        size = 1 << max(rows - 1, 0).bit_length()
        _COMPILED[size, *case] = _compile(size, *case)
    return (size, _COMPILED[size, *case]) if can_compile() else (0, None)


def can_compile() -> bool:
    """Whether no compilation of `compiled_part` has failed in this process."""
    return None not in _COMPILED.values()


def _compile(
    rows: int, columns: int, vocabulary: int, cap: float | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """By Inductor itself, for these sizes alone: Dynamo, its guards and its limits of compilations know nothing of it.

    In this process, without workers that would stay. The counters of compilations are put back, since a trial and a
    script read them. Run once, since Triton compiles and times its variants at the first call.
    """
    import torch._dynamo.config
    import torch._inductor
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if torch._dynamo.config.disable:  # TORCH_COMPILE_DISABLE
        return None
    before = {kind: counts.copy() for kind, counts in counters.items()}
    part = functools.partial(loss_and_low_gradient, vocabulary=vocabulary, cap=cap)
    sizes = ((rows, columns), dtype), ((rows,), torch.long)
    try:
        with torch.no_grad():
            with FakeTensorMode(shape_env=ShapeEnv()):  # without shapes Inductor's cache on disk is passed over
                fake: list[Any] = [torch.zeros(shape, dtype=kind, device=device) for shape, kind in sizes]
                graph = make_fx(part)(*fake)
            compiled = torch._inductor.compile(graph, fake, {"compile_threads": 1, "triton.cudagraphs": False})
            compiled(*(torch.zeros(shape, dtype=kind, device=device) for shape, kind in sizes))
        return compiled
    except torch.OutOfMemoryError:
        raise
    except Exception:  # no compiler, a chip that it does not know
        _LOG.debug("the loss is not compiled", exc_info=True)
        return None
    finally:
        counters.clear()
        counters.update(before)


LARGEST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients, relative to the largest, where two kernels are compared: a rounding each."""

TIMED_ROWS = 8192
"""Of hidden states, at most, on which kernels are timed."""

TIMED_RUNS = 3
"""Whose shortest counts: others of a machine's work only lengthen them."""


def choose_gpu_kernel(precision: str, *, compiled: bool) -> Kernel:
    """The kernel for a precision on CUDA; `compiled`: inside torch.compile, which fuses torch's operations by itself.

    In fp16 the gradients have to see the loss scale, which a compiled form does not.
    """
    plain = choose_kernel(precision, compiled=compiled)
    if precision == "fp16" or compiled:
        return plain
    return FastestKernel(plain, torch.bfloat16 if precision == "bf16" else torch.float32)


class FastestKernel:
    """A kernel that takes the fastest for each head: found by `choose`, else at its first call.

    Args:
        plain: torch's operations.
        dtype: Of the matmuls.
    """

    def __init__(self, plain: Kernel, dtype: torch.dtype) -> None:
        self.plain = plain
        self.dtype = dtype

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        *,
        cap: float | None = None,
    ) -> torch.Tensor:
        """The summed loss. With a cap, which is known here first, the kernel is compared once more, and not timed."""
        kernel = self.choose(weight, bias, hidden.shape[0])
        if cap is None or kernel is self.plain:
            return kernel(hidden, weight, bias, targets, cap=cap)
        agreed = agrees(kernel, self._dtype(weight), weight.device, bias=bias is not None, cap=cap)
        return (kernel if agreed else self.plain)(hidden, weight, bias, targets, cap=cap)

    def choose(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Kernel:
        """The fastest kernel for a head; asked before a run has activations, its timing takes no memory beside them.

        Under a trace nothing runs: torch's operations.

        Args:
            weight, bias: Of the head; their numbers do not matter.
            rows: Of hidden states in a micro-batch, about.
        """
        if detect_fake_mode([weight]) is not None:
            return self.plain
        dtype = self._dtype(weight)
        key = tuple(weight.shape), bias is not None, dtype, weight.device
        if key not in _FASTEST:
            _FASTEST[key] = self.plain
            compiled: Kernel = functools.partial(compiled_cross_entropy, dtype=dtype)
            if agrees(compiled, dtype, weight.device, bias=bias is not None) and can_compile():
                sizes = min(rows, TIMED_ROWS), weight.shape[0], weight.shape[1]
                with contextlib.suppress(torch.OutOfMemoryError):
                    case = random_case(*sizes, bias is not None, dtype, weight.device)
                    _FASTEST[key] = min((self.plain, compiled), key=lambda kernel: seconds_of(kernel, case))
                    del case
                if weight.device.type == "cuda":
                    torch.cuda.empty_cache()
        return _FASTEST[key]

    def _dtype(self, weight: torch.Tensor) -> torch.dtype:
        """A model in bf16 has its matmuls in bf16 without autocast too."""
        return weight.dtype if self.dtype == torch.float32 else self.dtype


_FASTEST: dict[Any, Kernel] = {}


def random_case(rows: int, vocabulary: int, size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """Hidden states, weight, bias or None, and targets, of which some are not counted."""
    shapes = (rows, size), (vocabulary, size), (vocabulary,)
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
    targets[::7] = IGNORE_INDEX
    return *made[: 2 + bias], *([] if bias else [None]), targets


def loss_and_gradients(kernel: Kernel, case: Any) -> list[torch.Tensor]:
    """Of a kernel on a case of `random_case`; the loss is halved, as the count of a batch divides it."""
    loss = kernel(*case)
    leaves = [one for one in case[:3] if one is not None]
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]


def seconds_of(kernel: Kernel, case: Any) -> float:
    """The shortest time of a kernel's forward and backward on a case; infinite where it fails."""
    device = case[0].device
    found = []
    try:
        for _ in range(1 + TIMED_RUNS):  # the first compiles
            began = time.perf_counter()
            loss_and_gradients(kernel, case)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - began)
    except RuntimeError:  # no memory for this one
        return float("inf")
    return min(found[1:])


_AGREED: dict[Any, bool] = {}


def agrees(
    kernel: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    cap: float | None = None,
) -> bool:
    """Whether a kernel runs here and agrees with torch's operations, in loss and gradients; asked once per process.

    Asked with several chunks of rows, of which the last is partly filled, and more logits than a block has. Asked
    without TF32, whatever the process has set: its rounding (2^-11 of a number) is larger than the difference that is
    allowed in fp32, and one kernel's matmuls may take it where another's do not.
    """
    key = getattr(kernel, "func", kernel), dtype, device, bias, cap
    if key not in _AGREED:
        try:
            case = random_case(40, 4227, 32, bias, dtype, device)
            plain = functools.partial(precomputed_cross_entropy, dtype=dtype)
            with full_fp32(), limit_chunk_rows(16):
                capped = (functools.partial(one, cap=cap) for one in (plain, kernel))
                pairs = zip(*(loss_and_gradients(one, case) for one in capped), strict=True)
            most = LARGEST_DIFFERENCE[dtype]
            _AGREED[key] = all(float((a - b).abs().max()) <= most * float(a.abs().max()) for a, b in pairs)
        except Exception:  # no compiler, a chip that it does not know: torch's operations are used
            _LOG.debug("a kernel of the loss does not run", exc_info=True)
            _AGREED[key] = False
    return _AGREED[key]


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """fp32 matmuls in fp32 inside; afterwards as the process had them, by whichever of torch's two interfaces.

    Set through the older one, which sets the newer along: after the newer alone, torch's getters raise.
    """
    modes: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    newer = [(mode, mode.fp32_precision) for mode in modes]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface has been used since
        older = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for mode, precision in newer:
            mode.fp32_precision = precision

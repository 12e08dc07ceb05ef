"""A roofline by kind of operation: what its time reaches of the rates that the probes measure, and what bounds it.

In: a trace of torch.profiler with shapes, in Chrome's format, and the `Rates` of this process. Out: an `Operations`
record for each kind. FLOPs and bytes are from the shapes of the inputs:

- A product has two FLOPs for each multiplication. Attention and convolutions have twice their forward's in backward:
  two products for each. What a kernel computes again is not counted.
- Bytes are those of the inputs, and as many as the largest of them for the result; of a product, its matrix. A fused
  optimizer writes what it reads, but for the gradients. Views move nothing. Of what reads by index, of LSTM and GRU and
  of compiled code they are not known.

Three bounds are compared: FLOPs at the rate of a large product of that dtype, bytes at the rate of a copy beyond the
caches, calls at the host's time for one small operation. The one that needs most time is the bound (Williams, Waterman,
Patterson 2009; the calls are our addition). A kind whose operands stay in caches may reach more than that rate.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan.planner.diagnose.records import Bound, Operations, Rates
from autoplan.probes.operations import CPU_BRIEF_SHAPES, CUDA_BRIEF_SHAPES, bandwidth_operations, matmul
from autoplan.probes.timing import TORCH_DTYPES, Operation, Sampler, probe_launch

SAMPLE_S = 0.1
"""For the samples of one rate."""

KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in (
    ("optimizer", r"::_fused_(adam|sgd|adagrad)|::_foreach_"),
    ("attention", r"scaled_dot_product|flash_attention|efficient_attention"),
    ("convolution", r"conv(\d|olution|_)"),
    ("recurrent", r"lstm|gru|rnn"),
    ("matrix products", r"::(\w*mm|linear|matmul|mv|dot|einsum)(_|$)|linear_pointwise|mkldnn_linear"),
    ("norm", r"norm(?!al)"),
    ("softmax and loss", r"softmax|_loss|cross_entropy|kl_div"),
    ("indexing", r"embedding|index|gather|scatter|take|nonzero|sort|topk|bincount|masked_select"),
    ("views", r"::(view\w*|_unsafe_view|_?reshape\w*|t|transpose\w*|permute|expand\w*|as_strided\w*|detach_?|select|"
              r"slice|narrow|(un)?squeeze_?|unbind|split\w*|chunk|alias|unfold|(un)?flatten|lift_fresh|empty\w*|resize_\w*|"
              r"result_type|is_\w+|item|_local_scalar_dense|resolve_\w+)$"),
    ("copies", r"copy|::to$|clone|contiguous|::cat|stack|fill|zero|ones|full|pad|repeat"),
    ("reductions", r"::(sum|mean|max|min|amax|amin|argmax|argmin|prod|all|any|std|var|var_mean|cumsum|logsumexp)$"),
    ("elementwise", r"^aten::"),
))  # fmt: skip
"""(kind, pattern of the operations' names): the first that fits."""

UNKNOWN = ("indexing", "recurrent", "compiled", "other")
"""Kinds whose bytes their shapes do not show."""

BACKWARD = 2.0
"""FLOPs of a backward in times of its forward's: the gradients of both operands."""

DTYPES = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
"""Names of dtypes in a trace."""

SIZES = {"double": 8, "long": 8, "long int": 8, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1, "unsigned char": 1}
"""Bytes of an element by its name in a trace; of others four."""

ROUNDED_US = 0.3
"""Times of a trace count from 1970 in older versions: as floats they are rounded to a quarter of a microsecond."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of the device."""

SHAPES = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
"""What a trace with shapes knows of arguments."""


def measure_rates(device: str, dtypes: Sequence[str]) -> Rates:
    """What the device reaches in this process, with its own threads and settings, by the probes' operations.

    Args:
        device: "cpu" or "cuda".
        dtypes: Of the products.
    """
    place = torch.device(device)
    shape = (CUDA_BRIEF_SHAPES if device == "cuda" else CPU_BRIEF_SHAPES)[-1]
    with torch.random.fork_rng(), torch.no_grad():
        products = {dtype: _rate(matmul(place, dtype, shape), place) for dtype in dtypes}
        if device == "cuda" and fp32_is_exact():
            torch.set_float32_matmul_precision("high")
            try:
                products["tf32"] = _rate(matmul(place, "float32", shape), place)
            finally:
                torch.set_float32_matmul_precision("highest")
        copy = next(one for one in bandwidth_operations(place, cache_bytes=None) if one.kind == "copy")
        return Rates(
            flops_per_s={dtype: rate for dtype, rate in products.items() if rate is not None},
            bytes_per_s=_rate(copy, place),
            launch_s=probe_launch(place, repeats=5).value or 0.0,
        )


def fp32_is_exact() -> bool:
    """Whether products of fp32 are in fp32: not in TF32, whichever of torch's two settings says so."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch.backends.cuda.matmul.fp32_precision was set, to something else
        return False


def _rate(operation: Operation, place: torch.device) -> float | None:
    """Work in a second; None where it does not run here."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return operation.work / _seconds(operation.build(), place)
    return None


def _seconds(call: Callable[[], object], place: torch.device) -> float:
    """Seconds that a call takes."""
    sampler = Sampler(call, device=place, limit_s=SAMPLE_S)
    while sampler.wants_more:
        sampler.sample()
    return sampler.timing().seconds


@dataclass(kw_only=True, slots=True)
class _Call:
    """One call of an operation on the host.

    Attributes:
        kind: Of the outermost operation that it runs in; None: it runs in none.
        inside_us: What it calls takes so long.
        works: Whether it does the work itself, and nothing that it calls.
        counted: Whether it runs inside of a product that was counted whole.
    """

    event: Mapping[str, Any]
    kind: str | None
    inside_us: float = 0.0
    works: bool = True
    counted: bool = False


@dataclass(kw_only=True, slots=True)
class _Sum:
    """What the calls of one kind do together."""

    seconds: float = 0.0
    calls: int = 0
    nbytes: float = 0.0
    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    forwards: int = 0
    backwards: int = 0


def read_operations(
    trace: Mapping[str, Any], steps: int, whole_s: float, rates: Rates, plain_s: float | None = None
) -> tuple[Operations, ...]:
    """The kinds of operations of a trace, that of most time first; what is between them last.

    On a GPU the host is slower while it is traced, and the kernels are not: there the shares are those of as many steps
    that were not traced, and idle is what no kernel or copy of the device fills.

    Args:
        trace: Chrome's format, with the shapes of the inputs.
        steps: How many steps it has.
        whole_s: Seconds of these steps.
        rates: What the device reaches.
        plain_s: Seconds of as many steps that are not traced; None: not known.
    """
    events = _whole_events(trace)
    on_device = _on_device(events)
    busy_s = _busy_s(events)
    if on_device and plain_s is not None:
        whole_s = max(busy_s, min(whole_s, plain_s))
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for call, seconds in _timed_calls(events, on_device):
        name = str(call.event["name"])
        compiled = "Compiled" in name or "triton" in name  # else, outside of any operation, a node of autograd
        one = sums[call.kind or ("compiled" if compiled else "other")]
        one.seconds += seconds
        if call.kind is not None and not call.counted:
            _count(one, call)
    sums["other"].seconds += sum(on_device.values())  # of a graph of CUDA, whose operations did not run on the host
    found = [_operations(kind, one, steps, whole_s, rates) for kind, one in sums.items() if one.seconds > 0]
    between = Operations(
        kind="device idle" if busy_s else "between operations",
        seconds=max(0.0, whole_s - (busy_s or sum(one.seconds for one in sums.values()))) / steps,
        share=max(0.0, 1 - (busy_s / whole_s if busy_s else sum(one.share for one in found))),
    )
    return (*sorted(found, key=lambda one: -one.seconds), between)


def _whole_events(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in trace.get("traceEvents", ()) if one.get("ph") == "X"]


def _on_device(events: Sequence[Mapping[str, Any]]) -> dict[Any, float]:
    """Seconds of work of the device by the number of the call that it is of."""
    found: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in DEVICE:
            found[event.get("args", {}).get("External id")] += event["dur"] / 1e6
    return found


def _timed_calls(events: Sequence[Mapping[str, Any]], on_device: dict[Any, float]) -> Iterator[tuple[_Call, float]]:
    """The calls with their own seconds: where the trace has a device, those of its work, which is taken out of them."""
    of_device = bool(on_device)
    for call in _calls(events):
        own_s = max(0.0, call.event["dur"] - call.inside_us) / 1e6
        of_call = call.event.get("args", {}).get("External id")
        yield call, on_device.pop(of_call, 0.0) if of_device else own_s  # a trace may give an id twice


def _busy_s(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which the device computed or copied: streams that do so together count once."""
    own = [(one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") in DEVICE]
    busy_us, until = 0.0, -math.inf
    for began, ended in sorted(own):
        busy_us += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return busy_us / 1e6


def kind_of(name: str) -> str:
    """The kind of an operation by its name in a trace."""
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


def _calls(events: Sequence[Mapping[str, Any]]) -> Iterator[_Call]:
    """The calls on the host: each knows the operation that it runs in, and whether it does the work."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" or str(event["name"]).startswith("Optimizer.step"):
            threads[event.get("pid"), event.get("tid")].append(event)
    for own in threads.values():
        open_: list[_Call] = []
        calls = []
        for event in sorted(own, key=lambda one: (one["ts"], -one["dur"])):
            while open_ and event["ts"] >= open_[-1].event["ts"] + open_[-1].event["dur"] - ROUNDED_US:
                open_.pop()
            outer, name = open_[-1] if open_ else None, str(event["name"])
            kind = outer.kind if outer else None
            if kind is None:
                is_step = name.startswith("Optimizer.step")
                kind = "optimizer" if is_step else kind_of(name) if name.startswith(("aten::", "mkldnn")) else None
            call = _Call(event=event, kind=kind)
            if outer is not None:
                outer.inside_us += event["dur"]
                outer.works = outer.works and kind_of(name) == "views"
                call.counted = outer.counted or _product(outer.event)[0] is not None
            open_.append(call)
            calls.append(call)
        yield from (call for call in calls if call.event.get("cat") == "cpu_op")


def _count(one: _Sum, call: _Call) -> None:
    """Adds the FLOPs and bytes of a call that does its work itself."""
    name, arguments = str(call.event["name"]), call.event.get("args", {})
    flops, result = _product(call.event)
    one.backwards += name == "aten::convolution_backward" or "scaled_dot_product" in name and "backward" in name
    if not call.works and flops is None:
        return
    one.calls += 1
    if kind_of(name) == "views":
        return
    shapes, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    sizes = [_size(shape, of) for shape, of in zip(shapes, types, strict=False)]
    lists = sum(_is_list(shape) for shape in shapes)
    dtype = next((str(of) for of in types if str(of) in DTYPES), "float")
    if lists > 1:  # parameters, gradients, moments
        one.nbytes += sum(sizes) * (2 - 1 / lists)
    elif name in ("aten::copy_", "aten::fill_"):
        one.nbytes += sum(sizes)
    else:
        one.nbytes += sum(sizes) + (max(sizes, default=0.0) if result is None else result * SIZES.get(dtype, 4))
    if flops is not None:
        one.flops[DTYPES[dtype]] += flops
        one.forwards += 1


def _product(event: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(FLOPs, elements of the result) of a product by the shapes of its inputs; None: it is no product."""
    name, arguments = str(event["name"]).partition("::")[2], event.get("args", {})
    shapes, concrete = arguments.get("Input Dims", []), arguments.get("Concrete Inputs", [])
    try:
        match name.removesuffix("_"):
            case "mm" | "bmm" | "addmm" | "baddbmm" | "_addmm_activation":
                first = int("add" in name)  # after what is added
                a, b = shapes[first : first + 2]
                return 2.0 * math.prod(a) * b[-1], float(math.prod(a[:-1]) * b[-1])
            case "mkldnn_linear" | "_linear_pointwise":
                x, w = shapes[:2]
                return 2.0 * math.prod(x) * w[0], float(math.prod(x[:-1]) * w[0])
            case "convolution":
                return _convolution(shapes[0], shapes[1], concrete)
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            q, k, v = shapes[:3]
            place = 6 if "efficient" in name or "cudnn" in name else 4  # of is_causal
            masked = len(concrete) > place and str(concrete[place]) == "True"
            work = 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
            return work / (2 if masked else 1), float(math.prod(q[:-1]) * v[-1])
    except (IndexError, TypeError, ValueError):  # an overload with other inputs
        pass
    return None, None


def _convolution(x: Sequence[int], w: Sequence[int], concrete: Sequence[Any]) -> tuple[float, float]:
    """(FLOPs, elements of the result) of aten::convolution: input, weight, bias, stride, padding, dilation, ..."""
    stride, padding, dilation = (_numbers(concrete[place], len(x) - 2) for place in (3, 4, 5))
    if str(concrete[6]) == "True":  # transposed: each element of the input is spread
        return 2.0 * math.prod(x) * math.prod(w[1:]), float(math.prod(x))
    out = [
        (size + 2 * pad - reach * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, reach in zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    ]
    return 2.0 * x[0] * math.prod(out) * math.prod(w), float(x[0] * w[0] * math.prod(out))


def _numbers(text: Any, count: int) -> list[int]:
    """`[1, 1]` as numbers; one for all is repeated."""
    found = [int(one) for one in re.findall(r"-?\d+", str(text))]
    return found * count if len(found) == 1 else found


def _is_list(shape: Any) -> bool:
    """Whether an input is a list of tensors."""
    return isinstance(shape, list) and bool(shape) and isinstance(shape[0], list)


def _size(shape: Any, of: Any) -> float:
    """Bytes of an input: a tensor, or a list of them."""
    if _is_list(shape):
        return sum(_size(one, of) for one in shape)
    numbers = isinstance(shape, list) and bool(shape) and all(isinstance(one, int) for one in shape)
    return float(math.prod(shape) * SIZES.get(str(of), 4)) if numbers else 0.0


def _operations(kind: str, one: _Sum, steps: int, whole_s: float, rates: Rates) -> Operations:
    more = 1 + BACKWARD * one.backwards / one.forwards if one.forwards else 1.0
    flops = {dtype: more * count for dtype, count in one.flops.items()}
    needs: dict[Bound, float] = {
        "compute": sum(n / rates.flops_per_s[dtype] for dtype, n in flops.items() if dtype in rates.flops_per_s),
        "memory": one.nbytes / rates.bytes_per_s if rates.bytes_per_s else 0.0,
        "launch": one.calls * rates.launch_s,
    }
    bound = max(needs, key=lambda name: needs[name])
    known = kind not in UNKNOWN and needs[bound] > 0
    return Operations(
        kind=kind,
        seconds=one.seconds / steps,
        share=one.seconds / whole_s,
        calls=one.calls / steps,
        flops_per_s=sum(flops.values()) / one.seconds or None,
        bytes_per_s=one.nbytes / one.seconds if known and one.nbytes else None,
        bound=bound if known else None,
        of_rate=needs[bound] / one.seconds if known else None,
    )


# Attention in single operations.


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The scores of an attention that is written in single operations.

    Attributes:
        shape: Of their tensor: (..., queries, keys).
        head_dim: Of a query.
        dtype: Of the products.
        dropout, bias: Whether some of them are dropped; whether a tensor is added to them.
        seconds: Of all steps of the trace, of what works on tensors of this size.
        calls: Softmaxes over them.
    """

    shape: tuple[int, ...]
    head_dim: int
    dtype: str
    dropout: bool
    bias: bool
    seconds: float
    calls: int


def find_scores(trace: Mapping[str, Any]) -> list[Scores]:
    """The scores of each size, those of most time first: where a batched product goes into a softmax of its size.

    What torch's own attention does inside is none. Counted are batched products that make or take a tensor of as many
    elements with the same two last sizes, and all else that takes one: scaling, masks, softmax, dropout, with their
    backward. Where queries and keys are as many as a query has numbers, sizes do not tell them apart: it is left out.
    """
    events = _whole_events(trace)
    calls = [(call, seconds) for call, seconds in _timed_calls(events, _on_device(events)) if call.kind != "attention"]
    found = []
    for shape in {_softmax_shape(call) for call, _ in calls} - {()}:
        makes = [call for call, _ in calls if _makes(call, shape)]
        head_dim = min((_operands(call)[0][0][-1] for call in makes), default=0)
        if not makes or head_dim == shape[-1] == shape[-2]:
            continue
        own = [(call, seconds) for call, seconds in calls if _makes(call, shape) or _takes(call, shape)]
        names = [str(call.event["name"]) for call, _ in own]
        found.append(
            Scores(
                shape=shape,
                head_dim=head_dim,
                dtype=DTYPES.get(_operands(makes[0])[1], "float32"),
                dropout=any("dropout" in name or "bernoulli" in name for name in names),
                bias=any(_adds(call, shape) for call, _ in own),
                seconds=sum(seconds for _, seconds in own),
                calls=sum(_softmax_shape(call) == shape for call, _ in own),
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def device_s(trace: Mapping[str, Any]) -> float:
    """Seconds in which a device computed or copied; 0: the trace has no work of one."""
    return _busy_s(_whole_events(trace))


def _softmax_shape(call: _Call) -> tuple[int, ...]:
    """Of the input of a softmax's forward over the last of 3 or 4 sizes; empty: it is none."""
    arguments = call.event.get("args", {})
    shapes, concrete = arguments.get("Input Dims", []), arguments.get("Concrete Inputs", [])
    if str(call.event["name"]) != "aten::_softmax" or not shapes or len(shapes[0]) not in (3, 4):
        return ()
    over = str(concrete[1]) if len(concrete) > 1 else ""
    return tuple(shapes[0]) if over in ("", "-1", str(len(shapes[0]) - 1)) else ()


def _operands(call: _Call) -> tuple[list[list[int]], str]:
    """The shapes of both operands of a batched product, and their type; no shapes: it is none."""
    arguments = call.event.get("args", {})
    shapes, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    place = {"aten::bmm": 0, "aten::baddbmm": 1}.get(str(call.event["name"]))
    if place is None or len(shapes) < place + 2 or len(shapes[place]) != 3:
        return [], ""
    return shapes[place : place + 2], str(types[place])


def _makes(call: _Call, scores: tuple[int, ...]) -> bool:
    """Whether a batched product makes a tensor of this size."""
    shapes, _ = _operands(call)
    return bool(shapes) and _is_alike([shapes[0][0], shapes[0][1], shapes[1][2]], scores)


def _takes(call: _Call, scores: tuple[int, ...]) -> bool:
    return any(_is_alike(shape, scores) for shape in call.event.get("args", {}).get("Input Dims", []))


def _adds(call: _Call, scores: tuple[int, ...]) -> bool:
    """Whether a tensor is added to the scores: a bias, or a mask of zeros and minus infinity."""
    shapes = call.event.get("args", {}).get("Input Dims", [])
    added = str(call.event["name"]) in ("aten::add", "aten::add_") and len(shapes) > 1
    return added and _is_alike(shapes[0], scores) and isinstance(shapes[1], list) and len(shapes[1]) >= 2


def _is_alike(shape: Any, scores: tuple[int, ...]) -> bool:
    """Whether a tensor has as many elements, and the same two last sizes in any order."""
    plain = isinstance(shape, list) and len(shape) >= 3 and not _is_list(shape)
    return plain and sorted(shape[-2:]) == sorted(scores[-2:]) and math.prod(shape) == math.prod(scores)


def fused_attention_s(scores: Scores, device: str) -> float | None:
    """Seconds of torch's attention of these sizes, forward and backward; None where it does not run here.

    With dropout of a tenth, and with a mask of numbers, where the scores have them.
    """
    *batch, queries, keys = scores.shape
    batch = [1, *batch][-2:]
    place, dtype = torch.device(device), TORCH_DTYPES[scores.dtype]
    with contextlib.suppress(RuntimeError, NotImplementedError), torch.random.fork_rng(), torch.enable_grad():
        q, k, v = (
            torch.randn(*batch, length, scores.head_dim, device=place, dtype=dtype, requires_grad=True)
            for length in (queries, keys, keys)
        )
        mask = torch.zeros(queries, keys, device=place, dtype=dtype) if scores.bias else None
        dropout = 0.1 if scores.dropout else 0.0

        def run() -> None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)
            torch.autograd.grad(out, (q, k, v), out.detach())

        return _seconds(run, place)
    return None


def without_shapes(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The trace without shapes and values of arguments, for Perfetto."""
    events = []
    for one in trace.get("traceEvents", ()):
        known = one.get("args")
        if isinstance(known, dict):
            one = one | {"args": {name: value for name, value in known.items() if name not in SHAPES}}
        events.append(one)
    return {**trace, "traceEvents": events}

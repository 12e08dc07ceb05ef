"""Builds the profile of a model: traces every variant, times the operations, adds what only the model knows.

In: a `Workload`. Out: a `ModelProfile`. The variants run under fake tensors; a program that needs real values is run
for real.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from itertools import product

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from autoplan.errors import AutoplanError, ConfigError, WorkloadError
from autoplan.planner.trace.like_cuda import TRACED_ELSEWHERE, LikeCuda
from autoplan.planner.trace.linear_fit import timings_of
from autoplan.planner.trace.model_profile import (
    PLAIN,
    LinearFit,
    ModelProfile,
    TraceRequest,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.trace.op_benchmark import time_operations
from autoplan.planner.trace.record_step import make_batch
from autoplan.planner.trace.rough_profile import with_rough_variants
from autoplan.planner.trace.variant_tracer import DEPTHS, VariantTracer, gradient_bytes, uniform_depth
from autoplan.processes import machine_trouble, raised_from_outside
from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.techniques.fp8 import linear_weights
from autoplan.strategies.techniques.loss_kernels import padded_as_on_cuda
from autoplan.strategies.workloads.devices import is_elsewhere
from autoplan.strategies.workloads.optimizers import kept_states
from autoplan.strategies.workloads.workload import Workload


def profile_workload(
    workload: Workload, device: str, *, identity: str, request: TraceRequest | None = None
) -> ModelProfile:
    """Traces the variants of a workload under fake tensors; if the plain one fails there, runs micro-steps for real.

    The plain variant alone decides whether the workload runs. Another variant that fails, with any error, is left out:
    `failed_variants` of the profile has the reason.

    Args:
        workload: What is trained.
        device: cpu or cuda. Without a GPU here the operations of cuda are those of the CPU under `LikeCuda`.
        identity: Kept in the profile.
        request: What is traced; None: every variant, without a limit.

    Raises:
        WorkloadError: the plain program runs neither on fake tensors nor on real ones. The text begins with the error
            of the program itself.
    """
    request = request or TraceRequest()
    if not is_elsewhere(device):
        return _profile_on(workload, device, identity=identity, request=request)
    with LikeCuda(), padded_as_on_cuda():
        profile = _profile_on(workload, "cpu", identity=identity, request=request)
    return profile.model_copy(update={"device": device, "notes": (*profile.notes, TRACED_ELSEWHERE)})


def _profile_on(workload: Workload, device: str, *, identity: str, request: TraceRequest) -> ModelProfile:
    """The profile of a workload on a device that is here."""
    why = request.not_fake
    if why is None:
        try:
            tracer = VariantTracer(workload, device, FakeTensorMode(allow_non_fake_inputs=True))
            gc.freeze()  # collecting what exists now takes a tenth of a trace otherwise
            return _profile(tracer, identity=identity, request=request)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            why = f"{error.func} needs the values of a tensor"
        except Exception as error:  # the user's program, with tensors that hold no values: anything may be raised
            if raised_from_outside(error) is not None:
                raise
            why = _one_line(error)
        finally:
            gc.unfreeze()
    tracer = VariantTracer(workload, device, contextlib.nullcontext())
    try:
        profile = _profile(tracer, identity=identity, request=request)
    except AutoplanError:
        raise
    except Exception as error:
        small, large = tracer.samples
        fixed = workload.fixed_micro_batch is not None
        samples = f"{small}" if fixed else f"{small} or {large}"
        more = " If it needs more samples than that, fix the micro-batch that it runs with: --fix micro_batch=N."
        failed = WorkloadError(
            f"{_one_line(error)}: raised by a plain forward and backward of {workload.name} on {device}, of {samples} "
            "samples",
            hint=f"Run it without autoplan: loss(model, make_batch({small}, 0)).total.backward()."
            f"{'' if fixed else more}",
        )
        # another process may do: a package can keep a fake tensor in its globals, and meet it here
        failed.add_note(why)
        raise failed from error
    note = f"not traced on fake tensors ({why}): micro-steps were run for real instead"
    return profile.model_copy(update={"method": "measured_block", "notes": (note, *profile.notes)})


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _profile(tracer: VariantTracer, *, identity: str, request: TraceRequest) -> ModelProfile:
    structure = find_structure(tracer.models.built())
    notes: list[str] = []
    _choose_depth(tracer, structure, notes)
    traced, failed, untraced = _trace_variants(tracer, structure, request, notes)
    tracer.timings = {} if request.known is None else timings_of(request.known, tracer.requests)
    if request.timing_budget_s > 0:
        tracer.timings = time_operations(
            tracer.requests,
            torch.device(tracer.device),
            request.timing_budget_s,
            notes,
            request.memory_limit_bytes,
            known=tracer.timings,
        )
    variants = {
        name: variant.model_copy(update={"groups": tuple(tracer.with_timing(g) for g in variant.groups)})
        for name, variant in traced.items()
    }
    profile = _assemble(tracer, structure, variants, identity, notes)
    profile = profile.model_copy(update={"failed_variants": failed, "timing_s": request.timing_budget_s})
    return with_rough_variants(profile, untraced)


def _choose_depth(tracer: VariantTracer, structure: Structure, notes: list[str]) -> None:
    """Sets whether the tracer may use truncated models, and one run for both micro-batches."""
    depth = uniform_depth(structure)
    deep = depth is not None and depth > DEPTHS[1]
    if depth is not None and deep and not tracer.depth_fit_is_accurate(depth):
        notes.append("the blocks differ: every variant was traced at whole depth")
        depth = None
    tracer.num_blocks = depth
    if depth:
        tracer.block_gradient_bytes = gradient_bytes(structure) / depth


def _trace_variants(
    tracer: VariantTracer, structure: Structure, request: TraceRequest, notes: list[str]
) -> tuple[dict[str, VariantProfile], dict[str, str], list[VariantKey]]:
    """Traces the plain variant, then the others while there is time; one that fails does not stop the rest.

    Returns:
        The profiles of those that were traced, and why others do not run, both by the text of their key; and those for
        which there was no time, or no memory.
    """
    failed: dict[str, str] = {}
    untraced: list[VariantKey] = []
    began = time.perf_counter()
    variants = {PLAIN.text(): tracer.profile_variant(PLAIN)}
    longest_s = time.perf_counter() - began
    wanted = [key for key in request.variants or _variant_keys(structure) if key != PLAIN]
    for key in sorted(wanted, key=lambda key: key.attention != "own"):
        started = time.perf_counter()
        done = len(variants) + len(failed) + len(untraced)
        tried = done > 1 or request.time_limit_s == 0
        if tried and request.time_limit_s is not None and started - began + 2 * longest_s > request.time_limit_s:
            untraced.append(key)
            continue
        try:
            same = tracer.same_with_own_attention(key)
            known = None if same is None else variants.get(same.text())
            variants[key.text()] = (
                tracer.profile_variant(key) if known is None else known.model_copy(update={"key": key})
            )
        except ConfigError as error:
            failed[key.text()] = error.message
        except Exception as error:  # a technique that does not go with this model, whatever the library raises
            if raised_from_outside(error) is not None:  # which says nothing about the technique
                raise
            if machine_trouble(error) is None:
                failed[key.text()] = _one_line(error)
            else:  # memory ran out: where there is more it may run
                untraced.append(key)
                notes.append(f"{key.text()} was not traced, its figures are estimates: {_one_line(error)}")
        longest_s = max(longest_s, time.perf_counter() - started)
    return variants, failed, untraced


def _variant_keys(structure: Structure) -> Iterator[VariantKey]:
    checkpointing = ("none", "selective", "full") if structure.blocks else ("none",)
    for values in product(("fp32", "half"), ("own", "eager", "sdpa"), checkpointing, ("full", "fused")):
        knobs = ("precision", "attention", "checkpointing", "loss")
        yield VariantKey.model_validate(dict(zip(knobs, values, strict=True)))


def _assemble(
    tracer: VariantTracer,
    structure: Structure,
    variants: dict[str, VariantProfile],
    identity: str,
    notes: list[str],
) -> ModelProfile:
    """Adds the sizes of the model, the optimizer and the batch to the variants."""
    workload, model, depth = tracer.workload, tracer.models.built(), tracer.num_blocks
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    kept = kept_states(workload.build_optimizer, trainable)
    if kept.why_assumed is not None:
        notes.append(kept.why_assumed)
    block_sizes = [sum(p.numel() for p in block.parameters()) for _, block in structure.blocks]
    outside_blocks = sum(p.numel() for p in parameters) - sum(block_sizes)
    stacks = len(structure.stacks) if depth is not None else 1
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    hidden = hidden if isinstance(hidden, int) else None
    # the activation between two blocks in fp32: (samples, sequence length, hidden); zero where a size is unknown
    boundary = 4.0 * (workload.sequence_length or 0) * (hidden or 0)
    return ModelProfile(
        identity=identity,
        method="traced",
        device=tracer.device,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        block_parameters=stacks * sum(block_sizes) / len(block_sizes) if block_sizes else 0.0,
        largest_unit_parameters=float(max([outside_blocks, *block_sizes])),
        num_blocks=depth or 0,
        sequence_length=workload.sequence_length,
        hidden=hidden,
        optimizer_name=kept.kind,
        optimizer_form=kept.form,
        optimizer_state_bytes_per_parameter=kept.bytes_per_element,
        parameter_tensors=len(trainable),
        largest_parameter=max((p.numel() for p in trainable), default=0),
        linear_weights=linear_weights(structure),
        clips_gradients=workload.max_grad_norm is not None,
        unused_parameters=tracer.unused_parameters,
        boundary_bytes=LinearFit(per_sample=boundary),
        batch_bytes=_batch_bytes(tracer),
        fewest_samples=float(tracer.samples[0]),
        tokens_per_sample=workload.tokens_per_sample,
        variants=variants,
        notes=tuple(notes),
    )


def _batch_bytes(tracer: VariantTracer) -> LinearFit:
    """The tensors of a batch, by a small batch."""
    samples = tracer.samples[0]
    batch = make_batch(tracer.workload, samples, tracer.mode)
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return LinearFit(per_sample=sum(t.numel() * t.element_size() for t in tensors) / samples)

"""Builds the profile of a model: traces every variant, times the operations, adds what only the model knows.

In: a `Workload`. Out: a `ModelProfile`. The variants run under fake tensors; a program that needs real values is run
for real.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.trace.model_profile import LinearFit, ModelProfile, VariantKey, VariantProfile
from autoplan.planner.trace.op_benchmark import time_operations
from autoplan.planner.trace.truncated_models import gradient_bytes, uniform_depth
from autoplan.planner.trace.variant_tracer import DEPTHS, VariantTracer
from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.workloads.workload import Workload

_ADAM_STATE_BYTES = 8.0
"""Bytes of Adam's two fp32 moments per parameter; assumed where the optimizer cannot be asked."""


def profile_workload(workload: Workload, device: str, *, identity: str, timing_budget_s: float = 0.0) -> ModelProfile:
    """Traces every variant of a workload under fake tensors; if that fails, runs micro-steps for real.

    Args:
        workload: What is trained.
        device: cpu or cuda.
        identity: Kept in the profile.
        timing_budget_s: Seconds for timing the recorded operations on the device, one by one; 0: none is timed.

    Raises:
        WorkloadError: the program runs neither on fake tensors nor on real ones; the text names what failed.
    """
    try:
        tracer = VariantTracer(workload, device, FakeTensorMode(allow_non_fake_inputs=True))
        with _without_garbage_collection():
            return _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"{error.func} needs the values of a tensor"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    notes = (f"not traced on fake tensors ({why}): micro-steps were run for real instead",)
    tracer = VariantTracer(workload, device, contextlib.nullcontext())
    try:
        profile = _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"{workload.name} can neither be traced ({why}) nor be run on {device}: {error}",
            hint="Check that one forward and backward of the workload run on that device without autoplan.",
        ) from error
    return profile.model_copy(update={"method": "measured_block", "notes": notes + profile.notes})


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Excludes all objects that exist now from garbage collection, which takes a tenth of a trace otherwise."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _profile(tracer: VariantTracer, *, identity: str, timing_budget_s: float) -> ModelProfile:
    structure = find_structure(tracer.models.built())
    notes: list[str] = []
    _choose_depth(tracer, structure, notes)
    variants = _trace_variants(tracer, structure, notes)
    if timing_budget_s > 0:
        device = torch.device(tracer.device)
        tracer.timings = time_operations(tracer.timing_requests(), device, timing_budget_s)
        variants = {
            name: variant.model_copy(update={"groups": tuple(tracer.with_timing(g) for g in variant.groups)})
            for name, variant in variants.items()
        }
    return _assemble(tracer, structure, variants, identity, notes)


def _choose_depth(tracer: VariantTracer, structure: Structure, notes: list[str]) -> None:
    """Sets whether the tracer may use truncated models, and one run for both micro-batches."""
    depth = uniform_depth(structure)
    deep = depth is not None and depth > DEPTHS[1]
    tracer.try_prime_batch(DEPTHS[0] if deep else None)
    if depth is not None and deep and not tracer.depth_fit_is_accurate(depth):
        notes.append("the blocks differ: every variant was traced at whole depth")
        depth = None
    tracer.num_blocks = depth
    if depth:
        tracer.block_gradient_bytes = gradient_bytes(structure) / depth


def _trace_variants(tracer: VariantTracer, structure: Structure, notes: list[str]) -> dict[str, VariantProfile]:
    """The profiles of all variants that apply to the workload, by the text of their key."""
    variants: dict[str, VariantProfile] = {}
    for key in _variant_keys(structure):
        same = tracer.same_with_own_attention(key)
        if same is not None and same.text() in variants:
            variants[key.text()] = variants[same.text()].model_copy(update={"key": key})
            continue
        try:
            variants[key.text()] = tracer.profile_variant(key)
        except ConfigError as error:
            notes.append(f"{key.text()}: not offered: {error.message}")
    return variants


def _variant_keys(structure: Structure) -> Iterator[VariantKey]:
    checkpointing: tuple[Literal["none", "selective", "full"], ...] = ("none",)
    if structure.blocks:
        checkpointing = ("none", "selective", "full")
    for precision, attention, policy, loss in product(
        ("fp32", "half"), ("own", "eager", "sdpa"), checkpointing, ("full", "fused")
    ):
        yield VariantKey.model_validate(
            {"precision": precision, "attention": attention, "checkpointing": policy, "loss": loss}
        )


def _optimizer_state(workload: Workload, count: int) -> tuple[str, float, str | None]:
    """Name of the optimizer, its state bytes per fp32 element, and a note if the latter had to be assumed.

    Found by one real step on `count` tiny parameters, as many as the model trains.
    """
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(max(1, count))]
    try:
        optimizer = workload.build_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception as error:  # a user's function may do anything with what it is given
        return "unknown", _ADAM_STATE_BYTES, f"optimizer state assumed as Adam's 8 bytes per parameter ({error})"
    state = optimizer.state.get(parameters[0], {})
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() >= 4]
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return type(optimizer).__name__, state_bytes / parameters[0].numel(), None


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
    optimizer_name, state_bytes, note = _optimizer_state(workload, len(trainable))
    if note is not None:
        notes.append(note)
    block_sizes = [sum(p.numel() for p in block.parameters()) for _, block in structure.blocks]
    outside_blocks = sum(p.numel() for p in parameters) - sum(block_sizes)
    stacks = len(structure.stacks) if depth is not None else 1
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
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
        hidden=hidden if isinstance(hidden, int) else None,
        optimizer_name=optimizer_name,
        optimizer_state_bytes_per_parameter=state_bytes,
        parameter_tensors=len(trainable),
        largest_parameter=max((p.numel() for p in trainable), default=0),
        clips_gradients=workload.max_grad_norm is not None,
        boundary_bytes=_boundary_bytes(workload.sequence_length, hidden),
        batch_bytes=_batch_bytes(tracer),
        fewest_samples=float(tracer.samples[0]),
        tokens_per_sample=workload.tokens_per_sample,
        variants=variants,
        notes=tuple(notes),
    )


def _boundary_bytes(sequence_length: int | None, hidden: object) -> LinearFit:
    """The activation between two blocks in fp32: (samples, sequence length, hidden); zero where a size is unknown."""
    if not sequence_length or not isinstance(hidden, int):
        return LinearFit()
    return LinearFit(per_sample=4.0 * sequence_length * hidden)


def _batch_bytes(tracer: VariantTracer) -> LinearFit:
    """The tensors of a batch, by a batch of two samples."""
    with tracer.mode:
        tensors = [t for t in pytree.tree_leaves(tracer.workload.make_batch(2, 0)) if isinstance(t, torch.Tensor)]
    return LinearFit(per_sample=sum(t.numel() * t.element_size() for t in tensors) / 2)

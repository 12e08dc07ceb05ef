"""Traces every variant of a workload, under fake tensors or for real, and puts the profile together."""

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
from autoplan.planner.trace.op_benchmark import time_recipes
from autoplan.planner.trace.truncated_models import gradient_bytes, uniform_depth
from autoplan.planner.trace.variant_tracer import DEPTHS, Tracer
from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.workloads.workload import Workload

_ADAM_LIKE_BYTES = 8.0


def profile_workload(workload: Workload, device: str, *, identity: str, timing_budget_s: float = 0.0) -> ModelProfile:
    """Traces every variant of a workload; where fake tensors cannot stand in, runs the real thing instead.

    Args:
        workload: What is trained.
        device: cpu or cuda. Fake tensors stand in for either.
        identity: Kept in the profile.
        timing_budget_s: Seconds for timing the recorded operations on the device, one by one; 0: none is timed.

    Raises:
        WorkloadError: the program runs neither on fake tensors nor on real ones: which operation stood in the way.
    """
    try:
        tracer = Tracer(workload, device, FakeTensorMode(allow_non_fake_inputs=True))
        with _frozen():
            return _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"{error.func} asks for the values of a tensor"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    notes = (f"not traced on fake tensors ({why}): micro-steps were run for real instead",)
    tracer = Tracer(workload, device, contextlib.nullcontext())
    try:
        profile = _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"{workload.name} can neither be traced ({why}) nor be run on {device}: {error}",
            hint="Run one forward and backward of the workload by itself on that device; it should pass.",
        ) from error
    return profile.model_copy(update={"method": "measured_block", "notes": notes + profile.notes})


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Keeps the garbage collector off what torch and the model library hold: a tenth of a trace goes into it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _profile(tracer: Tracer, *, identity: str, timing_budget_s: float) -> ModelProfile:
    model = tracer.models.built()
    structure = find_structure(model)
    notes: list[str] = []
    depth = uniform_depth(structure)
    tracer.try_one_run(DEPTHS[0] if depth is not None and depth > DEPTHS[1] else None)
    if depth is not None and depth > DEPTHS[1] and not tracer.depth_law_holds(depth):
        notes.append("the blocks differ: every variant was traced at whole depth")
        depth = None
    tracer.num_blocks = depth
    if depth:
        tracer.block_gradient_bytes = gradient_bytes(structure) / depth
    variants: dict[str, VariantProfile] = {}
    for key in _variant_keys(structure):
        same = tracer.same_as_own(key)
        if same is not None and same.text() in variants:
            variants[key.text()] = variants[same.text()].model_copy(update={"key": key})
            continue
        try:
            variants[key.text()] = tracer.variant(key)
        except ConfigError as error:
            notes.append(f"{key.text()}: not offered: {error.message}")
    if timing_budget_s > 0:
        tracer.timed = time_recipes(tracer.recipes(), torch.device(tracer.device), timing_budget_s)
        variants = {
            name: variant.model_copy(update={"groups": tuple(tracer.with_time(g) for g in variant.groups)})
            for name, variant in variants.items()
        }
    return _assemble(tracer, model, structure, depth, variants, identity, notes)


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
    """Name, state bytes per fp32 element, and a note where the latter had to be assumed; one tiny real step tells."""
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(max(1, count))]  # as many as the model trains
    try:
        optimizer = workload.build_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception as error:  # a user's function may do anything with what it is given
        return "unknown", _ADAM_LIKE_BYTES, f"optimizer state assumed as Adam's 8 bytes per parameter ({error})"
    state = optimizer.state.get(parameters[0], {})
    held = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor) and v.numel() >= 4)
    return type(optimizer).__name__, held / parameters[0].numel(), None


def _assemble(
    tracer: Tracer,
    model: nn.Module,
    structure: Structure,
    depth: int | None,
    variants: dict[str, VariantProfile],
    identity: str,
    notes: list[str],
) -> ModelProfile:
    workload, device = tracer.workload, tracer.device
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    optimizer_name, state_bytes, note = _optimizer_state(workload, len(trainable))
    if note is not None:
        notes.append(note)
    block_sizes = [sum(p.numel() for p in block.parameters()) for _, block in structure.blocks]
    outside = sum(p.numel() for p in parameters) - sum(block_sizes)
    per_depth = len(structure.stacks) if depth is not None else 1
    with tracer.mode:
        leaves = [t for t in pytree.tree_leaves(workload.make_batch(2, 0)) if isinstance(t, torch.Tensor)]
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    length = workload.sequence_length
    return ModelProfile(
        identity=identity,
        method="traced",
        device=device,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        block_parameters=per_depth * sum(block_sizes) / len(block_sizes) if block_sizes else 0.0,
        largest_unit_parameters=float(max([outside, *block_sizes])),
        num_blocks=depth or 0,
        sequence_length=length,
        hidden=hidden if isinstance(hidden, int) else None,
        optimizer_name=optimizer_name,
        optimizer_state_bytes_per_parameter=state_bytes,
        parameter_tensors=len(trainable),
        largest_parameter=max((p.numel() for p in trainable), default=0),
        clips_gradients=workload.max_grad_norm is not None,
        boundary_bytes=LinearFit(per_sample=4.0 * length * hidden)
        if length and isinstance(hidden, int)
        else LinearFit(),
        batch_bytes=LinearFit(per_sample=sum(t.numel() * t.element_size() for t in leaves) / 2),
        fewest_samples=float(tracer.samples[0]),
        tokens_per_sample=workload.tokens_per_sample,
        variants=variants,
        notes=tuple(notes),
    )

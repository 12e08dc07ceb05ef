"""Traces the variants of a workload.

In: a workload and a `VariantKey`. Out: a `VariantProfile`. A variant is recorded at two micro-batches. Of a model of
equal blocks, models with two and with three blocks per stack are recorded, and give the profile of the whole model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.planner.trace.linear_fit import (
    GroupKey,
    Split,
    VariantFits,
    fit_variant,
    group_key,
    make_variant_profile,
    split_by_depth,
)
from autoplan.planner.trace.model_profile import LinearFit, OperationGroup, VariantKey, VariantProfile
from autoplan.planner.trace.op_benchmark import OpTiming, TimingRequest
from autoplan.planner.trace.op_recorder import Recording
from autoplan.planner.trace.record_step import record_step
from autoplan.processes import raised_from_outside
from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.workloads.devices import build_fake, has_closed_hooks
from autoplan.strategies.workloads.workload import Workload

DEPTHS = (2, 3)
"""Blocks per stack of the truncated models."""

DEPTH_TOLERANCE = 0.01
"""The largest relative difference between the whole model and what the truncated models predict of it."""


class TruncatedModels:
    """Builds a workload's model once per depth, and gives out copies of it.

    Args:
        workload: Builds the model.
        device: Where it is built.
        mode: FakeTensorMode, or a null context for real tensors.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self._built: dict[int | None, nn.Module] = {}

    def built(self, depth: int | None = None) -> nn.Module:
        """The model with `depth` blocks in each stack; None: the whole model. The caller must not change it.

        Raises:
            TypeError: the blocks are in no list that can be cut.
        """
        if depth not in self._built:
            model = self._build()
            if depth is not None:
                # The copy has its own config. The user's may belong to every model that build_model makes.
                model = self._copy(model)
                truncate_model(model, depth)
            self._built[depth] = model
        return self._built[depth]

    def copy(self, depth: int | None = None) -> nn.Module:
        """A copy that may be prepared and run.

        Under fake tensors the copy has its own modules and shares the parameters, which have no values; the caller
        must leave no gradient and no hook on them. With real tensors the copy shares nothing. What no copy can be
        made of is built anew.
        """
        model = self.built(depth)
        try:
            return self._copy(model)
        except Exception:  # an attribute that refuses: a tensor with a graph, a lock, an open file
            if depth is not None:  # a model built anew shares the user's config, which is not to be cut
                raise
            return self._build()

    def _build(self) -> nn.Module:
        if isinstance(self.mode, FakeTensorMode):
            return build_fake(self.workload.build_model, self.mode, self.device)
        with torch.device(self.device):
            model = self.workload.build_model()
        return model.to(self.device)

    def _copy(self, model: nn.Module) -> nn.Module:
        if has_closed_hooks(model):
            raise TypeError("a hook of the model holds modules of it, and a copy's would hold those of the original")
        if not isinstance(self.mode, FakeTensorMode):
            return copy.deepcopy(model)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)


def uniform_depth(structure: Structure) -> int | None:
    """Blocks per stack, if all stacks have the same length and each has blocks of one class; else None."""
    lengths = {len(stack) for stack in structure.stacks}
    classes = [{type(block) for _, block in stack} for stack in structure.stacks]
    return lengths.pop() if len(lengths) == 1 and all(len(kinds) == 1 for kinds in classes) else None


def truncate_model(model: nn.Module, depth: int) -> None:
    """Keeps the first `depth` blocks of each stack, in place.

    Raises:
        TypeError: the blocks are in no list that can be cut.
    """
    for stack in find_structure(model).stacks:
        name = stack[0][0].rpartition(".")[0]
        parent = model.get_submodule(name)
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"{name} is a {type(parent).__name__}, which cannot be cut: it is no list of modules")
        del parent[depth:]
    config = getattr(model, "config", None)
    for attribute in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, depth)


def gradient_bytes(structure: Structure) -> float:
    """Bytes of the gradients of all blocks."""
    parameters = (p for _, block in structure.blocks for p in block.parameters() if p.requires_grad)
    return float(sum(p.numel() * p.element_size() for p in parameters))


class VariantTracer:
    """Records variants and keeps the recordings.

    Args:
        workload: What is traced.
        device: cpu or cuda.
        mode: FakeTensorMode, or a null context for real tensors.

    Attributes:
        samples: The small and the large micro-batch; straight lines go through their figures.
        num_blocks: Blocks per stack, where truncated models may be used. None: every variant is traced as a whole.
        block_gradient_bytes: Of one block of each stack.
        requests: How to time an operation of each group.
        timings: Measured seconds of groups of operations.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self.models = TruncatedModels(workload, device, mode)

        def build(parameters: Iterable[Any]) -> torch.optim.Optimizer:
            given = list(parameters)
            try:
                return workload.build_optimizer(given)
            except Exception:  # the user's own code; no recording takes a step
                return torch.optim.AdamW(given)

        # An optimizer that was given as an instance can be made only over the whole model.
        self._truncated_workload = dataclasses.replace(workload, build_optimizer=build, build_schedule=None)
        smallest = workload.fixed_micro_batch or 2
        self.samples = (smallest, 2 * smallest)
        self.num_blocks: int | None = None
        self.block_gradient_bytes = 0.0
        self.timings: Mapping[GroupKey, OpTiming] = {}
        self.requests: dict[GroupKey, TimingRequest] = {}
        self._recordings: dict[tuple[VariantKey, int | None, int], Recording] = {}

    def record(self, key: VariantKey, depth: int | None, which: int) -> Recording:
        """One micro-step of a variant, at the small (which=0) or the large (which=1) micro-batch."""
        if (key, depth, which) not in self._recordings:
            model = self.models.copy(depth)
            workload = self.workload if depth is None else self._truncated_workload
            recording = record_step(workload, self.device, key, model, self.samples[which], self.mode)
            self._recordings[key, depth, which] = recording
        return self._recordings[key, depth, which]

    def depth_fit_is_accurate(self, depth: int) -> bool:
        """Whether the truncated models predict the figures of the whole model, for the plain variant.

        Args:
            depth: Blocks per stack of the whole model.
        """
        key = VariantKey()
        try:
            shallow, deep = (self.record(key, truncated, 0) for truncated in DEPTHS)
        except Exception:  # a truncated model may be wrong for this program in any way
            return False
        whole = self.record(key, None, 0)
        figures = [
            (
                sum(operation.flops for operation in recording.operations),
                sum(operation.bytes_moved for operation in recording.operations),
                recording.saved_after_forward_bytes,
            )
            for recording in (shallow, deep, whole)
        ]
        for a, b, actual in zip(*figures, strict=True):
            predicted = b + (b - a) * (depth - DEPTHS[1])
            if abs(predicted - actual) > DEPTH_TOLERANCE * actual:
                return False
        return True

    def same_with_own_attention(self, key: VariantKey) -> VariantKey | None:
        """The variant with the model's own attention, if that is the attention that `key` asks for; else None."""
        if key.attention == "own":
            return None
        depth = DEPTHS[0] if self._is_truncated else None
        try:
            own, other = (self.record(VariantKey(attention=a), depth, 0) for a in ("own", key.attention))
        except Exception:  # the other attention does not run: profile_variant() says why
            return None
        same = [o.name for o in own.operations] == [o.name for o in other.operations]
        return key.model_copy(update={"attention": "own"}) if same else None

    @property
    def unused_parameters(self) -> bool:
        """Whether a backward of the whole model left a parameter that trains without a gradient.

        A truncated model may: it keeps what belongs to the blocks that it lacks.
        """
        return any(found.unused_parameters for (_, depth, _), found in self._recordings.items() if depth is None)

    @property
    def _is_truncated(self) -> bool:
        return self.num_blocks is not None and self.num_blocks > DEPTHS[1]

    def profile_variant(self, key: VariantKey) -> VariantProfile:
        """The profile of a variant.

        Raises:
            ConfigError: the variant does not apply to the workload.
        """
        depth = self.num_blocks or 0
        if not self._is_truncated:
            whole = self._fit(key, None)
            block_saved = (1 / max(depth, 1)) * whole.block_saved_bytes
            no_blocks: Split = (Counter(), whole.groups)
            return make_variant_profile(key, no_blocks, whole.peaks, block_saved, whole.saved_bytes, depth)
        shallow = self._fit(key, DEPTHS[0])
        split = split_by_depth(shallow.groups, self._fit(key, DEPTHS[1]).groups)
        block_saved = (1 / DEPTHS[0]) * shallow.block_saved_bytes
        more_blocks = depth - DEPTHS[0]
        # Under autocast a checkpointed block keeps its cast weights up to the end of the forward, and no longer.
        kept_later = block_saved if key.checkpointing == "none" else LinearFit(per_sample=block_saved.per_sample)
        peaks = {}
        for part, (first, later) in shallow.peaks.items():  # each block adds what it keeps; in the tail its gradients
            kept = more_blocks * (block_saved if part == "forward" else kept_later)
            if part == "tail":
                gradients = more_blocks * self.block_gradient_bytes * (1.0 if key.parameters == "own" else 0.5)
                peaks[part] = first + LinearFit(fixed=gradients), later
            else:
                peaks[part] = first + kept, later + kept
        saved = shallow.saved_bytes + more_blocks * block_saved
        return make_variant_profile(key, split, peaks, block_saved, saved, depth)

    def _fit(self, key: VariantKey, depth: int | None) -> VariantFits:
        """The fits of a variant at a depth; None: of the whole model.

        Where the micro-batch is fixed the program may run with no other one: then each figure is that of the fixed one.
        """
        small = self.record(key, depth, 0)
        try:
            large = self.record(key, depth, 1)
        except Exception as error:  # the user's program, of twice the samples that it is made for
            if self.workload.fixed_micro_batch is None or raised_from_outside(error) is not None:
                raise
            large = small
        return fit_variant(small, large, self.samples, self.requests)

    def with_timing(self, group: OperationGroup) -> OperationGroup:
        """The group with its measured seconds, if it was timed."""
        timing = self.timings.get(group_key(group))
        if timing is None:
            return group
        found = {"measured_s": timing.seconds, "measured_samples": float(self.samples[0]), "scaled": timing.scaled}
        if timing.larger_s is not None:
            found |= {
                "measured_more_s": timing.larger_s,
                "measured_more_samples": float(self.samples[0] * timing.larger_factor),
            }
        return group.model_copy(update=found)

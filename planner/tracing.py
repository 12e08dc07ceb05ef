"""The tracing itself: builds each variant with prepare() under fake tensors, records it, and fits the laws."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.cost.profile import (
    Law,
    ModelProfile,
    OperationGroup,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.recorder import Recorder, Recording, in_backward
from autoplan.planner.replay import Timed, Timing, time_recipes
from autoplan.planner.trace_laws import (
    GroupKey,
    Laws,
    add,
    blocks_apart,
    group_key,
    laws_of,
    minus,
    scale,
    swap_loss,
    to_profile,
    total_flops,
    total_moved,
)
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.structure import Structure, find_structure
from autoplan.strategies.workload import Workload

DEPTHS = (2, 3)
# whole-depth against the law from cut models: kept only where they agree this well
DEPTH_TOLERANCE = 0.01
_ADAM_LIKE_BYTES = 8.0


@dataclass(kw_only=True, slots=True)
class _Cut:
    """How a model is shortened: each stack to `depth` blocks; None: whole."""

    depth: int | None
    num_blocks: int


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
        tracer = _Tracer(workload, device, FakeTensorMode(allow_non_fake_inputs=True))
        return _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"{error.func} asks for the values of a tensor"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    notes = (f"not traced on fake tensors ({why}): micro-steps were run for real instead",)
    tracer = _Tracer(workload, device, contextlib.nullcontext())
    try:
        profile = _profile(tracer, identity=identity, timing_budget_s=timing_budget_s)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"{workload.name} can neither be traced ({why}) nor be run on {device}: {error}",
            hint="Run one forward and backward of the workload by itself on that device; it should pass.",
        ) from error
    return profile.model_copy(update={"method": "measured_block", "notes": notes + profile.notes})


def _profile(tracer: _Tracer, *, identity: str, timing_budget_s: float) -> ModelProfile:
    with tracer.mode, torch.device(tracer.device):
        model = tracer.workload.build_model()
    structure = find_structure(model)
    notes: list[str] = []
    depth = _uniform_depth(structure)
    if depth is not None and depth > DEPTHS[1] and not tracer.depth_law_holds(depth):
        notes.append("the blocks differ: every variant was traced at whole depth")
        depth = None
    tracer.num_blocks = depth
    if depth:
        tracer.block_gradient_bytes = _gradient_bytes(structure) / depth
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


def _gradient_bytes(structure: Structure) -> float:
    """Bytes of the gradients of all blocks."""
    parameters = (p for _, block in structure.blocks for p in block.parameters() if p.requires_grad)
    return float(sum(p.numel() * p.element_size() for p in parameters))


def _uniform_depth(structure: Structure) -> int | None:
    """Blocks per stack, where all stacks are as long and each is of one class; else None."""
    lengths = {len(stack) for stack in structure.stacks}
    classes = [{type(block) for _, block in stack} for stack in structure.stacks]
    return lengths.pop() if len(lengths) == 1 and all(len(kinds) == 1 for kinds in classes) else None


def _cut_model(model: nn.Module, depth: int) -> None:
    """Leaves the first `depth` blocks of each stack, in place."""
    for stack in find_structure(model).stacks:
        name = stack[0][0].rpartition(".")[0]
        parent = model.get_submodule(name)
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"{name} is a {type(parent).__name__}")
        del parent[depth:]
    config = getattr(model, "config", None)
    for attribute in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, depth)


def _copy(model: nn.Module) -> nn.Module:
    """A copy with parameters and buffers of its own: fake tensors have no data that deepcopy could ask for."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer)
    return copy.deepcopy(model, memo)


class _Tracer:
    """Records variants at cut depths and two micro-batches, and keeps what was recorded."""

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        fewest = workload.fixed_micro_batch or 2
        self.samples = (fewest, 2 * fewest)
        self.timed: dict[GroupKey, Timed] = {}
        self._recipes: dict[GroupKey, Timing] = {}
        self.num_blocks: int | None = None
        self.block_gradient_bytes = 0.0
        self._plain: dict[str, tuple[Counter[GroupKey], Counter[GroupKey]]] = {}
        self._models: dict[int | None, nn.Module] = {}
        self._kept: dict[tuple[str, int | None, int], Recording] = {}

    def depth_law_holds(self, depth: int) -> bool:
        """Whether cut models foretell the whole one, for the plain variant."""
        key = VariantKey()
        try:
            shallow, deep = (self.record(key, d, self.samples[0]) for d in DEPTHS)
        except (AttributeError, IndexError, TypeError, RuntimeError):
            return False
        whole = self.record(key, None, self.samples[0])
        for figure in (total_flops, total_moved, lambda recording: recording.saved_after_forward):
            a, b, real = figure(shallow), figure(deep), figure(whole)
            if abs(b + (b - a) * (depth - DEPTHS[1]) - real) > DEPTH_TOLERANCE * real:
                return False
        return True

    def record(self, key: VariantKey, depth: int | None, samples: int) -> Recording:
        """One micro-step of a variant."""
        place = (key.text(), depth, samples)
        if place not in self._kept:
            self._kept[place] = _record(self.workload, self.device, key, self._model(depth), samples, self.mode)
        return self._kept[place]

    def _model(self, depth: int | None) -> nn.Module:
        """A fresh copy of the model, cut to a depth."""
        with self.mode:
            if depth not in self._models:
                with torch.device(self.device):
                    model = self.workload.build_model()
                if depth is not None:
                    _cut_model(model, depth)
                self._models[depth] = model
            fake = isinstance(self.mode, FakeTensorMode)
            return _copy(self._models[depth]) if fake else copy.deepcopy(self._models[depth])

    def variant(self, key: VariantKey) -> VariantProfile:
        """The laws of a variant; the fused loss under checkpointing is put together from what it changes without."""
        plain = key.model_copy(update={"loss": "full"})
        if key.loss == "fused" and key.checkpointing != "none":
            bare, bare_fused = (
                self._laws(key.model_copy(update={"checkpointing": "none", "loss": loss})) for loss in ("full", "fused")
            )
            return swap_loss(key, self._laws(plain), bare, bare_fused)
        return self._laws(key)

    def same_as_own(self, key: VariantKey) -> VariantKey | None:
        """The same variant with the model's own attention, where that is the asked one already."""
        if key.attention == "own":
            return None
        depth = DEPTHS[0] if self.num_blocks is not None and self.num_blocks > DEPTHS[1] else None
        try:
            own, other = (self.record(VariantKey(attention=a), depth, self.samples[0]) for a in ("own", key.attention))
        except ConfigError:
            return None
        same = [o.name for o in own.operations] == [o.name for o in other.operations]
        return key.model_copy(update={"attention": "own"}) if same else None

    def _laws(self, key: VariantKey) -> VariantProfile:
        depth = self.num_blocks
        if depth is None or depth <= DEPTHS[1]:
            laws = self._at_depth(key, None)
            block_saved = scale(laws.block_saved, 1 / max(depth or 0, 1))
            return to_profile(key, Counter(), laws.groups, laws.peaks, block_saved, laws.saved, depth or 0)
        shallow = self._at_depth(key, DEPTHS[0])
        block, rest = self._split(key, shallow)
        block_saved = scale(shallow.block_saved, 1 / DEPTHS[0])
        more = depth - DEPTHS[0]
        # under autocast a checkpointed block keeps its cast weights to the end of the forward, and no longer
        later = block_saved if key.checkpointing == "none" else Law(per_sample=block_saved.per_sample)
        peaks = {
            part: self._deepen(part, pair, block_saved if part == "forward" else later, more)
            for part, pair in shallow.peaks.items()
        }
        return to_profile(key, block, rest, peaks, block_saved, add(shallow.saved, block_saved, more), depth)

    def _split(self, key: VariantKey, shallow: Laws) -> tuple[Counter[GroupKey], Counter[GroupKey]]:
        """What one block does and what the rest does.

        The plain variant of each precision is recorded at two depths, which tells them apart. What is not in the blocks
        is the same under every attention and checkpointing, and the blocks are the same under either loss.
        """
        plain = VariantKey(precision=key.precision)
        if plain.precision not in self._plain:
            two, three = (self._at_depth(plain, depth).groups for depth in DEPTHS)
            self._plain[plain.precision] = blocks_apart(two, three)
        block, rest = self._plain[plain.precision]
        if key == plain:
            return block, rest
        if key.loss != plain.loss:
            rest = minus(shallow.groups, block, DEPTHS[0])
        else:
            in_blocks = minus(shallow.groups, rest, 1)
            block = Counter({group: count // DEPTHS[0] for group, count in in_blocks.items()})
            if any(count % DEPTHS[0] for count in in_blocks.values()):
                rest[next(iter(rest))] = -1  # not alike after all
        if any(count < 0 for count in (block | rest).values()) or any(count < 0 for count in rest.values()):
            return blocks_apart(shallow.groups, self._at_depth(key, DEPTHS[1]).groups)
        return block, rest

    def _deepen(self, part: str, pair: tuple[Law, Law], block_saved: Law, more: int) -> tuple[Law, Law]:
        """The peaks with `more` blocks: what these keep; at the end of the backward their gradients instead."""
        first, later = pair
        if part == "tail":
            return Law(fixed=first.fixed + more * self.block_gradient_bytes, per_sample=first.per_sample), later
        return add(first, block_saved, more), add(later, block_saved, more)

    def _at_depth(self, key: VariantKey, depth: int | None) -> Laws:
        few, many = (self.record(key, depth, samples) for samples in self.samples)
        return laws_of(few, many, self.samples, self._recipes)

    def recipes(self) -> dict[GroupKey, Timing]:
        """For each group of operations how to run one again."""
        return self._recipes

    def with_time(self, group: OperationGroup) -> OperationGroup:
        """A group with the seconds that were measured for it, where they were."""
        timed = self.timed.get(group_key(group))
        if timed is None:
            return group
        found = {"measured_s": timed.seconds, "measured_samples": float(self.samples[0])}
        if timed.more_s is not None:
            found |= {"measured_more_s": timed.more_s, "measured_more_samples": float(self.samples[0] * timed.times)}
        return group.model_copy(update=found)


def _record(workload: Workload, device: str, key: VariantKey, model: nn.Module, samples: int, mode: Any) -> Recording:
    """Prepares a variant with prepare() and records one micro-step of it."""
    config = TrainingConfig.model_validate(
        {
            "micro_batch": 1,
            "precision": "bf16" if key.precision == "half" else "fp32",
            "attention": key.attention,
            "checkpointing": key.checkpointing,
            "loss": key.loss,
        }
    )
    with mode:
        blocks = [block for _, block in find_structure(model).blocks]
        # built where it belongs already; under fake tensors torch cannot swap parameters that are looked at
        model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
        run = prepare(workload, config, device=device, model=model)
        batch = workload.make_batch(samples, 0)
        recorder = Recorder()
        recorder.watch([*model.parameters(), *model.buffers()])
        at_start = recorder.alive
        _watch_gradients(recorder, run.parameters)
        _mark_parts(recorder, blocks)
        divisor = torch.tensor(1.0, device=device)
        with recorder:
            run.micro_step(batch, divisor, sync=True)
    recording = recorder.recording
    recording.peaks = {part: (a - at_start, b - at_start) for part, (a, b) in recording.peaks.items()}
    recording.saved_after_forward -= at_start
    return recording


def _watch_gradients(recorder: Recorder, parameters: list[nn.Parameter]) -> None:
    def count(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.gradient_bytes += parameter.grad.untyped_storage().nbytes()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)


def _mark_parts(recorder: Recorder, blocks: list[nn.Module]) -> None:
    """Hooks that tell the recorder where it is: see Recording for the parts."""
    if not blocks:
        return
    first, last = blocks[0], blocks[-1]
    alive_before: dict[int, int] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if not in_backward():
            alive_before[id(module)] = recorder.alive

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # the recomputation of a checkpointed block
            return
        recorder.recording.block_saved.append(recorder.alive - alive_before[id(module)])
        if module is last:
            recorder.part = "head"
            _on_gradient(output, lambda: _go(recorder, "backward", {"forward", "head"}))
            _on_gradient(args, lambda: _go(recorder, "middle", {"backward"}))
        if module is first and first is not last:
            _on_gradient(output, lambda: _go(recorder, "tail", {"middle", "backward", "head"}))

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)


def _go(recorder: Recorder, part: str, come_from: set[str]) -> None:
    if recorder.part in come_from:
        recorder.part = part


def _on_gradient(tensors: Any, then: Callable[[], None]) -> None:
    for tensor in pytree.tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: then())
            return


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
    tracer: _Tracer,
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
        boundary_bytes=Law(per_sample=4.0 * length * hidden) if length and isinstance(hidden, int) else Law(),
        batch_bytes=Law(per_sample=sum(t.numel() * t.element_size() for t in leaves) / 2),
        fewest_samples=float(tracer.samples[0]),
        tokens_per_sample=workload.tokens_per_sample,
        variants=variants,
        notes=tuple(notes),
    )

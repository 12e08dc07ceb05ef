"""The tracing itself: builds each variant with prepare() under fake tensors, records it, and fits the laws."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.cost.profile import (
    Law,
    ModelProfile,
    OperationGroup,
    PeakLaw,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.recorder import Operation, Recipe, Recorder, Recording, in_backward
from autoplan.planner.replay import time_recipes
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


GroupKey = tuple[Any, ...]


def profile_workload(workload: Workload, device: str, *, identity: str, timing_budget_s: float = 0.0) -> ModelProfile:
    """Traces every variant of a workload.

    Args:
        workload: What is trained.
        device: cpu or cuda. Fake tensors stand in for either.
        identity: Kept in the profile.
        timing_budget_s: Seconds for timing the recorded operations on the device, one by one; 0: none is timed.

    Raises:
        WorkloadError: the program cannot run on fake tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = workload.build_model()
    structure = find_structure(model)
    notes: list[str] = []
    samples = (
        (2, 4) if workload.fixed_micro_batch is None else (workload.fixed_micro_batch, 2 * workload.fixed_micro_batch)
    )
    tracer = _Tracer(workload, device, samples)
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
        timed = time_recipes(tracer.recipes(), torch.device(device), timing_budget_s)
        tracer.timed = timed
        variants = {
            name: variants[name].model_copy(update={"groups": tuple(tracer.with_time(g) for g in variant.groups)})
            for name, variant in variants.items()
        }
    return _assemble(workload, model, structure, depth, variants, tracer, identity, device, notes)


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

    def __init__(self, workload: Workload, device: str, samples: tuple[int, int]) -> None:
        self.workload = workload
        self.device = device
        self.samples = samples
        self.timed: dict[GroupKey, float] = {}
        self._recipes: dict[GroupKey, tuple[Recipe, int, float]] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
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
        for figure in (_flops, _moved, lambda recording: recording.saved_after_forward):
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
            return _copy(self._models[depth])

    def variant(self, key: VariantKey) -> VariantProfile:
        """The laws of a variant; the fused loss under checkpointing is put together from what it changes without."""
        plain = key.model_copy(update={"loss": "full"})
        if key.loss == "fused" and key.checkpointing != "none":
            bare, bare_fused = (
                self._laws(key.model_copy(update={"checkpointing": "none", "loss": loss})) for loss in ("full", "fused")
            )
            return _swap_loss(key, self._laws(plain), bare, bare_fused)
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
            block_saved = _scale(laws.block_saved, 1 / max(depth or 0, 1))
            return _to_profile(key, Counter(), laws.groups, laws.peaks, block_saved, laws.saved, depth or 0)
        shallow = self._at_depth(key, DEPTHS[0])
        block, rest = self._split(key, shallow)
        block_saved = _scale(shallow.block_saved, 1 / DEPTHS[0])
        more = depth - DEPTHS[0]
        # under autocast a checkpointed block keeps its cast weights to the end of the forward, and no longer
        later = block_saved if key.checkpointing == "none" else Law(per_sample=block_saved.per_sample)
        peaks = {
            part: self._deepen(part, pair, block_saved if part == "forward" else later, more)
            for part, pair in shallow.peaks.items()
        }
        return _to_profile(key, block, rest, peaks, block_saved, _add(shallow.saved, block_saved, more), depth)

    def _split(self, key: VariantKey, shallow: _Laws) -> tuple[Counter[GroupKey], Counter[GroupKey]]:
        """What one block does and what the rest does.

        The plain variant of each precision is recorded at two depths, which tells them apart. What is not in the blocks
        is the same under every attention and checkpointing, and the blocks are the same under either loss.
        """
        plain = VariantKey(precision=key.precision)
        if plain.precision not in self._plain:
            two, three = (self._at_depth(plain, depth).groups for depth in DEPTHS)
            self._plain[plain.precision] = _blocks_apart(two, three)
        block, rest = self._plain[plain.precision]
        if key == plain:
            return block, rest
        if key.loss != plain.loss:
            rest = _minus(shallow.groups, block, DEPTHS[0])
        else:
            in_blocks = _minus(shallow.groups, rest, 1)
            block = Counter({group: count // DEPTHS[0] for group, count in in_blocks.items()})
            if any(count % DEPTHS[0] for count in in_blocks.values()):
                rest[next(iter(rest))] = -1  # not alike after all
        if any(count < 0 for count in (block | rest).values()) or any(count < 0 for count in rest.values()):
            return _blocks_apart(shallow.groups, self._at_depth(key, DEPTHS[1]).groups)
        return block, rest

    def _deepen(self, part: str, pair: tuple[Law, Law], block_saved: Law, more: int) -> tuple[Law, Law]:
        """The peaks with `more` blocks: what these keep; at the end of the backward their gradients instead."""
        first, later = pair
        if part == "tail":
            return Law(fixed=first.fixed + more * self.block_gradient_bytes, per_sample=first.per_sample), later
        return _add(first, block_saved, more), _add(later, block_saved, more)

    def _at_depth(self, key: VariantKey, depth: int | None) -> _Laws:
        few, many = (self.record(key, depth, samples) for samples in self.samples)
        return _laws_of(few, many, self.samples, self._recipes)

    def recipes(self) -> dict[GroupKey, tuple[Recipe, int, float]]:
        """For each group of operations how to run one again, how many it stands for, and its FLOPs."""
        return self._recipes

    def with_time(self, group: OperationGroup) -> OperationGroup:
        """A group with the seconds that were measured for it, where they were."""
        seconds = self.timed.get(group_key(group))
        if seconds is None:
            return group
        return group.model_copy(update={"measured_s": seconds, "measured_samples": float(self.samples[0])})


@dataclass(kw_only=True, slots=True)
class _Laws:
    groups: Counter[GroupKey]
    peaks: dict[str, tuple[Law, Law]]
    saved: Law
    block_saved: Law


def _flops(recording: Recording) -> float:
    return sum(operation.flops for operation in recording.operations)


def _moved(recording: Recording) -> float:
    return sum(operation.bytes_moved for operation in recording.operations)


def _line(few: float, many: float, samples: tuple[int, int]) -> Law:
    slope = (many - few) / (samples[1] - samples[0])
    return Law(fixed=few - slope * samples[0], per_sample=slope)


def _scale(law: Law, factor: float) -> Law:
    return Law(fixed=law.fixed * factor, per_sample=law.per_sample * factor)


def _add(law: Law, block: Law, more: int) -> Law:
    return Law(fixed=law.fixed + more * block.fixed, per_sample=law.per_sample + more * block.per_sample)


def _blocks_apart(two: Counter[GroupKey], three: Counter[GroupKey]) -> tuple[Counter[GroupKey], Counter[GroupKey]]:
    """What one block does and what the rest does, from models of two and of three blocks."""
    block = _minus(three, two, 1)
    return block, _minus(two, block, DEPTHS[0])


def _minus(a: Counter[GroupKey], b: Counter[GroupKey], times: int) -> Counter[GroupKey]:
    """a - times x b, negative counts kept, zeros left out."""
    out = Counter(a)
    for group, count in b.items():
        out[group] -= times * count
    return Counter({group: count for group, count in out.items() if count})


def group_key(group: OperationGroup) -> GroupKey:
    """The key that a group was made from."""
    laws = (group.flops, group.bytes_moved, group.m, group.n, group.k, group.batch)
    return (group.name, group.kind, group.phase, group.dtype, *((law.fixed, law.per_sample) for law in laws))


def _laws_of(
    few: Recording,
    many: Recording,
    samples: tuple[int, int],
    recipes: dict[GroupKey, tuple[Recipe, int, float]],
) -> _Laws:
    groups: Counter[GroupKey] = Counter()
    start, end = _common_ends(few.operations, many.operations)
    pairs = list(zip(few.operations[:start], many.operations[:start], strict=True))
    if end:
        pairs += zip(few.operations[-end:], many.operations[-end:], strict=True)
    for a, b in pairs:
        key = _group_key(a, b, samples)
        groups[key] += 1
        if a.recipe is not None:
            recipes.setdefault(key, (a.recipe, 1, a.flops))
    between = few.operations[start : len(few.operations) - end], many.operations[start : len(many.operations) - end]
    groups.update(_grown_keys(*between, samples, recipes))
    peaks = {
        part: (
            _line(few.peaks[part][0], many.peaks[part][0], samples),
            _line(few.peaks[part][1], many.peaks[part][1], samples),
        )
        for part in few.peaks
        if part in many.peaks
    }
    return _Laws(
        groups=groups,
        peaks=peaks,
        saved=_line(few.saved_after_forward, many.saved_after_forward, samples),
        block_saved=_line(sum(few.block_saved), sum(many.block_saved), samples),
    )


def _common_ends(few: list[Operation], many: list[Operation]) -> tuple[int, int]:
    """How many operations two recordings have in common at their start and at their end."""
    length = min(len(few), len(many))
    start = next((i for i in range(length) if few[i].name != many[i].name), length)
    end = next((i for i in range(length - start) if few[-1 - i].name != many[-1 - i].name), length - start)
    return start, end


def _grown_keys(
    few: list[Operation],
    many: list[Operation],
    samples: tuple[int, int],
    recipes: dict[GroupKey, tuple[Recipe, int, float]],
) -> Counter[GroupKey]:
    """Groups for a stretch that grows by repetition (chunks of rows): alike operations as one batch of them."""
    totals: dict[tuple[str, str, str, str], list[list[Operation]]] = {}
    for side, operations in enumerate((few, many)):
        for o in operations:
            totals.setdefault((o.name, o.kind, o.phase, o.dtype), [[], []])[side].append(o)
    groups: Counter[GroupKey] = Counter()
    for (name, kind, phase, dtype), (a, b) in totals.items():
        laws = [
            _line(sum(o.flops for o in a), sum(o.flops for o in b), samples),
            _line(sum(o.bytes_moved for o in a), sum(o.bytes_moved for o in b), samples),
            *(Law(fixed=size) for size in (b or a)[0].sizes[:3]),
            _line(len(a), len(b), samples),
        ]
        key = (name, kind, phase, dtype, *((law.fixed, law.per_sample) for law in laws))
        groups[key] += 1
        recipe = a[0].recipe if a else None
        if recipe is not None:
            recipes.setdefault(key, (recipe, len(a), a[0].flops))
    return groups


def _group_key(few: Operation, many: Operation, samples: tuple[int, int]) -> GroupKey:
    pairs = [(few.flops, many.flops), (few.bytes_moved, many.bytes_moved)]
    pairs += list(zip(few.sizes, many.sizes, strict=True))
    laws = [_line(a, b, samples) for a, b in pairs]
    return (few.name, few.kind, few.phase, few.dtype, *((law.fixed, law.per_sample) for law in laws))


def _to_profile(
    key: VariantKey,
    block: Counter[GroupKey],
    rest: Counter[GroupKey],
    peaks: dict[str, tuple[Law, Law]],
    block_saved: Law,
    saved: Law,
    num_blocks: int,
) -> VariantProfile:
    segments: tuple[tuple[Literal["block", "rest"], Counter[GroupKey]], ...] = (("block", block), ("rest", rest))
    groups = [_group(g, count, segment) for segment, counts in segments for g, count in counts.items() if count]
    kernels = sum(g.count * (num_blocks if g.segment == "block" else 1) for g in groups)
    rest_saved = Law(
        fixed=saved.fixed - num_blocks * block_saved.fixed,
        per_sample=saved.per_sample - num_blocks * block_saved.per_sample,
    )
    return VariantProfile(
        key=key,
        groups=tuple(groups),
        kernels=kernels,
        peaks=tuple(
            PeakLaw(part=part, first=first, later=later)  # type: ignore[arg-type]
            for part, (first, later) in peaks.items()
            if part != "middle"
        ),
        block_saved_bytes=block_saved,
        rest_saved_bytes=rest_saved,
    )


def _group(key: GroupKey, count: float, segment: Literal["block", "rest"]) -> OperationGroup:
    name, kind, phase, dtype, *laws = key
    flops, moved, m, n, k, batch = (Law(fixed=fixed, per_sample=slope) for fixed, slope in laws)
    split = "none"
    if segment == "block":
        split = {"matmul": "n", "attention": "batch"}.get(kind, "all")
        if kind == "matmul" and batch.per_sample:
            split = "batch"
    return OperationGroup.model_validate(
        {
            "name": name,
            "kind": kind,
            "segment": segment,
            "phase": phase,
            "dtype": dtype,
            "count": count,
            "flops": flops,
            "bytes_moved": moved,
            "m": m,
            "n": n,
            "k": k,
            "batch": batch,
            "tensor_split": split,
        }
    )


def _swap_loss(
    key: VariantKey, plain: VariantProfile, bare: VariantProfile, bare_fused: VariantProfile
) -> VariantProfile:
    """A checkpointed variant with the fused loss: the checkpointed one, with the loss's own terms exchanged."""

    def exchange(a: Law, b: Law, c: Law) -> Law:
        return Law(fixed=a.fixed - b.fixed + c.fixed, per_sample=a.per_sample - b.per_sample + c.per_sample)

    by_part = {p.part: p for p in bare.peaks}, {p.part: p for p in bare_fused.peaks}
    peaks = tuple(
        PeakLaw(
            part=p.part,
            first=exchange(p.first, by_part[0][p.part].first, by_part[1][p.part].first),
            later=exchange(p.later, by_part[0][p.part].later, by_part[1][p.part].later),
        )
        for p in plain.peaks
        if p.part in by_part[0] and p.part in by_part[1]
    )
    blocks = tuple(g for g in plain.groups if g.segment == "block")
    rest = tuple(g for g in bare_fused.groups if g.segment == "rest")
    return VariantProfile(
        key=key,
        groups=blocks + rest,
        kernels=plain.kernels - bare.kernels + bare_fused.kernels,
        peaks=peaks,
        block_saved_bytes=plain.block_saved_bytes,
        rest_saved_bytes=exchange(plain.rest_saved_bytes, bare.rest_saved_bytes, bare_fused.rest_saved_bytes),
    )


def _record(
    workload: Workload, device: str, key: VariantKey, model: nn.Module, samples: int, mode: FakeTensorMode
) -> Recording:
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
    try:
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
    except DataDependentOutputException as error:
        raise WorkloadError(
            f"{workload.name} cannot be traced: {error.func} asks for the value of a tensor",
            hint="The model's control flow depends on data. One block of it can be measured instead.",
        ) from error
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


def _optimizer_state(workload: Workload) -> tuple[str, float, str | None]:
    """Name, state bytes per fp32 element, and a note where the latter had to be assumed; one tiny real step tells."""
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
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
    workload: Workload,
    model: nn.Module,
    structure: Structure,
    depth: int | None,
    variants: dict[str, VariantProfile],
    tracer: _Tracer,
    identity: str,
    device: str,
    notes: list[str],
) -> ModelProfile:
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    optimizer_name, state_bytes, note = _optimizer_state(workload)
    if note is not None:
        notes.append(note)
    block_sizes = [sum(p.numel() for p in block.parameters()) for _, block in structure.blocks]
    outside = sum(p.numel() for p in parameters) - sum(block_sizes)
    per_depth = len(structure.stacks) if depth is not None else 1
    with FakeTensorMode(allow_non_fake_inputs=True):
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

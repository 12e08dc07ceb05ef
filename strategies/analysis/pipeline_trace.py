"""Facts about a model that a pipeline cut needs: which modules run before, inside and after its blocks.

One forward of one sample with hooks, under fake tensors: nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PipelineTrace:
    """How a model runs around its blocks.

    Attributes:
        blocks: Names, in order.
        before, after: Names of the modules with parameters of their own that run before the first block, and after
            the last (or never as modules: a head whose weight the loss takes).
        output_shapes: By name of a module in `before`, the shape of its output for one sample; None: of its input.
        hidden_shape: Of the hidden states between blocks, for one sample: (1, sequence, hidden).
        hidden_dtype: Their type.
        tuples: Blocks return a tuple whose first part is the hidden states.
        block_costs, first_cost, last_cost: FLOPs per sample of the forward.
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    output_shapes: dict[str, tuple[int, ...] | None]
    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    tuples: bool
    block_costs: tuple[float, ...]
    first_cost: float
    last_cost: float


@dataclass
class _HookRecord:
    entered: int = 0
    left: int = 0
    before: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def trace_pipeline(model: nn.Module, structure: Structure, workload: Workload) -> PipelineTrace | str:
    """Runs one sample through a model under fake tensors.

    Args:
        model: The model, on any device; its own tensors are not touched.
        structure: Its structure.
        workload: Gives the sample and the loss.

    Returns:
        The trace, or the reason why the model cannot be cut.
    """
    if len(structure.stacks) != 1 or structure.frozen_stacks or len(structure.blocks) < 2:
        stacks = len(structure.stacks) + len(structure.frozen_stacks)
        return f"the model has {stacks} stack(s) of repeated blocks; only one can be cut into stages"
    names = [name for name, _ in structure.blocks]
    notes = _HookRecord()
    inside = {part for block in names for part, _ in model.get_submodule(block).named_modules(prefix=block)}
    owners = [
        name
        for name, module in model.named_modules()
        if name not in inside and any(True for _ in module.parameters(recurse=False))
    ]
    device = next(model.parameters()).device
    batch: Batch = workload.make_batch(1, 0)
    handles: list[Any] = []
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            if device.type == "meta":  # a loss may move what it holds (a reference model) to where the batch is
                model, device = workload.build_model(), torch.device("cpu")
            handles = _watch(model, names, owners, notes)
            fake = pytree.tree_map(
                lambda leaf: mode.from_tensor(leaf.to(device)) if isinstance(leaf, torch.Tensor) else leaf, batch
            )
            workload.loss(model, fake)
    except Exception as error:
        return f"its forward does not run without data ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    finally:
        for handle in handles:
            handle.remove()
    return _read(model, structure, names, owners, notes)


def _watch(model: nn.Module, names: list[str], owners: list[str], notes: _HookRecord) -> list[Any]:
    handles: list[Any] = []

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        notes.entered += 1
        notes.inputs.append(args[0] if args else kwargs.get("hidden_states"))

    def leave_block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        notes.left += 1
        notes.outputs.append(output)

    def watch_owner(name: str) -> Callable[..., None]:
        def ran(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            where = notes.before if not notes.entered else notes.after if notes.left == len(names) else notes.inside
            where.append(name)
            if isinstance(output, torch.Tensor):
                same = bool(args) and isinstance(args[0], torch.Tensor) and args[0].shape == output.shape
                notes.shapes[name] = None if same else tuple(output.shape)

        return ran

    for name in names:
        block = model.get_submodule(name)
        handles.append(block.register_forward_pre_hook(enter_block, with_kwargs=True))
        handles.append(block.register_forward_hook(leave_block))
    for name in owners:
        handles.append(model.get_submodule(name).register_forward_hook(watch_owner(name)))
    return handles


def _read(
    model: nn.Module, structure: Structure, names: list[str], owners: list[str], notes: _HookRecord
) -> PipelineTrace | str:
    if notes.entered != len(names) or notes.left != len(names):
        return f"its {len(names)} blocks ran {notes.entered} times in one forward"
    tuples = all(isinstance(output, tuple) for output in notes.outputs)
    hidden = [output[0] if isinstance(output, tuple) else output for output in notes.outputs]
    if not all(isinstance(tensor, torch.Tensor) for tensor in hidden):
        return "its blocks do not return hidden states"
    for position, (given, previous) in enumerate(zip(notes.inputs[1:], hidden, strict=False), start=1):
        if given is not previous:
            return f"{names[position]} does not take what {names[position - 1]} returns"
    if tuples and any(len(output) > 1 and output[1] is not None for output in notes.outputs):
        return "its blocks pass on more than hidden states"
    if len({(tuple(tensor.shape), tensor.dtype) for tensor in hidden}) > 1:
        return "hidden states change their shape from block to block"
    if notes.inside:
        return f"{notes.inside[0]} has parameters, is outside the blocks and runs between them"
    called = {*notes.before, *notes.after}
    head = None if structure.head is None else structure.head[0]
    for name in owners:
        if name not in called and name != head:
            return f"{name} has parameters and did not run as a module"
        if name in notes.before and name in notes.after:
            return f"{name} runs before the blocks and after them"
    lost = [name for name in notes.before if name not in notes.shapes]
    if lost:
        return f"{lost[0]} returns no tensor"
    before = tuple(name for name in owners if name in notes.before)
    after = tuple(name for name in owners if name not in notes.before)
    shape = tuple(hidden[0].shape)
    rows = math.prod(shape[:-1])
    # the two products of causal attention over (samples, sequence, hidden) states: 2 S^2 H a sample
    attention = 2.0 * shape[1] ** 2 * shape[2] if len(shape) == 3 else 0.0
    return PipelineTrace(
        blocks=tuple(names),
        before=before,
        after=after,
        output_shapes={name: notes.shapes[name] for name in before},
        hidden_shape=shape,
        hidden_dtype=hidden[0].dtype,
        tuples=tuples,
        block_costs=tuple(_matrix_flops(model.get_submodule(name), rows) + attention for name in names),
        first_cost=sum(_matrix_flops(model.get_submodule(name), rows) for name in before),
        last_cost=sum(_matrix_flops(model.get_submodule(name), rows) for name in after),
    )


def _matrix_flops(module: nn.Module, rows: int) -> float:
    """2 x rows x elements for every weight matrix that is multiplied with."""
    if isinstance(module, nn.Embedding):
        return 0.0
    return sum(2.0 * rows * weight.numel() for weight in module.parameters() if weight.dim() > 1)

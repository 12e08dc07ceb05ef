"""Tensor parallelism with sequence parallelism: each rank holds a part of every projection and of the vocabulary.

Parameters are DTensors on the tp axis, so that optimizers, FSDP2, clipping and distributed checkpoints see one model;
what runs between the collectives runs on local tensors. In a block (Korthikanti et al., arXiv:2205.05198, fig. 5):

    [B, S/t, H] -> norm -> gather the sequence -> colwise ... rowwise -> sum and scatter the sequence -> [B, S/t, H]

parallelize_module is not used for the projections: it unties head and embedding, refuses GPT-2's Conv1D, and a plain
Shard(1) of a fused query-key-value weight splits it across the wrong columns. Legend of shapes: B samples, S sequence,
H hidden, V vocabulary, t the degree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from autoplan.errors import ConfigError, WorkloadError
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.analysis.tensor_plans import FUSED_STYLE, TensorPlan, find_tensor_plan
from autoplan.strategies.techniques.base import Build, Strategy
from autoplan.strategies.techniques.loss import CHUNK_ROWS, splits_by_head
from autoplan.strategies.techniques.loss_kernels import limited_rows
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, OutputHead, Workload


class TensorParallelStrategy(Strategy):
    """Splits projections, norms and vocabulary over the tp axis."""

    name = "tp"

    def apply(self, build: Build) -> None:
        """Distributes every parameter and puts the collectives where the plan says; a split vocabulary splits the loss.

        Raises:
            ConfigError: the model has no plan, or the degree does not divide what it splits.
        """
        config = build.config
        if config.tp == 1:
            return
        assert build.mesh is not None
        mesh: DeviceMesh = build.mesh["tp"]
        plan = build.tensor_plan or make_tensor_plan(build.model, build.structure, build.workload, config.tp)
        split_model(build.model, plan, mesh, [name for name, _ in build.structure.blocks])
        if plan.head is not None:
            head = build.workload.head
            assert head is not None
            build.training_module.loss = VocabularyParallelLoss(head, mesh, chunked=config.loss == "fused")
        build.gradients.finish.append(functools.partial(reduce_partial_gradients, build.model))


def make_tensor_plan(model: nn.Module, structure: Structure, workload: Workload, degree: int) -> TensorPlan:
    """How a whole model is split over so many ranks; the meta device is enough.

    Raises:
        ConfigError: the model has no plan, or the degree does not divide what it splits.
    """
    plan = find_tensor_plan(model, structure, workload.tensor_plan)
    if isinstance(plan, str):
        raise ConfigError(f"tp={degree} does not apply: {plan}", hint="Use tp=1 for this model.")
    if plan.unit % degree:
        raise ConfigError(
            f"tp={degree} does not divide the model: it has {plan.unit_of}, so the degree must divide {plan.unit}",
            hint=f"tp can be {', '.join(str(d) for d in range(1, plan.unit + 1) if plan.unit % d == 0)}.",
        )
    if not splits_by_head(workload, model):
        plan = dataclasses.replace(plan, head=None, vocabulary_tables=())
    return plan


def split_model(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, blocks: Sequence[str]) -> None:
    """Splits a model in place; modules that a pipeline stage does not hold are passed over.

    Args:
        model: The model.
        plan: How it is split.
        mesh: The tp axis.
        blocks: The names of its repeated blocks.
    """
    splitter = _Splitter(model, mesh)
    for name, style in plan.styles.items():
        module = _held(model, name)
        if module is not None:
            splitter.split_projection(module, style)
    for name, attributes in plan.widths.items():
        module = _held(model, name)
        for attribute in attributes if module is not None else ():
            setattr(module, attribute, getattr(module, attribute) // mesh.size())
    for name in plan.vocabulary_tables:
        module = _held(model, name)
        if module is not None:
            splitter.split_table(module)
    if plan.head is not None and (linear := _held(model, plan.head)) is not None:
        splitter.split_head(linear)
    splitter.replicate_rest([*blocks, plan.exit])
    _place_collectives(model, plan, mesh)


def _held(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name, if this rank's stage holds it."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if next(module.parameters(), None) is not None else None


def _place_collectives(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    entry, exit_ = model.get_submodule(plan.entry), model.get_submodule(plan.exit)
    entry.register_forward_pre_hook(
        functools.partial(_on_input, functools.partial(split_sequence, mesh)), with_kwargs=True
    )
    for region in plan.regions:
        module = _held(model, region)
        if module is not None:
            gather = functools.partial(gather_sequence, mesh, Partial())
            module.register_forward_pre_hook(functools.partial(_on_input, gather), with_kwargs=True)
    # After the exit every rank has the whole sequence. Under a split head each rank's gradient is its own
    # vocabulary's share of the sum; under a whole head each has all of it.
    gather = functools.partial(gather_sequence, mesh, Partial() if plan.head is not None else Replicate())
    exit_.register_forward_hook(lambda module, args, output: gather(output))


def _on_input(
    change: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-hook that changes the hidden states: the first argument, or the one called so."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {key: change(value) if key == "hidden_states" else value for key, value in kwargs.items()}


# The collectives, each with its gradient.


def split_sequence(mesh: DeviceMesh, whole: torch.Tensor) -> torch.Tensor:
    """[B, S, H], the same on every rank -> this rank's [B, S/t, H]; the gradient is gathered.

    Raises:
        WorkloadError: the degree does not divide the sequence.
    """
    if whole.shape[1] % mesh.size():
        raise WorkloadError(
            f"a sequence of {whole.shape[1]} does not divide over tp={mesh.size()} ranks",
            hint="Pad batches to a multiple of the degree, or search with --fix tp=1.",
        )
    return _redistributed(mesh, whole, Replicate(), Shard(1))


def gather_sequence(mesh: DeviceMesh, gradient: Placement, part: torch.Tensor) -> torch.Tensor:
    """[B, S/t, H] -> [B, S, H]; a Partial gradient is summed and scattered, a Replicate one only cut."""
    whole = DTensor.from_local(part, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[gradient])


def sum_scatter_sequence(mesh: DeviceMesh, partial: torch.Tensor) -> torch.Tensor:
    """Each rank's summand [B, S, H] -> this rank's part [B, S/t, H] of the sum; the gradient is gathered."""
    return _redistributed(mesh, partial, Partial(), Shard(1))


def sum_whole(mesh: DeviceMesh, partial: torch.Tensor) -> torch.Tensor:
    """Each rank's summand -> the sum, on every rank."""
    return _redistributed(mesh, partial, Partial(), Replicate())


def _redistributed(mesh: DeviceMesh, part: torch.Tensor, now: Placement, then: Placement) -> torch.Tensor:
    return DTensor.from_local(part, mesh, [now], run_check=False).redistribute(placements=[then]).to_local()


def reduce_partial_gradients(model: nn.Module) -> None:
    """Sums the gradients that ranks hold in part (norms and biases of the split sequence), once per step.

    FSDP2 has done it by then for the parameters it holds.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


# The parameters.


def local(parameter: Any, *gradient: Placement) -> Any:
    """The rank's own part of a parameter; `gradient` says how gradients of the parts make up the whole's."""
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=list(gradient) or None)
    return parameter


class _Splitter:
    """Turns the parameters of a model into DTensors, each once, so that tied ones stay tied."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh

    def distribute(self, module: nn.Module, name: str, placement: Placement) -> None:
        """Replaces a parameter everywhere it stands."""
        parameter = module._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return
        # Every rank holds the same values already: nothing is sent (src_data_rank=None).
        whole = distribute_tensor(parameter.detach(), self._mesh, [placement], src_data_rank=None)
        split = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for owner in self._model.modules():
            for key, value in owner._parameters.items():
                if value is parameter:
                    owner._parameters[key] = split

    def split_projection(self, module: nn.Module, style: str) -> None:
        """Splits a Linear or Conv1D by its outputs (colwise) or its inputs (rowwise)."""
        transposed = type(module) is not nn.Linear
        fused = FUSED_STYLE.fullmatch(style)
        # dim of the weight that is split: Linear holds (outputs, inputs), Conv1D (inputs, outputs)
        dim = int(transposed) if style != "rowwise" else int(not transposed)
        parts = int(fused.group(1)) if fused else 1
        self.distribute(module, "weight", Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts))
        if style == "rowwise":
            self.distribute(module, "bias", Replicate())
            module.forward = functools.partial(_rowwise_forward, module, self._mesh, transposed)
        else:
            # A fused bias is held whole: FSDP2 would split its one dim a second time, and torch puts a tensor that
            # is split by two strides together in the wrong order (seen with 2.13; a weight has a dim for each).
            self.distribute(module, "bias", Shard(0) if parts == 1 else Replicate())
            module.forward = functools.partial(_colwise_forward, module, self._mesh, transposed, parts)

    def split_head(self, linear: nn.Module) -> None:
        """Splits the output head by rows; 50257 of them need not divide."""
        self.distribute(linear, "weight", Shard(0))
        self.distribute(linear, "bias", Shard(0))

    def split_table(self, embedding: nn.Module) -> None:
        """Splits an embedding by rows, as the head is split: tied, they are one parameter."""
        self.distribute(embedding, "weight", Shard(0))
        embedding.forward = functools.partial(_vocabulary_forward, embedding, self._mesh)

    def replicate_rest(self, sequence_parallel: Sequence[str]) -> None:
        """Holds every other parameter whole on each rank; where the sequence is split, gradients are summed."""
        for name, module in self._model.named_modules():
            held = [key for key, value in module._parameters.items() if value is not None]
            for key in held:
                self.distribute(module, key, Replicate())
            placements = [p for key in held for p in module._parameters[key].placements]
            if held and all(p.is_replicate() for p in placements) and "forward" not in vars(module):
                splits_sequence = any(name == part or name.startswith(part + ".") for part in sequence_parallel)
                gradient = Partial() if splits_sequence else Replicate()
                module.forward = functools.partial(_replicated_forward, module, tuple(held), gradient)


def _matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    return F.linear(x, weight.t() if transposed else weight, bias)


def _colwise_forward(module: Any, mesh: DeviceMesh, transposed: bool, parts: int, x: torch.Tensor) -> torch.Tensor:
    weight = local(module.weight)
    if parts == 1 or module.bias is None:
        return _matmul(x, weight, local(module.bias), transposed)
    bias = local(module.bias, Partial()).view(parts, mesh.size(), -1)[:, mesh.get_local_rank()].reshape(-1)
    return _matmul(x, weight, bias, transposed)


def _rowwise_forward(module: Any, mesh: DeviceMesh, transposed: bool, x: torch.Tensor) -> torch.Tensor:
    y = sum_scatter_sequence(mesh, _matmul(x, local(module.weight), None, transposed))
    # The bias once, after the sum; each rank adds it to its own positions, so its gradient is a sum over ranks.
    bias = local(module.bias, Partial())
    return y if bias is None else y + bias.to(y.dtype)


def _vocabulary_forward(module: Any, mesh: DeviceMesh, ids: torch.Tensor) -> torch.Tensor:
    """Looks up the ids in this rank's rows, zeros elsewhere, and sums over ranks: [B, S] -> [B, S, H]."""
    rows = local(module.weight)
    _, start = Shard.local_shard_size_and_offset(module.weight.shape[0], mesh.size(), mesh.get_local_rank())
    mine = (ids >= start) & (ids < start + rows.shape[0])
    padding = module.padding_idx
    padding = padding - start if padding is not None and 0 <= padding - start < rows.shape[0] else None
    ids = torch.where(mine, ids - start, 0)
    if type(module) is nn.Embedding:
        found = F.embedding(ids, rows, padding_idx=padding)
    else:  # it may scale what it finds
        module.padding_idx, whole = padding, module.padding_idx
        found = _own_forward(module, {"weight": rows}, ids)
        module.padding_idx = whole
    return sum_whole(mesh, torch.where(mine.unsqueeze(-1), found, 0))


def _own_forward(module: nn.Module, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module's class, with other tensors in the place of parameters; it may call super()."""
    held, forward = module._parameters, type(module).forward
    parameters = {name: held[name] for name in tensors}
    held.update(tensors)
    try:
        return forward(module, *args, **kwargs)
    finally:
        held.update(parameters)


def _replicated_forward(
    module: nn.Module, names: tuple[str, ...], gradient: Placement, *args: Any, **kwargs: Any
) -> Any:
    tensors = {name: local(module._parameters[name], gradient) for name in names}
    return _own_forward(module, tensors, *args, **kwargs)


class VocabularyParallelLoss:
    """Cross-entropy over logits whose vocabulary is split over ranks; no rank ever holds a whole row.

    Args:
        head: How the model splits into hidden states and output head.
        mesh: The tp axis.
        chunked: CHUNK_ROWS rows at a time, with recomputation: the fused loss of this layout.
    """

    def __init__(self, head: OutputHead, mesh: DeviceMesh, *, chunked: bool) -> None:
        self._head = head
        self._mesh = mesh
        self._chunked = chunked
        # Torch's rules for cross-entropy over split logits. Entered for good: the backward needs them too.
        self._rules = loss_parallel()
        self._rules.__enter__()

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        hidden = self._head.hidden(model, batch)
        linear: Any = self._head.linear(model)
        targets = self._head.targets(batch).reshape(-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        weight, bias = local(linear.weight), local(getattr(linear, "bias", None))
        vocabulary = linear.weight.shape[0]
        count = (targets != IGNORE_INDEX).sum()
        if not self._chunked:
            return LossSum(self._rows_loss(rows, weight, bias, targets, vocabulary), count)
        total = torch.zeros((), device=rows.device)
        at_once = limited_rows(CHUNK_ROWS)
        for some, classes in zip(rows.split(at_once), targets.split(at_once), strict=True):
            total = total + checkpoint(self._rows_loss, some, weight, bias, classes, vocabulary, use_reentrant=False)
        return LossSum(total, count)

    def _rows_loss(self, rows: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor, vocabulary: int) -> Any:
        logits = F.linear(rows, weight, bias).float()
        shape = torch.Size((rows.shape[0], vocabulary))
        split = DTensor.from_local(logits, self._mesh, [Shard(1)], run_check=False, shape=shape, stride=(vocabulary, 1))
        total = F.cross_entropy(split, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return total.to_local() if isinstance(total, DTensor) else total

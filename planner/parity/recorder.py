"""The data that a run of the parity check keeps: gradients, groups and parameters of each step, on sampled elements.

The reference and the candidate use the same Recorder. It reads tensors and changes none, except in `before_clipping`
with a factor. On several ranks every rank gathers whole tensors, so that each judges all of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.files import open_private
from autoplan.planner.parity.records import (
    START,
    WHOLE_STEPS,
    GroupMeasure,
    ParameterMeasure,
    StepMeasure,
    step_part,
)
from autoplan.strategies.analysis.structure import clean_name
from autoplan.strategies.techniques.mesh import axis_size, gather_full, local_tensor, named_parameters
from autoplan.strategies.techniques.rounded_steps import MOMENTS, StepRounding, like, rounding_of
from autoplan.strategies.workloads.carried import is_expanded, keep_buffers
from autoplan.text import writable

SAMPLED_ELEMENTS = 1 << 14  # of each parameter, evenly spread
_THINNED = 16  # one of so many sampled elements of a gradient is kept of the steps after the whole ones
_NORM_PIECE = 1 << 16
_STEP_FLAGS = ("params", "foreach", "fused", "capturable", "differentiable")  # how a step runs, not what it computes


class Recorder:
    """Keeps what one run of the check saw.

    Attributes:
        mesh: The mesh of the run; None: one rank.
        start: Sampled parameters before the first step, in their own dtype.
        clipped: For each step, the sampled gradients as the optimizer got them.
        stepped: For each step, the sampled parameters after it.
        steps: What each finished step saw.
        kept: For each step of a run that keeps parameters or moments rounded, the sampled parameters as they are kept;
            `stepped` then has what the step gave in fp32, before it was rounded.
        moments: For each step, the sampled moments as they are kept, in fp32, by parameter and name.
        rounding: What such a run keeps rounded.
    """

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.start: dict[str, torch.Tensor] = {}
        self.clipped: list[dict[str, torch.Tensor]] = []
        self.stepped: list[dict[str, torch.Tensor]] = []
        self.steps: list[StepMeasure] = []
        self.kept: list[dict[str, torch.Tensor]] = []
        self.moments: list[dict[str, dict[str, torch.Tensor]]] = []
        self.rounding: StepRounding | None = None
        self._unrounded: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._elements: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._put_back_buffers: Callable[[], None] = lambda: None
        self._norms: dict[str, float] = {}
        self._factor = 1.0
        self._groups: tuple[GroupMeasure, ...] = ()
        self._clipped: dict[str, torch.Tensor] = {}
        self._optimizer_steps = 0
        self._optimizer: Any = None

    # Before the first step.

    def begin(self, model: nn.Module, *, keep: bool = True) -> None:
        """Samples the parameters before the first step; with `keep`, also keeps what `restore` puts back.

        Frozen ones are kept if they are no more than those that train: a forward moves averages of these, and no base
        model.
        """
        self.start = self._sampled_parameters(model)
        names = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
        names = names.union(*self._stages(names))
        self._elements |= {f"{START}/{name}": self.start[name] for name in sorted(names)}
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._saved_buffers(model).items()}
        if keep:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            frozen = [p for p in model.parameters() if not (p.requires_grad or is_expanded(p))]
            few = sum(map(torch.numel, frozen)) <= sum(map(torch.numel, trained))
            tensors = map(local_tensor, (*trained, *frozen) if few else trained)
            self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
            self._put_back_buffers = keep_buffers(model)

    def restore(self) -> None:
        """Puts the parameters and buffers back to what they were before the first step."""
        with torch.no_grad():
            for tensor, kept in self._kept:
                tensor.copy_(kept)
        self._put_back_buffers()

    def release(self) -> None:
        """Drops the model and what was kept of it; what was recorded stays."""
        self._kept, self._put_back_buffers = [], lambda: None
        self.rounding = self._optimizer = None

    def parameters(self, model: nn.Module) -> dict[str, ParameterMeasure]:
        """The parameters that train, by name; of the whole model on one rank."""
        trained = {name: as_numbers(p) for name, p in named_parameters(model) if p.requires_grad}
        return {
            name: ParameterMeasure(shape=tuple(numbers.shape), dtype=str(numbers.dtype).removeprefix("torch."))
            for name, numbers in trained.items()
        }

    # A step, in the order of its events.

    def before_clipping(self, model: nn.Module, factor: float = 1.0) -> None:
        """Records the gradients of a step; then multiplies them by a factor, so that clipping has something to do."""
        self._norms = self.gradients(step_part(len(self.steps)), model)
        self._factor = factor
        if factor != 1.0:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)

    def before_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Records what the optimizer gets: clipped gradients, and its groups."""
        self._optimizer_steps += 1
        gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
        self._clipped = self._sampled(gradients)
        names = self._names = {id(parameter): name for name, parameter in named_parameters(model)}
        self._groups = self._merged_groups([_group(group, names) for group in optimizer.param_groups])

    def note_groups(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Records the groups of a step that is not taken."""
        self.before_optimizer(model, optimizer)
        groups = self._groups
        self.forget_step()
        self.steps.append(StepMeasure(loss=0.0, gradient_norms={}, gradient_norm=0.0, groups=groups))

    def forget_step(self) -> None:
        """Drops what was recorded of a step that was not taken (fp16)."""
        self._norms, self._clipped, self._groups, self._optimizer_steps = {}, {}, (), 0
        self._unrounded = {}

    def after_step(self, model: nn.Module, *, samples: int, loss: float, clipping_norm: float | None) -> None:
        """Records the parameters after a step of so many samples, and closes its record."""
        part = step_part(len(self.steps))
        shares = {}
        for name, gradient in self._clipped.items():
            before = norm_of(self._elements[f"{part}/{name}"])
            if before != 0:  # NaN too
                shares[name] = norm_of(gradient) / before
        self.clipped.append(self._clipped)
        kept = self._sampled_parameters(model)
        self.stepped.append(kept | self._unrounded)
        if self.rounding is not None:
            self.kept.append(kept)
            self.moments.append(self._sampled_moments(model))
        left = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.steps.append(
            StepMeasure(
                loss=loss,
                gradient_norms=self._norms,
                gradient_norm=self._factor * sum(norm**2 for norm in self._norms.values()) ** 0.5,
                clipping_norm=clipping_norm,
                clipped_share=shares,
                gradient_factor=self._factor,
                groups=self._groups,
                samples=samples,
                optimizer_steps=self._optimizer_steps,
                cleared=not any(as_numbers(local_tensor(gradient)).count_nonzero() for gradient in left),
            )
        )
        if len(self.steps) > WHOLE_STEPS:  # of these the whole gradient alone is compared
            thinned = {name: self._elements[f"{part}/{name}"][::_THINNED].clone() for name in self._norms}
            self._elements |= {f"{part}/{name}": sample for name, sample in thinned.items()}
        self.forget_step()

    # A forward and backward beside the steps.

    def gradients(self, part: str, model: nn.Module) -> dict[str, float]:
        """Keeps the sampled gradients of a part, in the place of earlier ones; gives the norms of the whole ones.

        The norms alone where the part has no name.
        """
        for name in [name for name in self._elements if name.startswith(part + "/")]:
            del self._elements[name]
        gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
        norms = {}
        for name, gradient in self._full(gradients).items():
            norms[name] = norm_of(gradient)
            if part:
                self._elements[f"{part}/{name}"] = sample_elements(gradient)
        return norms

    # The end.

    def changes(self, steps: int) -> dict[str, float]:
        """By parameter, frozen ones too, the norm of its change over so many steps, on the sampled elements."""
        last = self.stepped[steps - 1]
        return {name: norm_of(last[name].float() - start.float()) for name, start in self.start.items()}

    def buffer_changes(self, model: nn.Module) -> dict[str, float]:
        """By saved buffer whose shape is the same still, the norm of its change; 0 of a mask of -inf that stays."""
        return {
            name: norm_of(_difference(buffer.detach(), self._buffers[name]))
            for name, buffer in self._saved_buffers(model).items()
            if name in self._buffers and buffer.shape == self._buffers[name].shape
        }

    def add_steps(self, prefix: str, other: Recorder) -> None:
        """Keeps the gradients of another run's steps, under their names with a prefix."""
        self._elements |= {prefix + name: sample for name, sample in other._elements.items() if name.startswith("step")}

    def samples(self) -> dict[str, Any]:
        """The sampled elements as `part/parameter`, in fp32 as NumPy arrays."""
        return {name: sample.float().numpy() for name, sample in self._elements.items()}

    def save_samples(self, path: Path) -> None:
        """Writes the sampled elements."""
        import numpy as np

        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", opener=open_private) as file:
            np.savez(file, **{writable(name): values for name, values in self.samples().items()})

    # What is kept rounded.

    def watch_rounding(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on records what the steps of an optimizer gave before it was rounded, and what is kept of it."""
        self.rounding, self._optimizer = rounding_of(optimizer), optimizer
        if self.rounding is not None:
            self.rounding.observe = self._note_unrounded

    def _note_unrounded(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        name = self._names.get(id(parameter))
        if name is not None:
            self._unrounded |= self._sampled({name: like(value, parameter)})

    def _sampled_parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Sampled parameters: in their own dtype, or in fp32 where this run put them into bf16."""
        sampled = self._sampled(dict(named_parameters(model)))
        if self.rounding is None or self.rounding.parameters == "own":
            return sampled
        return {name: sample.float() if sample.is_floating_point() else sample for name, sample in sampled.items()}

    def _sampled_moments(self, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
        assert self.rounding is not None
        if self.rounding.states == "own":
            return {}
        found = {}
        for name, parameter in named_parameters(model):
            state = self.rounding.state_of(self._optimizer, parameter)
            found[name] = self._sampled({key: state[key] for key in MOMENTS if key in state})
        return found

    # How tensors are read.

    def _sampled(self, named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: sample_elements(tensor) for name, tensor in self._full(named).items()}

    def _full(self, named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Whole tensors; on one rank they are the model's own, which go on changing."""
        if self.mesh is None:
            return {name: as_numbers(tensor) for name, tensor in named.items()}
        return gather_full(named, self.mesh)

    def _saved_buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The buffers that are saved: running statistics are what is trained too.

        Where ranks share the model (tensor parallelism, a pipeline), they are not compared.
        """
        if axis_size(self.mesh, "tp") * axis_size(self.mesh, "pp") > 1:
            return {}
        saved = set(map(clean_name, model.state_dict().keys()))
        buffers = ((clean_name(name), buffer) for name, buffer in model.named_buffers())
        return {name: buffer for name, buffer in buffers if name in saved}

    def _stages(self, value: Any) -> list[Any]:
        """A value of each pipeline stage, on all of them."""
        stages = axis_size(self.mesh, "pp")
        if stages == 1:
            return [value]
        values: list[Any] = [None] * stages
        dist.all_gather_object(values, value, group=self.mesh.get_group("pp"))
        return values

    def _merged_groups(self, groups: list[GroupMeasure]) -> tuple[GroupMeasure, ...]:
        """The groups of the whole model: each pipeline stage's optimizer holds its own parameters."""
        merged = []
        for parts in zip_longest(*self._stages(groups)):
            held = [part for part in parts if part is not None]
            names = tuple(dict.fromkeys(name for part in held for name in part.parameters))
            merged.append(GroupMeasure(parameters=names, options=held[0].options))
        return tuple(merged)


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> GroupMeasure:
    """A parameter group as numbers."""
    held = tuple(names.get(id(parameter), "a tensor that is not the model's") for parameter in group["params"])
    options = {key: _number(value) for key, value in group.items() if key not in _STEP_FLAGS}
    return GroupMeasure(parameters=held, options={key: value for key, value in options.items() if value != ()})


def _number(value: Any) -> Any:
    """An option as a number, a tuple of numbers, or None; () for what is none of these."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else ()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, tuple | list) and all(isinstance(part, int | float | torch.Tensor) for part in value):
        return tuple(float(part) for part in value)
    return ()


def _difference(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """In fp64; 0 where the two are equal, infinite ones too."""
    return (after.double() - before.double()).masked_fill(after == before, 0.0)


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as dense real numbers: gradients of an embedding may be sparse, weights of a Fourier layer complex."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def norm_of(tensor: torch.Tensor) -> float:
    """The 2-norm: of pieces in fp32, then of the pieces' norms in fp64.

    It is as exact as fp64 throughout, at a tenth of its time.
    """
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    whole = tensor.detach().reshape(-1)
    pieces = whole.split(_NORM_PIECE) if tensor.device.type == "cpu" else (whole,)  # a GPU adds up in a tree
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=dtype) for piece in pieces])
    return float(torch.linalg.vector_norm(norms, dtype=torch.float64))


def sample_elements(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy on the CPU of at most SAMPLED_ELEMENTS elements: one of each of as many equal pieces of the tensor.

    A tensor that has no more elements is copied whole.
    """
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLED_ELEMENTS:
        return flat[_places(flat.numel(), SAMPLED_ELEMENTS).to(flat.device)].cpu()
    return flat.clone(memory_format=torch.contiguous_format).cpu()


@functools.cache
def _places(elements: int, sampled: int) -> torch.Tensor:
    """One place in each of equal pieces. Within a piece it goes on by the golden ratio, so that all columns are met."""
    numbers = torch.arange(sampled, dtype=torch.float64)
    return ((numbers + (numbers * 0.6180339887) % 1) * (elements / sampled)).long().clamp(max=elements - 1)

"""State that a forward leaves in a model for the next one: in buffers that it changes, and in plain attributes.

Examples: a codebook, a queue, the vectors of a spectral norm, the hidden state of a recurrent neuron. Other
micro-batches leave other state, so the micro-batch is part of what is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autoplan.strategies.workloads.batch import Batch, move_batch, slice_batch
from autoplan.strategies.workloads.randomness import seeded

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the largest element of a buffer, by dtype; 1e-3 of others. Of a loss: by the model's dtypes, or SAME_LOSS."""

SAME_LOSS = 1e-5


class Carried(NamedTuple):
    """The state that is carried from one forward to the next.

    Attributes:
        name: Of the buffer or attribute, with its module's; "the model" if it is not found.
        kind: The class of its module.
        why: A sentence about it.
    """

    name: str
    kind: str
    why: str


def carried_state(
    loss: Callable[[nn.Module, Batch], Any],
    model: nn.Module,
    make_batch: Callable[[int, int], Batch],
    device: torch.device,
    *,
    seed: int,
) -> Carried | None:
    """The state that a forward leaves in the model, if other micro-batches leave another; None: there is none.

    The loss is computed twice from the same samples, seed and buffers. Then each buffer is compared after one forward
    of two samples and after two forwards of one sample. One that a forward makes anew in a shape that follows the batch
    (a mask, a table for the longest sequence) is nothing carried, if the next losses are the same after both. The model
    is left as it was.

    Args:
        loss: Gives a LossSum.
        model: In training mode, on the device, without dropout.
        make_batch: Makes the samples.
        device: Where.
        seed: Of the generators while it runs.
    """
    both = slice_batch(make_batch(2, 0), 0, 2)
    parts = [move_batch(slice_batch(both, number, number + 1), device) for number in range(2)]
    whole = [move_batch(both, device)]
    attributes = _tensor_attributes(model)

    def after(batches: list[Batch], then: Sequence[Batch] = ()) -> tuple[dict[str, torch.Tensor], list[float]]:
        """The buffers after the batches and those that follow them, and the losses of the last ones."""
        losses: list[float] = []
        with torch.enable_grad(), buffers_kept(model):  # a loss may differentiate by its inputs
            for some in (batches, then) if then else (batches,):
                with seeded(seed):
                    losses = [float(loss(model, batch).total.detach()) for batch in some]
            return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}, losses

    def is_made_anew(names: list[str]) -> bool:
        """Whether a second forward leaves the same in these buffers, and later losses go by nothing that is in them."""
        following = [*reversed(parts), *whole]
        try:
            again, _ = after(whole, whole)
            (_, some), (_, others) = after(whole, following), after(parts, following)
        except Exception:  # the next forward cannot take what another micro-batch left
            return False
        same = all(name in again and _is_close(once[name], again[name]) for name in names)
        return same and all(_is_same_loss(model, one, other) for one, other in zip(some, others, strict=True))

    with attributes_kept(model):
        (once, (first,)), (_, (second,)) = after(whole), after(whole)
        if not _is_same_loss(model, first, second):
            moved = [name for name, value in _tensor_attributes(model).items() if value is not attributes.get(name)]
            why = f"keeps something for the next forward: the same two samples gave {first:.6g}, then {second:.6g}"
            return _carried(model, moved[0] if moved else "the model", why)
        twice, _ = after(parts)
        changed = [name for name, buffer in once.items() if name not in twice or not _is_close(buffer, twice[name])]
        if changed and all(name in twice and once[name].shape != twice[name].shape for name in changed):
            changed = [] if is_made_anew(changed) else changed
    why = "is a buffer that each forward changes, and two samples change it otherwise than one by one"
    return _carried(model, changed[0], why) if changed else None


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that modules keep in plain attributes, by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _carried(model: nn.Module, name: str, why: str) -> Carried:
    owner = model.get_submodule(name.rpartition(".")[0])
    return Carried(name, type(owner).__name__, why)


def _is_same_loss(model: nn.Module, one: float, other: float) -> bool:
    low = [TOLERANCE.get(parameter.dtype, 0.0) for parameter in model.parameters()]
    return abs(other - one) <= max(SAME_LOSS, *low) * max(abs(one), 1e-12)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() and one.numel()):
        return torch.equal(one, other)
    allowed = TOLERANCE.get(one.dtype, 1e-3) * float(one.abs().amax())
    return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts the attributes of a model's modules back afterwards: a forward may set some, which are no part of it."""
    kept = [(module, type(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes in kept:
            if type(module) is kind:
                vars(module).clear()
                vars(module).update(attributes)
            module.training = attributes.get("training", True)  # also of a lazy module, which has become another one


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts the buffers of a model back afterwards: a forward may change them, and the loss may read them."""
    put_back = keep_buffers(model)
    try:
        yield
    finally:
        put_back()


def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Copies the buffers of a model; what it returns puts them back, each time it is called."""
    kept = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = {id(b): b.detach().clone() for _, own in kept for b in own.values() if b is not None}

    def put_back() -> None:
        with torch.no_grad():
            for buffers, own in kept:
                buffers.update(own)  # one that the forward made anew, perhaps of another shape
                for buffer in own.values():
                    if buffer is None:
                        continue
                    value = values[id(buffer)]
                    if buffer.shape != value.shape:  # one that the forward resized
                        buffer.data = value.clone()
                    elif not is_expanded(buffer):
                        buffer.copy_(value)

    return put_back


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one number in memory, as `expand` makes them: no operation writes into these."""
    if tensor.layout != torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

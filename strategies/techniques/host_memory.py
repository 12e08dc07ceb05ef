"""Optimizer states and saved activations in the host's memory: copied there, and back for what reads them.

Copies run on the stream that trains, in its order, so nothing has to wait for anything: copies that run beside the work
would need streams and events, which no GPU has shown to be right or faster here. No number changes.

States: the optimizer's own step runs on the device, over one piece of the parameters after another, whichever optimizer
it is. torchao's CPUOffloadOptimizer steps on the host in place of that: it moves gradients and parameters too, has no
states over ranks, and does not clip a norm of all gradients.

Activations: torch's `save_on_cpu` with what it lacks: parameters and small tensors stay, and a tensor that several
operations save, or whose parts are saved, moves once (test_offload.py shows both).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.techniques.sizes import PIECE_BYTES

SMALLEST_BYTES = 2**20
"""Smaller activations are not worth their copies."""

LARGEST_WHOLE = 4
"""A part of a larger tensor takes the whole with it, up to so many times its own size; else it stays."""

# States.


def keep_states_on_host(optimizer: torch.optim.Optimizer, *, piece_bytes: int | None = None) -> None:
    """Has an optimizer keep its states on the host, from its next step or load on.

    Its `step` is replaced by one that takes piece after piece; `state_dict()` gives the states as they lie on the host.

    Args:
        optimizer: Not stepped yet.
        piece_bytes: Of parameters per piece; None: PIECE_BYTES.
    """
    states = _HostStates(optimizer, PIECE_BYTES if piece_bytes is None else piece_bytes)

    @torch.optim.Optimizer.profile_hook_step  # hooks of the step run once, not once per piece
    def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        states.step()
        return loss

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_pre_hook(states.before_load)
    optimizer.register_load_state_dict_post_hook(states.after_load)


class _HostStates:
    """The states of one optimizer. Tensors of one element (the count of steps) stay where the optimizer has them."""

    def __init__(self, optimizer: torch.optim.Optimizer, piece_bytes: int) -> None:
        self._optimizer = optimizer
        self._piece_bytes = piece_bytes
        self._host: dict[tuple[int, Any], torch.Tensor] = {}  # by id of the parameter and key of its state
        self._aside: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        step: Any = type(optimizer).step
        wrapped = "step" not in vars(optimizer) and getattr(step, "hooked", False)
        self._whole_step = types.MethodType(step.__wrapped__, optimizer) if wrapped else optimizer.step

    def step(self) -> None:
        """The optimizer's step, piece by piece."""
        held = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        try:
            for piece in self._pieces(held, gradients):
                for parameter, gradient in piece:
                    for key, value in self._large(parameter):
                        there = local_tensor(value).to(local_tensor(parameter).device, non_blocking=True, copy=True)
                        self._optimizer.state[parameter][key] = _like(value, there)
                    parameter.grad = gradient
                self._whole_step()
                for parameter, _ in piece:
                    parameter.grad = None
                    for key, value in self._large(parameter):
                        self._put(parameter, key, value)
        finally:
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = gradient
        if any(parameter.device.type == "cuda" for parameter in held):
            torch.cuda.current_stream().synchronize()  # from here on anybody may read the states

    def _pieces(
        self, held: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        piece: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = 0
        for parameter, gradient in zip(held, gradients, strict=True):
            own = local_tensor(parameter).nbytes
            if piece and size + own > self._piece_bytes:
                yield piece
                piece, size = [], 0
            piece.append((parameter, gradient))
            size += own
        if piece:
            yield piece

    def _large(self, parameter: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        return [(key, value) for key, value in self._optimizer.state.get(parameter, {}).items() if _moves(value)]

    def _put(self, parameter: torch.Tensor, key: Any, value: torch.Tensor) -> None:
        """Copies a state to its place on the host."""
        local, host = local_tensor(value), self._host.get((id(parameter), key))
        if host is None or host.shape != local.shape or host.dtype != local.dtype:
            pinned = parameter.device.type == "cuda"
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
            self._host[id(parameter), key] = host
        host.copy_(local, non_blocking=True)
        self._optimizer.state[parameter][key] = _like(value, host)

    def before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Takes the states out of what is loaded: torch would move each to its parameter's device, all at once."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(places) != len(own):
            return None  # torch says what is wrong
        self._aside, rest = [], dict(state_dict["state"])
        for place, parameter in zip(places, own, strict=True):
            given = rest.get(place, {})
            self._aside += [(parameter, key, value) for key, value in given.items() if _moves(value)]
            if place in rest:
                rest[place] = {key: value for key, value in given.items() if not _moves(value)}
        return {**state_dict, "state": rest}

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts them on the host."""
        aside, self._aside = self._aside, []
        for parameter, key, value in aside:
            self._put(parameter, key, value.to(parameter.dtype) if parameter.is_floating_point() else value)


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and local_tensor(value).numel() > 1


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Another local part for a tensor: of the same layout over the ranks, where it has one."""
    return DTensor(local, value._spec, requires_grad=False) if isinstance(value, DTensor) else local


def reason_against_pieces(build_optimizer: Callable[[Any], torch.optim.Optimizer], parameters: int) -> str | None:
    """Why an optimizer's states cannot be on the host; None if they can.

    Two of it are stepped three times on tiny parameters, one as a whole and one piece by piece: an optimizer that looks
    at all parameters together (L-BFGS; an estimate of one learning rate for all) moves them otherwise.

    Args:
        build_optimizer: Makes it over a list of parameters.
        parameters: How many parameters it is made over.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 4, generator=generator) for _ in range(max(2, parameters))]
    whole, apart = ([torch.nn.Parameter(one.clone()) for one in start] for _ in range(2))
    try:
        optimizers = [build_optimizer(whole), build_optimizer(apart)]
        keep_states_on_host(optimizers[1], piece_bytes=1)
        for _ in range(3):
            for one, two in zip(whole, apart, strict=True):
                one.grad = torch.randn(4, 4, generator=generator)
                two.grad = one.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
    except Exception as error:
        return f"a step of it in pieces failed: {type(error).__name__}: {error}".splitlines()[0]
    if not any(_moves(value) for state in optimizers[0].state.values() for value in state.values()):
        return f"{type(optimizers[0]).__name__} keeps no states of the parameters' size"
    if not all(torch.allclose(one, two, rtol=1e-6, atol=0) for one, two in zip(whole, apart, strict=True)):
        return f"{type(optimizers[0]).__name__} looks at all parameters together: stepped in pieces it trains otherwise"
    return None


# Activations.


class _Saved:
    """A tensor that a forward saved: its numbers in memory order, on the host, and on the device once it is asked."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._device = flat.device
        self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.device.type == "cuda")
        self._host.copy_(flat, non_blocking=True)
        self._back: torch.Tensor | None = None

    def back(self) -> torch.Tensor:
        if self._back is None:
            self._back = self._host.to(self._device, non_blocking=True, copy=True)
        return self._back


class HostActivations(torch.autograd.graph.saved_tensors_hooks):
    """Opened around one forward; the backward of what it made may run outside of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided  # no parameter, no class of its own
        if not plain or isinstance(tensor._base, nn.Parameter) or tensor.nbytes < SMALLEST_BYTES:
            return tensor.detach()  # a result that held itself would stay where no backward runs
        size, strides, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        start, count = offset, tensor.numel()
        if 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)) != count:
            # a part of a larger tensor (queries among keys and values): all of it, once for all of its parts
            start, count = 0, tensor.untyped_storage().nbytes() // tensor.element_size()
            if count > LARGEST_WHOLE * tensor.numel():
                return tensor.detach()
        flat = tensor.detach().as_strided((count,), (1,), start)
        return self._saved(flat, tensor._version), size, strides, offset - start

    def _saved(self, flat: torch.Tensor, version: int) -> _Saved:
        storage = StorageWeakRef(flat.untyped_storage())
        lazy = flat.is_conj(), flat.is_neg()  # z.conj() is a view of z with such a mark
        key = (storage.cdata, flat.storage_offset(), flat.numel(), flat.dtype, *lazy, version)
        if key in self._known:
            earlier, found = self._known[key][0], self._known[key][1]()
            if found is not None and not earlier.expired():  # the storage at that address may be another one by now
                return found
        saved = _Saved(flat)
        self._known[key] = storage, weakref.ref(saved)
        return saved

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        saved, size, strides, offset = packed
        return saved.back().as_strided(size, strides, offset)

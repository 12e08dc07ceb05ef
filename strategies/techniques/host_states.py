"""Optimizer states in the host's memory: the step runs on the device, over one piece of the parameters after another.

The states of a piece are copied to the device, the optimizer's own step runs on that piece alone, and the states are
copied back; the next piece's copies run meanwhile. So the step does the same operations in the same kernels as without
(no number changes), whichever optimizer it is, and the host keeps only the states. The other way, the step on the host,
moves half the bytes, and then waits for the host's memory: some 28 bytes per parameter through it, where these copies
are 16 over a link whose two directions work side by side; and it needs gradients and parameters there too.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.strategies.techniques.mesh import local_tensor
from autoplan.strategies.techniques.sizes import PIECE_BYTES, PIECES_AT_ONCE

_ALIGNMENT = 256

Held = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters with their gradients."""


def keep_states_on_host(optimizer: torch.optim.Optimizer, *, piece_bytes: int | None = None) -> HostStates:
    """Has an optimizer keep its states on the host, from its next step or load on.

    Its `step` is replaced by one that takes piece after piece; `state_dict()` gives the states as they lie on the host.
    """
    return HostStates(optimizer, PIECE_BYTES if piece_bytes is None else piece_bytes)


class HostStates:
    """The states of one optimizer. Tensors of one element (the count of steps) stay where the optimizer has them.

    Args:
        optimizer: Not stepped yet.
        piece_bytes: Of parameters per piece.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, piece_bytes: int) -> None:
        self._optimizer = optimizer
        self._piece_bytes = piece_bytes
        self._whole_step = _without_hooks(optimizer)
        self._host: dict[tuple[int, Any], torch.Tensor] = {}  # by id of the parameter and key of its state
        self._aside: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        self._streams: tuple[Any, Any] | None = None

        @torch.optim.Optimizer.profile_hook_step  # hooks of the step run once, not once per piece
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    # The step.

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        try:
            self._step_pieces(list(self._pieces(held)))
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
        return loss

    def _step_pieces(self, pieces: list[Held]) -> None:
        gone: deque[Any] = deque()
        arrived = self._fetch(pieces[0]) if pieces else None
        for number, piece in enumerate(pieces):
            here, arrived = arrived, None
            if number + 1 < len(pieces):
                # The host launches far ahead; without this wait it would ask for the memory of all pieces at once.
                while len(gone) > PIECES_AT_ONCE - 2:
                    gone.popleft().synchronize()
                arrived = self._fetch(pieces[number + 1])
            if here is not None:
                torch.cuda.current_stream().wait_event(here)
            for parameter, gradient in piece:
                parameter.grad = gradient
            self._whole_step()
            for parameter, _ in piece:
                parameter.grad = None
            if (event := self._give_back(piece)) is not None:
                gone.append(event)
        for event in gone:  # from here on anybody may read the states
            event.synchronize()

    def _pieces(self, held: Held) -> Iterator[Held]:
        piece: Held = []
        size = 0
        for parameter, gradient in held:
            own = _bytes_of(local_tensor(parameter))
            if piece and size + own > self._piece_bytes:
                yield piece
                piece, size = [], 0
            piece.append((parameter, gradient))
            size += own
        if piece:
            yield piece

    def _fetch(self, piece: Held) -> Any:
        """Copies a piece's states to the device of its parameters; the event after which they are there, on CUDA."""
        moved = [
            (self._optimizer.state[parameter], key, value, local_tensor(parameter).device)
            for parameter, _ in piece
            for key, value in self._large(parameter)
        ]
        streams = self._side_streams(piece)
        if streams is None:
            for state, key, value, device in moved:
                state[key] = _like(value, local_tensor(value).to(device, copy=True))
            return None
        stepping = torch.cuda.current_stream(local_tensor(piece[0][0]).device)  # inside, the copies' own is current
        with torch.cuda.stream(streams[0]):
            for state, key, value, device in moved:
                there = local_tensor(value).to(device, non_blocking=True)
                there.record_stream(stepping)  # an optimizer may put another tensor in its place while it is read
                state[key] = _like(value, there)
            return streams[0].record_event()

    def _give_back(self, piece: Held) -> Any:
        """Copies a piece's states to the host; the event after which they are there, on CUDA."""
        found = [(p, key, value) for p, _ in piece for key, value in self._large(p)]
        self._make_room([(parameter, key, local_tensor(value)) for parameter, key, value in found])
        streams = self._side_streams(piece)
        if streams is None:
            for parameter, key, value in found:
                self._put(parameter, key, value)
            return None
        streams[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[1]):
            for parameter, key, value in found:
                self._put(parameter, key, value)
                local_tensor(value).record_stream(streams[1])
            return streams[1].record_event()

    def _put(self, parameter: torch.Tensor, key: Any, value: torch.Tensor) -> None:
        host = self._host[id(parameter), key]
        host.copy_(local_tensor(value), non_blocking=True)
        self._optimizer.state[parameter][key] = _like(value, host)

    def _large(self, parameter: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        return [(key, value) for key, value in state.items() if _moves(value)]

    def _make_room(self, found: list[tuple[torch.Tensor, Any, torch.Tensor]]) -> None:
        """Host memory for states that have none yet: one buffer for all, since pinning rounds each one up."""
        lacking = [(p, key, value) for p, key, value in found if not _fits(self._host.get((id(p), key)), value)]
        if not lacking:
            return
        sizes = [-(-_bytes_of(value) // _ALIGNMENT) * _ALIGNMENT for _, _, value in lacking]
        pinned = any(p.device.type == "cuda" for p, _, _ in lacking)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        start = 0
        for (parameter, key, value), size in zip(lacking, sizes, strict=True):
            part = buffer[start : start + _bytes_of(value)].view(value.dtype).view(value.shape)
            self._host[id(parameter), key] = part
            start += size

    def _side_streams(self, piece: Held) -> tuple[Any, Any] | None:
        """One stream for each direction of the link, on CUDA."""
        device = local_tensor(piece[0][0]).device
        if device.type != "cuda":
            return None
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams

    # Loading: torch would move every state to its parameter's device, all at once.

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
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

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        aside, self._aside = self._aside, []
        typed = [(p, key, value.to(p.dtype) if p.is_floating_point() else value) for p, key, value in aside]
        self._make_room([(parameter, key, local_tensor(value)) for parameter, key, value in typed])
        for parameter, key, value in typed:
            self._host[id(parameter), key].copy_(local_tensor(value))
            optimizer.state[parameter][key] = _like(value, self._host[id(parameter), key])


def _without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """An optimizer's own step, without what torch's Optimizer has wrapped around it."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        return optimizer.step
    return types.MethodType(step.__wrapped__, optimizer)


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and local_tensor(value).numel() > 1


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Another local part for a tensor: of the same layout over the ranks, where it has one."""
    if not isinstance(value, DTensor):
        return local
    return DTensor(local, value._spec, requires_grad=False)


def _fits(host: torch.Tensor | None, value: torch.Tensor) -> bool:
    return host is not None and host.shape == value.shape and host.dtype == value.dtype


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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

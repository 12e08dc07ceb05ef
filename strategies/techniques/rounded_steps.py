"""An optimizer that steps in fp32 over parameters and states which are kept in fewer bits between steps.

The workload's own optimizer does the step: its class, groups and options stay, and so do its foreach and fused forms.
Around the step, a piece of the parameters at a time, what is kept rounded is put into fp32 and back (which forms there
are: docs/techniques.md). torchao's own optimizers are other classes, and have neither fp32 master copies nor moments in
bf16 that are rounded by chance; of them the format of 8 bits is taken.

Numbers that round by chance come from a generator of its own, seeded by the step, so that all replicas round alike and
a resumed run goes on as it would have. `state_dict` gives moments in fp32 and the master copies, so that what one form
saved another loads. FSDP2's shards are stepped as plain tensors, which is the same for an optimizer that treats each
element by itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.errors import ConfigError
from autoplan.strategies.techniques.mesh import local_tensor

PIECE_ELEMENTS = 1 << 25
"""Elements that are in fp32 at once: 128 MiB each of parameters, gradients and moments."""

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"

ELEMENTWISE = frozenset(
    ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
)
"""Of torch.optim: what treats each element by itself, so that a shard can be stepped alone."""

BLOCK = 256
"""Elements of 8-bit moments with one scale: torchao's figure, and bitsandbytes'."""

LEAST_8BIT_ELEMENTS = 4096
"""Of the smallest tensor that is kept in 8 bits: theirs too."""

TORCHAO = "it needs torchao, which is not installed here: pip install 'autoplan[cuda]' (or pip install torchao)"


class StepRounding:
    """The parameters and states that an optimizer keeps rounded, and how a step goes over them.

    Args:
        optimizer: The workload's own, not stepped yet.
        parameters: own, bf16 or bf16_stochastic: the parameters in bf16 that it holds are kept so.
        states: own, bf16 or 8bit: the same of Adam's moments.
        seed: Of the numbers that round.

    Attributes:
        steps: Steps taken; it seeds the next step's rounding. The caller sets it, so that a resumed run rounds alike.
        observe: Called with each parameter and its new value in fp32, before the value is rounded (the parity check).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, parameters: str, states: str, seed: int) -> None:
        self.parameters = parameters
        self.states = states
        self.steps = 0
        self.observe: Callable[[nn.Parameter, torch.Tensor], None] | None = None
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._low: set[int] = set()
        self._masters: dict[int, torch.Tensor] = {}
        self._stepped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._make_8bit = load_8bit_states() if states == "8bit" else None
        in_pieces = type(optimizer).__module__.startswith("torch.optim")
        self._piece = PIECE_ELEMENTS if in_pieces else None  # another optimizer may look at all parameters together
        for parameter in held_by(optimizer):
            if parameters != "own" and parameter.dtype is torch.bfloat16:
                self._low.add(id(parameter))
                if parameters == "bf16":
                    self._masters[id(parameter)] = local_tensor(parameter.detach()).float()

    # A step.

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, plain_step: Callable[[Any], Any]) -> None:
        """Steps piece by piece.

        Args:
            optimizer: The optimizer.
            plain_step: Its own step.
        """
        for generator in self._generators.values():
            generator.manual_seed(self._step_seed())
        self._follow(held_by(optimizer))
        groups = optimizer.param_groups
        held = [group["params"] for group in groups]
        try:
            for piece in self._pieces(groups):
                with_some = []
                for group, some in piece:
                    group["params"] = [self._widen(optimizer, parameter) for parameter in some]
                    with_some.append(group)
                optimizer.param_groups = with_some
                try:
                    plain_step(optimizer)
                finally:
                    self._narrow_all(optimizer)
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters
        self.steps += 1

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Gives the master copies what was written into parameters since the last step: weights that were loaded.

        An element that is still what its copy rounds to keeps the copy. All answers are read together, since a GPU is
        waited for.
        """
        kept = [p for p in parameters if id(p) in self._masters]
        pairs = [(self._masters[id(p)], local_tensor(p.data)) for p in kept]
        if not pairs:
            return
        differ = [(low != master.to(low.dtype)).any() for master, low in pairs]
        answers = torch.stack([one.to(differ[0].device) for one in differ]).tolist()
        for (master, low), written in zip(pairs, answers, strict=True):
            if written:
                master.copy_(torch.where(master.to(low.dtype) == low, master, low.float()))

    def _pieces(self, groups: list[dict[str, Any]]) -> Iterator[list[tuple[dict[str, Any], list[nn.Parameter]]]]:
        """The parameters that have a gradient, by group, some at a time."""
        piece: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        elements = 0
        for group in groups:
            some: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self._piece is not None and elements and elements + local_tensor(parameter).numel() > self._piece:
                    yield [*piece, (group, some)] if some else piece
                    piece, some, elements = [], [], 0
                some.append(parameter)
                elements += local_tensor(parameter).numel()
            if some:
                piece.append((group, some))
        if piece:
            yield piece

    def _widen(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that is stepped in the place of a parameter: a plain fp32 tensor with its gradient and its state.

        Another tensor in the parameter itself would do for one process, but torch then drops what DDP has hooked to it
        (set_data resets the gradient accumulator if the dtype changes).
        """
        if id(parameter) not in self._low:
            value = local_tensor(parameter.data)
        elif self.parameters == "bf16":
            value = self._masters[id(parameter)]
        else:
            value = local_tensor(parameter.data).float()
        stepped = nn.Parameter(value)
        if parameter.grad is not None:
            stepped.grad = local_tensor(parameter.grad).to(value.dtype)
        if parameter in optimizer.state:
            optimizer.state[stepped] = {key: widened(kept) for key, kept in optimizer.state.pop(parameter).items()}
        self._stepped.append((parameter, stepped))
        return stepped

    def _narrow_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Rounds what the step gave."""
        for parameter, stepped in self._stepped:
            value = stepped.data
            if self.observe is not None:
                self.observe(parameter, value)
            if id(parameter) in self._low:
                nearest = self.parameters == "bf16"
                rounded = value if nearest else round_by_chance(value, self._generator(value.device))
                local_tensor(parameter.data).copy_(rounded)
            if stepped in optimizer.state:
                state = optimizer.state.pop(stepped)
                optimizer.state[parameter] = {key: self._narrowed(key, one) for key, one in state.items()}
        self._stepped.clear()

    def _narrowed(self, key: str, value: Any) -> Any:
        """A part of the state as it is kept."""
        if key not in MOMENTS or self.states == "own" or not isinstance(value, torch.Tensor):
            return value
        if self.states == "bf16":
            return round_by_chance(value, self._generator(value.device))
        if value.numel() < LEAST_8BIT_ELEMENTS or value.numel() % BLOCK:
            return value
        assert self._make_8bit is not None
        kept = self._make_8bit.zeros(value.shape, key == "exp_avg", BLOCK, value.device)
        kept.copy_(value.contiguous())
        return kept

    def _step_seed(self) -> int:
        return self._seed + 1_000_003 * (self.steps + 1)

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device).manual_seed(self._step_seed())
        return found

    # What is kept, in fp32.

    @torch.no_grad()
    def master(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The fp32 master copy of a parameter, laid out as it is; None where there is none."""
        self._follow([parameter])
        found = self._masters.get(id(parameter))
        return None if found is None else like(found, parameter)

    def set_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Sets a master copy, and the parameter to it, rounded; nothing where there is none."""
        if id(parameter) in self._masters:
            with torch.no_grad():
                self._masters[id(parameter)].copy_(local_tensor(value))
                local_tensor(parameter.detach()).copy_(self._masters[id(parameter)])

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter, in fp32, laid out as the parameter is."""
        state = optimizer.state.get(parameter, {})
        return {key: like(widened(value), parameter, key) for key, value in state.items()}

    def load(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Takes over the tensors of a saved state: torch would have rounded them to the parameter's own dtype."""
        own = optimizer.state[parameter]
        own.pop(MASTER, None)
        shape = local_tensor(parameter).shape
        for key, value in state.items():
            if key == MASTER:
                self.set_master(parameter, value)
            elif key != "step" and isinstance(value, torch.Tensor) and local_tensor(value).shape == shape:
                exact = local_tensor(value).to(local_tensor(parameter).device, torch.float32, copy=True)
                own[key] = self._narrowed(key, exact)


class _Rounded(torch.optim.Optimizer):
    """Put before an optimizer's own class by `with_rounding`."""

    rounding: StepRounding
    plain_step: Callable[[Any], Any]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.rounding.step(self, type(self).plain_step)
        return loss

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        parameters = held_by(self)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            state = self.rounding.state_of(self, parameter)
            master = self.rounding.master(parameter)
            if state:
                saved["state"][number] = state if master is None else {**state, MASTER: master}
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, held_by(self), strict=True):
            if number in state_dict["state"]:
                self.rounding.load(self, parameter, state_dict["state"][number])


def with_rounding(
    optimizer: torch.optim.Optimizer, *, parameters: str, states: str, seed: int = 0
) -> torch.optim.Optimizer:
    """The same optimizer, which from now on steps over what is kept rounded.

    Args:
        optimizer: The workload's own, not stepped yet; it is changed in place.
        parameters: own, bf16 or bf16_stochastic; those that are kept so are in bf16 already.
        states: own, bf16 or 8bit.
        seed: Of the numbers that round.

    Raises:
        ConfigError: the optimizer treats a shard's elements together, or torchao is missing.
    """
    kind: Any = type(optimizer)
    sharded = any(isinstance(parameter, DTensor) for parameter in held_by(optimizer))
    if sharded and not (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE):
        raise ConfigError(
            f"parameters={parameters} on shards needs an optimizer of torch.optim that treats each element by itself; "
            f"this one is {kind.__module__}.{kind.__qualname__}",
            hint="Use dp_shard=1, or parameters=own.",
        )
    rounding = StepRounding(optimizer, parameters=parameters, states=states, seed=seed)
    own_step = kind.step
    plain = own_step.__wrapped__ if getattr(own_step, "hooked", False) else own_step  # the hooks run once, outside
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # it is still the workload's optimizer
    optimizer.__class__ = type(kind.__name__, (_Rounded, kind), {**named, "plain_step": staticmethod(plain)})
    optimizer.rounding = rounding  # type: ignore[attr-defined]
    optimizer._patch_step_function()
    return optimizer


def rounding_of(optimizer: torch.optim.Optimizer) -> StepRounding | None:
    """The rounding of what an optimizer keeps; None: nothing is rounded."""
    return optimizer.rounding if isinstance(optimizer, _Rounded) else None


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer holds, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def like(value: Any, parameter: torch.Tensor, key: str = "") -> Any:
    """A local tensor in the layout of the parameter that it belongs to; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if key == "step" or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def widened(value: Any) -> Any:
    """A part of a state in fp32; what is not rounded as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "codes"):  # torchao's OptimState8bit
        return value.dequantize()
    return value.float() if value.dtype is torch.bfloat16 else value


def round_by_chance(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An fp32 tensor in bf16, each number rounded up or down with the probability of its distance.

    bf16 has the upper 16 bits of fp32: a random number below 2**16 is added to the bits, and the lower 16 are cut off.
    """
    bits = value.contiguous().view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    rounded = (bits + chance).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def reason_against_8bit() -> str | None:
    """Why moments cannot be kept in torchao's 8 bits here; None if they can."""
    return None if importlib.util.find_spec("torchao") is not None else TORCHAO


def load_8bit_states() -> Any:
    """torchao's class of a state in 8 bits.

    Raises:
        ConfigError: torchao is missing, or has no such class.
    """
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        reason = reason_against_8bit() or f"this torchao has no 8-bit optimizer states ({error})"
        raise ConfigError(f"optimizer_state=8bit does not apply: {reason}", hint="Use optimizer_state=own.") from error
    return OptimState8bit

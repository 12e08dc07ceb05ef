"""A user's optimizer: what it may be, what it keeps, and the same one made again over other parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autoplan.errors import WorkloadError
from autoplan.strategies.config import OPTIMIZER_FLAGS

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are not frozen, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def follows_an_instance(build_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> bool:
    """Whether a function makes the same optimizer as an instance, over all parameters of its model only."""
    return isinstance(build_optimizer, functools.partial) and build_optimizer.func is _make_over


def step_form(optimizer: torch.optim.Optimizer) -> str | None:
    """The form (a value of the knob optimizer_step) that the flags of an optimizer ask for; None: torch chooses.

    None too if its groups differ.
    """
    each: dict[bool | None, str] = {True: "foreach", False: "for_loop"}
    forms = {"fused" if group.get("fused") else each.get(group.get("foreach")) for group in optimizer.param_groups}
    return forms.pop() if len(forms) == 1 else None


def check_optimizer(optimizer: Any, what: str) -> None:
    """Refuses what no step of a plan can drive: several optimizers, and one that runs the loss itself.

    Args:
        optimizer: What the user gave, or what a function of the user's returned.
        what: Names it in the error.

    Raises:
        WorkloadError: with the way that is left.
    """
    if isinstance(optimizer, list | tuple | dict):
        raise WorkloadError(
            f"{what} is a {type(optimizer).__name__} of {len(optimizer)} optimizers; a plan steps one",
            hint="Put the settings into parameter groups of one optimizer, or write one class whose step() steps "
            f"them all. {AS_A_STEP}",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure") if hasattr(optimizer, "step") else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"{what} is {type(optimizer).__name__}, whose step(closure) runs the loss as often as it likes; a plan's "
            "step runs it once for each micro-batch, and then the optimizer",
            hint=AS_A_STEP,
        )


AS_A_STEP = (
    "To keep the training as it is, search it as a program of its own: autoplan.search(step=make_step), or in a file "
    "`return autoplan.from_step(make_step)`; only what surrounds a step is tried then."
)


class KeptStates(NamedTuple):
    """The state that an optimizer keeps between steps.

    Attributes:
        kind: The optimizer's class; "unknown" if it cannot be asked.
        tensors: As many tensors of a parameter's shape, of the parameter that has the most: 2 for Adam.
        bytes_per_element: Bytes for each number of all parameters.
        why_assumed: Why these are Adam's figures, and not what was seen; None: they were seen.
        form: `step_form` of it; None too if it cannot be asked.
    """

    kind: str
    tensors: int
    bytes_per_element: float
    why_assumed: str | None = None
    form: str | None = None


STAND_IN_SIZE = 16
"""Each dim of a stand-in for a parameter has at most so many elements."""


def kept_states(
    build_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer], parameters: Sequence[torch.Tensor]
) -> KeptStates:
    """The state that a workload's optimizer keeps, seen at one real step over small stand-ins for the parameters.

    There are as many stand-ins as parameters, since an optimizer that follows an instance is made over that number
    only. Each has as many dims as its parameter: some go by shape (Muon for matrices, AdamW for the rest).

    Args:
        build_optimizer: The user's.
        parameters: What trains, on any device.
    """
    shapes = [[min(size, STAND_IN_SIZE) for size in parameter.shape] for parameter in parameters]
    stand_ins = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    try:
        optimizer = build_optimizer(stand_ins)
        for stand_in in stand_ins:
            stand_in.grad = torch.ones_like(stand_in)
        optimizer.step()
        values = [optimizer.state.get(stand_in, {}).values() for stand_in in stand_ins]
    except Exception as error:  # a user's function may do anything with what it is given
        return KeptStates("unknown", 2, 8.0, f"optimizer state assumed as Adam's 8 bytes per parameter ({error})")
    kept = [[one for one in some if isinstance(one, torch.Tensor) and one.dim()] for some in values]
    own = (sum(state.shape == stand_in.shape for state in some) for stand_in, some in zip(stand_ins, kept, strict=True))
    size = sum(state.numel() * state.element_size() for some in kept for state in some)
    numbers = max(sum(map(torch.numel, stand_ins)), 1)
    return KeptStates(type(optimizer).__name__, max(own, default=0), size / numbers, form=step_form(optimizer))


def rebuild_over(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A function that makes the same optimizer over other parameters: those at the same places.

    Args:
        optimizer: The optimizer to follow; its groups and hyper-parameters are kept, its state is not.
        parameters: The trainable parameters of the model it was made for, in the model's order.

    Raises:
        WorkloadError: it has parameters that are not among them, a step that was replaced on the instance, or something
            that only its constructor was told and that cannot be read from it.
    """
    check_optimizer(optimizer, "the optimizer")
    optimizer = unpatched(optimizer)
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        foreign = [parameter for parameter in trained if id(parameter) not in place]
        if foreign:
            raise WorkloadError(
                f"the optimizer has {len(foreign)} parameter(s) that are not the model's",
                hint="Make the optimizer over the parameters of the model that you hand in, or give a function.",
            )
        options = {key: value for key, value in group.items() if key != "params" and key not in OPTIMIZER_FLAGS}
        groups.append((options, [place[id(parameter)] for parameter in trained]))
    options = constructor_options(optimizer)
    make = functools.partial(_make_over, type(optimizer), groups, options, len(parameters))
    _refuse_lost_arguments(optimizer, make([torch.nn.Parameter(torch.zeros(1)) for _ in parameters]))
    return make


def constructor_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments of an optimizer's constructor: its defaults, and the arguments that it keeps by name.

    bitsandbytes keeps `optim_bits` in its `args`, torchao `bf16_stochastic_round` in an attribute.
    """
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    kept = _plain_attributes(optimizer)
    return options | {name: kept[name] for name in taken if name in kept and name not in options}


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer, and of its `args`, that are numbers, texts, or nothing."""
    holders = [getattr(optimizer, "args", None), optimizer]
    found = {name: value for holder in holders for name, value in getattr(holder, "__dict__", {}).items()}
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str))
    }


def step_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the hooks on an optimizer's step: a moving average of the weights, for example."""
    hooks = [
        hook for where in ("pre", "post") for hook in getattr(optimizer, f"_optimizer_step_{where}_hooks", {}).values()
    ]
    return [getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2] for hook in hooks]


def hooks_note(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """A sentence each where an optimizer has hooks on its step, and a model's parameters on their gradients."""
    notes = []
    if names := step_hooks(optimizer):
        notes.append(
            f"trials do not run the hooks on the optimizer's step ({', '.join(names)}); under the plan they run"
        )
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = [name for name, one in model.named_parameters() if any(getattr(one, kind, None) for kind in kinds)]
    if hooked:
        notes.append(
            f"trials do not run the hooks on gradients ({', '.join(hooked[:3])}); under the plan they run, once for "
            "each micro-batch"
        )
    return notes


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step was replaced on the instance, by something else than a schedule."""
    kind = getattr(type(optimizer), "_view_of", type(optimizer))
    own = vars(optimizer).get("step")
    inner = getattr(own, "__wrapped__", None) if hasattr(own, "_wrapped_by_lr_sched") else own
    return kind is type(optimizer) and inner is not None and inner is not kind.step


def unpatched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer that shares its groups, its state and all that it has, with the step of its class.

    copy.copy() would leave out what torch does not pickle: hooks, and the attributes of a subclass.

    Raises:
        WorkloadError: its step was replaced on the instance, by something else than a schedule.
    """
    kind = getattr(type(optimizer), "_view_of", type(optimizer))
    if has_own_step(optimizer):
        raise WorkloadError(
            f"the step of the optimizer ({kind.__name__}) was replaced on this instance, and a plan makes it anew",
            hint="Do the same in a subclass, or with register_step_pre_hook and register_step_post_hook.",
        )
    plain: torch.optim.Optimizer = object.__new__(kind)
    plain.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    return plain


class _StepOfView(property):
    """The step of a view. `hooked` tells load_state_dict() to put no function around it in its class."""

    hooked = True


def follow(own: Any, live: Any, instead: str) -> None:
    """Makes the user's optimizer or schedule a view of the one that trains: its rates, state and hooks are the same.

    So what the user's program does with it goes on: ReduceLROnPlateau changes its groups, a logger reads its rates, a
    checkpoint saves its state. Its own step() is an error, since what trains is stepped already.

    Args:
        own: The user's.
        live: That of the run, made like it.
        instead: What takes the steps, for the error.
    """
    for name, hooks in vars(own).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            hooks.update(getattr(live, name))
            setattr(live, name, hooks)  # the user's own dict, from which the user's handles remove them
    if isinstance(own, torch.optim.Optimizer):
        _share_tensors(own, live)
    kind = getattr(type(own), "_view_of", type(own))
    what = "optimizer" if isinstance(own, torch.optim.Optimizer) else "schedule"

    def step(*given: Any, **options: Any) -> Any:
        raise WorkloadError(
            f"step() of the {what} {kind.__name__} was called; since the plan was applied, {instead} takes its steps",
            hint=f"Leave that call out. What else you do with the {what} is done with the one that trains.",
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a schedule made over it later leaves it alone
    members = {"step": _StepOfView(lambda self: step), "_view_of": kind, "__module__": kind.__module__}
    own.__class__ = type(kind.__name__, (kind,), members | {"__qualname__": kind.__qualname__})
    own.__dict__ = live.__dict__
    if what == "optimizer":
        own._opt_called = True  # else a schedule made over it later warns that nothing was stepped before it


def _share_tensors(own: torch.optim.Optimizer, live: torch.optim.Optimizer) -> None:
    """Has an optimizer read the tensors of the user's groups: a program may fill that of its learning rate."""
    for group, trains in zip(own.param_groups, live.param_groups, strict=False):
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and isinstance(trains.get(key), torch.Tensor):
                with torch.no_grad():
                    trains[key] = value.copy_(trains[key])


def _refuse_lost_arguments(optimizer: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    if optimizer.state:
        return  # it has stepped, and may count its steps in an attribute
    own, anew = _plain_attributes(optimizer), _plain_attributes(made)
    lost = {name: value for name, value in own.items() if name in anew and value != anew[name]}
    if lost:
        name, value = next(iter(lost.items()))
        raise WorkloadError(
            f"the optimizer ({type(optimizer).__name__}) has {name}={value!r}, and made anew with its groups and "
            f"defaults it has {anew[name]!r}",
            hint="Hand in a function that makes the optimizer from parameters, not an instance.",
        )


def _make_over(
    kind: Any,
    groups: list[tuple[dict[str, Any], list[int]]],
    options: dict[str, Any],
    expected: int,
    parameters: Iterable[Any],
) -> torch.optim.Optimizer:
    given = list(parameters)
    if len(given) != expected:
        raise WorkloadError(
            f"an optimizer over {expected} parameters cannot be made over {len(given)}",
            hint="Hand in a function that makes the optimizer from parameters, not an instance.",
        )
    groups = [({key: cloned(value) for key, value in rest.items()}, places) for rest, places in groups]
    options = {name: cloned(value) for name, value in options.items()}
    return kind([{**rest, "params": [given[index] for index in places]} for rest, places in groups], **options)


def cloned(value: Any) -> Any:
    """A copy of a tensor, since a schedule writes into that of a learning rate; anything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def rebuild(optimizer: torch.optim.Optimizer, flags: dict[str, bool]) -> torch.optim.Optimizer:
    """The same optimizer, not stepped yet, with other flags: same class, groups, hyper-parameters and hooks.

    Raises:
        WorkloadError: its step was replaced on the instance.
    """
    optimizer = unpatched(optimizer)
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    flags = {name: value for name, value in flags.items() if name in taken}
    groups = [
        {key: value for key, value in group.items() if key not in OPTIMIZER_FLAGS} for group in optimizer.param_groups
    ]
    make: Any = kind
    made: torch.optim.Optimizer = make(groups, **(constructor_options(optimizer) | flags))
    _keep_hooks(optimizer, made)
    return made


def _keep_hooks(optimizer: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    """Gives an optimizer that was made anew the hooks of the first, but for those that its constructor registers."""
    for kind, hooks in vars(optimizer).items():
        if kind.startswith("_optimizer_") and kind.endswith("_hooks"):
            anew = getattr(made, kind)
            names = [getattr(hook, "__qualname__", None) for hook in anew.values()]
            for key in [key for key, hook in hooks.items() if getattr(hook, "__qualname__", "") in names]:
                del hooks[key]
            hooks.update(anew)
            setattr(made, kind, hooks)  # the same dict, from which the user's handles remove them


def with_lasting_schedule(workload: Workload) -> Workload:
    """The workload with a schedule that stays at its last rates after its end: trials may take more steps than it has.

    OneCycleLR raises then, which is right in a training and says nothing about a configuration.
    """
    build = workload.build_schedule
    if build is None:
        return workload

    def lasting(optimizer: torch.optim.Optimizer) -> Any:
        schedule = build(optimizer)
        steps = getattr(schedule, "total_steps", None)
        if isinstance(steps, int):
            step = schedule.step
            schedule.step = lambda: step() if schedule.last_epoch + 1 < steps else None
        return schedule

    return dataclasses.replace(workload, build_schedule=lasting)

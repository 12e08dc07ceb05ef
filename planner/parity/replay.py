"""The optimizer judged apart from the gradients: the workload's own, in its plain form, on the recorded gradients.

The candidate's gradients may be those of a low precision. The optimizer that got them is still checked exactly: from
the same start, with the same clipped gradients, a fresh optimizer (torch's for-loop) has to arrive at the same
parameters. An optimizer that treats each element by itself (SGD, Adam) is replayed on a sample of the elements. One
that does not (Adafactor, LAMB, Muon) is replayed on whole tensors where all of them are small, else not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autoplan.planner.parity.judge import finite
from autoplan.planner.parity.recorder import SAMPLED_ELEMENTS, Recorder, norm_of
from autoplan.planner.parity.records import ParameterMeasure, ReplayMeasure
from autoplan.strategies.workloads.optimizers import step_hooks
from autoplan.strategies.workloads.workload import Workload

TINY_MOMENTS = 1e-36
"""Below it bf16 runs out of exponents; a gradient that is all rounding (a key's bias) has such squares."""
_TRIAL_STEPS = 3
_TRIAL_DIM = 4  # at most, of the tensors on which an optimizer is tried
_RESOLVED = 0.5  # a change counts as resolved where rounding may be at most this share of it
Tensors = Mapping[str, torch.Tensor]


def replay(
    workload: Workload, parameters: Mapping[str, ParameterMeasure], recorder: Recorder, device: torch.device
) -> ReplayMeasure:
    """Compares the recorded parameters with those of a fresh optimizer, after each step.

    Args:
        workload: Makes the optimizer and the schedule.
        parameters: Those that train, in the model's order.
        recorder: What the run recorded.
        device: Where the optimizer runs.
    """
    missing = [name for name in parameters if name not in recorder.start]
    if missing:
        return ReplayMeasure(method="norms", reason=f"{missing[0]} does not train in the candidate")
    whole = all(parameter.elements <= SAMPLED_ELEMENTS for parameter in parameters.values())
    try:
        if not whole and not is_elementwise(workload, parameters, device):
            return ReplayMeasure(method="norms", reason="the optimizer treats the elements of a tensor together")
        moments: dict[str, float] = {}
        states = _replayed(workload, parameters, recorder, device, whole=whole, moments=moments)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        reason = f"the optimizer cannot be run by itself: {type(error).__name__}: {text}"
        return ReplayMeasure(method="norms", reason=reason)
    differences, unresolved = _differences(parameters, recorder, states)
    off, chance = rounding_errors(recorder)
    return ReplayMeasure(
        method="whole" if whole else "sampled",
        differences=differences,
        unresolved=unresolved,
        moments=moments,
        rounding=off,
        chance=chance,
    )


def _replayed(
    workload: Workload,
    parameters: Mapping[str, ParameterMeasure],
    recorder: Recorder,
    device: torch.device,
    *,
    whole: bool,
    moments: dict[str, float],
) -> list[Tensors]:
    """The parameters after each step, flat, as the fresh optimizer leaves them.

    What the run keeps rounded between steps, each step begins with: the rounded parameters where there is no fp32 copy
    of them, and the rounded moments. By parameter, `moments` gets how far these are from what the step gave.
    """
    values = {name: nn.Parameter(_shaped(recorder.start[name], parameters[name], device)) for name in parameters}
    if whole:
        optimizer = workload.build_optimizer(list(values.values()))
    else:
        optimizer = _over_samples(workload, parameters, values, device)
    for group in optimizer.param_groups:
        group.update({flag: False for flag in ("foreach", "fused") if flag in group})
    schedule = workload.build_schedule(optimizer) if workload.build_schedule is not None else None
    states: list[Tensors] = []
    no_copies = recorder.rounding is not None and recorder.rounding.parameters == "bf16_stochastic"
    for number, gradients in enumerate(recorder.clipped):
        for name, parameter in values.items():
            given = gradients.get(name)
            dtype = dtype_of(parameters[name])
            parameter.grad = None if given is None else _shaped(given, parameters[name], device).to(dtype)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        states.append({name: parameter.detach().reshape(-1).cpu().clone() for name, parameter in values.items()})
        for name, parameter in values.items():
            if no_copies:
                parameter.data.copy_(_shaped(recorder.kept[number][name], parameters[name], device))
            kept = recorder.moments[number].get(name, {}) if recorder.moments else {}
            for key, sample in kept.items():
                exact = optimizer.state[parameter][key]
                rounded = _shaped(sample, parameters[name], device)
                apart, size = norm_of(rounded.double() - exact.double()), norm_of(exact.double())
                moments[name] = max(moments.get(name, 0.0), finite(apart / max(size, TINY_MOMENTS)))
                exact.copy_(rounded)
    return states


def rounding_errors(recorder: Recorder) -> tuple[dict[str, float], float]:
    """How parameters were rounded: by parameter, the largest error past what is right; and how far from by chance.

    An error is counted in the distance of the two numbers of bf16 beside a value. To nearest, the right one is known.
    By chance, it is one of the two: the upper with the probability f of the value's place between them. So are the
    number of those rounded up, and of those rounded to the farther one, known within their standard deviations.
    """
    rounding = recorder.rounding
    if rounding is None or rounding.parameters == "own":
        return {}, 0.0
    off: dict[str, float] = {}
    up = far = variance_up = variance_far = 0.0
    for exact, kept in zip(recorder.stepped, recorder.kept, strict=True):
        for name, value in exact.items():
            if value.dtype is not torch.float32 or torch.equal(value, kept[name]):
                continue
            bits = value.view(torch.int32) & -(1 << 16)
            low = bits.view(torch.float32).double()
            ulp = (bits + (1 << 16)).view(torch.float32).double() - low  # away from zero
            place, taken = (value.double() - low) / ulp, (kept[name].double() - low) / ulp
            right = (
                (value.bfloat16().double() - low) / ulp if rounding.parameters == "bf16" else taken.round().clamp(0, 1)
            )
            off[name] = max(off.get(name, 0.0), finite(float((taken - right).abs().max())))
            nearer = torch.minimum(place, 1 - place)
            up += float((taken - place).sum())
            far += float((((taken - place).abs() > 0.5).double() - nearer).sum())
            variance_up += float((place * (1 - place)).sum())
            variance_far += float((nearer * (1 - nearer)).sum())
    if rounding.parameters == "bf16" or variance_up == 0.0:
        return off, 0.0
    return off, max(finite(abs(up) / variance_up**0.5), finite(abs(far) / max(variance_far, 1e-30) ** 0.5))


def _over_samples(
    workload: Workload,
    parameters: Mapping[str, ParameterMeasure],
    values: Mapping[str, nn.Parameter],
    device: torch.device,
) -> torch.optim.Optimizer:
    """The workload's optimizer, made over parameters of the true shapes, then given the sampled ones in their place.

    Functions that make groups go by shapes. The parameters that they see hold one number each, expanded.
    """
    shells = {
        name: nn.Parameter(torch.zeros((), dtype=dtype_of(parameter), device=device).expand(parameter.shape))
        for name, parameter in parameters.items()
    }
    optimizer = workload.build_optimizer(list(shells.values()))
    names = {id(shell): name for name, shell in shells.items()}
    for group in optimizer.param_groups:
        group["params"] = [values[names[id(shell)]] for shell in group["params"]]
    return optimizer


def is_elementwise(workload: Workload, parameters: Mapping[str, ParameterMeasure], device: torch.device) -> bool:
    """Whether steps on some elements of tensors move these as steps on the whole tensors do. Tried on small tensors."""
    generator = torch.Generator().manual_seed(0)
    small = {
        name: ParameterMeasure(shape=tuple(min(size, _TRIAL_DIM) for size in parameter.shape), dtype=parameter.dtype)
        for name, parameter in parameters.items()
    }
    ends = {}
    start = {name: _random(parameter, generator) for name, parameter in small.items()}
    gradients = [{name: _random(parameter, generator) for name, parameter in small.items()} for _ in range(3)]
    for stride in (1, 2):
        values = {
            name: nn.Parameter(tensor.to(device)[_every(tensor, stride)].clone()) for name, tensor in start.items()
        }
        optimizer = _over_samples(workload, parameters, values, device)
        if stride == 1 and step_hooks(optimizer):  # a hook may go by the tensors that the optimizer was made over
            optimizer = workload.build_optimizer(list(values.values()))
        for number in range(_TRIAL_STEPS):
            for name, value in values.items():
                tensor = gradients[number][name]
                value.grad = tensor.to(device)[_every(tensor, stride)].clone()
            optimizer.step()
        ends[stride] = values
    if all(torch.equal(value.detach().cpu(), start[name]) for name, value in ends[1].items()):
        return False  # it steps the tensors that it was made over, and not those of its groups
    return all(
        torch.allclose(ends[1][name].detach()[_every(ends[1][name], 2)], ends[2][name].detach(), rtol=1e-5, atol=1e-7)
        for name in small
    )


def _every(tensor: torch.Tensor, stride: int) -> tuple[slice, ...]:
    return tuple(slice(None, None, stride) for _ in range(tensor.dim()))


def _random(parameter: ParameterMeasure, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(parameter.shape, generator=generator).to(dtype_of(parameter))


def dtype_of(parameter: ParameterMeasure) -> torch.dtype:
    """The torch dtype of a parameter."""
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return dtype


def _shaped(flat: torch.Tensor, parameter: ParameterMeasure, device: torch.device) -> torch.Tensor:
    """Sampled elements as a tensor of as many dims as the parameter; a whole one in its own shape."""
    whole = flat.numel() == parameter.elements
    shape = parameter.shape if whole else (flat.numel(), *([1] * (len(parameter.shape) - 1)))
    return flat.reshape(shape).to(device).clone()


def _differences(
    parameters: Mapping[str, ParameterMeasure], recorder: Recorder, states: Sequence[Tensors]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The largest distance per parameter over its change, and the parameters whose change rounding hides.

    Two right orders of the same operations may round an element differently once or twice per step; a distance within
    that (`rounding`) does not count. A distance that is no number is as far off as can be.
    """
    worst: dict[str, float] = {}
    unresolved: list[str] = []
    for name, parameter in parameters.items():
        start = recorder.start[name].double()
        rounding_unit = torch.finfo(dtype_of(parameter)).eps * max(norm_of(start), 1e-30)
        for number, (theirs, ours) in enumerate(zip(states, recorder.stepped, strict=True), start=1):
            change = norm_of(theirs[name].double() - start)
            rounding = number * rounding_unit
            distance = norm_of(ours[name].double() - theirs[name].double())
            relative = 0.0 if distance <= rounding else (distance - rounding) / max(change, rounding)
            worst[name] = max(worst.get(name, 0.0), finite(relative))
            if number == len(states) and rounding > _RESOLVED * change:
                unresolved.append(name)
    return worst, tuple(unresolved)

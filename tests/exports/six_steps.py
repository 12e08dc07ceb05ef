"""Six optimizer steps, recorded: of a plain loop, of `plan.prepare`, and of whatever an export is for.

    plan = make_plan(micro_batch=2, dp_replicate=2)
    wanted = plain_loop(plan)
    assert compare(prepared(plan, zygote), wanted) == []
    assert compare(SixSteps.load(file_that_the_tool_wrote), wanted) == []

`plain_loop` is written with torch alone and knows nothing of how a plan is applied. It runs in one process whatever
the plan's ranks: the global batch is the same.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig
from tests.exports import workloads
from tests.exports.workloads import STEPS
from tests.recorded import named

WORKLOAD = f"{workloads.__file__}:language"
"""The language model; it has clipping, a warm-up, a group without weight decay, and counts that differ."""

BATCH_NORM = f"{workloads.__file__}:images"
"""The classifier with BatchNorm, for buffers; its micro_batch is 2."""


@dataclass(frozen=True, kw_only=True)
class SixSteps:
    """What is compared.

    Attributes:
        losses: Of each step: the summed loss of the global batch over the count of its items.
        grad_norms: Of each step, before clipping.
        learning_rates: Of each step, of the first parameter group: what the optimizer stepped with.
        parameters: After the last step, by the model's own names, whole (not a shard).
        buffers: Those that a checkpoint holds, after the last step; of the first rank.
        start: The parameters before the first step; of the plain loop, for the scale of a comparison.
    """

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Writes it to a file; returns the path."""
        torch.save(vars(self), path)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> SixSteps:
        """Reads such a file."""
        return cls(**torch.load(path, map_location="cpu"))


def compare(got: SixSteps, wanted: SixSteps, *, relative: float = 1e-4) -> list[str]:
    """The differences in words; none where both trained the same.

    Args:
        got: What is in question.
        wanted: What it is compared with; from `plain_loop`, so that it has `start`.
        relative: Of a number, its difference over the number; of a parameter, the norm of the difference over how far
            the parameter moved.
    """
    found = []
    for what in ("losses", "grad_norms", "learning_rates"):
        one, other = getattr(got, what), getattr(wanted, what)
        if len(one) != len(other):
            found.append(f"{what}: {len(one)} of them, wanted {len(other)}")
        for step, (value, reference) in enumerate(zip(one, other, strict=False)):
            if not math.isclose(value, reference, rel_tol=relative, abs_tol=1e-9):
                found.append(f"{what}[{step}] is {value:.7g}, wanted {reference:.7g}")
    assert wanted.start, "the scale of a comparison is how far plain_loop moved"
    return (
        found
        + _compare_tensors(got.parameters, wanted.parameters, wanted.start, relative)
        + _compare_tensors(got.buffers, wanted.buffers, {}, relative)
    )


def _compare_tensors(
    got: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    relative: float,
) -> list[str]:
    found = [f"{name} is missing" for name in sorted(set(wanted) - set(got))]
    found += [f"{name} is one too many" for name in sorted(set(got) - set(wanted))]
    for name in sorted(set(wanted) & set(got)):
        one, other = got[name], wanted[name]
        if one.shape != other.shape:
            found.append(f"{name} is of shape {tuple(one.shape)}, wanted {tuple(other.shape)}")
            continue
        one, other = one.detach().double(), other.detach().double()
        scale = float((other - start[name].double()).norm()) if name in start else float(other.norm())
        difference = float((one - other).norm())
        if not difference <= relative * scale + 1e-7:  # NaN differs
            found.append(f"{name} is off by {difference / scale if scale else math.inf:.3g} of its change")
    return found


def make_plan(workload: str = WORKLOAD, **knobs: Any) -> Plan:
    """The plan of a CPU search of a workload, without the search: `make_plan(micro_batch=2, dp_replicate=2)`.

    Args:
        workload: `file.py:function`.
        **knobs: Of TrainingConfig; micro_batch is 2 where it is not given.
    """
    from autoplan.strategies.analysis.training_facts import read_training_facts
    from autoplan.strategies.inspect import build_on_meta
    from autoplan.strategies.workloads.sources import load_workload, make_spec
    from tests import recorded

    spec = make_spec(model=workload)
    made = load_workload(spec)
    update = {"global_batch": made.global_batch, "sequence_length": made.sequence_length, "name": made.name}
    spec = spec.model_copy(update=update | {"open_fields": (), "unit": "tokens" if made.sequence_length else "samples"})
    config = TrainingConfig(**({"micro_batch": 2} | knobs))
    return recorded.make_plan(
        config,
        workload=spec,
        accumulation=config.accumulation(made.global_batch),
        training=read_training_facts(made, build_on_meta(made)),
    )


def function_of(plan: Plan) -> Any:
    """The workload of a plan of `make_plan`, by calling its function: nothing of autoplan loads it."""
    return getattr(workloads, plan.workload.reference.rpartition(":")[2])()


def samples(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """All samples of the six steps in order: a loader without shuffling makes the batches of the others of them."""
    workload = function_of(plan)
    batches = [workload.make_batch(workload.global_batch, index) for index in range(STEPS)]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(workload.global_batch)]


def plain_loop(plan: Plan, *, shares: Literal["contiguous", "interleaved"] = "contiguous") -> SixSteps:
    """The plan's training in one process and in fp32, written out.

    The loss is the sum over the global batch over the count of its items; micro-batches are the plan's, so that
    rounding and BatchNorm are too. Of several data-parallel ranks, the buffers are those of the first.

    Args:
        plan: From `make_plan`.
        shares: Which micro-batches are the first rank's: the first ones, or every n-th (as accelerate deals them out).
    """
    workload = function_of(plan)
    model = workload.build_model().train()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = workload.build_optimizer([p for p in model.parameters() if p.requires_grad])
    schedule = workload.build_schedule(optimizer)
    micro, ranks = plan.config.micro_batch, plan.config.dp
    losses, norms, rates = [], [], []
    for index in range(STEPS):
        batch = workload.make_batch(workload.global_batch, index)
        items = workload.count(batch)
        total = 0.0
        parts = workload.global_batch // micro
        for number in range(parts):
            of_first = number % ranks == 0 if shares == "interleaved" else number < parts // ranks
            part = {key: value[number * micro : (number + 1) * micro] for key, value in batch.items()}
            kept = [] if of_first else [(buffer, buffer.clone()) for buffer in model.buffers()]
            loss, _ = workload.loss(model, part)
            (loss / items).backward()
            total += float(loss.detach())
            for buffer, value in kept:
                buffer.copy_(value)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)))
        losses.append(total / items)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return SixSteps(losses=losses, grad_norms=norms, learning_rates=rates, start=start, **tensors_of(model))


def tensors_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters and the buffers of a model, whole, as SixSteps has them. All ranks call it where it is sharded.

    What DDP, torch.compile and checkpointing add to a name is taken out of it.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()

    def own(name: str) -> str:
        return name.removeprefix("module.").replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    parameters = {own(name): whole(value) for name, value in model.named_parameters()}
    held = set(map(own, model.state_dict()))
    buffers = {own(name): whole(value) for name, value in model.named_buffers() if own(name) in held}
    return {"parameters": parameters, "buffers": buffers}


def prepared(plan: Plan, zygote: Zygote | None = None) -> SixSteps:
    """The plan's training as `plan.prepare` makes it, on as many processes as the plan has ranks.

    Args:
        plan: From `make_plan`.
        zygote: Where several ranks are forked from; one needs none.
    """
    if plan.config.world_size == 1:
        return _run_prepared(plan)
    assert zygote is not None, "of several ranks"
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            target="tests.exports.six_steps:prepared_in_rank",
            args=(plan.model_dump_json(), f"{folder}/steps.pt"),
            ranks=plan.config.world_size,
            total_deadline_s=240.0,
        )
        zygote.run(task).check()
        return SixSteps.load(f"{folder}/steps.pt")


def prepared_in_rank(context: RankContext, plan: str, path: str) -> None:
    """Runs a rank of `prepared`; the first one writes the record."""
    context.init_process_group("gloo", 60.0)
    result = _run_prepared(Plan.model_validate_json(plan))
    if context.rank == 0:
        result.save(path)


def _run_prepared(plan: Plan) -> SixSteps:
    run = plan.prepare(workload=named(plan), device="cpu")
    losses, norms, rates = [], [], []
    for batch in global_batches(plan):
        rates.append(float(run.optimizer.param_groups[0]["lr"]))
        result = run.step(run.local_share(batch))
        assert result.grad_norm is not None
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return SixSteps(losses=losses, grad_norms=norms, learning_rates=rates, **tensors_of(run.model))


def global_batches(plan: Plan) -> Iterator[Any]:
    """The batches of the six steps."""
    workload = function_of(plan)
    for index in range(STEPS):
        yield workload.make_batch(workload.global_batch, index)

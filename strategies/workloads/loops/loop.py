"""A training loop of the user's own, plain or with Accelerate, read into a workload from its parts.

In: the model, the optimizer, the DataLoader and the loss that the loop has; also as `accelerator.prepare` gave them.
Out: a Workload. Nothing of Accelerate is imported: its wrappers are known by what they have.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from autoplan.errors import WorkloadError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.batch import move_batch
from autoplan.strategies.workloads.devices import device_of, on_cpu
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss
from autoplan.strategies.workloads.loops.loader import LoaderFacts, OrderedBatches, check_loader, read_loader
from autoplan.strategies.workloads.loops.mean_loss import (
    Count,
    CountLabels,
    CriterionLoss,
    LossMean,
    MeanLoss,
    OutputLoss,
    SummedLoss,
    across_samples,
    read_loss,
    scalar_of,
)
from autoplan.strategies.workloads.loops.schedules import (
    ScheduleInterval,
    at_the_start,
    by_interval,
    interval_note,
    plain_optimizer,
    read_schedule,
)
from autoplan.strategies.workloads.objects import workload_from_objects
from autoplan.strategies.workloads.optimizers import hooks_note, rebuild_over, trainable
from autoplan.strategies.workloads.own_setting import NOT_KNOWN, PRECISIONS, compile_mode_of, fp32_format, own_setting
from autoplan.strategies.workloads.padding import padding_words
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopParts:
    """The parts of a loop, without the wrappers.

    Attributes:
        model: As it computes without mixed precision.
        optimizer: torch's.
        loader: torch's.
        accumulation: Batches of the loader per optimizer step.
        known_accumulation: An Accelerator says so; False: it is taken to be 1.
        mixed_precision: As the Accelerator or Fabric was made; None: neither is known.
        compile_mode: Of torch.compile around the model; None: it is not compiled.
        spread: Over several devices, by DataParallel or DDP.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    accumulation: int
    known_accumulation: bool
    mixed_precision: str | None
    compile_mode: str | None
    spread: bool

    def own_setting(self, micro_batch: int) -> TrainingConfig | None:
        """The setting that the loop has, as far as its parts show it; None: a part of it is no knob."""
        precision = PRECISIONS.get(self.mixed_precision or "no")
        if precision == "fp32":
            precision = fp32_format(device_of(self.model))
        return own_setting(
            self.model,
            micro_batch=micro_batch,
            precision=None if self.spread else precision,
            compile_mode=self.compile_mode,
        )


def read_loop(
    model: Any,
    optimizer: Any,
    dataloader: Any,
    loss: Any = None,
    *,
    schedule: Any = None,
    schedule_interval: ScheduleInterval = "step",
    max_grad_norm: float | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    name: str | None = None,
    seed: int = 0,
    loss_mean: LossMean | None = None,
    accelerator: Any = None,
) -> Workload:
    """The training of a loop, from the parts that it has.

    Args:
        model: A module; one that Accelerate, DDP or torch.compile wrapped is unwrapped.
        optimizer: An optimizer over its parameters; Accelerate's wrapper is unwrapped.
        dataloader: A torch DataLoader; also a prepared one.
        loss: `loss(model, batch)` gives a LossSum, or a scalar mean; a torch loss (module or function) for batches of
            (inputs, targets); None: `model(**batch).loss`.
        schedule: A function that makes the learning-rate schedule from an optimizer, or the loop's own schedule.
        schedule_interval: When the loop steps its schedule: at each optimizer step, or once an epoch.
        max_grad_norm: The norm that the loop clips to.
        global_batch: Samples per optimizer step. None: the loader's batch size times the accumulation.
        sequence_length: Tokens per sample; None: samples are no sequences, or have none in common.
        name: For screens and plans.
        seed: For weights, batches and dropout.
        loss_mean: Over what a loss averages that returns a scalar; None: it is measured.
        accelerator: The Accelerator of the loop. None: it is found where the optimizer or the loader was prepared.

    Raises:
        WorkloadError: a part is missing or of the wrong kind, or the loop trains what no plan can keep.
    """
    parts = unwrap_loop(model, optimizer, dataloader, accelerator=accelerator)
    batches, facts = read_loader(
        parts.loader, batches_per_step=parts.accumulation, global_batch=global_batch, seed=seed
    )
    steps_per_epoch = max(facts.samples // facts.global_batch, 1)
    build_optimizer = rebuild_over(at_the_start(parts.optimizer), trainable(parts.model))
    workload, said = measured_workload(
        parts.model,
        _loss_function(loss),
        batches,
        facts,
        loss_mean=loss_mean,
        sum_divided=_sum_divided(parts, facts),
        optimizer=build_optimizer,
        schedule=by_interval(read_schedule(schedule, parts.optimizer), schedule_interval, steps_per_epoch),
        max_grad_norm=max_grad_norm,
        name=name,
        sequence_length=sequence_length,
        seed=seed,
    )
    if loss is None and _is_causal_loss(parts.model, workload):
        workload = dataclasses.replace(workload, loss=causal_loss, head=CausalHead())
    notes = _notes(parts, facts, workload, said, given=global_batch is not None)
    if workload.build_schedule is not None:
        over = build_optimizer(trainable(parts.model))
        notes.append(interval_note(workload.build_schedule, over, schedule_interval, steps_per_epoch))
    own = parts.own_setting(facts.batch_size)
    return dataclasses.replace(workload, notes=tuple(notes), taken_from="training loop", own_setting=own)


def measured_workload(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batches: OrderedBatches,
    facts: LoaderFacts,
    *,
    loss_mean: LossMean | None,
    seed: int,
    sum_divided: str | None,
    **fields: Any,
) -> tuple[Workload, list[str]]:
    """The workload of a loop whose batches were read, and sentences on what was measured.

    Over what the loss averages is measured, and whether padding changes what is trained.

    Args:
        model: The loop's own; it is left as it was.
        loss: Gives a scalar mean, or a LossSum.
        batches, facts: As `read_loader` gives them.
        loss_mean: See `read_loop`.
        seed: For weights, batches and dropout.
        sum_divided: See `read_loss`.
        fields: optimizer, schedule, max_grad_norm, name, sequence_length: see `workload_from_objects`.

    Raises:
        WorkloadError: no plan can keep the loss, or a step has no whole batches of the loop where it must.
    """
    loss_sum, count = read_loss(
        loss, model, batches, seed=seed, mean=loss_mean, global_batch=facts.global_batch, sum_divided=sum_divided
    )
    padding, carried = across_samples(loss_sum, model, batches, seed=seed)
    fixed = loss_mean == "batches" or has_batch_norm(model) or padding is not None or carried is not None
    if fixed and facts.global_batch % facts.batch_size:
        raise WorkloadError(
            f"the global batch of {facts.global_batch} is no whole number of the loop's batches of {facts.batch_size}",
            hint='With BatchNorm, with loss_mean="batches", and where padding or an earlier batch changes the '
            "gradients, a step takes whole batches of the DataLoader.",
        )
    workload = workload_from_objects(
        model=on_cpu(model),
        make_batch=batches,
        loss=loss_sum,
        global_batch=facts.global_batch,
        fixed_micro_batch=facts.batch_size if fixed else None,
        seed=seed,
        **fields,
    )
    workload = dataclasses.replace(workload, count=count)
    why = padding_words(padding) if padding is not None else carried and f"{carried.name} {carried.why}"
    return workload, _describe_data(facts, workload, count, why)


def _sum_divided(parts: LoopParts, facts: LoaderFacts) -> str | None:
    """Why a loop divides the sum of a batch by something, or may do so; None: its step is one batch."""
    if parts.accumulation > 1:
        return f"accelerator.backward divides it by the accumulation of {parts.accumulation}"
    if facts.global_batch != facts.batch_size:
        return (
            f"a step of {facts.global_batch} samples is not one of the DataLoader's batches of {facts.batch_size}, of "
            "which the loop may divide each"
        )
    return None


def unwrap_loop(model: Any, optimizer: Any, dataloader: Any, *, accelerator: Any = None) -> LoopParts:
    """The parts of a loop without what Accelerate, Fabric, DDP and torch.compile put around them.

    Raises:
        WorkloadError: a part is missing, of the wrong kind, or spread over processes.
    """
    parts = {"model": model, "optimizer": optimizer, "dataloader": dataloader}
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise WorkloadError(
            f"the loop lacks {', '.join(missing)}",
            hint="autoplan.search(model, optimizer, dataloader, loss) takes the parts of a training loop.",
        )
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"the model is {type(model).__name__}; with a dataloader it is a torch.nn.Module",
            hint="Hand in the model that the loop trains. A function that makes one goes with make_batch=.",
        )
    inner = plain_optimizer(optimizer)
    state = next((found for found in (_gradient_state(part) for part in parts.values()) if found is not None), None)
    steps = getattr(accelerator, "gradient_accumulation_steps", None) or getattr(state, "num_steps", None)
    state_of_processes = getattr(optimizer, "accelerator_state", None)
    processes: Any = getattr(accelerator, "num_processes", None) or getattr(state_of_processes, "num_processes", None)
    _refuse_processes(int(processes or 1), dataloader, int(steps or 1))
    mixed = getattr(accelerator, "mixed_precision", None) or getattr(state_of_processes, "mixed_precision", None)
    layers = list(_layers(model))
    kinds = {type(layer).__name__ for layer in layers}
    modes = (compile_mode_of(layer) for layer in layers)
    return LoopParts(
        model=unwrap_model(model),
        optimizer=inner,
        loader=check_loader(dataloader),
        accumulation=int(steps or 1),
        known_accumulation=steps is not None,
        mixed_precision=_fabric_precision(layers) if mixed is None else str(mixed),
        compile_mode=next((mode for mode in modes if mode is not None), None),
        spread=not kinds.isdisjoint(("DistributedDataParallel", "DataParallel")),
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, torch.compile, Accelerate and Fabric; parameters are the same objects.

    Raises:
        WorkloadError: its parameters are sharded.
    """
    inner = list(_layers(model))[-1]
    kind = type(inner).__name__
    sharded = any(type(parameter).__name__ == "DTensor" for parameter in inner.parameters())
    if sharded or kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        raise WorkloadError(
            f"the parameters of the model are spread over processes ({kind if not sharded else 'FSDP2'})",
            hint="Hand in the model as it is before it is sharded; how it is sharded is what a plan says.",
        )
    return _without_mixed_precision(inner)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model as it is wrapped, then what is inside of each wrapper, the user's own module last."""
    inner: Any = model
    while True:
        yield inner
        kind = type(inner).__name__
        if kind in ("DistributedDataParallel", "DataParallel"):
            inner = inner.module
        elif kind == "OptimizedModule" and isinstance(vars(inner).get("_modules", {}).get("_orig_mod"), nn.Module):
            inner = inner._orig_mod
        elif kind == "_FabricModule":
            inner = inner._original_module
        else:
            return


def _fabric_precision(layers: list[nn.Module]) -> str | None:
    """The precision of the Fabric that set a model up; None: none did."""
    fabric = (layer for layer in layers if type(layer).__name__ == "_FabricModule")
    strategies = (getattr(layer, "_strategy", None) for layer in fabric)
    found = (getattr(getattr(strategy, "precision", None), "precision", None) for strategy in strategies)
    return next((str(one) for one in found if one is not None), None)


def _without_mixed_precision(model: nn.Module) -> nn.Module:
    """The model without the autocast that `accelerator.prepare` puts into its forward; precision is a knob.

    It shares its parameters and modules with the user's, whose own forward stays as it is.
    """
    if "_original_forward" not in vars(model):
        return model
    plain = copy.copy(model)
    plain.__dict__ = {key: value for key, value in vars(model).items() if key not in ("forward", "_original_forward")}
    return plain


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a BatchNorm of the model trains: then a loop's batch size is part of what it trains.

    As `enter_training_mode` has it: of a model in evaluation mode as a whole, everything trains.
    """
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return any(norm.training or not model.training for norm in norms)


def _gradient_state(part: Any) -> Any:
    """Accelerate's gradient state, which a prepared optimizer and a prepared DataLoader have."""
    state = vars(part).get("gradient_state") if hasattr(part, "__dict__") else None
    return state if hasattr(state, "num_steps") else None


def _refuse_processes(processes: int, dataloader: Any, steps: int) -> None:
    if processes <= 1:
        return
    size = getattr(dataloader, "total_batch_size", None)
    whole = f"global_batch={size * steps}" if isinstance(size, int) else "global_batch= of all processes together"
    raise WorkloadError(
        f"this is one of {processes} processes of an Accelerate launch, and a search starts its own",
        hint=f"Run the program by itself (python train.py), and say what all processes train together: {whole}. "
        "nproc= is the largest number of processes that a plan may have.",
    )


def _loss_function(loss: Any) -> Callable[[nn.Module, Any], Any]:
    if loss is None:
        return OutputLoss()
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == functional.__name__:
        return CriterionLoss(loss)
    if not callable(loss):
        raise WorkloadError(
            f"the loss is {type(loss).__name__}; it is a function loss(model, batch)",
            hint="Leave it out for a model that computes its own loss: model(**batch).loss.",
        )
    found: Callable[[nn.Module, Any], Any] = loss
    return found


def _is_causal_loss(model: nn.Module, workload: Workload) -> bool:
    """Whether the model's own loss is the one of the next token, which can be fused with the output head."""
    count, loss = workload.count, workload.loss
    if not isinstance(count, CountLabels) or not count.shifted or "label" not in count.name:
        return False
    if not hasattr(model, "get_output_embeddings") or not isinstance(loss, MeanLoss):
        return False
    batch = move_batch(workload.make_batch(2, 0), device_of(model))
    training = model.training
    model.eval()
    try:
        with seeded(0), torch.no_grad():
            ours, own = causal_loss(model, batch), scalar_of(loss.mean(model, batch))
        return math.isclose(float(ours.total) / float(ours.count), float(own), rel_tol=1e-5)
    except Exception:  # a model that takes its batch otherwise: its own loss is used
        return False
    finally:
        model.train(training)


def _describe_data(facts: LoaderFacts, workload: Workload, count: Count | None, fixed_by: str | None) -> list[str]:
    """Sentences on what was found of the loss and the DataLoader."""
    steps, size = workload.global_batch, facts.batch_size
    notes = []
    if workload.fixed_micro_batch is not None:
        why = fixed_by or "BatchNorm normalises each batch by itself, or each has the same weight in a step"
        notes.append(f"the micro-batch stays at the DataLoader's {size}: {why}")
    elif count is not None:
        what = "sum" if isinstance(workload.loss, SummedLoss) else "mean"
        notes.append(f"the loss is a {what} over {count.describe()}, found by measuring it")
    if isinstance(count, CountLabels) and steps > size:
        notes.append(
            f"a loop that averages the means of its {steps // size} batches weights the tokens of a batch with few "
            'labels more; a plan divides by the count of the whole global batch. loss_mean="batches" keeps the former'
        )
    if facts.left_over:
        notes.append(f"each epoch ends with a batch of {facts.left_over} samples; a plan's steps are all whole")
    if facts.has_workers:
        notes.append("trials make their batches in their own process, without the DataLoader's workers")
    return notes


def _notes(parts: LoopParts, facts: LoaderFacts, workload: Workload, measured: list[str], *, given: bool) -> list[str]:
    """Sentences on what is taken over from the loop, and what is not."""
    steps, size = workload.global_batch, facts.batch_size
    notes = []
    if given:
        notes.append(f"global batch {steps} samples, as given; the DataLoader's batches have {size}")
    elif parts.known_accumulation:
        notes.append(f"global batch {steps} samples: batches of {size} x {parts.accumulation} of accumulation")
    else:
        notes.append(
            f"global batch {steps} samples: the DataLoader's batch size. A loop that accumulates gives global_batch="
        )
    notes += measured
    unsaid = {"max_grad_norm=": workload.max_grad_norm, "schedule=": workload.build_schedule}
    missing = [name for name, value in unsaid.items() if value is None]
    if missing:
        none = {"max_grad_norm=": "clips no gradients", "schedule=": "keeps its learning rate"}
        what = " and ".join(none[name] for name in missing)
        notes.append(f"the loop is taken to be one that {what}; else give {' and '.join(missing)}")
    notes += hooks_note(parts.optimizer, parts.model)
    return [*notes, *_setting_notes(parts, size)]


def _setting_notes(parts: LoopParts, size: int) -> list[str]:
    """A sentence on the loop's own setting: what is known of it, and what cannot be seen."""
    own, mixed = parts.own_setting(size), parts.mixed_precision
    if own is None:
        return [NOT_KNOWN if mixed in (None, "no") else f"mixed_precision={mixed}: {NOT_KNOWN}"]
    if mixed is None:
        return [
            f"your setting is what the loop's parts show ({own.describe()}). Autocast around a step cannot be seen: "
            "baseline={'precision': 'bf16'} says it"
        ]
    if own.precision in ("fp32", "tf32"):
        return []
    return [
        f"your setting has mixed_precision={mixed}; the plan may have another precision. To keep it: "
        f"fix={{'precision': '{own.precision}'}}"
    ]

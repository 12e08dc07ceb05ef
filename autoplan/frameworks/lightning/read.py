"""From a LightningModule with its data to a Workload; of `lightning` and of `pytorch_lightning`.

In: a module, its datamodule or DataLoader, perhaps the Trainer. Out: a `ModuleReading`. The module, the datamodule and
the Trainer are left as they are: a copy of the module is set up and read. Lightning is not imported here.

In trials there is no Trainer: `self.log` does nothing, and `self.trainer` is a `TrainerFacts`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.devices import on_cpu
from autoplan.strategies.workloads.loops.loader import check_loader, read_loader
from autoplan.strategies.workloads.loops.loop import measured_workload
from autoplan.strategies.workloads.loops.mean_loss import LossMean
from autoplan.strategies.workloads.loops.schedules import Stepped, at_the_start, read_schedule
from autoplan.strategies.workloads.optimizers import rebuild_over, trainable
from autoplan.strategies.workloads.own_setting import NOT_KNOWN, PRECISIONS, compile_mode_of, fp32_format, own_setting
from autoplan.strategies.workloads.user_errors import users_call
from autoplan.strategies.workloads.workload import Workload

BATCH_INDEX = 1
"""The batch_idx of training_step in trials: not 0, at which many modules do something that they do now and then."""

CHANGE_TRAINING = (
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)
"""Hooks that decide what a step does; a module with one of its own is refused."""

NOT_RUN = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "transfer_batch_to_device",
)
"""Hooks around a step that trials do not run; a module with one of its own gets a note."""

CHANGING_CALLBACKS = (
    "GradientAccumulationScheduler",
    "BatchSizeFinder",
    "StochasticWeightAveraging",
    "WeightAveraging",
)
"""Callbacks that change a training as it goes on; they get a note."""

ONE_DEVICE = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies that on one device train as a plan on one does."""

AS_A_TRAINER = "The search calls them as a Trainer does before it begins."

SINGLE = "A plan trains with one optimizer: return it, ([optimizer], [schedule]), or a dict of both."


class MissingTrainerError(WorkloadError, AttributeError):
    """The module asks its Trainer for something that trials do not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """The stand-in for `self.trainer` while there is no Trainer: numbers of the training, at its first step.

    Attributes:
        accumulate_grad_batches, gradient_clip_val, max_epochs, max_steps: As the Trainer has them.
        num_training_batches: Batches of an epoch.
        estimated_stepping_batches: Optimizer steps of the whole training; infinite where it has no end.
    """

    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    max_epochs: int | None = None
    max_steps: int = -1
    num_training_batches: int = 0
    estimated_stepping_batches: float = float("inf")
    world_size: int = 1
    global_rank: int = 0
    local_rank: int = 0
    current_epoch: int = 0
    global_step: int = 0
    is_global_zero: bool = True
    training: bool = True
    sanity_checking: bool = False
    barebones: bool = True
    logger: None = None
    loggers: tuple[()] = ()
    callbacks: tuple[()] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingTrainerError(
            f"the module reads self.trainer.{name}, and there is no Trainer in trials",
            hint="Guard it (`if self.trainer.training` and the like do), or move it into a callback.",
        )


@dataclasses.dataclass(frozen=True)
class TrainingStepLoss:
    """The loss of a LightningModule: what its training_step returns.

    Attributes:
        takes_index: training_step has a second parameter.
    """

    takes_index: bool

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        """A tensor, or a dict with "loss"."""
        module: Any = model
        if getattr(module, "_trainer", None) is None:
            stand_in(module, TrainerFacts())  # a module drops what stands in for its Trainer when it is copied
        batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
        return module.training_step(batch, BATCH_INDEX) if self.takes_index else module.training_step(batch)


class ModuleReading(NamedTuple):
    """The workload that was read of a LightningModule, and the numbers that its Trainer counts in batches.

    Attributes:
        workload: What is trained.
        batch_samples: Samples of a batch, of all processes together.
        accumulation: Batches of an optimizer step.
        frequency: See `ModuleOptimizer`; 1 where `schedule=` was given.
    """

    workload: Workload
    batch_samples: int
    accumulation: int
    frequency: int


class ModuleOptimizer(NamedTuple):
    """The optimizer and the schedule that configure_optimizers gives.

    Attributes:
        optimizer: The one optimizer.
        schedule: Makes its schedule; None: a constant rate.
        notes: Sentences for the user.
        frequency: Batches after which a schedule of the interval "step" is due; 1: each, or it goes by epochs.
    """

    optimizer: torch.optim.Optimizer
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    notes: list[str]
    frequency: int = 1


def read_training(module: Any) -> Workload:
    """The training of a LightningModule that has its data itself, without a Trainer.

    Raises:
        WorkloadError: see `read_module`.
    """
    return read_module(module).workload


def read_module(
    module: Any,
    data: Any = None,
    *,
    trainer: Any = None,
    loss_mean: LossMean | None = None,
    schedule: Any = None,
    max_grad_norm: float | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    name: str | None = None,
    seed: int = 0,
) -> ModuleReading:
    """The training of a LightningModule.

    Args:
        module: It trains with automatic optimization and one optimizer.
        data: A LightningDataModule or a DataLoader; None: the module's own train_dataloader().
        trainer: A lightning Trainer, whose accumulation, clipping, devices and length are read. None: none of them.
        loss_mean: Over what training_step averages; None: it is measured.
        schedule: Instead of the schedule of configure_optimizers.
        max_grad_norm: Instead of the Trainer's gradient_clip_val.
        global_batch: Samples per optimizer step. None: the loader's batch size times the Trainer's accumulation and
            devices.
        sequence_length, name, seed: See Workload.

    Raises:
        WorkloadError: manual optimization, several optimizers, hooks that change what a step does, clipping by value,
            or data that no plan can keep.
    """
    _refuse_module(module)
    accumulation, processes, clip = _trainer_settings(trainer)
    facts = TrainerFacts(accumulate_grad_batches=accumulation, gradient_clip_val=clip, world_size=processes)
    twin = _set_up(copy_model(module, facts))
    loader = check_loader(_loader_of(twin, data, facts), "train_dataloader()")
    steps = accumulation * processes
    batches, found = read_loader(loader, batches_per_step=steps, global_batch=global_batch, seed=seed)
    facts = _with_length(facts, trainer, found.samples // (found.batch_size * processes))
    twin.trainer = facts
    optimizer, own_schedule, said, frequency = read_optimizers(twin, facts.num_training_batches, accumulation)
    index = len(inspect.signature(module.training_step).parameters) > 1
    workload, measured = measured_workload(
        twin,
        TrainingStepLoss(index),
        batches,
        found,
        loss_mean=loss_mean,
        sum_divided="Lightning divides it by the accumulation and the devices, which a plan may change",
        optimizer=rebuild_over(at_the_start(optimizer), trainable(twin)),
        schedule=own_schedule if schedule is None else schedule,
        max_grad_norm=clip if max_grad_norm is None else max_grad_norm,
        name=name or type(module).__name__,
        sequence_length=sequence_length,
        seed=seed,
    )
    where = "the Trainer's" if trainer is not None else "no Trainer was given:"
    notes = (
        f"global batch {found.global_batch} samples: batches of {found.batch_size}, {where} accumulation "
        f"{accumulation}, devices {processes}",
        *measured,
        *said,
        *_notes(module, trainer),
    )
    own = read_setting(module, trainer, found.batch_size)
    build = functools.partial(copy_model, on_cpu(twin), facts)
    return ModuleReading(
        dataclasses.replace(workload, build_model=build, notes=notes, taken_from="LightningModule", own_setting=own),
        batch_samples=found.batch_size * processes,
        accumulation=accumulation,
        frequency=frequency if schedule is None else 1,
    )


def read_setting(module: Any, trainer: Any, batch_samples: int) -> TrainingConfig | None:
    """The setting that a lightning.Trainer gives to a module; None: there is none, or it is no setting of knobs.

    Args:
        module: The user's.
        trainer: The user's; None: none was given.
        batch_samples: Of a batch of one process.
    """
    if trainer is None or int(trainer.num_devices) * int(trainer.num_nodes) > 1:
        return None
    if type(trainer.strategy).__name__ not in ONE_DEVICE:
        return None
    precision = PRECISIONS.get(str(trainer.precision))
    if precision == "fp32":
        precision = fp32_format(getattr(trainer.strategy, "root_device", torch.device("cpu")))
    return own_setting(module, micro_batch=batch_samples, precision=precision, compile_mode=compile_mode_of(module))


def copy_model(module: Any, facts: TrainerFacts) -> Any:
    """A copy of a module as it runs in trials: without a Trainer, and with a `self.log` that does nothing."""
    copied = copy.deepcopy(module)
    stand_in(copied, facts)
    return copied


def stand_in(module: Any, facts: TrainerFacts) -> None:
    """Gives a module what it may ask its Trainer, and a `self.log` that does nothing."""
    module.trainer = facts
    module.log = module.log_dict = _log_nothing


def _log_nothing(*args: Any, **options: Any) -> None:
    """Instead of self.log and self.log_dict: there is no Trainer that keeps what is logged."""


def read_optimizers(module: Any, batches_per_epoch: int, accumulation: int) -> ModuleOptimizer:
    """The optimizer of a module, and its schedule as it goes on by optimizer steps.

    Args:
        module: A copy of the user's, with a `trainer`.
        batches_per_epoch: Of one rank.
        accumulation: Batches of an optimizer step; a schedule of the interval "epoch" is stepped after their epoch.

    Raises:
        WorkloadError: it fails, or gives no optimizer or several.
    """
    with users_call(f"configure_optimizers() of {type(module).__name__}", SINGLE):
        given = module.configure_optimizers()
    optimizers, schedules = _parse(given)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        what = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else type(optimizers[0]).__name__
        raise WorkloadError(f"configure_optimizers() of {type(module).__name__} gives {what}", hint=SINGLE)
    if len(schedules) > 1:
        raise WorkloadError(
            f"configure_optimizers() gives {len(schedules)} schedules for one optimizer",
            hint="Put them into one: torch.optim.lr_scheduler.SequentialLR or ChainedScheduler.",
        )
    if not schedules:
        return ModuleOptimizer(optimizers[0], None, [])
    options = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    schedule = options["scheduler"]
    if type(schedule).__name__ == "ReduceLROnPlateau":
        said = "ReduceLROnPlateau is stepped by a metric, which trials have not: a constant rate"
        return ModuleOptimizer(optimizers[0], None, [said])
    frequency, notes = int(options.get("frequency", 1)), []
    if options.get("interval", "epoch") == "step":
        every = steps_between(frequency, accumulation)
        if frequency > 1 and batches_per_epoch % (every * accumulation):
            notes.append(
                f"Lightning counts the {frequency} batches of the schedule's frequency anew in each epoch of "
                f"{batches_per_epoch}; a plan's steps count on"
            )
    else:
        every, frequency = frequency * (batches_per_epoch // accumulation or 1), 1
    make = read_schedule(schedule, optimizers[0])
    assert make is not None, "a schedule was given"
    return ModuleOptimizer(optimizers[0], make if every == 1 else Stepped(make, every), notes, frequency)


def steps_between(frequency: int, accumulation: int) -> int:
    """Optimizer steps from one step of a schedule to the next, under a lightning.Trainer.

    It steps a schedule of the interval "step" at batches that end an optimizer step, where their number is also a
    multiple of the frequency.
    """
    return math.lcm(frequency, accumulation) // accumulation


def _parse(given: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedules, in the forms that Lightning takes."""
    if given is None:
        raise WorkloadError("configure_optimizers() gives None, so nothing is trained", hint=SINGLE)
    if isinstance(given, torch.optim.Optimizer):
        return [given], []
    if isinstance(given, Mapping):
        return [given.get("optimizer")], [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list):
        return given[0], given[1] if isinstance(given[1], list) else [given[1]]
    if isinstance(given, list | tuple):
        parsed = [_parse(one) for one in given]
        return [one for optimizers, _ in parsed for one in optimizers], [one for _, found in parsed for one in found]
    return [given], []


def _refuse_module(module: Any) -> None:
    if not module.automatic_optimization:
        raise WorkloadError(
            f"{type(module).__name__} optimizes manually (automatic_optimization = False), so what a step does is its "
            "own program",
            hint="Search with automatic optimization, or give the parts of one step: "
            "autoplan.search(model, optimizer, dataloader, loss).",
        )
    own = [hook for hook in CHANGE_TRAINING if is_overridden(module, hook)]
    if own:
        raise WorkloadError(
            f"{type(module).__name__} has {' and '.join(own)} of its own, which decide what a step does; a plan runs "
            "its own step",
            hint="Leave the hook out for the search, or give the parts: autoplan.search(model, optimizer, dataloader, "
            "loss).",
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise WorkloadError(
            f"training_step of {type(module).__name__} takes dataloader_iter, so it fetches its batches itself",
            hint="Take a batch: training_step(self, batch, batch_idx).",
        )


def is_overridden(holder: Any, hook: str) -> bool:
    """Whether a class of the user's own has the hook, and not one of Lightning's."""
    owner = next((kind for kind in type(holder).__mro__ if hook in vars(kind)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _trainer_settings(trainer: Any) -> tuple[int, int, float | None]:
    """Accumulation, processes and the norm to clip at."""
    if trainer is None:
        return 1, 1, None
    clip = getattr(trainer, "gradient_clip_val", None) or None
    algorithm = getattr(trainer, "gradient_clip_algorithm", None)
    if clip is not None and str(getattr(algorithm, "value", algorithm) or "norm") != "norm":
        raise WorkloadError(
            f"the Trainer clips gradients by {getattr(algorithm, 'value', algorithm)}; a plan clips the norm of all",
            hint="Train with gradient_clip_algorithm='norm', or without clipping.",
        )
    if int(getattr(trainer, "global_step", 0) or 0):
        raise WorkloadError(
            f"the Trainer is at step {trainer.global_step}; a plan is for a training from its start",
            hint="Search before trainer.fit(), with a Trainer that was made anew.",
        )
    processes = int(trainer.num_devices) * int(trainer.num_nodes)
    return int(trainer.accumulate_grad_batches), processes, None if clip is None else float(clip)


def _loader_of(twin: Any, data: Any, facts: TrainerFacts) -> Any:
    """The training's DataLoader: that which was given, or what train_dataloader() gives."""
    holder = twin
    if data is not None and not hasattr(data, "train_dataloader"):
        return data
    if data is not None:
        holder = copy.copy(data)  # prepare_data() and setup() set attributes
        holder.trainer = facts
        _refuse_hooks(data)
    elif not is_overridden(twin, "train_dataloader"):
        raise WorkloadError(
            f"{type(twin).__name__} has no train_dataloader(), and no data was given",
            hint="autoplan.search(module, datamodule) or autoplan.search(module, dataloader).",
        )
    with users_call(f"prepare_data(), setup('fit') or train_dataloader() of {type(holder).__name__}", AS_A_TRAINER):
        if holder is not twin:
            holder.prepare_data()
            holder.setup("fit")
        loader = holder.train_dataloader()
    if isinstance(loader, Mapping | list | tuple) or type(loader).__name__ == "CombinedLoader":
        raise WorkloadError(
            "train_dataloader() gives several loaders, and a step takes a batch of each",
            hint="Give one DataLoader over a dataset that gives a sample of each: "
            "torch.utils.data.StackDataset(one=..., other=...).",
        )
    return loader


def _refuse_hooks(data: Any) -> None:
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    own = [hook for hook in hooks if is_overridden(data, hook)]
    if own:
        raise WorkloadError(
            f"{type(data).__name__} has {' and '.join(own)} of its own, and trials have no datamodule",
            hint="Put it into collate_fn, or into the module: its on_after_batch_transfer runs in trials.",
        )


def _set_up(twin: Any) -> Any:
    """The copy with its lazy layers made, as a Trainer does before it asks for data and optimizer."""
    with users_call(f"prepare_data(), setup('fit') or configure_model() of {type(twin).__name__}", AS_A_TRAINER):
        for hook, arguments in (("prepare_data", ()), ("setup", ("fit",)), ("configure_model", ())):
            if is_overridden(twin, hook):
                getattr(twin, hook)(*arguments)
    return twin


def _with_length(facts: TrainerFacts, trainer: Any, batches: int) -> TrainerFacts:
    """The facts with how long the training is.

    Args:
        facts: Those without it.
        trainer: The user's; None: none.
        batches: Of the loader, on one rank.
    """
    limit = getattr(trainer, "limit_train_batches", None)
    if isinstance(limit, int | float) and limit:  # a whole number counts batches, another is a share of them
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epochs, most = getattr(trainer, "max_epochs", None), int(getattr(trainer, "max_steps", -1) or -1)
    steps = float("inf")
    if epochs is not None and epochs >= 0:
        steps = -(-batches // facts.accumulate_grad_batches) * epochs
    if most >= 0:
        steps = min(steps, most)
    whole = int(steps) if steps != float("inf") else steps
    return dataclasses.replace(
        facts, max_epochs=epochs, max_steps=most, num_training_batches=batches, estimated_stepping_batches=whole
    )


def _notes(module: Any, trainer: Any) -> list[str]:
    """Sentences on the parts of Lightning that do not run in trials."""
    notes = ["self.log does nothing in trials, and no callback runs"]
    own = [hook for hook in NOT_RUN if is_overridden(module, hook)]
    if own:
        notes.append(f"trials do not run {', '.join(own)} of {type(module).__name__}")
    if trainer is None:
        notes.append(
            "no Trainer was given: no accumulation and no clipping, unless global_batch= and max_grad_norm= say"
        )
        return notes
    precision = str(getattr(trainer, "precision", "32-true"))
    if precision != "32-true":
        yours = NOT_KNOWN if read_setting(module, trainer, 1) is None else "your setting has it"
        notes.append(f"the Trainer's precision={precision} is a knob of the plan, whose parameters stay fp32; {yours}")
    changing = [type(one).__name__ for one in trainer.callbacks if type(one).__name__ in CHANGING_CALLBACKS]
    if changing:
        notes.append(
            f"{', '.join(changing)} of the Trainer change the training as it goes on; trials are its beginning"
        )
    return notes

"""Trainings as they stand, as workloads: of a Trainer, a loop, a LightningModule, a function of one step.

What `autoplan.search` is given, by position or by name, is told apart in `read_training`, and read by its own reader.
The functions `from_...` are for who wants to change a part before the search, or to return a Workload from a file for
the command line. Loads torch only where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoplan.errors import UsageError, WorkloadError
from autoplan.strategies.workloads.frameworks import LIGHTNING_MODULES, MODULES, framework_of, is_one_of, module_of

if TYPE_CHECKING:
    from autoplan.strategies.workloads.loops.mean_loss import LossMean
    from autoplan.strategies.workloads.loops.schedules import ScheduleInterval
    from autoplan.strategies.workloads.workload import Workload


LIGHTNING_DATA = (
    "lightning.pytorch.core.datamodule.LightningDataModule",
    "pytorch_lightning.core.datamodule.LightningDataModule",
)
LOADERS = ("torch.utils.data.dataloader.DataLoader", "accelerate.data_loader.DataLoaderAdapter")


def read_training(workload: Any, parts: dict[str, Any], settings: dict[str, Any]) -> Workload | None:
    """The workload of a training as it stands (a Trainer, a LightningModule, a loop, a step); None: it is none.

    `parts` are those that were given.

    Raises:
        UsageError: parts were given that it has itself.
        WorkloadError: it is one, and cannot be taken over.
    """
    given, framework = dict(parts), framework_of(workload)
    if framework is None or is_one_of(workload, LIGHTNING_MODULES):  # which has data beside it
        if workload is not None and "model" in given:
            raise UsageError(f"{type(workload).__name__} was given first, and model= too", hint="Give one of them.")
        found = read_parts(given.pop("model", workload), **given, **settings)
        if found is None and given.keys() - {"name"} and is_one_of(workload, MODULES):
            raise WorkloadError(
                f"the loop lacks {', '.join(name for name in ('optimizer', 'dataloader') if name not in given)}",
                hint="autoplan.search(model, optimizer, dataloader, loss) takes the parts of a training loop. Without "
                "a DataLoader, make_batch= makes the batches.",
            )
        return found
    if given.keys() - {"name"}:
        raise UsageError(
            f"a {type(workload).__name__} was given, and {', '.join(sorted(given))} too",
            hint="Give either the Trainer, which has all of them, or the parts.",
        )
    return from_trainer(workload)


def read_parts(
    model: Any,
    *,
    optimizer: Any = None,
    dataloader: Any = None,
    loss: Any = None,
    make_batch: Any = None,
    trainer: Any = None,
    accelerator: Any = None,
    loss_mean: LossMean | None = None,
    schedule_interval: ScheduleInterval | None = None,
    step: Any = None,
    precisions: Sequence[str] = (),
    **settings: Any,
) -> Workload | None:
    """The workload of a loop's or a LightningModule's parts, or of a step, with what is to be said of it.

    Args:
        model: The first thing that was given, or `model=`.
        optimizer: The second; for a LightningModule this place is its data's.
        dataloader, loss, make_batch, trainer, accelerator, loss_mean, schedule_interval, step: See `autoplan.search`.
        precisions: That are allowed around a step.
        settings: schedule, max_grad_norm, global_batch, sequence_length, name, seed.

    Returns:
        None where no DataLoader, no LightningModule and no step was given.

    Raises:
        WorkloadError: a part is missing or of the wrong kind, or no plan can keep what is trained.
    """
    parts = {"model": model, "optimizer": optimizer, "dataloader": dataloader, "loss": loss, "make_batch": make_batch}
    interval = None if schedule_interval == "step" else schedule_interval
    others = {"trainer": trainer, "accelerator": accelerator, "loss_mean": loss_mean, "schedule_interval": interval}
    if step is not None:
        outside = {name: settings.pop(name, None) for name in ("schedule", "max_grad_norm", "sequence_length")}
        _refuse(parts | others | outside, "a step has them itself")
        settings["global_batch"] = settings.get("global_batch") or 1
        return from_step(step, precisions=precisions, **settings)
    if is_one_of(model, LIGHTNING_MODULES):
        from autoplan.frameworks.lightning.read import read_module

        data, optimizer = (dataloader, optimizer) if dataloader is not None else (optimizer, None)
        given = {"optimizer": optimizer, "loss": loss, "accelerator": accelerator, "make_batch": make_batch}
        given |= {"schedule_interval": interval}
        _refuse(given, "a LightningModule says these itself")
        return read_module(model, data, trainer=trainer, loss_mean=loss_mean, **settings).workload
    if is_one_of(optimizer, LOADERS + LIGHTNING_DATA):
        raise WorkloadError(
            f"the second argument is {type(optimizer).__name__}; after a model comes its optimizer",
            hint="autoplan.search(model, optimizer, dataloader, loss). Only a LightningModule has an optimizer itself.",
        )
    if dataloader is None:
        _refuse(others, "they go with a dataloader or a LightningModule")
        return None
    from autoplan.strategies.workloads.loops.loop import read_loop

    _refuse({"trainer": trainer}, "it goes with a LightningModule")
    _refuse({"make_batch": make_batch}, "the batches are the dataloader's")
    settings |= {"schedule_interval": schedule_interval or "step", "loss_mean": loss_mean}
    return read_loop(model, optimizer, dataloader, loss, accelerator=accelerator, **settings)


def _refuse(given: dict[str, Any], why: str) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise WorkloadError(f"{', '.join(named)} was given too, and {why}", hint="Leave it out.")


def allowed_precisions(fix: Mapping[str, Any] | None, bound: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The precisions besides fp32 that the user names: around a step, no other is tried."""
    bounded = (bound or {}).get("precision")
    named = [(fix or {}).get("precision"), getattr(bounded, "values", bounded)]  # a Bound has its values
    texts = [text for value in named if value for text in (value.split(",") if isinstance(value, str) else value)]
    return tuple(dict.fromkeys(str(text).strip() for text in texts if str(text).strip() != "fp32"))


def from_trainer(trainer: Any) -> Workload:
    """The training of a transformers Trainer (or TRL's SFTTrainer, DPOTrainer) as a Workload.

    `autoplan.search(trainer)` calls it; by itself it is for who wants to change a part before the search:
    `autoplan.search(dataclasses.replace(autoplan.from_trainer(trainer), max_grad_norm=0.5))`.

    Args:
        trainer: A Trainer that has not trained yet. It is left as it was.

    Returns:
        Its model (copies of it are trained), batches, loss, optimizer, schedule, clipping and global batch; `notes`
        says what was taken over and what does not run in trials.

    Raises:
        WorkloadError: train() began, there is no dataset, it streams without a length or is smaller than a global
            batch, this is one of several processes, or the class makes its samples while it trains.
    """
    framework = framework_of(trainer)
    if framework is None:
        raise UsageError(
            f"this is a {type(trainer).__name__}, and no Trainer of transformers",
            hint="Give the parts: autoplan.search(model=, make_batch=, loss=, optimizer=, global_batch=).",
        )
    workload: Workload = module_of(framework, "read").read_training(trainer)
    return workload


def from_loop(
    model: Any,
    optimizer: Any = None,
    dataloader: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    schedule: Any = None,
    schedule_interval: ScheduleInterval = "step",
    max_grad_norm: float | None = None,
    loss_mean: LossMean | None = None,
    accelerator: Any = None,
    trainer: Any = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    name: str | None = None,
    seed: int = 0,
) -> Workload:
    """The training of a loop's parts, or of a LightningModule with its data, as a Workload.

    `autoplan.search(model, optimizer, dataloader, loss)` calls it. A function of a file that returns it makes the loop
    known to the command line: `autoplan search --model train.py:training`.

    Args:
        model: The loop's model, also as Accelerate, DDP or torch.compile wrapped it; or a LightningModule.
        optimizer: The loop's optimizer; after a LightningModule its datamodule or DataLoader.
        dataloader: The loop's torch DataLoader.
        loss: `loss(model, batch)` gives a LossSum or a scalar mean; a loss of torch for batches of
            (inputs, targets); None: `model(**batch).loss`.
        schedule, schedule_interval, max_grad_norm, loss_mean, accelerator, trainer, global_batch, sequence_length,
            name, seed: See `autoplan.search`.

    Raises:
        WorkloadError: a part is missing or of the wrong kind, or the loop trains what no plan can keep.
    """
    workload = read_parts(
        model,
        optimizer=optimizer,
        dataloader=dataloader,
        loss=loss,
        trainer=trainer,
        accelerator=accelerator,
        loss_mean=loss_mean,
        schedule=schedule,
        schedule_interval=schedule_interval,
        max_grad_norm=max_grad_norm,
        global_batch=global_batch,
        sequence_length=sequence_length,
        name=name,
        seed=seed,
    )
    if workload is None:
        raise UsageError(
            "no dataloader was given",
            hint="autoplan.from_loop(model, optimizer, dataloader, loss) takes a loop's parts.",
        )
    return workload


def from_step(
    make_step: Callable[[], Callable[[int], Any]],
    *,
    global_batch: int = 1,
    precisions: Sequence[str] = (),
    name: str | None = None,
    seed: int = 0,
) -> Workload:
    """The training of a function of one step, of which no part is known, as a Workload.

    Args:
        make_step: Sets the training up and returns step(index), which trains on one batch and returns its loss. It is
            called in each process that runs steps, with seeded generators.
        global_batch: Samples of a step, which throughput counts. 1: it counts steps.
        precisions: Number formats that may be tried besides fp32: "tf32", and "bf16" by autocast around the step.
        name: For screens and plans; None: that of make_step.
        seed: Of torch's, Python's and NumPy's generators.

    Raises:
        WorkloadError: make_step is no function, or a precision cannot be set from outside of a step.
    """
    from autoplan.strategies.workloads.loops.step import read_step

    return read_step(make_step, precisions=precisions, global_batch=global_batch, name=name, seed=seed)

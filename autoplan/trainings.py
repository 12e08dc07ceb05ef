"""Trainings as they stand, as workloads: of a Trainer, a loop, a LightningModule, a function of one step.

`autoplan.search` reads what it is given through `read_training`. The functions `from_...` are for who wants to change a
part before the search, or to return a Workload from a file for the command line. Loads torch only where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoplan.errors import UsageError

if TYPE_CHECKING:
    from autoplan.strategies.workloads.trainers.mean_loss import LossMean
    from autoplan.strategies.workloads.trainers.schedules import ScheduleInterval
    from autoplan.strategies.workloads.workload import Workload


def read_training(workload: Any, parts: dict[str, Any], settings: dict[str, Any]) -> Workload | None:
    """The workload of a training as it stands (a Trainer, a LightningModule, a loop, a step); None: it is none.

    Raises:
        UsageError: parts were given that it has itself.
    """
    from autoplan.strategies.workloads.trainers import find_source, read_source
    from autoplan.strategies.workloads.trainers.parts import LIGHTNING_MODULES, is_one_of, read_parts

    given = {name: value for name, value in parts.items() if value is not None}
    if find_source(workload) is None or is_one_of(workload, LIGHTNING_MODULES):  # which has data beside it
        if workload is not None and "model" in given:
            raise UsageError(f"{type(workload).__name__} was given first, and model= too", hint="Give one of them.")
        return read_parts(given.pop("model", workload), **given, **settings)
    if set(given) - {"name"}:
        raise UsageError(
            f"a {type(workload).__name__} was given, and {', '.join(sorted(given))} too",
            hint="Give either the Trainer, which has all of them, or the parts.",
        )
    return read_source(workload)


def allowed_precisions(fix: Mapping[str, Any] | None, bound: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The precisions besides fp32 that the user names: around a step, no other is tried."""
    named = [(fix or {}).get("precision"), (bound or {}).get("precision")]
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
    from autoplan.strategies.workloads.trainers import read_source

    workload = read_source(trainer)
    if workload is None:
        raise UsageError(
            f"this is a {type(trainer).__name__}, and no Trainer of transformers",
            hint="Give the parts: autoplan.search(model=, make_batch=, loss=, optimizer=, global_batch=).",
        )
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
        loss: `loss(model, batch)` gives a LossSum or a scalar mean; a torch loss module for batches of
            (inputs, targets); None: `model(**batch).loss`.
        schedule, schedule_interval, max_grad_norm, loss_mean, accelerator, trainer, global_batch, sequence_length,
            name, seed: See `autoplan.search`.

    Raises:
        WorkloadError: a part is missing or of the wrong kind, or the loop trains what no plan can keep.
    """
    from autoplan.strategies.workloads.trainers.parts import read_parts

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
    from autoplan.strategies.workloads.trainers.parts import read_parts

    workload = read_parts(None, step=make_step, precisions=precisions, global_batch=global_batch, name=name, seed=seed)
    assert workload is not None, "a step was given"
    return workload

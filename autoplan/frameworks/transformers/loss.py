"""The loss and the schedule of a Trainer in trials, by the Trainer's own code.

In: a Trainer. Out: its parts (`make_parts`), an object of the same class that travels to trials. It has no callbacks,
no optimizer, no data, and an accelerator of one process, so that nothing of it logs, saves or talks to other ranks. And
of the parts: `loss(model, batch)` that gives a sum and a count, and `build_schedule(optimizer)`.

A Trainer's step adds the losses of its micro-batches. Where `compute_loss` divides by `num_items_in_batch`, the items
(labels) of the whole step, the step's loss is sum / items. Where it does not, the Trainer divides each by the number of
micro-batches, and the step's loss is the mean over samples. Given the items of the micro-batch alone, `compute_loss`
gives that micro-batch's mean in both cases, so mean x items is the sum.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import cloudpickle
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size
from autoplan.strategies.workloads.devices import on_cpu
from autoplan.strategies.workloads.digests import code_functions, is_own_class
from autoplan.strategies.workloads.optimizers import trainable
from autoplan.strategies.workloads.randomness import seed_generators
from autoplan.strategies.workloads.samples import SAMPLES
from autoplan.strategies.workloads.training_mode import own_checkpointing, without_own_checkpointing
from autoplan.strategies.workloads.workload import LossSum

DIVIDES_BY = "num_items_in_batch"

NOT_DIVIDED = 1e-4
"""A share of a loss or of its gradients below this is rounding."""

OF_ONE_TRAINER = (
    "model",
    "model_wrapped",
    "optimizer",
    "lr_scheduler",
    "callback_handler",
    "control",
    "state",
    "accelerator",
    "args",
    "gather_function",
    "deepspeed",
    "_memory_tracker",
)
"""Attributes that no two Trainers share."""

NOT_TAKEN = (
    *OF_ONE_TRAINER,
    "model_init",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "_eval_dataloaders",
)
"""Attributes of a Trainer that trials do not get."""

NOT_TRAINED = (
    "output_dir",
    "run_name",
    "report_to",
    "project",
    "trackio",
    "disable_tqdm",
    "hub",
    "push_to",
    "log",
    "save",
    "eval",
    "per_device_eval",
    "dataloader",
    "resume",
    "ignore_data",
    "load_best",
    "metric_for",
    "greater_is",
    "deepspeed",
    "fsdp",
    "accelerator_config",
    "parallelism_config",
    "distributed_state",
    "hf_deepspeed",
    "_n_gpu",
    "__cached",
    "_setup_devices",
    "use_cpu",
    "ddp",
)
"""Beginnings of the names of arguments that say where results go or how processes are started; trials do not get them,
and a search is the same one whatever they say."""


LOSS_ARGUMENTS = ("label_smoothing_factor", "neftune_noise_alpha")
"""Arguments of every Trainer that its loss reads."""

NOT_A_LOSS = ("predict_", "generation_", "dataset_")
"""Beginnings of the names of arguments that subclasses add and no loss reads."""

ATTACHED = {"args", "accelerator", "state", "model", "model_wrapped", "optimizer", "lr_scheduler", "processing_class"}
"""Attributes of the parts that are not the Trainer's own values."""


class TrainerLoss:
    """A Trainer's loss as a sum and a count.

    Args:
        parts: The parts of the Trainer.
        micro_batches: How many micro-batches the Trainer's own step adds: accumulation x ranks.
        micro_batch: Samples in each.
    """

    def __init__(self, parts: Any, *, micro_batches: int, micro_batch: int) -> None:
        self.parts = parts
        self.micro_batches = micro_batches
        self.micro_batch = micro_batch

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of a micro-batch, times its items; and the items."""
        inputs, samples = inputs_of(batch)
        parts = attach(self.parts, model, _device_of(inputs))
        items = parts._get_num_items_in_batch([inputs], parts.accelerator.device)
        if items is None or not is_scaled(parts, items):
            mean = parts.compute_loss(model, inputs, **({} if items is None else {DIVIDES_BY: items}))
            return LossSum(mean * samples, samples)
        divisor = items.clamp(min=1) if isinstance(items, torch.Tensor) else max(1, items)  # a batch without any label
        mean = parts.compute_loss(model, inputs, **{DIVIDES_BY: divisor})
        return LossSum(mean * divisor, items)

    def count(self, batch: Batch) -> int:
        """The items of a batch on the host, as the loss will count them."""
        inputs, samples = inputs_of(batch)
        items = self.parts._get_num_items_in_batch([inputs], torch.device("cpu"))
        return samples if items is None or not is_scaled(self.parts, items) else int(items)

    def has_items(self, batch: Batch) -> bool:
        """Whether the Trainer counts the items of such a batch: it has labels that are one tensor."""
        inputs, _ = inputs_of(batch)
        return self.parts._get_num_items_in_batch([inputs], torch.device("cpu")) is not None

    def check(self, model: nn.Module, batch: Batch) -> None:
        """Looks, on a few samples, at what the Trainer's own step makes of several micro-batches.

        Raises:
            WorkloadError: it adds up means that nothing divides, so its gradients grow with accumulation.
        """
        if self.micro_batches == 1 or (divided := self.divided(model, batch)) in (None, "all"):
            return
        name, times = type(self.parts).__name__, self.micro_batches
        what = f"does not divide by {DIVIDES_BY}" if divided == "nothing" else f"divides only a part by {DIVIDES_BY}"
        raise WorkloadError(
            f"the loss of {name} with {type(model).__name__} {what}, and the Trainer takes it as divided: it adds "
            f"the losses of the {times} micro-batches of a step, so its gradients are up to {times} times those of the "
            "same samples in one micro-batch, and depend on the micro-batch",
            hint=f"Hand in the Trainer with per_device_train_batch_size={times * self.micro_batch} and "
            "gradient_accumulation_steps=1: its loss is then the mean over all items of the step, and the search finds "
            f"the micro-batch that fits. Or divide by {DIVIDES_BY} in compute_loss. With loss_is_scaled_for_ga = False "
            "the Trainer takes the mean of the micro-batches' means; if they count different numbers of items, that "
            f"needs micro_batch={self.micro_batch} fixed too.",
        )

    def divided(self, model: nn.Module, batch: Batch) -> Literal["all", "nothing", "part"] | None:
        """How much of the loss is divided by the number of items; None: it is not asked to.

        With 2**20 times as many items, what is divided is as good as gone, and what is left is not divided. Losses and
        gradients are compared: a term that is 0 at the start may have a gradient.

        Where the Trainer counts no items, and takes the loss as divided all the same, the loss can divide by the
        accumulation alone: then that is 2**20 times as many.

        Args:
            model: In training mode, on its device.
            batch: A few samples, on the same device.
        """
        inputs, _ = inputs_of(batch)
        parts = copy.copy(self.parts)
        parts.args = copy.copy(parts.args)
        attach(parts, model, _device_of(inputs))
        items = parts._get_num_items_in_batch([inputs], parts.accelerator.device)
        if not is_scaled(parts, items) or (items is not None and not int(items)):
            return None
        trained = trainable(model)
        sizes = []
        for times in (1, 1 << 20):
            seed_generators(0)
            if items is None:
                parts.current_gradient_accumulation_steps = parts.args.gradient_accumulation_steps = times
            with torch.enable_grad(), without_own_checkpointing(own_checkpointing(model)):
                loss = parts.compute_loss(model, dict(inputs), **({} if items is None else {DIVIDES_BY: items * times}))
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            norms = [float(torch.linalg.vector_norm(one.float())) for one in gradients if one is not None]
            sizes.append((abs(float(loss.detach())), math.hypot(*norms)))
            del loss, gradients
        left = [few / whole for whole, few in zip(*sizes, strict=True) if whole]
        if all(share < NOT_DIVIDED for share in left):
            return "all"
        return "nothing" if all(abs(share - 1) < NOT_DIVIDED for share in left) else "part"

    def compared(self) -> dict[str, Any]:
        """The values that the loss reads of its Trainer, by name; another Trainer's values are compared with them.

        They are the code of the user's own classes, the attributes that this code reads, label smoothing, and the
        arguments that a subclass of TrainingArguments adds (DPO's beta).
        """
        from transformers import TrainingArguments

        kind = type(self.parts).__bases__[0]
        own = [one for one in kind.__mro__ if is_own_class(one)]
        read = {
            name
            for one in own
            for member in vars(one).values()
            for function in code_functions(member)
            for name in function.__code__.co_names
        }
        state, args = vars(self.parts), vars(self.parts.args)
        base = {field.name for field in dataclasses.fields(TrainingArguments)}
        found = {"the class of the Trainer": kind, "compute_loss_func": state.get("compute_loss_func")}
        of_class = {name for one in own for name, member in vars(one).items() if not code_functions(member)}
        names = sorted(read - ATTACHED & (state.keys() | of_class))
        found |= {f"{name} of the Trainer": getattr(self.parts, name) for name in names}
        found |= {f"{name} of the arguments": args[name] for name in sorted(args.keys() - base)}
        found |= {f"{name} of the arguments": args[name] for name in LOSS_ARGUMENTS if name in args}
        return {name: value for name, value in found.items() if value is not None and not name.startswith(NOT_A_LOSS)}

    def describe_dependence(self, text: str) -> str:
        """Why the micro-batch is not free, for a reader who has a Trainer and no LossSum.

        Args:
            text: What the losses of two samples were.
        """
        return (
            f"{text.partition(': ')[0]}: compute_loss of {type(self.parts).__name__} depends on which samples are in a "
            "micro-batch together (a mean over items whose number differs, a contrastive or an auxiliary loss)"
        )


class TrainerSchedule:
    """Makes the learning-rate schedule as the Trainer makes it.

    Args:
        parts: The parts of the Trainer.
        steps: Optimizer steps of the whole training.
    """

    def __init__(self, parts: Any, steps: int) -> None:
        self.parts = parts
        self.steps = steps

    def compared(self) -> dict[str, Any]:
        """Its length; the rates that it gives are compared as numbers."""
        return {"steps of the schedule": self.steps}

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        parts = copy.copy(self.parts)
        parts.optimizer, parts.lr_scheduler = optimizer, None
        return parts.create_scheduler(num_training_steps=self.steps, optimizer=optimizer)


def is_scaled(parts: Any, items: Any) -> bool:
    """Whether the Trainer takes the loss as divided by the items of the whole step; else it divides by accumulation."""
    said = getattr(parts, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    return (parts.model_accepts_loss_kwargs and items is not None) or parts.compute_loss_func is not None


def inputs_of(batch: Batch) -> tuple[dict[str, Any], int]:
    """The fields of a batch as a dict that compute_loss may change, and the number of samples."""
    check_fields(batch)
    return {name: value for name, value in batch.items() if name != SAMPLES}, batch_size(batch)


def check_fields(batch: Any) -> None:
    """Raises WorkloadError where a batch has no named fields."""
    if not isinstance(batch, Mapping):
        raise WorkloadError(
            f"the collator made a {type(batch).__name__}; a Trainer's batches are dicts of tensors",
            hint="Return a dict from data_collator.",
        )


def _device_of(inputs: Any) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


class MissingPart(AttributeError):
    """The Trainer's loss reads something that trials do not have."""


class LocalAccelerator:
    """The parts of an accelerator that a loss uses, for one process: gathering gives back what it got."""

    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = True
    parallelism_config = None
    use_distributed = False
    sync_gradients = True
    mixed_precision = "no"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    def distributed_type(self) -> Any:
        """No distribution."""
        from accelerate.utils import DistributedType

        return DistributedType.NO

    @property
    def state(self) -> LocalAccelerator:
        """Itself: it has what is asked of the state."""
        return self

    def gather(self, value: Any, *args: Any, **options: Any) -> Any:
        """The value; a scalar as one number in a row, as the real one gives it."""
        return value

    gather_for_metrics = reduce = pad_across_processes = gather

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """The user's model in whatever wraps it."""
        while isinstance(getattr(model, "module", None), nn.Module) and type(model).__module__.startswith("torch."):
            model = model.module
        return getattr(model, "_orig_mod", model)

    def autocast(self, *args: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
        """None: the plan's precision is around the loss already."""
        return contextlib.nullcontext()

    def wait_for_everyone(self) -> None:
        """Nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        raise MissingPart(f"the loss reads self.accelerator.{name}, which trials do not have")


def make_parts(trainer: Any) -> Any:
    """The parts of a Trainer.

    Args:
        trainer: Not changed.
    """
    from transformers import TrainerState

    taken = {name: value for name, value in vars(trainer).items() if name not in NOT_TAKEN and travels(value)}
    for name, value in taken.items():
        if isinstance(value, nn.Module):
            taken[name] = on_cpu(value)
    taken |= {
        "model": None,
        "model_wrapped": None,
        "args": _arguments_of(trainer.args),
        "accelerator": LocalAccelerator(),
        "state": TrainerState(),
        "optimizer": None,
        "lr_scheduler": None,
        "is_in_train": True,
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_created_lr_scheduler": False,
    }
    return _make(type(trainer), "self", taken)


def attach(parts: Any, model: nn.Module, device: torch.device) -> Any:
    """The parts with the model that a trial trains, on its device."""
    if parts.__dict__.get("model") is not model:
        parts.__dict__["model"] = parts.__dict__["model_wrapped"] = model
        parts.accelerator.device = device
        parts.args.__dict__["_local_device"] = device
        for name, value in parts.__dict__.items():
            if isinstance(value, nn.Module) and name not in ("model", "model_wrapped"):  # a reference model
                with unset_fake_temporarily():  # a trace is not to take its values
                    value.to(device)
    return parts


def travels(value: Any) -> bool:
    """Whether a value can be sent to another process."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _arguments_of(args: Any) -> Any:
    """The arguments that may matter to a loss or a schedule, as an object of their class, for one process."""
    fields = {field.name for field in dataclasses.fields(args)}
    taken = {
        name: value
        for name, value in vars(args).items()
        if name in fields and not name.startswith(NOT_TRAINED) and travels(value)
    }
    return _make(type(args), "self.args", taken)


def _make(kind: type, name: str, state: dict[str, Any]) -> Any:
    """An object with the code of a class, and of its attributes these.

    Args:
        kind: Of a Trainer, or of its arguments.
        name: As a loss calls it: "self" or "self.args".
        state: The attributes.
    """
    made: Any = object.__new__(_class_of(kind, name))
    made.__dict__.update(state)
    return made


@functools.cache
def _class_of(kind: type, name: str) -> type:
    """A class with the code of another one, and an error for what is not there."""

    def missing(self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise MissingPart(
            f"the loss reads {name}.{attribute}, which trials do not have: they get parts of the Trainer alone"
        )

    def reduce(self: Any) -> Any:
        return _make, (kind, name, {key: None if key in OF_A_TRIAL else value for key, value in vars(self).items()})

    members = {"__getattr__": missing, "__reduce__": reduce, "__module__": __name__}
    return type(kind.__name__, (kind,), members | (_ONE_PROCESS if name == "self.args" else {}))


OF_A_TRIAL = ("model", "model_wrapped", "_local_device")
"""The attributes that `attach` sets; they do not go to another process."""

_ONE_PROCESS = {
    "device": property(lambda self: self.__dict__.get("_local_device") or torch.device("cpu")),
    "n_gpu": property(lambda self: 0),
    "world_size": property(lambda self: 1),
    "process_index": property(lambda self: 0),
    "local_process_index": property(lambda self: 0),
}
"""The properties of the arguments that tell of processes and devices: those of one process."""

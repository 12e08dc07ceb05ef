"""The parts of a Trainer that its loss and its schedule read: an object of the same class, without its state.

In: a Trainer. Out: an object whose `compute_loss` and `create_scheduler` are the Trainer's own code, and which travels
to trials. It has no callbacks, no optimizer, no data, and an accelerator of one process: nothing of it logs, saves or
talks to other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

NOT_TAKEN = (
    "model",
    "model_wrapped",
    "model_init",
    "optimizer",
    "lr_scheduler",
    "callback_handler",
    "control",
    "state",
    "accelerator",
    "args",
    "gather_function",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "deepspeed",
    "_memory_tracker",
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


class MissingPart(AttributeError):
    """The Trainer's loss reads something that trials do not have."""


class LocalAccelerator:
    """What a loss asks of an accelerator, for one process: gathering gives back what it got."""

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

    def gather(self, value: Any) -> Any:
        """The value; a scalar as one number in a row, as the real one gives it."""
        return value

    def gather_for_metrics(self, value: Any, *args: Any, **options: Any) -> Any:
        """The value."""
        return value

    def reduce(self, value: Any, *args: Any, **options: Any) -> Any:
        """The value."""
        return value

    def pad_across_processes(self, value: Any, *args: Any, **options: Any) -> Any:
        """The value."""
        return value

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
            taken[name] = copy.deepcopy(value).to("cpu") if _is_on_gpu(value) else value
    taken |= {
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
    return _make(type(trainer), taken)


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


def _is_on_gpu(module: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in module.parameters())


def travels(value: Any) -> bool:
    """Whether a value can be sent to another process."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _make(kind: type, state: dict[str, Any]) -> Any:
    parts: Any = object.__new__(_class_of(kind))
    parts.__dict__.update(state, model=None, model_wrapped=None)
    return parts


@functools.cache
def _class_of(kind: type) -> type:
    """A class with the code of a Trainer's class, and an error for what is not there."""

    def missing(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingPart(
            f"the loss of {kind.__name__} reads self.{name}, which trials do not have: they get parts of the Trainer, "
            "not the Trainer"
        )

    def reduce(self: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in ("model", "model_wrapped")}
        return _make, (kind, state)

    return type(kind.__name__, (kind,), {"__getattr__": missing, "__reduce__": reduce, "__module__": __name__})


def _arguments_of(args: Any) -> Any:
    """The arguments that may matter to a loss or a schedule, as an object of their class, for one process."""
    fields = {field.name for field in dataclasses.fields(args)}
    taken = {
        name: value
        for name, value in vars(args).items()
        if name in fields and not name.startswith(NOT_TRAINED) and travels(value)
    }
    return _make_arguments(type(args), taken)


def _make_arguments(kind: type, values: dict[str, Any]) -> Any:
    arguments: Any = object.__new__(_arguments_class(kind))
    arguments.__dict__.update(values)
    return arguments


@functools.cache
def _arguments_class(kind: type) -> type:
    def reduce(self: Any) -> Any:
        return _make_arguments, (kind, {name: value for name, value in vars(self).items() if name[0] != "_"})

    def missing(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingPart(f"the loss reads self.args.{name}, which trials do not have")

    members = {
        "device": property(lambda self: self.__dict__.get("_local_device", torch.device("cpu"))),
        "n_gpu": property(lambda self: 0),
        "world_size": property(lambda self: 1),
        "process_index": property(lambda self: 0),
        "local_process_index": property(lambda self: 0),
        "__reduce__": reduce,
        "__getattr__": missing,
        "__module__": __name__,
    }
    return type(kind.__name__, (kind,), members)

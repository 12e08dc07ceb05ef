"""Makes a Trainer of transformers or TRL anew with other arguments, and has it divide a loss that nothing divides.

In: a Trainer. Out: one of the same class. The class's own __init__ is not run again: it may tokenise, pack or wrap what
is prepared already. That of transformers.Trainer is, which makes the accelerator; the attributes that do not depend on
the arguments are carried over.
"""

from __future__ import annotations

import copy
import os
import signal
import types
from typing import Any

import torch

from autoplan.frameworks.transformers.loss import OF_ONE_TRAINER
from autoplan.planner.plan.trainer_arguments import compiles_in_place
from autoplan.strategies.analysis.structure import find_structure, language_models
from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig
from autoplan.strategies.techniques.allocator import keep_freed_memory
from autoplan.strategies.techniques.attention import decoder_of, reason_against_maskless

BUILT_ANEW = (
    *OF_ONE_TRAINER,
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "is_fsdp_xla_enabled",
    "is_fsdp_xla_v1_enabled",
    "is_fsdp_xla_v2_enabled",
    "place_model_on_device",
    "current_flos",
    "_train_batch_size",
    "_created_lr_scheduler",
)
"""Attributes of a Trainer that depend on its arguments, or that no two Trainers share; the others are carried over."""

COMPILER_VARIABLES = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")
"""The variables that older TrainingArguments leave in the environment, for every Trainer that is made later."""

FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
"""The variable that an accelerator with FSDP leaves in the environment, in the same way."""


def build_anew(trainer: Any, arguments: Any, *, optimizers: tuple[Any, Any] = (None, None)) -> Any:
    """A Trainer of the same class with other arguments: everything that does not depend on them is the old one's.

    A callback that holds the old Trainer, or a method of it, holds the new one afterwards.

    Args:
        trainer: The old one.
        arguments: Its TrainingArguments, of the class of the old ones.
        optimizers: The optimizer and the schedule; None: as the arguments say.
    """
    from transformers import Trainer

    for name in COMPILER_VARIABLES:
        if not arguments.torch_compile:
            os.environ.pop(name, None)
    if not arguments.fsdp:
        os.environ.pop(FSDP_VARIABLE, None)
    on_termination = signal.getsignal(signal.SIGTERM)
    made: Any = object.__new__(type(trainer))
    Trainer.__init__(
        made,
        model=trainer.model,
        args=arguments,
        data_collator=trainer.data_collator,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
        processing_class=trainer.processing_class,
        compute_loss_func=trainer.compute_loss_func,
        compute_metrics=trainer.compute_metrics,
        optimizers=optimizers,
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
    )
    changed = signal.getsignal(signal.SIGTERM) is not on_termination  # enable_jit_checkpoint: the old one has its own
    if changed and on_termination is not None:  # None: it was not set from Python, and cannot be put back
        signal.signal(signal.SIGTERM, on_termination)
    for name, value in vars(trainer).items():
        if name not in BUILT_ANEW:
            setattr(made, name, of_another(value, trainer, made))
    made.model_init = None  # it would make another model when train() begins
    made.callback_handler.callbacks = list(trainer.callback_handler.callbacks)
    for callback in made.callback_handler.callbacks:
        manager = vars(callback).get("jit_manager")  # it saves the Trainer that it holds
        for holder in (callback,) if manager is None else (callback, manager):
            for name, value in list(vars(holder).items()):
                if (new := of_another(value, trainer, made)) is not value:
                    vars(holder)[name] = new
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and made.accelerator.mixed_precision != "no":
        made.ref_model = made.accelerator.prepare_model(reference, evaluation_mode=True)
    return made


def copy_trainer(trainer: Any) -> Any:
    """A copy of a Trainer with a copy of its arguments; what it holds of the old one, it holds of itself."""
    twin = copy.copy(trainer)
    vars(twin).update({name: of_another(value, trainer, twin) for name, value in vars(trainer).items()})
    twin.args = copy.copy(trainer.args)
    return twin


def of_another(value: Any, old: Any, new: Any) -> Any:
    """The value; where it is the old Trainer or a method of it, the new one or its method."""
    if value is old:
        return new
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return value


def switch_on(model: Any, config: TrainingConfig, device: str) -> None:
    """Sets what a process has of a plan, beside the model itself: threads, allocator, kernels, compiled blocks.

    Args:
        model: Its blocks are compiled in place, where the plan says so.
        config: The plan's configuration.
        device: cuda or cpu.
    """
    if config.threads is not None and device == "cpu":
        torch.set_num_threads(config.threads)
    if config.allocator == "keep" and device == "cpu":
        keep_freed_memory()
    if config.attention in ATTENTION_BACKENDS:
        kernel = config.attention.removeprefix("sdpa_")
        names = {"flash": "flash_sdp", "cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp", "math": "math_sdp"}
        for key, name in names.items():
            getattr(torch.backends.cuda, f"enable_{name}")(key == kernel)
    for inner in language_models(model):
        reason_against_maskless(decoder_of(inner))  # registers the attention that takes no mask
    if config.compile == "block":
        options: dict[str, Any] = {} if config.compile_mode == "default" else {"mode": config.compile_mode}
        for name, _ in find_structure(model).all_blocks:
            model.get_submodule(name).compile(dynamic=False, **options)
    elif compiles_in_place(config, device):
        model.compile(mode=config.compile_mode, dynamic=False)


def scale_loss(trainer: Any, *, divided: Any = None, times: float = 1.0) -> None:
    """Has a Trainer multiply its loss in training, or divide it by the items of the whole step.

    Args:
        trainer: Its compute_loss is replaced, on this one object.
        divided: The TrainerLoss of its workload, which counts the items of a micro-batch, where the Trainer's model
            gives that micro-batch's mean and the loss is to be divided; None: it is multiplied alone.
        times: The factor.
    """
    own = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **options: Any
    ) -> Any:
        if return_outputs or not model.training:  # an evaluation
            return own(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **options)
        scale = times
        if divided is not None and num_items_in_batch is not None:  # counted before compute_loss takes the labels out
            scale = times * divided.count(inputs) / num_items_in_batch
        return own(model, inputs, num_items_in_batch=num_items_in_batch, **options) * scale

    trainer.compute_loss = compute_loss

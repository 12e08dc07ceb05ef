"""From a Trainer to a Workload.

In: a Trainer that has not trained yet. Out: its model, batches, loss, optimizer, schedule, clipping and global batch as
a Workload, with sentences for the user. The Trainer is left as it was; its callbacks, evaluation and checkpoints do not
run in trials, which get parts of it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any, cast

import cloudpickle
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autoplan.errors import WorkloadError
from autoplan.frameworks.transformers.loss import TrainerLoss, TrainerSchedule, check_fields, make_parts
from autoplan.frameworks.transformers.rebuild import copy_trainer
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loops.loader import OrderedBatches, batches_in_form, collated, fetch
from autoplan.strategies.workloads.loops.schedules import at_the_start, same_schedule
from autoplan.strategies.workloads.optimizers import hooks_note, rebuild_over, trainable
from autoplan.strategies.workloads.own_setting import (
    NOT_KNOWN,
    PRECISIONS,
    UNKNOWN,
    compile_mode_of,
    fp32_format,
    own_setting,
)
from autoplan.strategies.workloads.randomness import generators_kept
from autoplan.strategies.workloads.user_errors import failing_as
from autoplan.strategies.workloads.workload import Workload

KNOWN_OVERRIDES = {
    "training_step": ("transformers.", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"),
    "_prepare_inputs": ("transformers.",),
    "get_batch_samples": ("transformers.",),
    "_inner_training_loop": ("transformers.",),
}
"""Methods around the loss, and the modules whose own form of them changes nothing that trials leave out."""

STEPPED_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")

KEPT_STEPS = 512
"""Of the order of a longer epoch, so many global batches are kept; then it begins again."""


def read_training(trainer: Any) -> Workload:
    """The training of a Trainer.

    Args:
        trainer: A Trainer that has not trained yet. It is not changed, but for the notes that accelerate keeps.

    Raises:
        WorkloadError: it trains already, runs on several processes, lacks a dataset, or is of a kind that makes its
            samples while it trains.
    """
    refuse_begun(trainer)
    _refuse_ranks(trainer)
    _refuse_unknown_loops(trainer)
    args = trainer.args
    model = trainer.model
    _refuse_uncopyable(model)
    global_batch = global_batch_of(trainer)
    batches, notes = read_batches(trainer, global_batch, int(args.seed))
    parts = make_parts(trainer)
    micro_batch = int(trainer._train_batch_size)
    loss = TrainerLoss(parts, micro_batches=max(1, global_batch // micro_batch), micro_batch=micro_batch)
    optimizer = make_optimizer(trainer)
    with failing_as(
        f"the optimizer {type(optimizer).__name__} cannot be made over other parameters",
        "Trials train copies of the model. Search with optim='adamw_torch'; its memory and time differ.",
    ):
        build_optimizer = rebuild_over(optimizer, trainable(model))
    schedule, said = _schedule(trainer, parts, steps_of_training(trainer))
    return Workload(
        name=f"{type(trainer).__name__} of {_model_name(model)}",
        build_model=functools.partial(copy_model, model),
        make_batch=batches,
        loss=loss,
        build_optimizer=build_optimizer,
        global_batch=global_batch,
        max_grad_norm=float(args.max_grad_norm) if args.max_grad_norm and args.max_grad_norm > 0 else None,
        build_schedule=schedule,
        count=loss.count if batches.rows_are_samples else None,
        seed=int(args.seed),
        taken_from=type(trainer).__name__,
        own_setting=read_setting(trainer),
        notes=(*_what_does_not_run(trainer), *hooks_note(optimizer, model), *said, *notes, *_overridden(trainer)),
    )


def refuse_begun(trainer: Any) -> None:
    """Refuses a Trainer that trains or has trained.

    Raises:
        WorkloadError: train() began.
    """
    steps = int(getattr(trainer.state, "global_step", 0) or 0)
    prepared = type(trainer.optimizer).__name__ == "AcceleratedOptimizer"
    stepped = bool(getattr(trainer.optimizer, "state", None))
    if steps or prepared or stepped or getattr(trainer, "is_in_train", False):
        raise WorkloadError(
            f"train() of this {type(trainer).__name__} has begun"
            + (f": it is at step {steps}" if steps else "")
            + "; a plan is for a training from its start",
            hint="Make the Trainer anew, search, apply the plan, and then train.",
        )


NO_KNOBS = ("auto_find_batch_size", "deepspeed", "fsdp")
"""Arguments that make another training of it than any knobs do."""

LIGER = "use_liger_kernel"
"""The same; a plan leaves it as it is."""


def read_setting(trainer: Any) -> TrainingConfig | None:
    """The setting that the arguments of a Trainer ask for; None: several devices, or what no knob says."""
    args = trainer.args
    on_several = int(args.n_gpu) > 1 or int(args.world_size) > 1
    compiles = bool(args.torch_compile)
    if on_several or any(getattr(args, name, None) for name in (*NO_KNOBS, LIGER)):
        return None
    if compiles and args.torch_compile_backend not in (None, "inductor"):
        return None
    tf32 = True if args.tf32 is None and compiles else args.tf32  # torch_compile switches it on; None: as torch has it
    mixed = next((name for name in ("bf16", "fp16") if getattr(args, name)), getattr(args, "mixed_precision", "no"))
    if mixed == "fp16" and args.device.type == "cpu":  # accelerate leaves it out there
        mixed = "no"
    return own_setting(
        trainer.model,
        micro_batch=int(trainer._train_batch_size),
        precision=PRECISIONS.get(mixed) if mixed != "no" else fp32_format(args.device, asked=tf32),
        checkpointing=_checkpointing(args),
        compile_mode=(args.torch_compile_mode or "default") if compiles else compile_mode_of(trainer.model),
    )


def _checkpointing(args: Any) -> str:
    """What the arguments have recomputed, in the words of the knob; versions differ in the name."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if getattr(args, name, False):
            more = getattr(args, f"{name}_kwargs", None) or {}
            every = more.get("every_n_layers", 1)
            if more.get("offload"):
                return UNKNOWN
            return "full" if every == 1 else f"every_{every}"
    return "none"


def make_optimizer(trainer: Any) -> torch.optim.Optimizer:
    """The optimizer that the Trainer would train with, over its own parameters; the Trainer does not keep it.

    Raises:
        WorkloadError: it cannot be made, or is no optimizer over the parameters.
    """
    twin = copy.copy(trainer)
    if twin.optimizer is not None:
        return at_the_start(twin.optimizer)
    what = f"the optimizer {trainer.args.optim} of the {type(trainer).__name__} cannot be made"
    with failing_as(what, "Does trainer.create_optimizer() work by itself?"):
        made = twin.create_optimizer() or twin.optimizer  # some set it, and return nothing
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            f"create_optimizer() gave {type(made).__name__}, which is no torch.optim.Optimizer",
            hint="Search with optim='adamw_torch' or another optimizer of torch.",
        )
    return made


def read_batches(trainer: Any, global_batch: int, seed: int) -> tuple[OrderedBatches, list[str]]:
    """The batches of a Trainer, and sentences for the user.

    Args:
        trainer: Is left as it was.
        global_batch: Samples per optimizer step.
        seed: For collators that draw.

    Raises:
        WorkloadError: there is no dataset, it has no length, it is smaller than a global batch, or the loader's
            batches are not those of the arguments.
    """
    with generators_kept():
        loader = _loader_of(trainer)
        sampler = getattr(loader, "batch_sampler", None)
        dataset = getattr(loader, "dataset", trainer.train_dataset)
        if sampler is None or isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise WorkloadError(
                f"the train_dataset of the {type(trainer).__name__} is a {type(dataset).__name__}, a stream without a "
                "length; trials read the same samples several times",
                hint="Search with a part of it as a map-style dataset: "
                "datasets.Dataset.from_list(list(itertools.islice(stream, 4096))); train with the stream.",
            )
        if len(dataset) < global_batch:
            raise WorkloadError(
                f"the train_dataset has {len(dataset)} samples, and a global batch {global_batch} "
                "(per_device_train_batch_size x gradient_accumulation_steps x processes): no step of the Trainer is "
                "whole",
                hint="Give more samples, or a smaller batch.",
            )
        lists = iter(sampler)
        first: list[int] = next(lists, [])
        _refuse_batch_size(trainer, len(first))
        flat = itertools.chain(first, itertools.chain.from_iterable(lists))
        order = tuple(int(place) for place in itertools.islice(flat, KEPT_STEPS * global_batch))
        collate = loader.collate_fn
        if type(collate).__name__ == "RemoveColumnsCollator":  # of transformers: its logger cannot be hashed
            collate = copy.copy(collate)
            collate.logger = None
        check_fields(collated(collate, fetch(dataset, order[:1]), seed))
        return batches_in_form(dataset, collate, order, seed), _cut_step(trainer, dataset, global_batch)


def refuse_other_batch_size(trainer: Any, size: int) -> None:
    """Refuses a Trainer whose loader would not take this per_device_train_batch_size. It is left as it was.

    New arguments are not made for it: making them takes the accelerator's state from the Trainer that is there.

    Raises:
        WorkloadError: its batches have another size.
    """
    twin = copy_trainer(trainer)
    twin.args.per_device_train_batch_size = size
    twin._train_batch_size = twin.args.train_batch_size
    with generators_kept():
        _refuse_batch_size(twin, len(next(iter(_loader_of(twin).batch_sampler), [])))


def _refuse_batch_size(trainer: Any, found: int) -> None:
    wanted = int(trainer._train_batch_size)
    if found != wanted:
        raise WorkloadError(
            f"get_train_dataloader() of the {type(trainer).__name__} gives batches of {found} samples where the "
            f"arguments ask for {wanted}; a plan sets the batch size by per_device_train_batch_size",
            hint="Have get_train_dataloader() make batches of self._train_batch_size samples, which follows that "
            "argument.",
        )


def steps_of_training(trainer: Any) -> int:
    """Optimizer steps of the whole training."""
    with generators_kept():
        return max(1, int(trainer.set_initial_training_values(trainer.args, _loader_of(trainer))[-1]))


def _loader_of(trainer: Any) -> Any:
    """The Trainer's own loader; the accelerator forgets that it made one."""
    if trainer.train_dataset is None:
        raise WorkloadError(
            f"the {type(trainer).__name__} has no train_dataset", hint="Give it one: Trainer(train_dataset=...)."
        )
    prepared = getattr(trainer.accelerator, "_dataloaders", [])
    before = len(prepared)
    columns = trainer._signature_columns
    try:
        return trainer.get_train_dataloader()
    finally:
        del prepared[before:]
        trainer._signature_columns = columns


def _cut_step(trainer: Any, dataset: Any, global_batch: int) -> list[str]:
    """A sentence where the last step of an epoch has fewer samples; else none."""
    if len(dataset) % global_batch == 0 or trainer.args.dataloader_drop_last:
        return []
    return [
        f"the last step of an epoch has only {len(dataset) % global_batch} of {global_batch} samples "
        "(dataloader_drop_last is off); it is not measured"
    ]


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of a model that shares nothing with it, on the current default device; all of it in training mode.

    Trainer.training_step calls model.train() at each step, so no part of a model stays in evaluation mode.

    On meta, or under fake tensors, nobody wants the numbers: the copy has tensors without them, and takes no memory.

    A model whose forward was replaced (TRL puts a fused output head into it) is copied by pickling: the replacement
    holds on to the original, and copy.deepcopy does not look into functions.
    """
    device = torch.get_default_device()
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    unnumbered = bool(modes) or device.type == "meta"
    if unnumbered:
        copied: nn.Module = copy.deepcopy(model, _without_numbers(model, device, modes[-1] if modes else None))
    elif any("forward" in vars(part) for part in model.modules()):
        with torch.device("cpu"):
            copied = pickle.loads(cloudpickle.dumps(model))
    else:
        copied = copy.deepcopy(model)
    copied.train()  # a train() of the user's own may return nothing
    return copied if unnumbered or device.type == "cpu" else copied.to(device)


def _without_numbers(model: nn.Module, device: torch.device, mode: FakeTensorMode | None) -> dict[int, Any]:
    """By id of a parameter or buffer, a tensor of its shape and kind: what copy.deepcopy puts in its place."""

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            plain = tensor.detach()
        return plain.to(device="meta") if mode is None else mode.from_tensor(plain).to(device)

    memo: dict[int, Any] = {id(buffer): shape_of(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(shape_of(parameter), requires_grad=parameter.requires_grad)
    return memo


def _schedule(trainer: Any, parts: Any, steps: int) -> tuple[Any, list[str]]:
    """A function that makes the schedule (None: the rate is constant), and sentences for the user."""
    given = trainer.lr_scheduler
    kind = str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))
    by_metric = (
        kind in ("reduce_lr_on_plateau", "greedy") if given is None else type(given).__name__ in STEPPED_BY_METRIC
    )
    if by_metric:
        return None, ["the schedule is stepped after evaluations, which trials do not run: their rate is constant"]
    if given is not None:
        return same_schedule(given), []
    return TrainerSchedule(parts, steps), [
        f"learning-rate schedule {kind} over {steps} steps, as its arguments make it"
    ]


def global_batch_of(trainer: Any) -> int:
    """Samples of an optimizer step, on all of the Trainer's processes."""
    return int(trainer._train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size)


def _model_name(model: nn.Module) -> str:
    inner: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__ + (" with adapters" if inner is not model else "")


def _refuse_ranks(trainer: Any) -> None:
    ranks = int(trainer.args.world_size)
    if ranks > 1:
        raise WorkloadError(
            f"this is process {trainer.args.process_index} of {ranks} that train together; a search runs in one "
            "process and starts ranks of its own",
            hint="Run the search without torchrun, with gradient_accumulation_steps="
            f"{trainer.args.gradient_accumulation_steps * ranks} so that the global batch stays "
            f"{global_batch_of(trainer)}, and nproc= for the largest number of ranks. Then load the plan under "
            "torchrun, and apply it there.",
        )
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise WorkloadError(
            "the model was sharded when it was loaded, so trials cannot copy it",
            hint="Search with the model loaded whole; the plan decides how it is sharded.",
        )


def quantizer_of(model: nn.Module) -> str | None:
    """How the weights of a model are quantised; None: they are not, or not by transformers."""
    method = getattr(model, "quantization_method", None) or getattr(model, "hf_quantizer", None)
    if method is None:
        return None
    return str(getattr(method, "value", type(method).__name__ if not isinstance(method, str) else method))


def _refuse_uncopyable(model: nn.Module) -> None:
    """Refuses a quantised model whose weights no copy can be made of: trials train copies."""
    method = quantizer_of(model)
    if method is None:
        return
    with failing_as(
        f"the model's weights are quantised ({method}), and cannot be copied",
        "Trials train copies. Search the same model without quantisation; memory and time will differ.",
    ):
        copy_model(model)


def _refuse_unknown_loops(trainer: Any) -> None:
    """Refuses a class that changes what happens around the loss: trials call compute_loss, and nothing around it."""
    for name, known in KNOWN_OVERRIDES.items():
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
        if owner is None or owner.__module__.startswith(known):
            continue
        if owner.__module__.startswith("trl.") and name != "training_step":
            why = (
                "it makes its samples while it trains (with a model that generates), so there are no batches to measure"
            )
            hint = "Search with an SFTTrainer or a DPOTrainer of the same model and lengths."
        else:
            why = "what it does around compute_loss is not known, and trials would leave it out"
            hint = "Move it into compute_loss, or hand the search the parts: model=, make_batch=, loss=, optimizer=."
        raise WorkloadError(f"{owner.__name__} has a {name}() of its own: {why}", hint=hint)


def _what_does_not_run(trainer: Any) -> list[str]:
    """Sentences on what the Trainer does and trials do not."""
    from transformers import TrainerCallback

    handled = trainer.callback_handler.callbacks
    own = [
        type(callback).__name__
        for callback in handled
        if isinstance(callback, TrainerCallback) and not type(callback).__module__.startswith("transformers.")
    ]
    text = f"callbacks do not run in trials ({', '.join(own)} among them)" if own else "callbacks do not run in trials"
    notes = [f"{text}, nor evaluation, logging and checkpoints"]
    args = trainer.args
    if getattr(args, "neftune_noise_alpha", None):
        notes.append("the noise of neftune_noise_alpha is not in trials")
    if getattr(args, LIGER, False):
        notes.append(f"the kernels of {LIGER} are not in trials: they are put in when train() begins; {NOT_KNOWN}")
    if (gpus := int(args.n_gpu)) > 1:
        notes.append(
            f"this process sees {gpus} GPUs, over which the Trainer by itself splits each batch (DataParallel): the "
            f"global batch of {global_batch_of(trainer)} is that of all of them"
        )
    if getattr(trainer, "model_init", None) is not None:
        notes.append("model_init is not called again: the model is as it is now")
    if (method := quantizer_of(trainer.model)) is not None:
        notes.append(f"the model's weights are quantised ({method}); trials copy them as they are")
    return notes


def _overridden(trainer: Any) -> list[str]:
    """Sentences on the arguments that a plan decides instead, and on whether they are known as your setting."""
    args = trainer.args
    knobs = ("bf16", "fp16", "tf32", "torch_compile", "gradient_checkpointing", "activation_checkpointing")
    named = {name: getattr(args, name, None) for name in (*knobs, *NO_KNOBS)}
    if named["gradient_checkpointing"]:  # the same by its earlier name
        del named["activation_checkpointing"]
    given = [f"{name}={value}" for name, value in named.items() if value]
    if not given:
        return []
    text = f"the plan decides {', '.join(given)}; "
    text += NOT_KNOWN if read_setting(trainer) is None else "your setting has them"
    few = [name for name in ("deepspeed", "fsdp") if named[name]]
    if few:
        size = global_batch_of(trainer)
        text += f". The global batch is that of this one process: {size}; give global_batch= for more"
    return [text]

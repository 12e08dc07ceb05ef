"""Workloads from Python objects of a library call: a Workload, or a model with its batches, loss and optimizer."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.errors import WorkloadError
from autoplan.files import make_private_folder, replace_file
from autoplan.probes.host import read_host
from autoplan.strategies.workloads.batch import Batch
from autoplan.strategies.workloads.devices import copy_model
from autoplan.strategies.workloads.digests import Describer, digest, installed_versions
from autoplan.strategies.workloads.fingerprint import fingerprints_of
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss, count_labels
from autoplan.strategies.workloads.optimizers import hooks_note, rebuild_over, trainable
from autoplan.strategies.workloads.pickling import dumps, load
from autoplan.strategies.workloads.spec import DEFAULT_GLOBAL_BATCH, WorkloadSpec, check_count
from autoplan.strategies.workloads.user_errors import failing_as, refuse_lazy
from autoplan.strategies.workloads.workload import LossSum, Workload
from autoplan.units import format_bytes

_INLINE_BYTES = 4 << 20  # a larger payload is kept in a file, so that it is not sent with every trial

COPIES = 2
"""Of a model that was given as an object, in each rank."""


def spec_from_objects(
    workload: Workload | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    make_batch: Callable[[int, int], Batch] | None = None,
    loss: Callable[[nn.Module, Batch], LossSum] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = None,
    name: str | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
) -> WorkloadSpec:
    """The spec of a workload made of Python objects, which travel with it (by cloudpickle).

    Args:
        workload: A whole Workload; or the parts of one:
        model, make_batch, loss, optimizer, schedule, max_grad_norm, name: See `workload_from_objects`.
        global_batch: Samples per optimizer step; None: the workload's own, or DEFAULT_GLOBAL_BATCH.
        sequence_length: Tokens per sample; None: the workload's own.
        seed: For weights, batches and dropout.

    Raises:
        WorkloadError: a part is missing or cannot be sent to another process.
    """
    check_count("the global batch", global_batch, "global_batch=32")
    check_count("the sequence length", sequence_length, "sequence_length=1024")
    said: tuple[str, ...] = ()
    parts: dict[str, Any] = {"model": model, "make_batch": make_batch, "loss": loss, "optimizer": optimizer}
    parts |= {"schedule": schedule, "max_grad_norm": max_grad_norm}
    settings: dict[str, Any] = {"global_batch": global_batch, "sequence_length": sequence_length, "name": name}
    if workload is None:
        if global_batch is None:
            said = (f"global batch {DEFAULT_GLOBAL_BATCH} samples per optimizer step; change it with global_batch=",)
            settings["global_batch"] = DEFAULT_GLOBAL_BATCH
        workload = workload_from_objects(**parts, **settings, seed=seed)
    else:
        given = [name for name, value in parts.items() if value is not None]
        if given:
            raise WorkloadError(
                f"a whole workload was given, and {', '.join(given)} too, which would be dropped",
                hint="Put them into the workload: dataclasses.replace(workload, max_grad_norm=1.0).",
            )
        if not isinstance(workload, Workload):
            raise WorkloadError(
                f"the workload is {type(workload).__name__}; it is an autoplan.Workload, or a text like 'gpt2'",
                hint="Or give the parts: model=, make_batch=, loss=, optimizer=.",
            )
        workload = dataclasses.replace(workload, **{key: value for key, value in settings.items() if value is not None})
    check_size(workload)
    if torch.get_default_dtype() != torch.float32:
        raise WorkloadError(
            f"torch's default dtype is {torch.get_default_dtype()} here, and trials run in processes of their own, "
            "where it is torch.float32",
            hint="Give dtypes where tensors are made, and put it back before the search: "
            "torch.set_default_dtype(torch.float32). Weights and batches keep the dtype that they have.",
        )
    digests, unhashed = digests_of(workload)
    identity = digest(digests)
    return WorkloadSpec(
        kind="object",
        reference=workload.name,
        name=workload.name,
        sequence_length=workload.sequence_length,
        global_batch=workload.global_batch,
        unit="tokens" if workload.sequence_length else "samples",
        payload=pack_objects(
            workload,
            identity,
            what=f"the objects of {workload.name}",
            hint="Open files, locks and connections inside make_batch or build_model, not outside of them.",
        ),
        identity=identity,
        digests=digests,
        sources=fingerprints_of(workload) | {"versions": installed_versions()},
        unhashed=unhashed,
        notes=workload.notes,
        taken_from=workload.taken_from,
        own_setting=workload.own_setting,
        defaults_used=said,
    )


def check_size(workload: Workload) -> None:
    """Raises WorkloadError where a model that was given as an object does not fit the host's memory in a rank.

    A rank loads the model that it was sent and trains a copy: COPIES times the bytes of its tensors.
    """
    models = [part for part in getattr(workload.build_model, "args", ()) if isinstance(part, nn.Module)]
    tensors = itertools.chain(*(itertools.chain(model.parameters(), model.buffers()) for model in models))
    size = sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")
    available = read_host().memory_available_bytes.value if size > _INLINE_BYTES else None
    if available is not None and COPIES * size > available:
        raise WorkloadError(
            f"the model of {workload.name} has {format_bytes(size)} of tensors. Each rank is sent the whole model and "
            f"trains a copy, which takes {format_bytes(COPIES * size)}; {format_bytes(available)} of the host's memory "
            "are available",
            hint="Give a function that makes the model, so that each rank makes its own: "
            "autoplan search --trainer FILE.py:FUNCTION for a Trainer, model=FUNCTION for a loop.",
        )


# The part of what is trained that a field of a Workload belongs to; other fields are settings.
_PARTS = {
    "build_model": "model",
    "loss": "loss",
    "head": "loss",
    "count": "loss",
    "tokens": "counting",
    "build_optimizer": "optimizer",
    "build_schedule": "schedule",
    "make_batch": "data",
    "load_weights": "weights",
}


def digests_of(workload: Workload) -> tuple[dict[str, str], tuple[str, ...]]:
    """A digest per part of a workload, and the types of values that cannot be hashed."""
    describers: dict[str, Describer] = {}
    parts: dict[str, list[Any]] = {"weights": []}
    for field in dataclasses.fields(workload):
        part = _PARTS.get(field.name, "settings")
        if field.name in ("notes", "taken_from", "find_unused_parameters", "own_setting"):
            continue  # sentences, where it came from, what changes no number, and what a plan replaces
        describer = describers.setdefault(part, Describer(stamps=part == "data"))
        parts.setdefault(part, []).append([field.name, describer.describe(getattr(workload, field.name))])
    parts["weights"] += [describer.weights for describer in describers.values() if describer.weights]
    found = {part: digest(described) for part, described in parts.items()}
    unhashed = {name for describer in describers.values() for name in describer.unhashed}
    return found | {"versions": digest(installed_versions())}, tuple(sorted(unhashed))


def workload_from_objects(
    *,
    model: nn.Module | Callable[[], nn.Module] | None,
    make_batch: Callable[[int, int], Batch] | None,
    loss: Callable[[nn.Module, Batch], LossSum] | None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None,
    global_batch: int,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = None,
    name: str | None = None,
    sequence_length: int | None = None,
    fixed_micro_batch: int | None = None,
    seed: int = 0,
) -> Workload:
    """A Workload from its parts.

    Args:
        model: A module (copies of it are trained), or a function that makes one.
        make_batch: `make_batch(num_samples, index)` gives a batch on the CPU.
        loss: `loss(model, batch)` gives a LossSum; None: the causal loss of a transformers model with `labels`.
        optimizer: An optimizer over the model's parameters, or a function that makes one from parameters.
        global_batch: Samples per optimizer step.
        schedule: A function that makes the learning-rate schedule from the optimizer.
        max_grad_norm: Clip to this norm; None: no clipping.
        name: For screens and plans; None: the class of the model.
        sequence_length: Tokens per sample; None: samples are not sequences.
        fixed_micro_batch: See Workload.
        seed: For weights, batches and dropout.

    Raises:
        WorkloadError: a part is missing, or of the wrong kind.
    """
    if not (model and make_batch and optimizer):
        parts = {"model": model, "make_batch": make_batch, "optimizer": optimizer}
        raise WorkloadError(
            f"the workload lacks {', '.join(part for part, value in parts.items() if not value)}",
            hint="A workload is a model, make_batch(num_samples, index), a loss and an optimizer, or a Workload. The "
            "parts of a loop are given in this order: autoplan.search(model, optimizer, dataloader, loss).",
        )
    instance = model if isinstance(model, nn.Module) else None
    if instance is not None:
        refuse_lazy(instance, f"the model ({type(instance).__name__})")
    causal = loss is None
    if instance is not None and causal and not hasattr(instance, "get_output_embeddings"):
        raise WorkloadError(
            f"no loss was given, and {type(instance).__name__} is not a language model of transformers",
            hint="Give loss(model, batch) -> LossSum(sum of the losses, number of items).",
        )
    return Workload(
        name=name or (type(instance).__name__ if instance is not None else str(getattr(model, "__name__", "model"))),
        build_model=model if instance is None else functools.partial(copy_model, instance),
        make_batch=make_batch,
        loss=causal_loss if loss is None else loss,
        build_optimizer=_optimizer_maker(optimizer, instance),
        global_batch=global_batch,
        sequence_length=sequence_length,
        max_grad_norm=max_grad_norm,
        build_schedule=schedule,
        count=functools.partial(count_labels, shifted=True) if causal else None,
        head=CausalHead() if causal else None,
        fixed_micro_batch=fixed_micro_batch,
        seed=seed,
        notes=() if callable(optimizer) or instance is None else tuple(hooks_note(optimizer, instance)),
    )


def _optimizer_maker(
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer], model: nn.Module | None
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A function that makes the optimizer from parameters.

    Args:
        optimizer: Such a function, or an optimizer over the parameters of `model`.
        model: None where the model is made by a function.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if model is None:
        raise WorkloadError(
            "the optimizer is an instance, and the model is a function that makes new parameters",
            hint="Give a function for both, or an instance of both.",
        )
    return rebuild_over(optimizer, trainable(model))


def unpack(spec: WorkloadSpec) -> Workload:
    """The workload that travels with a spec.

    Raises:
        WorkloadError: the spec was read from a plan, which contains no objects; or they do not load here.
    """
    if spec.payload is None:
        raise WorkloadError(
            f"{spec.name} was made of Python objects, which a plan does not carry",
            hint="Pass them again: plan.prepare(model, optimizer, loss), or search with the same ones.",
        )
    workload = unpack_objects(spec.payload, f"the objects of {spec.name}")
    assert isinstance(workload, Workload), "spec_from_objects packs workloads"
    return workload


def unpack_objects(payload: str, what: str) -> Any:
    """The objects that `pack_objects` packed.

    Raises:
        WorkloadError: it does not load here; `what` names it.
    """
    kind, _, text = payload.partition(":")
    hint = "Define them in the script itself or in an importable module."
    with failing_as(f"{what} do not load in another process", hint):
        if kind == "file":
            with open(text, "rb") as file:  # not as bytes first, which would take as much memory again
                return load(file)
        return load(io.BytesIO(base64.b64decode(text)))


def pack_objects(objects: Any, identity: str, *, what: str, hint: str) -> str:
    """Objects as text: cloudpickled, in base64; or the path of a file for large ones.

    Raises:
        WorkloadError: they cannot be pickled; `what` names them, and `hint` says what to do.
    """
    with failing_as(f"{what} cannot be sent to another process", hint):
        data = dumps(objects)
    if len(data) <= _INLINE_BYTES:
        return "inline:" + base64.b64encode(data).decode()
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("autoplan")) / "objects"
    path = folder / f"{identity}.pickle"
    make_private_folder(folder)
    replace_file(path, data, private=True)
    return f"file:{path}"

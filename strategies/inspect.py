"""Looks at a workload without running it: the facts that the space, the cost model and the screen need.

The model is built on the meta device, so that nothing is allocated; only the loss of a user's own function is run once,
on two samples. Runs in a rank (it loads torch); the records load none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autoplan.errors import DeviceError, UsageError, WorkloadError
from autoplan.probes.profile import HardwareProfile
from autoplan.processes import is_out_of_memory, machine_trouble
from autoplan.strategies.analysis.additivity import measure_additivity
from autoplan.strategies.analysis.facts import (
    LOSS_PHASE,
    Choices,
    Dependence,
    Inspection,
    ParallelFacts,
    WorkloadFacts,
    limited,
)
from autoplan.strategies.analysis.pipeline_trace import trace_pipeline
from autoplan.strategies.analysis.structure import Structure, disable_dropout, find_structure, language_models
from autoplan.strategies.analysis.tensor_plans import find_tensor_plan
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.prepare import STRATEGIES
from autoplan.strategies.techniques.attention import attention_dropout
from autoplan.strategies.workloads.batch import move_batch
from autoplan.strategies.workloads.carried import carried_state
from autoplan.strategies.workloads.counting import find_counted, look_at_sizes
from autoplan.strategies.workloads.data_files import DataFiles, watch_data_files
from autoplan.strategies.workloads.devices import is_elsewhere, move_to_meta
from autoplan.strategies.workloads.digests import digest
from autoplan.strategies.workloads.fingerprint import fingerprints_of
from autoplan.strategies.workloads.loops.step import time_step
from autoplan.strategies.workloads.objects import digests_of
from autoplan.strategies.workloads.optimizers import (
    check_optimizer,
    follows_an_instance,
    kept_states,
    trainable,
)
from autoplan.strategies.workloads.own_setting import is_compiled
from autoplan.strategies.workloads.randomness import seeded_build
from autoplan.strategies.workloads.sources import load_workload
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.strategies.workloads.training_mode import enter_training_mode
from autoplan.strategies.workloads.user_errors import refuse_lazy, user_error, users_call, with_checked_batches
from autoplan.strategies.workloads.workload import Workload

SMALL_PARAMETERS = 10_000_000
"""Models up to this size are looked at on one thread."""

LARGEST_RUN_PARAMETERS = 200_000_000
"""Models up to this size are run once, on two short samples, to look at their loss."""

LIBRARIES = ("transformers", "peft", "trl", "accelerate", "diffusers", "timm", "torchvision", "einops")
"""Packages whose modules start nothing when they are imported: what the workload imports of them, every later rank does
too, so the zygote imports it once."""


def _ignore(_: Any) -> None:
    """Where nobody asks for the phases."""


def run_inspect_rank(
    context: Any, spec: WorkloadSpec, hardware: HardwareProfile, device: str, parallel: bool = True, real: bool = False
) -> Inspection:
    """inspect_workload() in a rank, with the user's errors as data."""
    phase, report = (_ignore, _ignore) if context is None else (context.phase, context.report)
    before = set(sys.modules)
    try:
        facts = inspect_workload(
            spec,
            hardware,
            device,
            parallel=parallel,
            real=real,
            phase=phase,
            early=lambda known: report(Inspection(facts=known)),
        )
        answer = Inspection(facts=facts, imported=_installed(name for name in sys.modules if name not in before))
    except UsageError as error:
        trouble = machine_trouble(error)
        if trouble is not None:
            raise trouble from None
        answer = Inspection(error_code=error.code, error=error.message, hint=error.hint)
    except DeviceError as error:
        answer = Inspection(error_code=error.code, error=error.message, hint=error.hint)
    report(answer)
    return answer


def _installed(modules: Iterable[str]) -> tuple[str, ...]:
    """Those of LIBRARIES that are the installed ones: a copy beside the user's file is found by its own path alone."""
    places = tuple(os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("purelib", "platlib"))

    def is_installed(name: str) -> bool:
        file = getattr(sys.modules[name], "__file__", None)
        return name.partition(".")[0] in LIBRARIES and os.path.realpath(str(file)).startswith(places)

    return tuple(filter(is_installed, modules))


def inspect_workload(
    spec: WorkloadSpec,
    hardware: HardwareProfile,
    device: str,
    *,
    parallel: bool = True,
    real: bool = False,
    phase: Callable[[str], None] = _ignore,
    early: Callable[[WorkloadFacts], None] = _ignore,
) -> WorkloadFacts:
    """The facts of a workload.

    Args:
        spec: What is trained.
        hardware: The machine.
        device: cuda or cpu.
        parallel: Look at what the model allows of several ranks, which traces it; False: one rank trains it.
        real: Build the model with values, and run its loss before anything is traced without: for a package that
            keeps tensors in its globals.
        phase: Is told which of FUNCTIONS runs next.
        early: Is given the facts before the loss is run, which only adds whether it is a sum over samples.

    Raises:
        WorkloadError: its functions fail or return the wrong thing, or its model trains nothing.
    """
    runs_on = "cpu" if is_elsewhere(device) else device
    with watch_data_files() as data:
        phase("load")
        workload = load_workload(spec)
        phase("build_model")
        model = build_on_meta(workload, real=real)
        if spec.kind == "function" and any(is_compiled(part) for part in model.modules()):
            raise WorkloadError(
                f"build_model of {workload.name} returned a model that torch.compile has compiled, so no trial could "
                "run without that",
                hint="Return the model itself: a search tries to compile it. To compare with the compiled model, give "
                "compile=model as the baseline.",
            )
        phase("make_batch")
        batch = with_checked_batches(workload).make_batch(2, 0)
        counting = _what_is_counted(spec, workload, batch, model)
    phase("facts")
    structure = find_structure(model)
    fixed = workload.fixed_micro_batch
    spec = spec.model_copy(
        update={
            "options": spec.options | ({} if fixed is None else {"fixed_micro_batch": fixed}),
            "global_batch": workload.global_batch,
            "sequence_length": workload.sequence_length,
            "open_fields": (),
            "name": workload.name,
            "notes": workload.notes,
            "taken_from": workload.taken_from,
            "own_setting": workload.own_setting,
            "find_unused_parameters": workload.find_unused_parameters,
            **counting,
            **_what_is_hashed(spec, workload, data),
        }
    )

    def facts_of(structure: Structure, noisy: bool = False) -> WorkloadFacts:
        offered = []
        for strategy in STRATEGIES:
            own = strategy.name == "threads"  # it asks for torch's own number
            with contextlib.nullcontext() if own else _enough_threads(model):
                offered.append(strategy.choices(workload, structure, hardware, device))
        choices = [limited(choice, workload.knobs) for choice in offered]
        facts = _facts(spec, workload, model, structure, choices)
        if not parallel:
            return facts
        return facts.model_copy(update={"parallel": _parallel_facts(spec, model, structure, workload, noisy=noisy)})

    _check_optimizer(workload, model)
    runs_loss = spec.kind in ("function", "object") and not structure.micro_batch_dependent
    if real and runs_loss and workload.knobs is None:
        phase(LOSS_PHASE)
        dependent, noisy = find_dependent_loss(workload, model, runs_on, seeds=parallel)
        return facts_of(dataclasses.replace(structure, micro_batch_dependent=dependent), noisy)
    facts = facts_of(structure)
    if workload.knobs is not None:
        early(facts)
        phase(LOSS_PHASE)
        return facts.model_copy(update={"step_s": time_step(workload), "training": None})
    if not runs_loss:
        return facts
    early(facts)
    phase(LOSS_PHASE)
    with _enough_threads(model):
        dependent, noisy = find_dependent_loss(workload, model, runs_on, seeds=parallel)
    if not dependent and not (noisy and parallel):
        return facts
    return facts_of(dataclasses.replace(structure, micro_batch_dependent=dependent), noisy)


@contextlib.contextmanager
def _enough_threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small model: more would wait for each other, above all beside other work."""
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) <= SMALL_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_on_meta(workload: Workload, *, real: bool = False) -> nn.Module:
    """The model on the meta device, in train mode.

    A model whose own code needs real numbers while it is built is built on the CPU and moved.

    Args:
        workload: Its build_model makes the model.
        real: Build it on the CPU, and leave it there.

    Raises:
        WorkloadError: build_model fails, gives no module, or one whose parameters have no shapes yet.
    """
    try:
        with contextlib.nullcontext() if real else torch.device("meta"):
            model = workload.build_model()
    except WorkloadError:
        raise
    except Exception:
        model = _build_on(workload)
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"build_model of {workload.name} returned {type(model).__name__}; it returns a torch.nn.Module",
            hint="Give a function that makes the model.",
        )
    refuse_lazy(model, f"the model of {workload.name}")
    if not real:
        move_to_meta(model)
    enter_training_mode(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"no parameter of {workload.name} trains: the model has {sum(1 for _ in model.parameters())}, all frozen",
            hint="Leave requires_grad True on the parameters that are to be trained.",
        )
    return model


def _build_on(workload: Workload, device: str = "cpu") -> nn.Module:
    what = f"build_model() of {workload.name}"
    with users_call(what, "It makes the model, without arguments; call it by itself."):
        model = workload.build_model()
        return model.to(device) if hasattr(model, "to") else model


def find_dependent_loss(
    workload: Workload, model: nn.Module, device: str, *, seeds: bool
) -> tuple[tuple[Dependence, ...], bool]:
    """Runs the loss of a user's own function on two samples, to see whether it is a sum over samples, and draws noise.

    A model that is too large for that is left to the parity check, which looks too.

    Args:
        workload: What is trained.
        model: Its model, on any device.
        device: Where the loss runs.
        seeds: Look for noise in a loss that is a sum, too: several ranks may train one model.

    Returns:
        Why it is no sum (empty: it is one), and whether it draws random numbers with dropout off.

    Raises:
        WorkloadError: the loss fails or returns the wrong thing.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST_RUN_PARAMETERS:
        return (), False
    with seeded_build(workload.seed):
        real = _build_on(workload, device)
    enter_training_mode(real)
    disable_dropout(real)
    try:
        if (check := getattr(workload.loss, "check", None)) is not None:
            check(real, move_batch(workload.make_batch(2, 0), torch.device(device)))
        found = measure_additivity(workload, real, torch.device(device), noise=False, seeds=seeds)
        if found.additive or (found.padding is None and not found.deterministic):
            carried = carried_state(workload.loss, real, workload.make_batch, torch.device(device), seed=workload.seed)
            if carried is None:
                return (), not found.deterministic
            return (Dependence(module=carried.name, kind=carried.kind, why=carried.why),), not found.deterministic
    except WorkloadError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # the trials find a micro-batch that fits
            return (), False
        raise user_error(
            error,
            f"loss(model, batch) of {workload.name} on make_batch(2, 0)",
            "The loss hands the model what its forward needs, from what the batch has, and returns "
            "LossSum(sum of the losses, number of items).",
        ) from error
    words = getattr(workload.loss, "describe_dependence", None)  # of a loss that the user did not write as a LossSum
    why = found.describe() if words is None else words(found.describe())
    return (Dependence(module="loss", kind="Workload.loss", why=why),), not found.deterministic


def _what_is_counted(spec: WorkloadSpec, workload: Workload, batch: Any, model: nn.Module) -> dict[str, Any]:
    """The fields of a spec that say what throughput counts, and how the batches of a user's own function vary."""
    counted = find_counted(workload, batch, model)
    own = spec.kind in ("function", "object")
    sizes = look_at_sizes(workload, counted) if own else None
    return {"unit": counted.unit, "counted": counted, "batch_sizes": sizes}


def _what_is_hashed(spec: WorkloadSpec, workload: Workload, data: DataFiles) -> dict[str, Any]:
    """The fields of a spec that can be known only now: the pieces of a function's workload, and its data files."""
    if spec.kind not in ("function", "object"):
        return {}
    sources = dict(spec.sources)
    fields: dict[str, Any] = {"sources": sources}
    if spec.kind == "function":
        sources |= fingerprints_of(workload)
        fields["unhashed"] = digests_of(workload)[1]
    if data.stamps:
        sources["data files"] = data.stamps
        fields["digests"] = spec.digests | {"data": digest([spec.digests.get("data"), data.stamps])}
    return fields


def _facts(
    spec: WorkloadSpec, workload: Workload, model: nn.Module, structure: Structure, choices: list[Choices]
) -> WorkloadFacts:
    # of a model inside a module of the user's own, the one that trains
    trained = (inner for inner in language_models(model) if any(p.requires_grad for p in inner.parameters()))
    config: Any = getattr(next(trained, model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = list(model.parameters())
    optimizer = workload.build_optimizer(trainable(model))
    vocabulary = _whole_number(text, "vocab_size")
    logits = None if vocabulary is None or spec.sequence_length is None else spec.sequence_length * vocabulary
    return WorkloadFacts(
        spec=spec,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in trainable(model)),
        embedding_parameters=sum(part.numel() for _, module in structure.embeddings for part in module.parameters()),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_blocks=len(structure.blocks),
        hidden_size=_whole_number(text, "hidden_size"),
        num_heads=_whole_number(text, "num_attention_heads"),
        num_key_value_heads=_whole_number(text, "num_key_value_heads"),
        logits_per_sample=logits,
        attention_dropout=attention_dropout(model),
        optimizer=type(optimizer).__name__,
        optimizer_states=kept_states(workload.build_optimizer, trainable(model)).tensors,
        tied=structure.tied,
        micro_batch_dependent=structure.micro_batch_dependent,
        fixed_micro_batch=workload.fixed_micro_batch,
        choices=tuple(choices),
        training=read_training_facts(workload, model),
    )


def _check_optimizer(workload: Workload, model: nn.Module) -> None:
    what = f"build_optimizer(parameters) of {workload.name}"
    with users_call(what, "It makes a torch.optim.Optimizer from the parameters that it is given."):
        optimizer = workload.build_optimizer(trainable(model))
    check_optimizer(optimizer, f"what {what} gives")


def _parallel_facts(
    spec: WorkloadSpec, model: nn.Module, structure: Structure, workload: Workload, *, noisy: bool
) -> ParallelFacts:
    """The tp and pp that the model allows; no pipeline if batches differ in size, or the optimizer is an instance."""
    plan = find_tensor_plan(model, structure, workload.tensor_plan)
    trace = trace_pipeline(model, structure, workload)
    pp_reason = trace if isinstance(trace, str) else None
    if pp_reason is None and spec.batch_sizes is not None and spec.batch_sizes.vary:
        pp_reason = "its batches differ in size, and the stages of a pipeline are built for one size"
    if pp_reason is None and follows_an_instance(workload.build_optimizer):
        pp_reason = "its optimizer was given as an instance over all parameters, and a stage has some: give a function"
    length = workload.tokens_per_sample
    return ParallelFacts(
        num_blocks=len(structure.blocks),
        tp_unit=None if isinstance(plan, str) else plan.unit,
        tp_unit_of="" if isinstance(plan, str) else plan.unit_of,
        tp_reason=plan if isinstance(plan, str) else None,
        pp_reason=pp_reason,
        noisy=noisy,
        block_costs=() if isinstance(trace, str) else tuple(cost / length for cost in trace.block_costs),
        first_cost=0.0 if isinstance(trace, str) else trace.first_cost / length,
        last_cost=0.0 if isinstance(trace, str) else trace.last_cost / length,
    )


def _whole_number(config: Any, name: str) -> int | None:
    """A size in a config; None where it has none, or a list of them (a staged image model has one for each stage)."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

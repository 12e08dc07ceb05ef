"""Inputs of `autoplan estimate`: TrainingConfig's knobs under their own names, other trainers' names read as them, and
what TrainingConfig has no knob for under names of its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.cost.analytical.cluster import Chip
from autoplan.planner.cost.analytical.layouts import (
    ATTENTION,
    FOREACH_TEMPORARY_BYTES,
    LOSSES,
    OPTIMIZER_STATE_BYTES,
    dimension_columns,
)
from autoplan.planner.cost.analytical.transformer import Transformer
from autoplan.planner.cost.columns import PRECISIONS, SHARDINGS, STATES
from autoplan.planner.cost.roofline import matmul_efficiency_of, processors_of
from autoplan.strategies.config import KNOBS, PLAIN, UNPRICED
from autoplan.strategies.knob_text import check_knob

OTHER_INPUTS = {
    "sharding": "ddp, zero1, zero2, shard_grad_op or zero3. zero1 and zero2 are other trainers'; the others are said "
    "with dp_shard and reshard_after_forward too",
    "sequence_parallel": "false: tensor parallelism that does not split the sequence",
    "chunked_loss": "true: the loss casts its logits to fp32 a chunk at a time (torchtune, LitGPT)",
    "optimizer": f"the workload's: {', '.join(OPTIMIZER_STATE_BYTES)}",
    "states": "what is kept per parameter: fp32 (autoplan), megatron, master or 16bit",
    "reduce_dtype": "fp32 (autoplan) or 16bit: how FSDP and ZeRO reduce gradients",
    "trainable_parameters": "how many are trained; the others are frozen (LoRA)",
    "flat_parameters": "true: FSDP1, whose frozen parameters have gradients too",
    "ep": "expert parallelism: of the data-parallel ranks, how many share the experts",
    "expert_capacity": "rows of an expert's product over an equal share of the tokens: 1, or the capacity factor",
    "expert_imbalance": "of the busiest rank's experts, by how much the interval of the step widens: 0.1",
    "cp": "context parallelism: ranks that share each sequence",
    "cp_exchange": "ring (keys and values go round) or gather (they are gathered before attention)",
    "document_len": "tokens that see each other, where documents are packed into a sequence",
    "frozen": "nf4 (QLoRA) or int8: how frozen parameters of the blocks are kept; 16bit",
    "gradient_dtype": "fp32 or 16bit: gradients, where `states` does not say it",
}
"""The inputs for which TrainingConfig has no knob: what other trainers do, and what belongs to the workload."""

IGNORED_KNOBS = {
    **UNPRICED,
    "compile_mode": "what CUDA graphs save is not in the closed form",
    "threads": "a knob of CPUs",
    "allocator": "how freed memory is kept",
    "parameters": "say states=master (bf16 with fp32 copies) or states=16bit instead",
    "optimizer_state": "say optimizer=adamw_8bit instead",
    "kernels": "the closed form counts the passes of fused norms and gates, whoever wrote them",
    "offload": "the closed form knows no link to the host: a search prices it from the probe of the link",
}
"""Knobs that are accepted and change nothing in an estimate, each with the reason."""


def _by_other_name(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {other: name for name, others in names.items() for other in others}


ALIASES = _by_other_name(
    {
        "sharding": ("zero_stage", "sharding_strategy"),
        "checkpointing": ("activation_checkpointing", "gradient_checkpointing", "recompute", "recompute_granularity"),
        "attention": ("flash", "flash_attention", "use_flash_attn", "attn_implementation"),
        "precision": ("dtype", "mixed_precision"),
        "compile": ("torch_compile",),
        "pp_schedule": ("schedule", "pipeline_schedule"),
        "tp": ("tensor_parallel_size", "tensor_model_parallel_size"),
        "pp": ("pipeline_parallel_size", "pipeline_model_parallel_size"),
        "virtual_stages": ("virtual_pipeline_model_parallel_size",),
        "cp": ("context_parallel_size",),
        "ep": ("expert_model_parallel_size", "expert_parallel_size"),
        "expert_capacity": ("moe_expert_capacity_factor",),
        "dp": ("data_parallel_size",),
        "micro_batch": ("micro_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        "accumulation": ("gradient_accumulation_steps",),
    }
)
"""Other trainers' names of what is fixed (DeepSpeed, Megatron-LM, FSDP1, transformers), and the names here."""

ROW_ALIASES = _by_other_name(
    {
        "global_batch": ("global_batch_size", "train_batch_size"),
        "num_gpus": ("world_size", "n_gpus"),
        "chip": ("gpu",),
        "seq_len": ("seq_length", "sequence_length"),
        "layers": ("num_layers",),
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_query_groups",),
        "ffn": ("ffn_hidden_size",),
        "vocab": ("vocab_size",),
    }
)
"""The same of what a row of a table has besides."""

FROZEN_BYTES = {"16bit": 0.0, "nf4": 0.516, "int8": 1.002}
"""Bytes of a quantised parameter; 0: as the others. nf4: 4 bits, a constant of 8 bits for each 64, and one of fp32 for
256 of these: 4.127 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314, section 3). int8: a 16-bit constant for each
row of some thousand (LLM.int8(), arXiv 2208.07339). Not fitted."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SHARDING_NAMES = {"0": "ddp", "none": "ddp", "no_shard": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
_SHARDING_NAMES |= {"full_shard": "zero3", "hybrid_shard": "zero3", "fsdp": "zero3", "fsdp2": "zero3"}
_PRECISION_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_PRECISION_NAMES |= {"amp_bf16": "bf16", "bf16-mixed": "bf16", "amp_fp16": "fp16", "16-mixed": "fp16"}
VALUES: dict[str, dict[str, dict[str, str]]] = {
    "sharding": {old: {"sharding": new} for old, new in _SHARDING_NAMES.items()},
    "checkpointing": {old: {"checkpointing": "full"} for old in (*_TRUE, "block", "whole")}
    | {old: {"checkpointing": "none"} for old in _FALSE},
    "attention": {old: {"attention": "sdpa"} for old in (*_TRUE, "flash", "flash_attention_2", "flash_attn")}
    | {old: {"attention": "eager"} for old in _FALSE},
    "precision": {old: {"precision": new} for old, new in _PRECISION_NAMES.items()}
    | {old: {"precision": "bf16", "fp8": "tensorwise"} for old in ("fp8", "amp_fp8")},
    "fp8": {old: {"fp8": "tensorwise"} for old in _TRUE} | {old: {"fp8": "off"} for old in _FALSE},
    "compile": {old: {"compile": "block"} for old in _TRUE} | {old: {"compile": "off"} for old in _FALSE},
    "loss": {"chunked": {"loss": "full", "chunked_loss": "true"}},
    "optimizer": {"adamw_fused": {"optimizer": "adamw", "optimizer_step": "fused"}},
    "reduce_dtype": {old: {"reduce_dtype": "16bit"} for old in ("bf16", "fp16", "bfloat16", "float16")},
}
"""Other words for values, by the name here: what each is read as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The given inputs, under the names and values used here; in sentences, which were read otherwise or not read."""

    values: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The inputs that are no degrees: columns of Layouts that no knob fills, the knobs, and other inputs."""

    columns: dict[str, Any]
    knobs: dict[str, Any]
    other: dict[str, Any]


def read_inputs(given: Mapping[str, Any], aliases: Mapping[str, str] = ALIASES) -> Inputs:
    """The same inputs under the names and with the values used here.

    Args:
        given: Text by name; empty texts are left out.
        aliases: Other names of inputs.

    Raises:
        ConfigError: two names of one input are given, with different values.
    """
    values: dict[str, str] = {}
    notes: list[str] = []
    for name, value in given.items():
        text = "" if value is None else str(value).strip()
        if name is None or not text:
            continue
        canonical = aliases.get(name, name)
        text = text.lower() if canonical in KNOBS else text
        read = VALUES.get(canonical, {}).get(text.lower(), {canonical: text})
        if (canonical, text) not in read.items() or name != canonical:
            notes.append(f"{name}={text} is read as {' '.join(f'{k}={v}' for k, v in read.items())}")
        for key, new in read.items():
            if values.get(key, new).lower() != new.lower():
                raise ConfigError(
                    f"{name}={text} says {key}={new}, and {key}={values[key]} is given too",
                    hint=f"Give {key} once.",
                )
            values[key] = new
    notes += [f"{knob} changes nothing here ({why})" for knob, why in IGNORED_KNOBS.items() if knob in values]
    return Inputs(values=values, notes=tuple(notes))


def check_names(values: Mapping[str, str]) -> None:
    """Raises for what is neither a knob nor another input, and for values that a knob does not take.

    Raises:
        ConfigError: an unknown name, whose hint has near ones, or a value.
    """
    known = (*KNOBS, *OTHER_INPUTS, "dp", "accumulation")
    for name, value in values.items():
        if name in KNOBS:
            check_knob(name, value)
        elif name not in known:
            near = difflib.get_close_matches(name, (*known, *ALIASES), n=2)
            raise ConfigError(
                f"{name!r} is no knob of a layout",
                hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"The knobs are {', '.join(KNOBS)}; "
                f"what autoplan has no knob for: {', '.join(OTHER_INPUTS)}.",
            )


def read_settings(values: Mapping[str, str], model: Transformer, chip: Chip, defaults: Mapping[str, str]) -> Settings:
    """The inputs that are no degrees.

    Args:
        values: Inputs as `read_inputs` gives them.
        model, chip: What is trained, on what.
        defaults: Of knobs that are not given, where they are not TrainingConfig's.

    Raises:
        ConfigError: a value that its input does not take.
        UsageError: what does not go together, or that the chip cannot do.
    """
    names = ("precision", "fp8", "compile", "attention", "loss", "optimizer_step")
    if values.get("states") == "megatron":  # apex's FusedAdam
        defaults = {"optimizer_step": "fused", **defaults}
    knobs = {name: check_knob(name, values.get(name, defaults.get(name, getattr(PLAIN, name)))) for name in names}
    knobs |= {name: check_knob(name, values[name]) for name in IGNORED_KNOBS if name in values}
    precision = "fp8" if knobs["fp8"] != "off" else knobs["precision"]
    peak = chip.peak(precision)
    if peak is None:
        have = ", ".join(p for p in PRECISIONS if chip.peak(p) is not None)
        raise UsageError(f"{chip.sheet.name} has no {precision} units", hint=f"It has {have}.")
    columns = {
        **dimension_columns(model),
        "peak_flops_per_s": peak,
        "memory_bytes_per_s": chip.sheet.memory_bandwidth_bytes_per_s.value,
        "memory_bytes": chip.sheet.memory_bytes.value,
        "processors": processors_of(chip.sheet),
        "matmul_efficiency": matmul_efficiency_of(chip.sheet),
        "precision": PRECISIONS.index("bf16" if precision == "fp8" else precision),
        "attention": ATTENTION.index(knobs["attention"]),
        "loss": _loss(values, knobs["loss"]),
        "trainable": _trainable(values, model),
        "flat_parameters": flag(values, "flat_parameters", False),
        "document_len": number(values, "document_len", 0.0),
        "capacity": number(values, "expert_capacity", 1.0),
        "imbalance_sd": number(values, "expert_imbalance", 0.1),
        "ring": choice(values, "cp_exchange", ("ring", "gather"), "ring") == "ring",
        "frozen_bytes": FROZEN_BYTES[choice(values, "frozen", tuple(FROZEN_BYTES), "16bit")],
        "gradient_bytes": {"own": 0.0, "fp32": 4.0, "16bit": 2.0}[
            choice(values, "gradient_dtype", ("own", "fp32", "16bit"), "own")
        ],
        **_state_columns(values, precision),
    }
    other = {name: values[name] for name in OTHER_INPUTS if name in values and name != "sharding"}
    return Settings(columns=columns, knobs=knobs, other=other)


def _loss(values: Mapping[str, str], loss: str) -> int:
    chunked = flag(values, "chunked_loss", False)
    if chunked and loss == "fused":
        raise UsageError("loss=fused holds no logits that chunked_loss=true could cast", hint="Give one of the two.")
    return LOSSES.index("chunked" if chunked else loss)


def _trainable(values: Mapping[str, str], model: Transformer) -> float:
    trainable = number(values, "trainable_parameters", float(model.parameters))
    # the figures that trainers print leave out a bias or a padded vocabulary here and there
    if trainable > 1.1 * model.parameters:
        raise UsageError(
            f"trainable_parameters={trainable:g} is more than the model's {model.parameters:g}",
            hint="Leave it out where all parameters are trained.",
        )
    if "trainable_parameters" not in values and choice(values, "frozen", tuple(FROZEN_BYTES), "16bit") != "16bit":
        raise UsageError(
            f"frozen={values['frozen']} is of parameters that are not trained, and all are",
            hint="Give trainable_parameters too: how many are trained.",
        )
    return min(trainable, float(model.parameters))


def _state_columns(values: Mapping[str, str], precision: str) -> dict[str, Any]:
    """The columns for what the optimizer and the trainer keep per parameter."""
    optimizer = choice(values, "optimizer", tuple(OPTIMIZER_STATE_BYTES), "adamw")
    states = choice(values, "states", STATES, "fp32")
    if states != "fp32" and precision not in ("bf16", "fp16", "fp8"):
        raise UsageError(
            f"states={states} goes with bf16, fp16 or fp8, not with {precision}",
            hint="Give one of these as precision, or leave states out.",
        )
    narrow = 2.0 if states == "16bit" else 1.0
    return {
        "optimizer_bytes": OPTIMIZER_STATE_BYTES[optimizer] / (1.0 if optimizer.endswith("8bit") else narrow),
        "foreach_bytes": FOREACH_TEMPORARY_BYTES.get(optimizer, 0.0) / narrow,
        "states": STATES.index(states),
        "reduces_16bit": choice(values, "reduce_dtype", ("fp32", "16bit"), "fp32") == "16bit",
    }


def read_sharding(values: Mapping[str, str]) -> str | None:
    """The sharding that the inputs name, as one of SHARDINGS; None: nothing, or what holds wherever there are shards.

    Raises:
        UsageError: sharding and reshard_after_forward say different things.
    """
    said = choice(values, "sharding", SHARDINGS, "") if "sharding" in values else None
    if "reshard_after_forward" not in values:
        return said
    reshards = check_knob("reshard_after_forward", values["reshard_after_forward"])
    if said in ("zero3", "shard_grad_op") and reshards is not (said == "zero3"):
        raise UsageError(f"sharding={said} contradicts reshard_after_forward={reshards}", hint="Give one of the two.")
    return said or (None if reshards else "shard_grad_op")


def number(values: Mapping[str, Any], name: str, default: float) -> float:
    """A number above 0.

    Raises:
        UsageError: it is none.
    """
    text = values.get(name)
    if text is None or str(text).strip() == "":
        return default
    hint = "Write a plain number above 0, without a unit, or leave it out."
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}, not a number", hint=hint) from None
    if not np.isfinite(value) or value <= 0:
        raise UsageError(f"{name} is {text}; it must be above 0", hint=hint)
    return value


def whole(values: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number above 0.

    Raises:
        UsageError: it is none.
    """
    value = number(values, name, float(default))
    if value != int(value):
        raise UsageError(f"{name} is {value:g}, not a whole number", hint="Write a whole number, or leave it out.")
    return int(value)


def flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false, as people write it.

    Raises:
        UsageError: it is neither.
    """
    text = values.get(name)
    if text is None or str(text).strip() == "":
        return default
    if str(text).lower() in (*_TRUE, *_FALSE):
        return str(text).lower() in _TRUE
    raise UsageError(f"{name} is {text!r}, not true or false", hint="Or leave it out for the default.")


def choice(values: Mapping[str, Any], name: str, allowed: tuple[str, ...], default: str) -> str:
    """One of several words.

    Raises:
        UsageError: it is none of them.
    """
    text = str(values.get(name) or default).lower()
    if text not in allowed:
        raise UsageError(f"{name} is {text!r}, which is none of its values", hint=f"It is one of {', '.join(allowed)}.")
    return text

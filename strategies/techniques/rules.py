"""Which combinations of knobs no run can have. Loads no torch: the planner's process, which makes the space, asks too.

Most rules follow from the knobs' own metadata (`Knob.needs` with a reason, `Knob.excludes`). What needs more than one
value beside another is a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autoplan.strategies.config import CUDAGRAPH_MODES, INTERLEAVED_SCHEDULES, PLAIN, Knob, TrainingConfig, knobs

SIXTEEN_BITS_ONLY = ("sdpa_flash", "sdpa_cudnn")
"""Kernels that take bf16 and fp16 alone: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_dtypes."""

MOST_ADDITIONS = 32
"""Gradients in bf16 that are added up in a row, over micro-batches and DDP's replicas: sqrt(32) 2^-9 is 1.1 %."""

Reason = Callable[[TrainingConfig, int | None], str | None]
"""(configuration, global batch) -> why the knobs do not go together, None if they do.

Without the global batch a rule says nothing of the micro-batches of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        technique: Whose rule it is, as `Knob.technique`.
        reads: The knobs that it reads.
        incompatible: The reason against a configuration.
    """

    technique: str
    reads: tuple[str, ...]
    incompatible: Reason


def _rule_of(name: str, knob: Knob) -> Rule:
    """The rule that refuses configurations by a knob's own metadata."""
    refused = [need for need in knob.needs if need.why]

    def incompatible(config: TrainingConfig, global_batch: int | None) -> str | None:
        value = getattr(config, name)
        if value == getattr(PLAIN, name):
            return None
        for need in refused:
            if not need.is_met(getattr(config, need.knob)):
                return f"{name}={value} needs {need.describe()}: {need.why}"
        for other, why in knob.excludes.items():
            if (beside := getattr(config, other)) != getattr(PLAIN, other):
                return f"{name}={value} does not go with {other}={beside}: {why}"
        return None

    reads = (name, *(need.knob for need in refused), *knob.excludes)
    return Rule(technique=knob.technique, reads=reads, incompatible=incompatible)


def _attention(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.attention in SIXTEEN_BITS_ONLY and config.precision not in ("bf16", "fp16"):
        return f"attention={config.attention} takes numbers of 16 bits: precision=bf16 or fp16"
    return None


def _compilation(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.compile == "block" and config.compile_mode in CUDAGRAPH_MODES:
        return f"compile_mode={config.compile_mode} records CUDA graphs, which needs compile=model"
    return None


def _batch_norm(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.batch_norm == "own":
        return None
    if config.dp == 1:
        return "batch_norm=sync needs several data-parallel ranks: one has nobody to share statistics with"
    if config.dp_replicate > 1 and config.dp_shard > 1:
        return "batch_norm=sync goes over one axis of ranks: dp_replicate or dp_shard"
    return None


def _gradient_sync(config: TrainingConfig, global_batch: int | None) -> str | None:
    if global_batch is None or config.gradient_sync == "last" or global_batch > config.micro_batch * config.dp:
        return None
    made = f"micro_batch={config.micro_batch} on {config.dp} ranks makes 1"
    return f"gradient_sync=every needs several micro-batches per step, and {made}: it would be gradient_sync=last"


def _offload(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.offload == "none":
        return None
    asked = f"offload={config.offload}"
    rounded = next((f"{k}={v}" for k in ("parameters", "optimizer_state") if (v := getattr(config, k)) != "own"), None)
    if rounded is not None and config.offload != "activations":
        return f"{asked} does not go with {rounded}, whose states step on the device"
    if config.offload == "parameters":
        return _offloaded_parameters(config)
    if config.offload == "optimizer":
        return None
    if config.compile_mode in CUDAGRAPH_MODES:
        return f"{asked} does not go with compile_mode={config.compile_mode}: CUDA graphs record no copies to the host"
    if config.checkpointing == "selective":
        return f"{asked} does not go with checkpointing=selective, which keeps results where autograd does not see them"
    return None


def _offloaded_parameters(config: TrainingConfig) -> str | None:
    asked = "offload=parameters"
    if config.dp_shard == 1:
        return f"{asked} needs FSDP2 (dp_shard of at least 2), which keeps the shards on the host"
    if config.compile_mode in CUDAGRAPH_MODES:
        return f"{asked} does not go with compile_mode={config.compile_mode}: CUDA graphs record no copies of the host"
    if config.precision == "fp16":
        return f"{asked} does not go with precision=fp16: the loss scaler looks at gradients on the device"
    if config.fp8 != "off":
        return f"{asked} does not go with fp8={config.fp8}, which was not compared with shards on the host"
    return None


def _additions_in_bf16(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.parameters == "own" or global_batch is None or config.dp_shard > 1 and config.gradient_sync == "last":
        return None  # FSDP2 adds micro-batches up in fp32, which it reduces in
    additions = global_batch // (config.micro_batch * config.dp) + config.dp_replicate - 1
    if additions <= MOST_ADDITIONS:
        return None
    return (
        f"parameters={config.parameters} adds {additions} gradients up in bf16 here, over micro-batches and replicas; "
        f"more than {MOST_ADDITIONS} in a row lose over 1 %: use a larger micro_batch"
    )


def _pipeline(config: TrainingConfig, global_batch: int | None) -> str | None:
    if config.pp == 1:
        return None
    if (config.pp_schedule in INTERLEAVED_SCHEDULES) != (config.virtual_stages > 1):
        least = "2 or more" if config.pp_schedule in INTERLEAVED_SCHEDULES else "1"
        stages = f"virtual_stages={config.virtual_stages}"
        return f"pp_schedule={config.pp_schedule} does not go with {stages}: it takes {least}"
    reason = None if global_batch is None else _pipeline_passes(config, global_batch)
    if reason is not None:
        return reason
    if config.compile == "model":
        return "compile=model does not go with a pipeline: a stage would leave the graph of the whole model early"
    if config.pp_schedule != "zero_bubble":
        return None
    if config.dp > 1:
        return "zero_bubble computes gradients past the hooks that DDP and FSDP2 reduce them in"
    if config.compile != "off" or config.loss != "full" or config.checkpointing != "none":
        return "zero_bubble goes through a graph twice; compiled, fused and checkpointed graphs allow it once"
    return None


def _pipeline_passes(config: TrainingConfig, global_batch: int) -> str | None:
    stages, per_pass = config.pp, config.pp_microbatches
    accumulation = global_batch // (config.micro_batch * config.dp)
    if accumulation % per_pass:
        return f"pp_microbatches={per_pass} does not divide the {accumulation} micro-batches of a step"
    if per_pass < stages:
        return f"pp_microbatches={per_pass} is less than pp={stages}: some stages would be idle throughout"
    if config.virtual_stages > 1 and per_pass % max(1, per_pass // stages):
        # torch's interleaved schedules go in rounds of as many micro-batches, about one per stage
        return f"pp_schedule={config.pp_schedule} goes in rounds of about {stages}: pp_microbatches={per_pass} is none"
    return None


_SHARE = ("micro_batch", "dp_replicate", "dp_shard")
"""The knobs that say, with the global batch, how many micro-batches a step has."""

RULES = (
    *(_rule_of(name, knob) for name, knob in knobs().items() if knob.excludes or any(n.why for n in knob.needs)),
    Rule(technique="attention", reads=("attention", "precision"), incompatible=_attention),
    Rule(technique="compilation", reads=("compile", "compile_mode"), incompatible=_compilation),
    Rule(technique="batch_norm", reads=("batch_norm", "dp_replicate", "dp_shard"), incompatible=_batch_norm),
    Rule(technique="data_parallel", reads=(*_SHARE, "gradient_sync"), incompatible=_gradient_sync),
    Rule(
        technique="offload",
        reads=(
            *("offload", "parameters", "optimizer_state", "compile_mode", "checkpointing", "precision", "fp8"),
            "dp_shard",
        ),
        incompatible=_offload,
    ),
    Rule(technique="parameters", reads=(*_SHARE, "parameters", "gradient_sync"), incompatible=_additions_in_bf16),
    Rule(
        technique="pipeline_parallel",
        reads=(
            *("pp", "pp_schedule", "pp_microbatches", "virtual_stages"),
            *(*_SHARE, "compile", "loss", "checkpointing"),
        ),
        incompatible=_pipeline,
    ),
)


def incompatible(
    config: TrainingConfig, global_batch: int | None = None, *, techniques: Collection[str] | None = None
) -> str | None:
    """The first reason why the knobs of a configuration do not go together; None if they do.

    It says nothing of the workload, the device or the number of ranks that run: each technique's `choices` and
    `apply` do.

    Args:
        config: The configuration; micro_batch x dp divides the global batch.
        global_batch: Samples per optimizer step. Without it the rules on the micro-batches of a step are left out.
        techniques: Whose rules are asked; None: all.
    """
    for rule in RULES if techniques is None else [rule for rule in RULES if rule.technique in techniques]:
        reason = rule.incompatible(config, global_batch)
        if reason is not None:
            return reason
    return None

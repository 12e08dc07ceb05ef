"""The export target megatron: a shell file with the flags of Megatron-LM's pretrain_gpt.py.

In: a plan of a causal language model. Out: one file with the array MEGATRON_FLAGS. The model is a GPT-2 or
one of the Llama family; what Megatron's GPT model is not is refused. Which flags there are, with their types and
choices, is in keys/megatron.json, per version; it was read from Megatron's own parser. The check reads the file back by
that table, and by Megatron's own parser where that is installed.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, Target, comment, provenance_lines, same_or_error, same_or_error_each
from autoplan.planner.export.pretraining import NEAREST, NOT_CARRIED, adamw_of, causal_fields, data_not_carried
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import pick_table
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext
from autoplan.strategies.config import CHECKPOINT_EVERY, not_carried

Flags = dict[str, str | int | float | bool]
"""By flag; True for one without a value."""

BACKENDS = {"eager": "unfused", "sdpa": "auto", "sdpa_flash": "flash", "sdpa_cudnn": "fused"}
"""By value of attention, what --attention-backend says."""


class MegatronTarget(Target):
    """A shell file to `source`, with the flags as an array of bash."""

    name = "megatron"
    suffix = ".sh"
    carries_loader = False

    def render(self, plan: Plan, stem: str) -> Export:
        table = pick_table("megatron", None)
        given, not_carried = flags(plan)
        text = _text(plan, f"{stem}.sh", table, given, not_carried)
        return Export(files={f"{stem}.sh": text}, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        wanted, _ = flags(plan)
        read = read_flags(text, pick_table("megatron", None)["flags"])
        for flag in {**wanted, **read}:
            same_or_error(flag, read.get(flag), wanted.get(flag))
        if not _has_parser():
            return ("read back by the table of flags, not by Megatron's own parser, which is in its repository alone",)
        found = read_by_tool(
            f"{__name__}:read_back_in_rank", (_words(text),), tool="Megatron's parser", what="the flags"
        )
        same_or_error_each(wanted, found)
        return ()


def flags(plan: Plan) -> tuple[Flags, list[str]]:
    """The flags, and sentences on what they do not say.

    Raises:
        ExportError: Megatron's models or parallelism are not the plan's.
    """
    config = plan.config
    fields = causal_fields(plan, "Megatron")
    training = adamw_of(plan, "Megatron")
    if config.dp_replicate > 1 and config.dp_shard > 1:
        raise ExportError(
            f"replicas of shards (dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard}) are not written for "
            "Megatron, whose sharding is another one",
            hint="The target torchtitan has them. " + NEAREST,
        )
    not_carried = data_not_carried(plan)
    options = training.main_group.options
    given: Flags = {
        "--micro-batch-size": config.micro_batch,
        "--global-batch-size": plan.workload.global_batch,
        "--seq-length": plan.workload.sequence_length or 0,
        "--calculate-per-token-loss": True,
        "--optimizer": "adam",
        "--lr": options["lr"],
        "--min-lr": options["lr"],
        "--lr-decay-style": "constant",
        "--weight-decay": options["weight_decay"],
        "--adam-beta1": options["betas"][0],
        "--adam-beta2": options["betas"][1],
        "--adam-eps": options["eps"],
        "--clip-grad": training.max_grad_norm or 0.0,
        "--seed": training.seed,
    }
    given |= model_flags(fields, plan)
    given |= _parallel(plan, fields, not_carried)
    given |= _checkpointing(plan, fields, not_carried)
    if config.precision in ("bf16", "fp16"):
        given[f"--{config.precision}"] = True
        not_carried.append(
            f"precision={config.precision} as autocast: Megatron keeps the parameters themselves in that format, and "
            "fp32 masters of them in the optimizer; norms and residuals are rounded too"
        )
    if config.attention in BACKENDS:
        given["--attention-backend"] = BACKENDS[config.attention]
    if options["weight_decay"]:
        not_carried.append("weight decay on every parameter: Megatron leaves biases and norms out of it")
    return given, not_carried + _no_flags(plan)


def _parallel(plan: Plan, fields: dict[str, Any], not_carried: list[str]) -> Flags:
    config = plan.config
    given: Flags = {"--tensor-model-parallel-size": config.tp, "--pipeline-model-parallel-size": config.pp}
    if config.tp > 1:
        given["--sequence-parallel"] = True
    if config.pp > 1:
        not_carried.append(
            f"pp_schedule={config.pp_schedule} and pp_microbatches={config.pp_microbatches}: Megatron runs 1F1B "
            "(interleaved with virtual stages) over all micro-batches of a step"
        )
    if config.virtual_stages > 1:
        given["--num-virtual-stages-per-pipeline-rank"] = config.virtual_stages
    if config.dp_shard > 1:
        return given | _sharding(plan, fields, not_carried)
    if config.dp_replicate > 1:
        given["--overlap-grad-reduce"] = True
    return given


def _sharding(plan: Plan, fields: dict[str, Any], not_carried: list[str]) -> Flags:
    """FSDP2 where Megatron takes it; else its optimizer that shards states."""
    config = plan.config
    reasons = {
        "a pipeline": config.pp > 1,
        "an output head that is the embedding": fields.get("tie_word_embeddings"),
        "fp16": config.precision == "fp16",
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if not against:
        given: Flags = {"--use-torch-fsdp2": True, "--no-gradient-accumulation-fusion": True}
        given["--ckpt-format"] = "torch_dist"
        return given | ({} if config.reshard_after_forward else {"--torch-fsdp2-no-reshard-after-forward": True})
    not_carried.append(
        f"dp_shard={config.dp_shard} by FSDP2, which Megatron refuses with {' and '.join(against)}: its distributed "
        "optimizer shards the optimizer's states alone, which takes more memory than was measured"
    )
    return {"--use-distributed-optimizer": True, "--overlap-grad-reduce": True, "--overlap-param-gather": True}


def _checkpointing(plan: Plan, fields: dict[str, Any], not_carried: list[str]) -> Flags:
    value = plan.config.checkpointing
    if value == "none":
        return {}
    if value == "selective":
        not_carried.append("checkpointing=selective by the plan's policy: Megatron's recomputes the core attention")
        return {"--recompute-granularity": "selective"}
    given: Flags = {"--recompute-granularity": "full"}
    if value == "full":
        return given | {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    layers = -(-int(model_flags(fields, plan)["--num-layers"]) // (plan.config.pp * plan.config.virtual_stages))
    not_carried.append(f"checkpointing={value}: Megatron recomputes as many layers, the first ones of each stage")
    return given | {"--recompute-method": "block", "--recompute-num-layers": -(-layers // CHECKPOINT_EVERY[value])}


def _no_flags(plan: Plan) -> list[str]:
    """The knobs that Megatron has nothing for."""
    config = plan.config
    found = not_carried(config, "Megatron", NOT_CARRIED)
    if config.compile != "off":
        found.append(f"compile={config.compile} mode={config.compile_mode}: Megatron has kernels of its own")
    if config.attention not in ("own", *BACKENDS):
        found.append(f"attention={config.attention}: Megatron has no such backend")
    if config.optimizer_step != "own":
        found.append(f"optimizer_step={config.optimizer_step}: Megatron's Adam is a fused one")
    if config.dp_shard > 1:
        found.append(f"gradient_sync={config.gradient_sync}: Megatron decides when gradients are scattered")
    return found


def _text(plan: Plan, file: str, table: dict[str, Any], given: Flags, not_carried: list[str]) -> str:
    config = plan.config
    lines = [
        *provenance_lines(plan),
        f"Written for Megatron-LM {table['written_for']}, flags read from its parser ({table['source']}).",
        f"Start: source {file}; torchrun --nproc-per-node {config.world_size} pretrain_gpt.py "
        '"${MEGATRON_FLAGS[@]}" and your own flags of data, tokenizer, --train-iters and checkpoints.',
        f"Global batch: {plan.workload.global_batch} = {config.micro_batch} x {plan.accumulation} accumulation x "
        f"{config.dp} data-parallel ranks. Loss: the sum over the tokens of the global batch over their number "
        "(--calculate-per-token-loss), as in the plan; without that flag Megatron takes a mean of means.",
        "Left out, Megatron's own defaults would hold: clipping at 1.0, dropout of 0.1, weight decay of 0.01.",
    ]
    exports = []
    if config.tp > 1:
        exports.append("export CUDA_DEVICE_MAX_CONNECTIONS=1  # communication and computation in the order of the host")
    if config.precision == "tf32":
        exports.append("export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1  # precision=tf32")
    words = [f"  {flag}" + ("" if value is True else f" {shlex.quote(str(value))}") for flag, value in given.items()]
    return "\n".join([comment(lines, not_carried), *exports, "MEGATRON_FLAGS=(", *words, ")", ""])


def _words(text: str) -> list[str]:
    """The words of the array."""
    inside = text.partition("\nMEGATRON_FLAGS=(\n")[2].rpartition("\n)")[0]
    return shlex.split(inside)


def read_flags(text: str, table: dict[str, dict[str, Any]]) -> Flags:
    """The flags of a file with their values, by a table of flags.

    Raises:
        ExportError: a flag that is not in the table, or a value that it does not take.
    """
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    words, found = _words(text), Flags()
    while words:
        flag = words.pop(0)
        entry = table.get(flag)
        if entry is None:
            raise ExportError(f"{flag} is no flag of Megatron", hint="Nothing was written. Please report it.")
        if entry["type"] is None:
            found[flag] = True
            continue
        value = words.pop(0) if words else ""
        try:
            found[flag] = kinds[entry["type"]](value)
        except ValueError:
            raise ExportError(f"{flag} takes {entry['type']}, not {value!r}", hint="Please report it.") from None
        if entry["choices"] and found[flag] not in entry["choices"]:
            raise ExportError(f"{flag} takes one of {entry['choices']}, not {value!r}", hint="Please report it.")
    return found


def _has_parser() -> bool:
    """Whether Megatron's training package is installed (the wheel megatron-core has none)."""
    spec = importlib.util.find_spec("megatron")  # a namespace; what is in it is not imported for this
    places = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(place) / "training" / "arguments.py").exists() for place in places)


def read_back_in_rank(context: RankContext, words: list[str]) -> dict[str, Any]:
    """The values that Megatron's own parser reads, by flag, in this process."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    values = vars(parser.parse_args(words))
    found: dict[str, Any] = {}
    for action in parser._actions:
        for flag in action.option_strings:
            value = values.get(action.dest)
            if action.nargs == 0:
                value = value == action.const
            found[flag] = value if isinstance(value, bool | int | float | str) else getattr(value, "name", str(value))
    return found


LLAMA_LIKE: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"--add-qkv-bias": True},
    "qwen3": {"--qk-layernorm": True},
}
"""By type of model, the flags besides those of Llama."""


def model_flags(fields: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The flags of a model.

    Raises:
        ExportError: Megatron's GPT model is another one.
    """
    kind = fields["model_type"]
    if kind == "gpt2":
        return _gpt2(fields)
    if kind in LLAMA_LIKE:
        return _llama(fields, plan) | LLAMA_LIKE[kind]
    raise ExportError(
        f"no flags of Megatron are known for models of type {kind}",
        hint=f"There are some for gpt2, {', '.join(LLAMA_LIKE)}. {NEAREST}",
    )


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "--vocab-size": fields["vocab_size"],
        "--make-vocab-size-divisible-by": 1,
        "--init-method-std": fields["initializer_range"],
    }
    return flags if fields.get("tie_word_embeddings") else flags | {"--untie-embeddings-and-output-weights": True}


def _gpt2(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["activation_function"] != "gelu_new" or fields["attn_pdrop"] is None:
        raise ExportError(
            f"a GPT-2 with the activation {fields['activation_function']} is not written for Megatron", hint=NEAREST
        )
    if fields["embd_pdrop"] != fields["resid_pdrop"]:
        raise ExportError(
            f"the dropout of the embedding is {fields['embd_pdrop']}, that of the residuals {fields['resid_pdrop']}; "
            "Megatron has one rate for both",
            hint=NEAREST,
        )
    return _common(fields) | {
        "--num-layers": fields["n_layer"],
        "--hidden-size": fields["n_embd"],
        "--ffn-hidden-size": fields["n_inner"] or 4 * fields["n_embd"],
        "--num-attention-heads": fields["n_head"],
        "--max-position-embeddings": fields["n_positions"],
        "--position-embedding-type": "learned_absolute",
        "--normalization": "LayerNorm",
        "--norm-epsilon": fields["layer_norm_epsilon"],
        "--openai-gelu": True,
        "--no-bias-gelu-fusion": True,
        "--attention-dropout": fields["attn_pdrop"],
        "--hidden-dropout": fields["resid_pdrop"],
    }


def _llama(fields: dict[str, Any], plan: Plan) -> dict[str, Any]:
    kind = fields["model_type"]
    window = fields.get("sliding_window") if fields.get("use_sliding_window", kind == "mistral") else None
    if window and window < (plan.workload.sequence_length or 0):
        raise ExportError(
            f"the model attends within {window} tokens, and sequences have {plan.workload.sequence_length}",
            hint=NEAREST,
        )
    if fields.get("hidden_act", "silu") != "silu" or fields.get("mlp_bias"):
        raise ExportError("an MLP with biases or another activation than SiLU is not written", hint=NEAREST)
    heads = fields["num_attention_heads"]
    flags = _common(fields) | {
        "--num-layers": fields["num_hidden_layers"],
        "--hidden-size": fields["hidden_size"],
        "--ffn-hidden-size": fields["intermediate_size"],
        "--num-attention-heads": heads,
        "--kv-channels": fields.get("head_dim") or fields["hidden_size"] // heads,
        "--group-query-attention": True,
        "--num-query-groups": fields.get("num_key_value_heads") or heads,
        "--max-position-embeddings": fields["max_position_embeddings"],
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--norm-epsilon": fields["rms_norm_eps"],
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": fields.get("attention_dropout") or 0.0,
        "--hidden-dropout": 0.0,
    }
    if kind != "qwen2" and fields.get("attention_bias"):
        raise ExportError("attention with biases on its output too is not written for Megatron", hint=NEAREST)
    return flags | _rotary(fields)


def _rotary(fields: dict[str, Any]) -> dict[str, Any]:
    """The flags of the rotary embedding."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    base = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    flags: dict[str, Any] = {"--rotary-base": int(base)}
    if kind == "default":
        return flags
    if kind == "llama3" and (rope["low_freq_factor"], rope["high_freq_factor"]) == (1.0, 4.0):
        return flags | {"--use-rope-scaling": True, "--rope-scaling-factor": float(rope["factor"])}
    raise ExportError(f"a rotary embedding of type {kind} is not written for Megatron", hint=NEAREST)

"""The flags of Megatron-LM that say a model: those of GPT-2 and of the Llama family.

In: a configuration of transformers. Out: flags. What Megatron's GPT model is not is refused: other types, scaled rotary
embeddings but Llama 3's, windows of attention.
"""

from __future__ import annotations

from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.pretraining.shared import NEAREST, is_tied
from autoplan.planner.plan.plan import Plan

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
    return flags if is_tied(fields) else flags | {"--untie-embeddings-and-output-weights": True}


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
    if kind not in ("qwen2",) and fields.get("attention_bias"):
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

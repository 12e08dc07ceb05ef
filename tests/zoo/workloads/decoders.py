"""Causal language models of transformers, from configurations with random weights; the loss is the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
    StableLmConfig,
)
from zoo_data import VOCABULARY, padded, tokens

import autoplan

LENGTH = 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Full sequences, as a packed corpus gives them."""
    ids = tokens(num_samples, LENGTH, index)
    return {"input_ids": ids, "labels": ids.clone()}


def documents(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Padded documents; padding is masked in the labels."""
    ids, mask = padded(num_samples, LENGTH, index)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """The mean that the model gives, times the labels behind it."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return autoplan.LossSum(model(**batch).loss * count, count)


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Cross-entropy of the logits, summed."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    return autoplan.LossSum(total, (labels != -100).sum())


def pretraining(
    name: str,
    config: Any,
    *,
    build: Callable[[Any], nn.Module] = AutoModelForCausalLM.from_config,
    make_batch: Callable[[int, int], dict[str, torch.Tensor]] = text,
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], autoplan.LossSum] = own_loss,
    learning_rate: float = 1e-3,
    **more: Any,
) -> autoplan.Workload:
    """The usual pre-training: AdamW, clipping at 1."""
    return autoplan.Workload(
        name=name,
        build_model=lambda: build(config),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.1),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
        **more,
    )


def gpt2() -> autoplan.Workload:
    """Dropout, learned positions, Conv1D, tied head."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64)
    return pretraining("gpt2", config, build=GPT2LMHeadModel)


def llama() -> autoplan.Workload:
    """Grouped queries."""
    return pretraining("llama", LlamaConfig(**SIZES, num_key_value_heads=2), build=LlamaForCausalLM)


def mistral() -> autoplan.Workload:
    """A sliding window shorter than the sequence."""
    return pretraining("mistral", MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16))


def qwen3() -> autoplan.Workload:
    """Norms of queries and keys; tied head; its own count."""
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    return pretraining("qwen3", config, count=lambda batch: int((batch["labels"][:, 1:] != -100).sum()))


def gemma2() -> autoplan.Workload:
    """Capped logits, window and full attention in turn."""
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=16, query_pre_attn_scalar=16)
    return pretraining("gemma2", config)


def gemma3() -> autoplan.Workload:
    """Five window layers to one full layer, padded documents."""
    sizes = SIZES | {"num_hidden_layers": 6}
    config = Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=16, sliding_window=16)
    return pretraining("gemma3", config, make_batch=documents)


def phi3() -> autoplan.Workload:
    """Queries, keys and values in one projection; gate and up in one."""
    return pretraining("phi3", Phi3Config(**SIZES, num_key_value_heads=2), loss=next_token_loss)


def falcon() -> autoplan.Workload:
    """One key and value for all heads, attention and MLP in parallel."""
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return pretraining("falcon", config)


def bloom() -> autoplan.Workload:
    """ALiBi."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=4, n_head=4)
    return pretraining("bloom", config, make_batch=documents)


def opt() -> autoplan.Workload:
    """Dropout and layerdrop."""
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        word_embed_proj_dim=32,
        ffn_dim=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        layerdrop=0.1,
    )
    return pretraining("opt", config)


def gpt_neox() -> autoplan.Workload:
    """Parallel residual, rotary positions on a quarter of each head."""
    return pretraining("gpt-neox", GPTNeoXConfig(**SIZES), loss=next_token_loss, make_batch=documents)


def gptj() -> autoplan.Workload:
    """Rotary positions, parallel residual, a head with a bias."""
    config = GPTJConfig(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64, rotary_dim=8)
    return pretraining("gptj", config)


def stablelm() -> autoplan.Workload:
    """LayerNorm with rotary positions on part of each head."""
    return pretraining("stablelm", StableLmConfig(**SIZES, num_key_value_heads=4))


def olmo2() -> autoplan.Workload:
    """Norms after attention and MLP."""
    return pretraining("olmo2", Olmo2Config(**SIZES))


def cohere() -> autoplan.Workload:
    """Scaled logits, tied head."""
    return pretraining("cohere", CohereConfig(**SIZES, logit_scale=0.25))

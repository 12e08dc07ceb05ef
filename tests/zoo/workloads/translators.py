"""Encoder-decoders of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from zoo_data import VOCABULARY, padded, tokens, waves

import autoplan

SOURCE, TARGET = 40, 24


def pairs(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Padded sources and padded targets of other lengths."""
    source, source_mask = padded(num_samples, SOURCE, index)
    target, target_mask = padded(num_samples, TARGET, index + 50)
    return {"input_ids": source, "attention_mask": source_mask, "labels": target.masked_fill(target_mask == 0, -100)}


def mean_times_labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """The model's mean loss times the labels it counted."""
    count = (batch["labels"] != -100).sum()
    return autoplan.LossSum(model(**batch).loss * count, count)


def translation(name: str, build_model: Any, loss: Any = mean_times_labels) -> autoplan.Workload:
    """AdamW with a linear warm-up."""
    return autoplan.Workload(
        name=name,
        build_model=build_model,
        make_batch=pairs,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        build_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4),
        global_batch=8,
        sequence_length=SOURCE,
        max_grad_norm=1.0,
    )


def t5() -> autoplan.Workload:
    """Relative positions; the decoder has a copy of the configuration."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    return translation("t5", lambda: T5ForConditionalGeneration(config))


BART_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def bart() -> autoplan.Workload:
    """Dropout, learned positions."""
    return translation("bart", lambda: BartForConditionalGeneration(BartConfig(**BART_SIZES)))


def mbart() -> autoplan.Workload:
    """Layerdrop in the encoder and the decoder."""
    config = MBartConfig(**BART_SIZES, encoder_layerdrop=0.2, decoder_layerdrop=0.2)
    return translation("mbart", lambda: MBartForConditionalGeneration(config))


def _smoothed(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(**batch).logits
    total = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )
    return autoplan.LossSum(total, (batch["labels"] != -100).sum())


def pegasus() -> autoplan.Workload:
    """Label smoothing."""
    return translation("pegasus", lambda: PegasusForConditionalGeneration(PegasusConfig(**BART_SIZES)), _smoothed)


def _speech(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    sound, _ = waves(num_samples, 64 * 16, index)
    return {"input_features": sound.view(num_samples, 16, 64), "labels": tokens(num_samples, 12, index)}


def whisper() -> autoplan.Workload:
    """Frames of sound to text."""
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return autoplan.Workload(
        name="whisper",
        build_model=lambda: WhisperForConditionalGeneration(config),
        make_batch=_speech,
        loss=mean_times_labels,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )

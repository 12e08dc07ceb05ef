"""Audio models of transformers: characters from sound (CTC), and classes of sound."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    HubertConfig,
    HubertForCTC,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from zoo_data import tokens, waves

import autoplan

SAMPLES = 1600
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "ctc_loss_reduction": "sum",
    "ctc_zero_infinity": True,
}


def _speech(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    sound, _ = waves(num_samples, SAMPLES, index)
    letters = tokens(num_samples, 6, index, vocabulary=16)
    letters[::2, -2:] = -100  # transcripts are not equally long
    return {"input_values": sound, "labels": letters}


def _ctc_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """The model sums it (ctc_loss_reduction="sum"); it counts for each sample."""
    return autoplan.LossSum(model(**batch).loss, len(batch["input_values"]))


def _recognition(name: str, build_model: Any) -> autoplan.Workload:
    return autoplan.Workload(
        name=name,
        build_model=build_model,
        make_batch=_speech,
        loss=_ctc_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-4),
        build_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5)),
        global_batch=8,
        max_grad_norm=1.0,
    )


def wav2vec2() -> autoplan.Workload:
    """CTC with layerdrop, and stretches of the input masked at random (drawn with NumPy)."""
    config = Wav2Vec2Config(**SIZES, mask_time_prob=0.1, mask_time_length=4)
    return _recognition("wav2vec2", lambda: Wav2Vec2ForCTC(config))


def _frozen_hubert() -> nn.Module:
    model = HubertForCTC(HubertConfig(**SIZES, apply_spec_augment=False))
    model.freeze_feature_encoder()
    return model


def hubert() -> autoplan.Workload:
    """CTC with layerdrop over a frozen feature encoder."""
    return _recognition("hubert", _frozen_hubert)


def _spectrogram(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    sound, label = waves(num_samples, 64 * 16, index)
    return {"input_values": sound.view(num_samples, 64, 16), "labels": label}


def _class_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(input_values=batch["input_values"]).logits
    return autoplan.LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))


def ast() -> autoplan.Workload:
    """A transformer over spectrograms."""
    config = ASTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=64,
        num_mel_bins=16,
        num_labels=8,
    )
    return autoplan.Workload(
        name="ast",
        build_model=lambda: ASTForAudioClassification(config),
        make_batch=_spectrogram,
        loss=_class_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=8,
    )

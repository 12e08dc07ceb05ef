"""Encoders of transformers: masked tokens, classification, tagging, question answering."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    ElectraConfig,
    ElectraForTokenClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from zoo_data import VOCABULARY, lengths, padded

import autoplan

LENGTH = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MASK = 1


def masked_text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Padded text with 15 % of the tokens masked; the number of labels differs between samples."""
    ids, mask = padded(num_samples, LENGTH, index)
    chosen = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(index)) < 0.15) & (mask == 1)
    chosen[:, 0] = True
    return {
        "input_ids": ids.masked_fill(chosen, MASK),
        "attention_mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
    }


def classified_text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Padded text; the class is whether the first token is a common one."""
    ids, mask = padded(num_samples, LENGTH, index)
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids[:, 0] > 20).long()}


def mean_times_labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """The model's mean loss times the labels it counted."""
    count = (batch["labels"] != -100).sum()
    return autoplan.LossSum(model(**batch).loss * count, count)


def fine_tuning(name: str, build_model: Any, make_batch: Any, loss: Any = mean_times_labels) -> autoplan.Workload:
    """AdamW at a small weight decay."""
    return autoplan.Workload(
        name=name,
        build_model=build_model,
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.01),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


def bert() -> autoplan.Workload:
    """Masked tokens, uneven counts."""
    return fine_tuning("bert", lambda: BertForMaskedLM(BertConfig(**SIZES)), masked_text)


def roberta() -> autoplan.Workload:
    """Two classes from the first token."""
    config = RobertaConfig(**SIZES, num_labels=2, pad_token_id=0)
    return fine_tuning("roberta", lambda: RobertaForSequenceClassification(config), classified_text)


def deberta() -> autoplan.Workload:
    """Disentangled attention with relative positions."""
    config = DebertaV2Config(
        **SIZES,
        num_labels=2,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        type_vocab_size=0,
    )
    return fine_tuning("deberta-v2", lambda: DebertaV2ForSequenceClassification(config), classified_text)


def _tagged_text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(num_samples, LENGTH, index)
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids % 5).masked_fill(mask == 0, -100)}


def electra() -> autoplan.Workload:
    """A tag for each token."""
    config = ElectraConfig(**SIZES, embedding_size=32, num_labels=5)
    return fine_tuning("electra", lambda: ElectraForTokenClassification(config), _tagged_text)


def modernbert() -> autoplan.Workload:
    """Local and global attention in turn, rotary positions."""
    config = ModernBertConfig(
        **SIZES, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return fine_tuning("modernbert", lambda: ModernBertForMaskedLM(config), masked_text)


def _questions(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(num_samples, LENGTH, index)
    start = lengths(num_samples, 8, index) - 1
    return {"input_ids": ids, "attention_mask": mask, "start_positions": start, "end_positions": start + 2}


def _span_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    total = F.cross_entropy(output.start_logits, batch["start_positions"], reduction="sum")
    total = total + F.cross_entropy(output.end_logits, batch["end_positions"], reduction="sum")
    return autoplan.LossSum(total / 2, len(batch["input_ids"]))


def distilbert() -> autoplan.Workload:
    """Two positions for each sample."""
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=64, hidden_dim=128, n_layers=4, n_heads=4, max_position_embeddings=64
    )
    return fine_tuning("distilbert", lambda: DistilBertForQuestionAnswering(config), _questions, _span_loss)


def albert() -> autoplan.Workload:
    """One layer that is called for every depth."""
    config = AlbertConfig(**SIZES, embedding_size=32)
    return fine_tuning("albert", lambda: AlbertForMaskedLM(config), masked_text)

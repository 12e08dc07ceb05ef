"""State space models and other recurrences of transformers, and recurrent networks in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from decoders import own_loss
from torch import nn
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from zoo_data import VOCABULARY, tokens

import autoplan

LENGTH = 24


def _text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids = tokens(num_samples, LENGTH, index)
    return {"input_ids": ids, "labels": ids.clone()}


def _short_text(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids = tokens(num_samples, 16, index)
    return {"input_ids": ids, "labels": ids.clone()}


def mamba() -> autoplan.Workload:
    """A scan over the sequence in Python."""
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2)
    return autoplan.Workload(
        name="mamba",
        build_model=lambda: MambaForCausalLM(config),
        make_batch=_text,
        loss=own_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


def mamba2() -> autoplan.Workload:
    """A scan in chunks."""
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=16,
        expand=2,
        n_groups=1,
        chunk_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return autoplan.Workload(
        name="mamba2",
        build_model=lambda: Mamba2ForCausalLM(config),
        make_batch=_text,
        loss=own_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


def _rwkv_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return autoplan.LossSum(total, labels.numel())


def rwkv() -> autoplan.Workload:
    """Time mixing step by step."""
    config = RwkvConfig(vocab_size=VOCABULARY, context_length=16, hidden_size=32, num_hidden_layers=2)
    return autoplan.Workload(
        name="rwkv",
        build_model=lambda: RwkvForCausalLM(config),
        make_batch=_short_text,
        loss=_rwkv_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=4,
        sequence_length=16,
    )


class LSTMModel(nn.Module):
    """Embeddings, an LSTM of two layers with dropout between, a head tied to the embeddings."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def _lstm_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return autoplan.LossSum(total, labels.numel())


def lstm() -> autoplan.Workload:
    """A recurrent language model; SGD with clipping, as they were trained."""
    return autoplan.Workload(
        name="lstm",
        build_model=LSTMModel,
        make_batch=_text,
        loss=_lstm_loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=0.25,
    )


class Reader(nn.Module):
    """A GRU over padded sentences, packed so that padding costs nothing."""

    def __init__(self, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, state = self.gru(packed)
        return self.head(torch.cat([state[0], state[1]], -1))


def _sentences(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    long = torch.randint(4, LENGTH + 1, (num_samples,), generator=generator)
    ids = tokens(num_samples, LENGTH, index) * (torch.arange(LENGTH)[None] < long[:, None])
    return {"ids": ids, "lengths": long, "labels": (ids[:, 0] > 20).long()}


def _reader_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["ids"], batch["lengths"])
    return autoplan.LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))


def gru() -> autoplan.Workload:
    """Packed sequences: their lengths are read on the CPU."""
    return autoplan.Workload(
        name="gru",
        build_model=Reader,
        make_batch=_sentences,
        loss=_reader_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        global_batch=8,
    )

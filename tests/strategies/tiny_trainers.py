"""Trainers of transformers as people have them, tiny: a T5 with padded pairs, a ViT, Llamas with many losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

ARGUMENTS: dict[str, Any] = {
    "output_dir": "trainer-output",
    "use_cpu": True,
    "report_to": [],
    "max_steps": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to the longest sample of the micro-batch."""

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "labels": padded([sample["labels"] for sample in samples], -100),
    }


def _rows(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]


def t5_trainer(folder: Path, *, micro_batch: int = 8, accumulation: int = 1, **changes: Any) -> Seq2SeqTrainer:
    """A T5, whose loss is a mean over labels that divides by no num_items_in_batch."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    pairs = zip(_rows(64, 4, 20, 0), _rows(64, 2, 12, 1), strict=True)
    return Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            **ARGUMENTS
            | {"output_dir": str(folder)}
            | {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
            | changes
        ),
        train_dataset=[{"input_ids": question, "labels": answer} for question, answer in pairs],
        data_collator=pad,
    )


def vit_trainer(folder: Path, **changes: Any) -> Trainer:
    """A ViT, whose dataset has a column that the model does not take."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    generator = torch.Generator().manual_seed(0)
    return Trainer(
        model=ViTForImageClassification(config),
        args=arguments(folder, **changes),
        train_dataset=[
            {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": number % 5, "path": "x.png"}
            for number in range(64)
        ],
    )


def llama_trainer(folder: Path, kind: type[Trainer] = Trainer, samples: int = 64, **changes: Any) -> Any:
    """A Llama on padded sequences whose first two labels do not count."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    parts = {name: changes.pop(name) for name in ("compute_loss_func", "optimizers", "callbacks") if name in changes}
    rows = _rows(samples, 4, 20, 2)
    return kind(
        model=LlamaForCausalLM(config),
        args=arguments(folder, **changes),
        train_dataset=[{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows],
        data_collator=pad,
        **parts,
    )


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Four samples twice a step, clipped, with a warm-up and weight decay."""
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return TrainingArguments(**ARGUMENTS | {"output_dir": str(folder)} | batch | changes)


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A compute_loss_func that divides by the items of the whole step."""
    logits = outputs["logits"][:, :-1].float()
    flat = logits.reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


class OwnLoss(Trainer):
    """A Trainer whose loss reads an attribute of its own."""

    share = 0.5

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed_loss(outputs, labels, num_items_in_batch) * self.share
        return (loss, outputs) if return_outputs else loss


class MeanOfEach(Trainer):
    """A Trainer whose loss is a mean that it does not divide, as many on the internet are."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

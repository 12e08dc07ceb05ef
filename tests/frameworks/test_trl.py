"""TRL's Trainers are taken over: real steps of their own loops against a TrainingRun's. Skipped without trl."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("trl", "peft", "datasets"):
    pytest.importorskip(package, reason=f"{package} is not installed: python -m tests.exports.environments trl")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

import autoplan  # noqa: E402
from autoplan.frameworks.transformers.rebuild import build_anew  # noqa: E402
from autoplan.strategies.workloads.batch import batch_size, slice_batch  # noqa: E402
from autoplan.strategies.workloads.sources import spec_from_objects  # noqa: E402
from tests.frameworks.test_transformers_apply import apply, plan_for, trained  # noqa: E402
from tests.frameworks.test_transformers_read import FP32, differences  # noqa: E402
from tests.strategies.tiny_trainers import ARGUMENTS  # noqa: E402

BATCH: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
PLAIN: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(61)} | {"<pad>": 61, "<eos>": 62, "<unk>": 63}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(low: int, high: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high, (64,), generator=generator).tolist()
    return [" ".join(f"w{int(i)}" for i in torch.randint(0, 61, (size,), generator=generator)) for size in sizes]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=61,
            eos_token_id=62,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def sft(folder: Path, *, adapters: bool = True, **changes: Any) -> SFTTrainer:
    rows = [{"prompt": a, "completion": " " + b} for a, b in zip(texts(2, 6, 0), texts(3, 20, 1), strict=True)]
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(**ARGUMENTS | {"output_dir": str(folder)} | BATCH | PLAIN | changes),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )


def dpo(folder: Path, *, adapters: bool = True, **changes: Any) -> DPOTrainer:
    columns = zip(texts(2, 6, 0), texts(3, 12, 1), texts(3, 12, 2), strict=True)
    rows = [{"prompt": p, "chosen": " " + a, "rejected": " " + b} for p, a, b in columns]
    model = llama()
    return DPOTrainer(
        model=model,
        ref_model=None if adapters else copy.deepcopy(model),
        args=DPOConfig(**ARGUMENTS | {"output_dir": str(folder)} | BATCH | PLAIN | changes),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )


STRANGERS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "sft with adapters, padded": (sft, 2),
    "sft, label smoothing": (lambda folder: sft(folder, adapters=False, label_smoothing_factor=0.1), 8),
    "sft, packed": (lambda folder: sft(folder, adapters=False, packing=True, max_length=32), 2),
    "dpo with adapters": (dpo, 2),
    "dpo with a reference model": (lambda folder: dpo(folder, adapters=False), 8),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_steps_are_those_of_the_trainers_own_loop(name: str, tmp_path: Path) -> None:
    make, micro_batch = STRANGERS[name]
    found = differences(make(tmp_path), micro_batch)
    assert max(found.values()) < FP32, found


@pytest.mark.parametrize("make", [sft, dpo], ids=["sft", "dpo"])
def test_the_new_trainer_trains_the_same(make: Callable[[Path], Any], tmp_path: Path) -> None:
    as_it_was = trained(make(tmp_path))
    trainer = make(tmp_path)
    made, _ = apply(plan_for(trainer), trainer)
    assert type(made) is type(trainer) and made.train_dataset is trainer.train_dataset
    assert (made.args.per_device_train_batch_size, made.args.gradient_accumulation_steps) == (2, 4)
    pairs = zip(as_it_was, trained(made), strict=True)
    assert max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) for a, b in pairs) < 5e-5


@pytest.mark.parametrize("make", [sft, dpo], ids=["sft", "dpo"])
def test_the_same_trainer_is_the_same_search(make: Callable[[Path], Any], tmp_path: Path) -> None:
    specs = [spec_from_objects(autoplan.from_trainer(make(tmp_path / name))) for name in ("a", "b")]
    assert specs[0].digests == specs[1].digests
    assert specs[0].identity == specs[1].identity


def test_pairs_stay_together(tmp_path: Path) -> None:
    workload = autoplan.from_trainer(dpo(tmp_path))
    whole = workload.make_batch(4, 0)
    part = slice_batch(whole, 1, 3)
    assert batch_size(whole) == 4 and whole["input_ids"].shape[0] == 8, "two rows of a pair"
    assert batch_size(part) == 2 and part["input_ids"].shape[0] == 4


def test_what_is_prepared_is_not_prepared_again(tmp_path: Path) -> None:
    trainer = sft(tmp_path, adapters=False, packing=True, max_length=32)
    made = build_anew(trainer, trainer.args)
    assert made.train_dataset is trainer.train_dataset and made.aux_loss_enabled == trainer.aux_loss_enabled

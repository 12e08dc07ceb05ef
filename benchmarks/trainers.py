"""The speed-up that a plan gives a Trainer as it stands: its own loop before and after `plan.apply_to`, side by side.

    python -m benchmarks.trainers [--only NAME] [--budget 60s] [--rounds 5] [--out FILE]

Four Trainers as people write them: a T5 on padded pairs (Seq2SeqTrainer), a ViT (Trainer), a Llama with LoRA on padded
prompts (TRL's SFTTrainer), and a DPO with LoRA (DPOTrainer); the last two need trl, peft and datasets. Each is
searched, the plan is applied, and then the Trainer as it was and the new one train some steps with their own loops, in
turn, each in a process of its own. The speed-up is the median over the rounds of the ratio of the two median step
times. Weights are random; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autoplan
from autoplan.frameworks.transformers.speed import run_own_loop

ARGUMENTS: dict[str, Any] = {
    "use_cpu": not torch.cuda.is_available(),
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 200,
    "warmup_steps": 10,
    "weight_decay": 0.01,
}


def lengths(count: int, low: int, high: int, seed: int) -> list[int]:
    """Lengths of samples, most of them short."""
    generator = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(count, generator=generator).pow(2)).long().tolist()


def tokens(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    """Random samples of many lengths."""
    generator = torch.Generator().manual_seed(seed + 1)
    sizes = lengths(count, low, high, seed)
    return [torch.randint(3, 2000, (size,), generator=generator).tolist() for size in sizes]


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


def t5(folder: str) -> Any:
    """Translation or summaries: long questions, short answers, padded."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=2000, d_model=256, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0)
    pairs = zip(tokens(512, 16, 192, 0), tokens(512, 8, 64, 1), strict=True)
    return Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(output_dir=folder, **ARGUMENTS, per_device_train_batch_size=16),
        train_dataset=[{"input_ids": question, "labels": answer} for question, answer in pairs],
        data_collator=pad,
    )


def vit(folder: str) -> Any:
    """Images of one size, in small micro-batches."""
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=96,
        patch_size=16,
        num_labels=10,
    )
    return Trainer(
        model=ViTForImageClassification(config),
        args=TrainingArguments(
            output_dir=folder, **ARGUMENTS, per_device_train_batch_size=8, gradient_accumulation_steps=4
        ),
        train_dataset=[{"pixel_values": torch.randn(3, 96, 96), "labels": number % 10} for number in range(512)],
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(1997)} | {"<pad>": 1997, "<eos>": 1998, "<unk>": 1999}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            pad_token_id=1997,
            eos_token_id=1998,
            bos_token_id=None,
        )
    )


def _texts(count: int, low: int, high: int, seed: int) -> list[str]:
    return [" ".join(f"w{token % 1997}" for token in row) for row in tokens(count, low, high, seed)]


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"])


def sft_lora(folder: str) -> Any:
    """Prompts and completions, with adapters, and checkpointing as TRL has it by default."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prompts, answers = _texts(512, 8, 64, 0), _texts(512, 8, 160, 1)
    rows = [{"prompt": a, "completion": " " + b} for a, b in zip(prompts, answers, strict=True)]
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    return SFTTrainer(
        model=_llama(),
        args=SFTConfig(output_dir=folder, **ARGUMENTS, **batch, bf16=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=_lora(),
    )


def dpo_lora(folder: str) -> Any:
    """Preference pairs, with adapters: the model without them is the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    columns = (_texts(256, 8, 48, 0), _texts(256, 8, 96, 1), _texts(256, 8, 96, 2))
    rows = [{"prompt": p, "chosen": " " + a, "rejected": " " + b} for p, a, b in zip(*columns, strict=True)]
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return DPOTrainer(
        model=_llama(),
        args=DPOConfig(output_dir=folder, **ARGUMENTS, **batch, bf16=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=_lora(),
    )


TRAINERS: dict[str, Callable[[str], Any]] = {"t5": t5, "vit": vit, "sft_lora": sft_lora, "dpo_lora": dpo_lora}


def measure(name: str, *, budget: str, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Searches one Trainer, applies the plan, and times both Trainers in turn."""
    make = TRAINERS[name]
    plan = autoplan.search(make(str(folder)), budget=budget, store=folder / "store", out=folder / f"{name}.json")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        applied = plan.apply_to(make(str(folder)))
    as_it_was = make(str(folder))
    pairs = []
    for number in range(rounds):
        in_turn = [as_it_was, applied] if number % 2 == 0 else [applied, as_it_was]
        loops = {id(trainer): run_own_loop(trainer, steps=steps) for trainer in in_turn}
        before, after = loops[id(as_it_was)], loops[id(applied)]
        if before.reason or after.reason:
            raise SystemExit(f"{name}: a loop did not run: {before.reason or after.reason}")
        pairs.append((before.median_s, after.median_s))
        print(f"{name} round {number}: {before.median_s:.4g} s -> {after.median_s:.4g} s", flush=True)
    ratios = sorted(before / after for before, after in pairs)
    return {
        "trainer": type(as_it_was).__name__,
        "model": type(as_it_was.model).__name__,
        "global_batch": plan.workload.global_batch,
        "as_it_was": f"{as_it_was.args.per_device_train_batch_size} x {as_it_was.args.gradient_accumulation_steps}",
        "plan": f"{plan.config.describe()}; accumulation {plan.accumulation}",
        "plan_over_plain_fp32": [plan.speedup.low, plan.speedup.median, plan.speedup.high],
        "plan_step_s": plan.measurement.step_time_s.median,
        "step_s_pairs": pairs,
        "speedup_of_the_trainer": [ratios[0], statistics.median(ratios), ratios[-1]],
        "own_loop_over_measured": plan.measurement.step_time_s.median / statistics.median(after for _, after in pairs),
        "said": [str(item.message) for item in said],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TRAINERS), action="append")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trainers.json")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="autoplan-trainers-") as folder:
        for name in options.only or list(TRAINERS):
            results[name] = measure(
                name, budget=options.budget, rounds=options.rounds, steps=options.steps, folder=Path(folder)
            )
            low, median, high = results[name]["speedup_of_the_trainer"]
            print(f"{name}: {median:.2f} x ({low:.2f} to {high:.2f})")
            options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

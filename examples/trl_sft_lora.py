"""TRL's SFTTrainer with LoRA: searched as it stands, made anew with the plan, trained.

    pip install trl peft
    python examples/trl_sft_lora.py          # searches for 10 minutes, then trains the adapter

Nothing is downloaded: a small Llama with random weights, a tokenizer of bytes, and questions that are made here. Their
lengths differ, so batches are padded; the plan's memory is that of the longest batch.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import autoplan


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token."""
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_dataset(samples: int) -> Dataset:
    """Sums, in words of different lengths."""
    numbers = torch.randint(0, 10_000, (samples, 4), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [row[: 2 + index % 3] for index, row in enumerate(numbers)]
    prompts = [f"What is {' plus '.join(map(str, row))}? " for row in rows]
    answers = [f"It is {sum(row)}." for row in rows]
    return Dataset.from_dict({"prompt": prompts, "completion": answers})


def make_trainer(width: int = 128, steps: int = 50, output: str = "sft") -> SFTTrainer:
    """An SFTTrainer over an adapter of rank 8, with a global batch of 8 x 2 = 16."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **special, use_cache=False))
    arguments = SFTConfig(
        output_dir=output,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_length=128,
        max_steps=steps,
        logging_steps=10,
        bf16=False,  # TRL's default needs a GPU; precision and checkpointing are the plan's to decide
        save_strategy="no",
        report_to="none",
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=make_dataset(512),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def main() -> None:
    """The whole way: from a Trainer to a trained adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--budget", default="10m")
    options = parser.parse_args()

    trainer = make_trainer(options.width, options.steps)
    plan = autoplan.current_plan() or autoplan.search(trainer, budget=options.budget, out="plan.json")
    print(f"plan: {plan.config.describe()}, {plan.speedup.median:.2f} times the baseline")

    trainer = plan.apply_to(trainer)
    autoplan.TransformersWatch(plan).add_to(trainer)
    result = trainer.train()
    trainer.save_model("adapter")
    print(f"trained: {result.global_step} steps, loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()

"""About a hundred correct ways to run small workloads: none of them may fail the parity check.

python -m tests.planner.parity.variants        # prints the largest difference of each comparison, by precision
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import Workload
from tests.strategies.tiny import BERT, GPT2, LLAMA, T5, classifier, language

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LANGUAGE_KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer_step": "foreach"},
    {"optimizer_step": "fused"},
    {"checkpointing": "full"},
    {"checkpointing": "selective", "optimizer_step": "for_loop"},
    {"precision": "bf16"},
    {"precision": "bf16", "checkpointing": "full", "optimizer_step": "fused"},
    {"precision": "bf16", "checkpointing": "selective"},
    {"precision": "fp16"},
    {"precision": "fp16", "checkpointing": "full", "optimizer_step": "fused"},
)
CAUSAL_KNOBS: tuple[dict[str, Any], ...] = (
    {"loss": "fused"},
    {"loss": "fused", "precision": "bf16", "checkpointing": "selective", "optimizer_step": "fused"},
    {"loss": "fused", "precision": "fp16", "checkpointing": "every_2"},
    {"attention": "eager"},
    {"attention": "sdpa", "precision": "bf16"},
    {"attention": "eager", "precision": "bf16", "loss": "fused"},
)
COMPILED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {"compile": "block"}),
    ("gpt2", {"compile": "block", "precision": "bf16", "checkpointing": "selective", "loss": "fused"}),
    ("gpt2", {"compile": "model", "precision": "bf16"}),
    ("llama", {"compile": "block", "precision": "bf16", "optimizer_step": "fused"}),
    ("llama", {"compile": "model", "loss": "fused", "checkpointing": "full"}),
    ("classifier", {"compile": "block", "precision": "bf16"}),
)
MODELS: dict[str, Callable[[int], Workload]] = {
    "gpt2": lambda seed: language(GPT2, seed=seed, max_grad_norm=1.0, weight_decay=0.1),
    "llama": lambda seed: language(LLAMA, seed=seed, max_grad_norm=1.0, weight_decay=0.1),
    "t5": lambda seed: language(T5, seed=seed),
    "bert": lambda seed: language(BERT, seed=seed, weight_decay=0.01),
    "moe": lambda seed: language(MIXTRAL, seed=seed),
    "classifier": lambda seed: classifier(seed=seed),
    "long": lambda seed: language({**LLAMA, "max_position_embeddings": 256}, length=192, seed=seed),
    "bf16_model": lambda seed: in_bf16(language(LLAMA, seed=seed, max_grad_norm=1.0, learning_rate=1e-3)),
    "batch_norm": lambda seed: classifier(norm=True, fixed_micro_batch=4, seed=seed),
}
SEEDS = 3


def in_bf16(workload: Workload) -> Workload:
    """The workload with parameters that are stored in bf16."""
    build = workload.build_model
    workload.build_model = lambda: build().to(torch.bfloat16)
    return workload


def variants(*, compiled: bool = True) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(workload, seed, knobs) of each variant."""
    for name in ("gpt2", "llama", "t5", "bert"):
        for number, knobs in enumerate(LANGUAGE_KNOBS):
            yield name, number % SEEDS, knobs
    for name in ("gpt2", "llama", "moe"):
        for number, knobs in enumerate(CAUSAL_KNOBS):
            yield name, number % SEEDS, knobs
    for name in ("classifier", "batch_norm"):
        for number, knobs in enumerate(LANGUAGE_KNOBS):
            yield name, number % SEEDS, knobs
    for name in ("moe", "long", "bf16_model"):
        for number, knobs in enumerate(knobs for knobs in LANGUAGE_KNOBS if name != "bf16_model" or is_full(knobs)):
            yield name, number % SEEDS, knobs
    if compiled:
        yield from ((name, 0, knobs) for name, knobs in COMPILED)


def is_full(knobs: dict[str, Any]) -> bool:
    """Whether parameters keep their own dtype in the forward."""
    return knobs.get("precision", "fp32") != "fp16"


def micro_batch_of(name: str) -> int:
    return 4 if name == "batch_norm" else 2


def main() -> None:
    from tests.contracts.parity_contract import check_parity

    torch.set_num_threads(1)
    worst: dict[tuple[str, str], tuple[float, float, str]] = {}
    alarms = total = 0
    import sys

    for name, seed, knobs in variants(compiled="--compiled" in sys.argv):
        config = TrainingConfig.model_validate({"micro_batch": micro_batch_of(name)} | knobs)
        parity = check_parity(MODELS[name](seed), config)
        total += 1
        if not parity.passed:
            alarms += 1
            print("ALARM", name, seed, knobs, parity.failures, flush=True)
        kind = "bf16 model" if name == "bf16_model" else config.precision
        for check in parity.checks:
            key = (check.name.replace("own length", "step 1"), kind)
            if check.difference >= worst.get(key, (-1.0, 0.0, ""))[0]:
                worst[key] = (check.difference, check.allowed, f"{name} {check.where} {knobs}")
    for (check_name, kind), (difference, allowed, where) in sorted(worst.items()):
        print(f"{check_name:45} {kind:10} {difference:9.2e} / {allowed:.1e}  {where}")
    print(f"{alarms} alarm(s) in {total} variants")


if __name__ == "__main__":
    main()

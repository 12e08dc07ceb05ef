"""A hundred correct ways to run small workloads in fp32, and in bf16: none of them may fail the parity check.

python -m tests.planner.parity.variants        # prints the largest difference of each comparison, by precision
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan.planner.parity.compare import compare
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import Workload
from tests.contracts.parity_contract import candidate, reference
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
CHECKPOINTING = ("none", "full", "selective")
STEPS = ("own", "for_loop", "foreach", "fused")
CAUSAL = ("gpt2", "llama", "moe", "long")
FP16: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (name, knobs)
    for name in ("gpt2", "llama", "t5", "bert", "moe", "classifier", "batch_norm")
    for knobs in ({}, {"checkpointing": "full", "optimizer_step": "fused"})
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
    """(workload, seed, knobs) of each variant: 12 of each workload in fp32 and in bf16, some in fp16 or compiled."""
    for precision in ("fp32", "bf16"):
        for name in MODELS:
            for number, (checkpointing, step) in enumerate(itertools.product(CHECKPOINTING, STEPS)):
                knobs = {"precision": precision, "checkpointing": checkpointing, "optimizer_step": step}
                if name in CAUSAL:
                    knobs |= {"loss": ("full", "fused")[number % 2], "attention": ("own", "eager", "sdpa")[number % 3]}
                yield name, number % SEEDS, knobs
    yield from ((name, 0, {"precision": "fp16", **knobs}) for name, knobs in FP16)
    if compiled:
        yield from ((name, 0, knobs) for name, knobs in COMPILED)


@functools.cache
def plain_run(name: str, seed: int) -> Any:
    """The reference, which is the same for all knobs here."""
    return reference(MODELS[name](seed), TrainingConfig(micro_batch=micro_batch_of(name)))


def verdict(name: str, seed: int, knobs: dict[str, Any]) -> Any:
    """The verdict on a variant."""
    config = TrainingConfig.model_validate({"micro_batch": micro_batch_of(name)} | knobs)
    plain = plain_run(name, seed)
    return compare(plain, [candidate(MODELS[name](seed), config, plain)], config)


def micro_batch_of(name: str) -> int:
    return 4 if name == "batch_norm" else 2


def main() -> None:
    torch.set_num_threads(1)
    worst: dict[tuple[str, str], tuple[float, float, str]] = {}
    alarms = total = 0
    for name, seed, knobs in variants(compiled="--compiled" in sys.argv):
        parity = verdict(name, seed, knobs)
        total += 1
        if not parity.passed:
            alarms += 1
            print("ALARM", name, seed, knobs, parity.failures, flush=True)
        kind = "bf16 model" if name == "bf16_model" else knobs.get("precision", "fp32")
        for check in parity.checks:
            key = (check.name.replace("own length", "step 1"), kind)
            if check.difference >= worst.get(key, (-1.0, 0.0, ""))[0]:
                worst[key] = (check.difference, check.allowed, f"{name} {check.where} {knobs}")
    for (check_name, kind), (difference, allowed, where) in sorted(worst.items()):
        print(f"{check_name:45} {kind:10} {difference:9.2e} / {allowed:.1e}  {where}")
    print(f"{alarms} alarm(s) in {total} variants")


if __name__ == "__main__":
    main()

"""The trainings of the scoreboard: a small GPT, a small Llama with LoRA, an image model, an encoder-decoder."""

from __future__ import annotations

import json
from pathlib import Path

from autoplan.strategies.workloads.sources import make_spec
from autoplan.strategies.workloads.spec import WorkloadSpec
from benchmarks.accuracy_local import CONFIGS

DATA = Path(__file__).parent / "data"
FUNCTIONS = {"llama_lora": f"{DATA}/llama_lora.py:workload", "vision": f"{DATA}/vision.py:vision"}
MODELS = {"gpt": CONFIGS["gpt2"], "encoder_decoder": CONFIGS["encoder_decoder"]}
CASES = ("gpt", "llama_lora", "vision", "encoder_decoder")
SEQUENCE_LENGTH = 96
"""Of the models that are made from a configuration."""

GLOBAL_BATCHES = {"gpt": 16, "llama_lora": 16, "vision": 32, "encoder_decoder": 16}
"""Samples of an optimizer step."""


def case_spec(case: str, folder: Path) -> WorkloadSpec:
    """The workload of a case.

    Args:
        case: One of CASES.
        folder: Where a model's configuration may be written; it must outlive the spec.
    """
    samples = GLOBAL_BATCHES[case]
    if case in FUNCTIONS:
        return make_spec(model=FUNCTIONS[case], global_batch=samples)
    path = folder / case / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MODELS[case]))
    return make_spec(model=str(path), sequence_length=SEQUENCE_LENGTH, global_batch=samples)

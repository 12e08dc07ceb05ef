"""Measures how far each parallel technique is from one plain fp32 process, and which planted bugs are found.

    python -m benchmarks.parallel_parity            # about 3 minutes on 2 cores; writes benchmarks/results/

Tiny GPT-2 and Llama (4 blocks, hidden 32, an odd vocabulary of 67), 8 sequences of 16 tokens with different counts,
gloo on this machine's CPU. One SGD step, so that each change is proportional to its gradient. Relative differences per
parameter: of the gradient norm before clipping, of the gradient, and of the norm of the change.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from tests.strategies.parallel.test_parallel_parity import (
    DATA,
    FOUR_RANKS,
    LOW_PRECISION,
    PIPELINE,
    PLANTED,
    TENSOR_PARALLEL,
    WITH_OTHERS,
    config_of,
)
from tests.strategies.parallel.world import differences, run_step

RESULTS = Path(__file__).parent / "results" / "parallel_parity.json"
HEAD = (
    f"{'model':6} {'technique':22} {'ranks':>5} {'gradient norm':>14} {'gradient':>10} {'change norm':>12} {'held':>6}"
)


def main() -> None:
    rows: list[dict[str, Any]] = []
    print(HEAD)
    with (
        Zygote(preload=("torch", "torch.distributed.tensor", "transformers")) as zygote,
        tempfile.TemporaryDirectory() as d,
    ):
        folder = Path(d)
        for model in ("gpt2", "llama", "qwen3"):
            plain, reference = run_step(zygote, model, TrainingConfig(micro_batch=8), folder)
            for name, knobs in (DATA | TENSOR_PARALLEL | PIPELINE | FOUR_RANKS | WITH_OTHERS | LOW_PRECISION).items():
                config = config_of(knobs)
                result, candidate = run_step(zygote, model, config, folder)
                found = differences(reference, candidate)
                held = result["elements"] / plain["elements"]
                rows.append({"model": model, "technique": name, "config": config.describe(), "held": held} | found)
                print(
                    f"{model:6} {name:22} {config.world_size:5} {found['gradients_norm']:14.1e} "
                    f"{found['gradients']:10.1e} {found['changes_norm']:12.1e} {held:6.2f}",
                    flush=True,
                )
        print("\nplanted bug (gpt2), and what finds it")
        _, reference = run_step(zygote, "gpt2", TrainingConfig(micro_batch=8), folder)
        for plant, knobs in PLANTED:
            found_by = find_bug(zygote, reference, plant, knobs, folder)
            rows.append({"planted": plant.__name__, "config": config_of(knobs).describe(), "seen": found_by})
            print(f"{plant.__name__:30} {config_of(knobs).describe():50} {found_by}", flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def find_bug(zygote: Zygote, reference: Any, plant: Any, knobs: dict[str, Any], folder: Path) -> str:
    """What the comparison reports of a planted bug."""
    try:
        _, candidate = run_step(zygote, "gpt2", config_of(knobs), folder, plant=plant)
        found = differences(reference, candidate)
    except AssertionError as error:
        text = str(error)
        return "copies of a tied weight differ" if "differ" in text else "a parameter too many: " + text[:60]
    return f"gradient norm differs by {found['gradients_norm']:.2g}, gradient by {found['gradients']:.2g}"


if __name__ == "__main__":
    main()

"""Times the forms of the fused loss beside all logits at once, forward and backward: a JSON line for each.

python -m benchmarks.gpu.losses [--device cpu]     # on a CPU at one small shape, to try it
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
from torch.nn import functional as F

from autoplan.strategies.techniques.loss_kernels import (
    Kernel,
    agrees,
    can_compile,
    choose_kernel,
    compiled_cross_entropy,
    random_case,
    seconds_of,
)
from autoplan.strategies.workloads.workload import IGNORE_INDEX

SHAPES = {"gpt2": (8192, 50257, 768), "llama3.2-1b": (4096, 128256, 2048), "llama-7b": (2048, 32000, 4096)}
"""Rows of hidden states, classes, and the size of a row."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: None, targets: torch.Tensor) -> torch.Tensor:
    """The loss as a model has it."""
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def main() -> None:
    """Times each form at each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device)
    shapes = SHAPES if device.type == "cuda" else {"small": (64, 300, 32)}
    for (name, shape), (precision, dtype) in ((one, two) for one in shapes.items() for two in DTYPES.items()):
        forms: dict[str, Kernel] = {
            "all logits": all_logits,
            "compiled": torch.compile(all_logits),
            "torch": choose_kernel(precision, compiled=False),
            "compiled part": functools.partial(compiled_cross_entropy, dtype=dtype),
        }
        case = random_case(*shape, False, dtype, device)
        for form, kernel in forms.items():
            found = {"shape": name, "precision": precision, "form": form, "seconds": None, "peak_bytes": None}
            if form == "compiled part" and not (agrees(kernel, dtype, device) and can_compile()):
                print(json.dumps(found | {"note": "it does not run here, or does not agree with torch's"}), flush=True)
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found["seconds"] = seconds_of(kernel, case)
            if device.type == "cuda":
                found["peak_bytes"] = torch.cuda.max_memory_allocated()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

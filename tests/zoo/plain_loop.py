"""Trains each workload of the zoo with a plain PyTorch loop: the proof that it is a sound training.

    python -m tests.zoo.plain_loop [names] [--steps 12]

The loop shares no line with autoplan's own. It has the workload's optimizer, schedule and clipping; the gradients of
summed losses are divided by the count of the whole global batch. The losses of repeated batches must stay finite and
fall.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.zoo.catalogue import Entry, pick

STEPS = 12
BATCHES = 2  # seen again and again, so that the loss can fall within few steps
SLOWEST_STEP_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRun:
    """What a plain loop saw.

    Attributes:
        losses: Per optimizer step, over the whole global batch.
        step_s: The median of the steps' seconds, the first left out.
        parameters: Of the model.
    """

    losses: tuple[float, ...]
    step_s: float
    parameters: int

    @property
    def verdict(self) -> str:
        """ "falls", "changes", or what is wrong."""
        if not all(map(math.isfinite, self.losses)):
            return "not finite"
        third = max(1, len(self.losses) // 3)
        first, last = (sum(part) / third for part in (self.losses[:third], self.losses[-third:]))
        if last < first:
            return "falls"
        return "changes" if last != first else "stands still"


def load(entry: Entry) -> Any:
    """The Workload of an entry, imported as autoplan imports it."""
    from autoplan.strategies.workloads.function_file import import_function

    return import_function(entry.reference)()


def train(workload: Any, micro_batch: int | None, steps: int = STEPS) -> PlainRun:
    """Trains with a plain loop.

    Args:
        workload: An autoplan.Workload.
        micro_batch: Samples per forward and backward; None: the whole global batch at once.
        steps: Optimizer steps.
    """
    import torch

    torch.manual_seed(workload.seed)
    random.seed(workload.seed)
    model = workload.build_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = workload.build_optimizer(parameters)
    schedule = workload.build_schedule(optimizer) if workload.build_schedule is not None else None
    size = micro_batch or workload.global_batch
    losses, seconds = [], []
    for step in range(steps):
        batch = workload.make_batch(workload.global_batch, step % BATCHES)
        started = time.perf_counter()
        total, count = 0.0, 0.0
        for start in range(0, workload.global_batch, size):
            summed, items = workload.loss(model, _slice(batch, start, start + size))
            summed.backward()
            total, count = total + float(summed.detach()), count + float(items)
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(count)
        if workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        seconds.append(time.perf_counter() - started)
        losses.append(total / count)
    middle = sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2]
    return PlainRun(losses=tuple(losses), step_s=middle, parameters=sum(p.numel() for p in model.parameters()))


def _slice(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _slice(value, start, stop) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_slice(value, start, stop) for value in batch)
    return batch[start:stop] if batch.dim() else batch


def micro_batch_of(entry: Entry, workload: Any) -> int | None:
    """The micro-batch that the user fixed, in the workload or beside it."""
    fixed = entry.fix.get("micro_batch", workload.fixed_micro_batch)
    return None if fixed is None else int(fixed)


def main() -> int:
    """Trains them all and prints a line for each; 1 where one does not train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or kinds; all where none is given")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    bad = 0
    for entry in pick(chosen.names):
        if entry.missing:
            print(f"{entry.name:20} skipped: {', '.join(entry.missing)} is not installed", flush=True)
            continue
        try:
            workload = load(entry)
            run = train(workload, micro_batch_of(entry, workload), chosen.steps)
        except Exception:
            bad += 1
            print(f"{entry.name:20} FAILED\n{traceback.format_exc(limit=-3)}", flush=True)
            continue
        slow = "  SLOW" if run.step_s > SLOWEST_STEP_S else ""
        bad += run.verdict not in ("falls", "changes")
        print(
            f"{entry.name:20} {run.verdict:10} {run.losses[0]:9.4f} -> {run.losses[-1]:9.4f}  "
            f"{1000 * run.step_s:6.1f} ms a step  {run.parameters:8,} parameters{slow}",
            flush=True,
        )
    print(f"{bad} failed" if bad else "all train")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares autoplan's plain run with the plain loop, with nothing switched off: dropout, noise and eval() as they are.

    python -m tests.zoo.same_training [names]

Both start from the workload's seed and take the same steps in the same micro-batches, so that they draw the same random
numbers; the losses then agree to rounding. What differs was changed in silence: modules that the user had set to
eval(), a seed, a schedule, clipping, weight decay. The parity check cannot see what it changes on both sides.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.zoo.catalogue import Entry, pick
from tests.zoo.plain_loop import BATCHES, load, micro_batch_of, train

STEPS = 4
TOLERANCE = 2e-4  # of the loss; sums in another order differ by 1e-6, bf16 parameters by 5e-5, a frozen part by 2e-2


def difference(entry: Entry, steps: int = STEPS) -> float:
    """The largest relative difference of a step's loss between the plain loop and prepare() with the plain config.

    Args:
        entry: The workload.
        steps: Optimizer steps.
    """
    import dataclasses

    import numpy as np

    from autoplan.strategies.config import TrainingConfig
    from autoplan.strategies.prepare import prepare

    workload = load(entry)
    fixed = micro_batch_of(entry, workload)
    size = fixed or workload.global_batch
    np.random.seed(workload.seed)
    plain = train(workload, size, steps).losses
    random.seed(workload.seed)
    np.random.seed(workload.seed)
    again = dataclasses.replace(load(entry), fixed_micro_batch=fixed)
    run = prepare(again, TrainingConfig(micro_batch=size), device="cpu")
    ours = [float(run.step(again.make_batch(again.global_batch, step % BATCHES)).loss) for step in range(steps)]
    return max(abs(a - b) / abs(a) for a, b in zip(plain, ours, strict=True))


def main() -> int:
    """A line for each workload; 1 where one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or kinds; all where none is given")
    bad = 0
    for entry in pick(parser.parse_args().names):
        if entry.missing or entry.expected == "refused":
            continue
        try:
            found = difference(entry)
            words = f"{'the same' if found <= TOLERANCE else 'DIFFERS':10} by {found:.1e} of the loss"
            bad += found > TOLERANCE
        except Exception as error:  # one that fails never stops the others
            words, bad = f"FAILED     {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", bad + 1
        print(f"{entry.name:20} {words}", flush=True)
    print(f"{bad} differ or fail" if bad else "all train the same")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

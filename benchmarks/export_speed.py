"""Compares the speed of an exported PyTorch script with that of its plan (`plan.prepare`), in interleaved rounds.

    python -m benchmarks.export_speed [--knobs '{"dp_replicate": 2}'] [--rounds 10] [--out FILE]

In each round both are built in fresh processes, and then take steps in turn, one step each, while the other waits. So
other work on the machine, which lasts longer than a step, meets both. The ratio of a round is the median step of the
script over that of the plan. Reported are the median of the rounds' ratios, and the interval from the second smallest
to the second largest: of ten rounds it holds the median with 98 % (binomial).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from autoplan.planner.export.run import export_plan
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2

RESULTS = Path(__file__).parent / "results" / "export_speed.json"
MODEL = GPT2 | {
    "n_layer": 4,
    "n_embd": 192,
    "n_head": 4,
    "vocab_size": 4096,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GLOBAL_BATCH, LENGTH = 8, 64
WARMUP_STEPS, STEPS = 2, 12

Step = Callable[[int], Any]


def plan_step(plan: Plan) -> Step:
    """A step of the plan's own run."""
    run = plan.prepare(device="cpu")

    def step(number: int) -> Any:
        return run.step(run.local_share(run.workload.make_batch(GLOBAL_BATCH, number)))

    return step


def script_step(path: Path) -> Step:
    """A step of the exported script, by its own functions."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported"] = module
    spec.loader.exec_module(module)
    run = module.prepare("cpu")
    return lambda number: module.train_step(run, module.rank_batch(run, number))


class Side:
    """One of the two, in forked ranks of its own: a step is taken when it is asked for.

    Args:
        make_step: Builds the run.
        ranks: How many.
    """

    def __init__(self, make_step: Callable[[], Step], ranks: int) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self._ranks: list[tuple[int, Any, Any]] = []
        for rank in range(ranks):
            asked, ask = os.pipe()
            answered, answer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(ask)
                if ranks > 1:
                    number, count = str(rank), str(ranks)
                    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                _take_steps(make_step, asked, answer)
            os.close(asked)
            os.close(answer)
            self._ranks.append((child, os.fdopen(ask, "w", buffering=1), os.fdopen(answered)))

    def step(self) -> tuple[float, float]:
        """The seconds and the loss of one step, of the first rank."""
        for _, ask, _ in self._ranks:
            ask.write("step\n")
        found = [answered.readline().split() for _, _, answered in self._ranks]
        if not all(found):
            raise SystemExit("a rank ended before its steps were done")
        return float(found[0][0]), float(found[0][1])

    def close(self) -> None:
        """Ends the ranks."""
        for _, ask, _ in self._ranks:
            ask.write("end\n")  # ranks that were forked later hold this pipe too, so closing it would not end them
        for child, ask, answered in self._ranks:
            os.waitpid(child, 0)
            ask.close()
            answered.close()


def _take_steps(make_step: Callable[[], Step], asked: int, answer: int) -> None:
    """A rank: answers each line with the seconds of a step, its batch included, and its loss; never returns."""
    status = 1
    try:
        warnings.simplefilter("ignore")
        step = make_step()
        with os.fdopen(asked) as lines, os.fdopen(answer, "w", buffering=1) as out:
            for number, line in enumerate(lines):
                if line == "end\n":
                    break
                started = time.perf_counter()
                loss = float(step(number).loss)
                out.write(f"{time.perf_counter() - started!r} {loss!r}\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def measure(plan: Plan, path: Path, rounds: int) -> dict[str, Any]:
    """The rounds, and what they say."""
    ranks = plan.config.world_size
    makers: dict[str, Callable[[], Step]] = {"plan": lambda: plan_step(plan), "script": lambda: script_step(path)}
    rows, difference = [], 0.0
    for number in range(rounds):
        sides = {name: Side(make, ranks) for name, make in makers.items()}
        seconds: dict[str, list[float]] = {"plan": [], "script": []}
        for turn in range(WARMUP_STEPS + STEPS):
            losses = {}
            for name in sorted(sides, reverse=(number + turn) % 2 == 1):
                spent, losses[name] = sides[name].step()
                seconds[name] += [spent] if turn >= WARMUP_STEPS else []
            difference = max(difference, abs(losses["script"] / losses["plan"] - 1))
        for side in sides.values():
            side.close()
        row = {name: median(values) for name, values in seconds.items()}
        rows.append(row | {"ratio": row["script"] / row["plan"]})
        print(f"round {number + 1}: plan {row['plan']:.4f} s, script {row['script']:.4f} s", flush=True)
    ratios = sorted(row["ratio"] for row in rows)
    inside = ratios[1:-1] if rounds >= 10 else ratios
    return {
        "config": plan.config.describe(),
        "ranks": ranks,
        "rounds": rows,
        "script_over_plan": {"median": median(ratios), "low": inside[0], "high": inside[-1]},
        "largest_relative_loss_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--knobs", default="{}", help="of the plan, as JSON; micro_batch is 4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        spec = make_spec(model=str(folder / "config.json"), global_batch=GLOBAL_BATCH, sequence_length=LENGTH)
        config = TrainingConfig(**({"micro_batch": 4} | json.loads(arguments.knobs)))
        plan = make_plan(config, workload=spec, accumulation=config.accumulation(GLOBAL_BATCH))
        (path,) = export_plan(plan, "pytorch", folder / "train.py").paths
        result = measure(plan, path, arguments.rounds)
    ratio = result["script_over_plan"]
    print(f"a step of the script takes {ratio['median']:.3f} of the plan's ({ratio['low']:.3f} to {ratio['high']:.3f})")
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
    cases = [case for case in before["cases"] if case["config"] != result["config"]]
    document = {
        "model": f"GPT-2 of {MODEL['n_layer']} blocks, width {MODEL['n_embd']}, vocabulary {MODEL['vocab_size']}",
        "global_batch": GLOBAL_BATCH,
        "sequence_length": LENGTH,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cases": [*cases, result],
    }
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

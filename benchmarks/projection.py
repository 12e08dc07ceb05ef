"""How far projections of an anchor are from what was measured there: recorded, published, and live.

    python -m benchmarks.projection                     (recorded and published: half a minute, measures nothing)
    python -m benchmarks.projection --live --minutes 5  (measures this machine: 2 cores are enough)

Three kinds of pairs, each projected by the code of `autoplan estimate --anchor` (planner/estimate/anchor.py):

- recorded: benchmarks/results/search_tables has 64 configurations of four models on 1 rank of 1 core, and 64 on up to 2
  ranks of 2 cores. Those of 1 rank are the anchor; step times of 2 ranks and their order are predicted.
- published: rows of the same model in a table, on another number of GPUs, and on another chip. One row is the anchor.
  They have no trace, so that the parts of a step are those of the closed form.
- live: 1 thread predicts 2; ranks 1 and 2 over gloo predict 4. All configurations of a round run one after the other in
  a drawn order, so that a slow minute falls on all kinds alike. With 2 cores 4 ranks take turns.

Beside the anchored error stands that without an anchor: the same model with the probes or the datasheet alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.analytical.cluster import Cluster
from autoplan.planner.cost.analytical.rows import estimate_rows
from autoplan.planner.cost.calibrate import FACTORS, NOISE_SD, TimeFit
from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.prediction import spread
from autoplan.planner.cost.traced.estimator import CostTable
from autoplan.planner.estimate.anchor import OTHER_CHIP_SD, Learned, Measured, Target, carry
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.search.preload import preload_for
from autoplan.planner.trace.model_profile import ModelProfile, variants_to_trace
from autoplan.planner.trace.trace import TraceLimits, trace_profile
from autoplan.planner.trials.runner import TrialOrder, TrialRunner
from autoplan.probes.run import run_probes
from autoplan.processes import Zygote
from autoplan.strategies.config import PLAIN, TrainingConfig
from benchmarks import accuracy
from benchmarks.recorded import LIMIT_BYTES, read_table
from benchmarks.search_cases import CASES, case_spec
from benchmarks.search_tables import TABLES

OUT = Path(__file__).parent / "results" / "projection.json"
FEW_TRIALS = 12
"""Trials of an anchor: as many as a search of some minutes has. Drawn by a seed."""


MOST_PAIRS = 300
"""Of a table, drawn by a seed."""

ROW_SD = 0.1
"""What no factor explains of a published row: standard deviation of the logarithm (analytical/step_time.py)."""


def compare(predicted: Floats, low: Floats, high: Floats, measured: Floats) -> dict[str, Any]:
    """Errors, coverage of the 90 % intervals, and whether the order is right.

    `order` is Spearman's correlation, `regret` what the predicted best loses to the measured best.
    """
    error = predicted / measured - 1
    return {
        "count": len(measured),
        "mean_error": float(np.mean(np.abs(error))),
        "bias": float(np.mean(error)),
        "covered": float(np.mean((low <= measured) & (measured <= high))),
        "order": _rank_correlation(predicted, measured) if len(measured) > 2 else None,
        "regret": float(measured[int(np.argmin(predicted))] / measured.min() - 1),
    }


def _rank_correlation(a: Floats, b: Floats) -> float:
    ranks = [np.argsort(np.argsort(column)).astype(np.float64) for column in (a, b)]
    return float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])


def compare_table(table: CostTable, measured: Floats) -> dict[str, Any]:
    """`compare` of predictions of the traced model."""
    return compare(table.step_time_s, table.step_time_low_s, table.step_time_high_s, measured)


def project(
    anchor: Measured, profile: ModelProfile, configs: Sequence[TrainingConfig], seconds: Floats, cores: int
) -> dict[str, Any]:
    """Projections onto ranks of the anchor's own kind of host, with the anchor's trials and without."""
    ranks = max(config.world_size for config in configs)
    cluster = Cluster(nodes=1, gpus_per_node=ranks, chip=anchor.device.name)
    target = Target(cluster=cluster, here=True, cores=cores, assumed=())
    out = {}
    for name, trials in (("anchored", anchor.trials), ("probes alone", ())):
        told = Measured(hardware=anchor.hardware, kind="cpu", trials=trials, global_batch=anchor.global_batch)
        estimator = carry(Learned.of(told, profile), target, profile, anchor.global_batch).estimator
        out[name] = compare_table(estimator.table(configs), seconds)
    return out


def recorded() -> dict[str, Any]:
    """1 rank predicts 2, of the recorded tables."""
    out: dict[str, Any] = {}
    for case in CASES:
        one, two = (read_table(TABLES / f"{case}-{ranks}") for ranks in (1, 2))
        there = [i for i, c in enumerate(two.candidates) if c.world_size == 2 and math.isfinite(two.seconds[i])]
        configs = [two.candidates[i] for i in there]
        trials = random.Random(0).sample([t for t in one.rounds[0] if t.outcome is Outcome.OK], FEW_TRIALS)
        anchor = Measured(hardware=one.hardware, kind="cpu", trials=trials, global_batch=one.global_batch)
        out[case] = project(anchor, untimed(one.profile), configs, two.seconds[there], cores=2)
    return out


def untimed(profile: ModelProfile) -> ModelProfile:
    """The profile without the times of its operations, which a plan does not have."""
    variants = {
        name: variant.model_copy(
            update={"groups": tuple(group.model_copy(update={"measured_s": None}) for group in variant.groups)}
        )
        for name, variant in profile.variants.items()
    }
    return profile.model_copy(update={"variants": variants})


# Published pairs.


PARTS = {
    "matmul/half": "matmul_s",
    "attention": "attention_s",
    "memory": "memory_s",
    "dispatch": "launch_s",
    "optimizer": "optimizer_s",
    "communication": "communication_s",
}


def published() -> dict[str, Any]:
    """Each row of a table predicts the others of its model: on other numbers of GPUs, and on another chip."""
    out: dict[str, Any] = {}
    for name, load in (
        ("llm-foundry", accuracy.llm_foundry),
        ("fms-fsdp", accuracy.fms_fsdp),
        ("vTrain", accuracy.vtrain),
    ):
        rows = [row for row in load() if row.layout.get("fp8", "False") in ("False", "false")]
        estimated = estimate_rows([row.layout for row in rows])
        assert estimated.table is not None and not estimated.reasons, estimated.reasons
        table = estimated.table
        parts = np.zeros((len(FACTORS), len(rows)))
        for factor, column in PARTS.items():
            parts[FACTORS.index(factor)] = getattr(table, column)
        for kind, other_chip in (("other number of GPUs", False), ("other chip", True)):
            pairs = list(_pairs(rows, other_chip))
            if not pairs:
                continue
            pairs = random.Random(0).sample(pairs, min(len(pairs), MOST_PAIRS))
            found = [_of_pair(parts, table.bubble_s, rows[a].seconds, a, b, other_chip) for a, b in pairs]
            step, low, high = (np.array(column) for column in zip(*found, strict=True))
            measured = np.array([rows[b].seconds for _, b in pairs])
            raw = np.array([float(table.step_time_s[b]) for _, b in pairs])
            wide = np.array([float(spread(table.log_sd[b])) for _, b in pairs])
            anchored, alone = compare(step, low, high, measured), compare(raw, raw / wide, raw * wide, measured)
            for one in (anchored, alone):  # over rows of different models these say nothing
                del one["order"], one["regret"]
            out[f"{name}, {kind}"] = {"anchored": anchored, "datasheet alone": alone}
    return out


def _pairs(rows: Sequence[accuracy.Row], other_chip: bool) -> Iterator[tuple[int, int]]:
    """Anchor and target: the same model and length, on another chip, or on another number of GPUs of the same."""
    same = ("layers", "hidden", "heads", "seq_len")
    for a, b in itertools.permutations(range(len(rows)), 2):
        one, two = rows[a].layout, rows[b].layout
        if any(one[name] != two[name] for name in same):
            continue
        if (one["chip"] != two["chip"]) is other_chip and (other_chip or int(one["num_gpus"]) != int(two["num_gpus"])):
            yield a, b


def _of_pair(
    parts: Floats, bubble_s: Floats, seconds: float, a: int, b: int, other_chip: bool
) -> tuple[float, float, float]:
    """Row b's step, with its interval, by what row a took: as `carry` has it for the parts of a step."""
    fit = TimeFit()
    fit.observe(parts[:, a], seconds - float(bubble_s[a]), noise=ROW_SD)
    if other_chip:
        fit.covariance += np.diag([OTHER_CHIP_SD.get(factor, 0.0) ** 2 for factor in FACTORS])
    predicted, sd = fit.predict(parts[:, [b]])
    step = float(predicted[0]) * (1 + float(bubble_s[b]) / float(parts[:, b].sum()))
    wide = float(spread(np.sqrt(np.square(sd) + ROW_SD**2 - NOISE_SD**2))[0])
    return step, step / wide, step * wide


# Live.


def configurations(samples: int) -> dict[str, list[TrainingConfig]]:
    """What is measured: one rank on one thread and on both; layouts of 1, 2 and 4 ranks."""

    def make(**knobs: Any) -> TrainingConfig:
        return PLAIN.model_copy(update=knobs)

    some: list[dict[str, Any]] = [{"micro_batch": 2}, {"micro_batch": 8}, {"micro_batch": 4, "checkpointing": "full"}]
    some += [{"micro_batch": 8, "precision": "bf16"}]
    pipeline = {"pp": 2, "pp_schedule": "1f1b"}
    return {
        "1 thread": [make(threads=1, **one) for one in some],
        "2 threads": [make(threads=2, **one) for one in some],
        "1 rank": [make(**one) for one in some[1:3]],
        "2 ranks": [
            make(dp_replicate=2, micro_batch=4),
            make(dp_shard=2, micro_batch=4),
            make(tp=2, micro_batch=8),
            make(**pipeline, micro_batch=4, pp_microbatches=samples // 4),
        ],
        "4 ranks": [
            make(dp_replicate=4, micro_batch=2),
            make(dp_replicate=4, micro_batch=4),
            make(dp_shard=4, micro_batch=4),
            make(dp_replicate=2, dp_shard=2, micro_batch=4),
            make(tp=2, dp_replicate=2, micro_batch=4),
            make(**pipeline, dp_replicate=2, micro_batch=2, pp_microbatches=samples // 4),
        ],
    }


def live(case: str, minutes: float, seed: int, least: int) -> dict[str, Any]:
    """Measures rounds until the time is over, so many at least; then projects, from what the anchors alone measured."""
    rng = random.Random(seed)
    ends_at = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="projection-") as name:
        folder = Path(name)
        spec = case_spec(case, folder)
        groups = configurations(spec.global_batch)
        everything = [(group, config) for group, configs in groups.items() for config in configs]
        with Zygote(preload=preload_for(spec)) as zygote:
            hardware = run_probes(zygote, device="cpu", collective_ranks=2)
            profile = trace_profile(
                spec,
                device="cpu",
                zygote=zygote,
                variants=variants_to_trace([config for _, config in everything], has_blocks=True),
                limits=TraceLimits(timing_budget_s=0.0),
            )
            runner = TrialRunner(
                zygote,
                spec,
                device="cpu",
                memory_limit_bytes=LIMIT_BYTES,
                host_limit_bytes=LIMIT_BYTES,
                directory=folder / "trials",
            )
            trials: dict[tuple[str, TrainingConfig], list[Trial]] = {}
            longest = 0.0
            for number in itertools.count():
                began = time.monotonic()
                if number >= least and began + longest > ends_at:
                    break
                for place, (group, config) in enumerate(rng.sample(everything, len(everything))):
                    order = TrialOrder(
                        number=100 * number + place,
                        purpose="search",
                        config=config,
                        prediction=None,
                        deadline_s=120.0,
                        most_s=1.5,
                    )
                    trial = runner.run(order)
                    print(f"round {number + 1}: {group} {trial.outcome.value} {config.describe()}", flush=True)
                    trials.setdefault((group, config), []).append(trial)
                longest = max(longest, time.monotonic() - began)
    cores = hardware.host.cores_usable
    out: dict[str, Any] = {"case": case, "rounds": number, "cpu": hardware.host.cpu_model, "cores": cores}
    out["disturbed"] = sum(bool(trial.disturbed) for found in trials.values() for trial in found)
    for sources, to in ((("1 thread",), "2 threads"), (("1 rank", "2 ranks"), "4 ranks")):
        told = [t for (group, _), found in trials.items() if group in sources for t in found]
        there = {config: times for (group, config), found in trials.items() if group == to and (times := _times(found))}
        if not there:
            out[to] = f"nothing ran: {[t.reason for (group, _), found in trials.items() if group == to for t in found]}"
            continue
        anchor = Measured(hardware=hardware, kind="cpu", trials=told, global_batch=spec.global_batch)
        seconds = np.array([float(np.median(times)) for times in there.values()])
        out[f"{' and '.join(sources)} -> {to}"] = project(anchor, profile, list(there), seconds, cores)
        out[f"{to}, seconds"] = dict(zip([config.describe() for config in there], seconds.tolist(), strict=True))
    return out


def _times(trials: Sequence[Trial]) -> list[float]:
    return [t.step_time_s.median for t in trials if t.outcome is Outcome.OK and t.step_time_s is not None]


def show(found: Mapping[str, Any]) -> None:
    """A line for each projection."""
    print("pairs | count | error | bias | covered | order | regret || without an anchor: error | covered | order")
    for kind, pairs in found.items():
        for name, both in pairs.items():
            if not isinstance(both, dict) or "anchored" not in both:
                continue
            one, other = both.values()
            cells = [f"{kind}: {name}", str(one["count"]), f"{one['mean_error']:.1%}", f"{one['bias']:+.1%}"]
            cells += [f"{one['covered']:.0%}", _order(one), "" if "regret" not in one else f"{one['regret']:.1%}"]
            cells += ["without:", f"{other['mean_error']:.1%}", f"{other['covered']:.0%}", _order(other)]
            print(" | ".join(cells))


def _order(one: Mapping[str, Any]) -> str:
    return "" if one.get("order") is None else f"{one['order']:.2f}"


def main() -> None:
    """Projects, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="measure this machine; else what is recorded and published")
    parser.add_argument("--case", choices=CASES, default="gpt", help="with --live: the model")
    parser.add_argument("--minutes", type=float, default=5.0, help="with --live: no round begins that would end later")
    parser.add_argument("--rounds", type=int, default=2, help="with --live: at least so many, whatever they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help=f"keep the figures in it: {OUT.name} beside the others")
    options = parser.parse_args()
    if options.live:
        found = {"live": {options.case: live(options.case, options.minutes, options.seed, options.rounds)}}
        show({"live": {k: v for k, v in found["live"][options.case].items() if isinstance(v, dict)}})
    else:
        found = {"recorded": recorded(), "published": published()}
        show(found)
    if options.out is not None:
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        for kind, pairs in found.items():
            before.setdefault(kind, {}).update(pairs)
        options.out.write_text(json.dumps(before, indent=1) + "\n")


if __name__ == "__main__":
    main()

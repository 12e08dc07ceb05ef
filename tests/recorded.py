"""Plans for tests of what reads plans: built from records, so that no search has to run first."""

from __future__ import annotations

import math
from typing import Any

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import Alternative, Choice, Environment, Measurement
from autoplan.planner.records.trials import (
    Claim,
    Interval,
    LeftOutFamily,
    Outcome,
    Parity,
    PeakMemory,
    Prediction,
    Trial,
    WorkLine,
)
from autoplan.planner.records.trust import Call
from autoplan.planner.search.session import PLAIN_PARITY
from autoplan.probes.profile import Device, HardwareProfile, Host
from autoplan.record import Reading
from autoplan.strategies.analysis.training_facts import GroupFacts, TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec


def interval(median: float, spread: float = 0.02) -> Interval:
    return Interval(median=median, low=median * (1 - spread), high=median * (1 + spread), samples=9)


def make_hardware(*, cores: int = 2, gpu: bool = False) -> HardwareProfile:
    def known(value: float, unit: str) -> Reading:
        return Reading.driver(value, unit, "a test")

    host = Host(
        cpu_model="Test CPU <3 GHz>",
        cores_physical=cores,
        cores_logical=cores,
        cores_usable=cores,
        numa_nodes=1,
        memory_total_bytes=known(16 * 2**30, "bytes"),
        memory_available_bytes=known(12 * 2**30, "bytes"),
        cgroup_version=None,
        cgroup_memory_limit_bytes=Reading.unknown("bytes", "no cgroup"),
        cgroup_cpu_limit=Reading.unknown("1", "no cgroup"),
        shared_memory_bytes=known(2**30, "bytes"),
        load_average=known(0.1, "1"),
        kernel="6.1",
        python="3.11.9",
        torch="2.13.0",
        driver=None,
        cuda=None,
    )
    device = Device(
        index=0,
        type="cpu",
        name="Test CPU <3 GHz>",
        memory_total_bytes=known(16 * 2**30, "bytes"),
        memory_available_bytes=known(12 * 2**30, "bytes"),
        cores=cores,
        peak_flops_per_s={
            "float32": Reading(value=1.0e11, unit="flop/s", provenance="measured"),
            "bfloat16": Reading(value=4.0e11, unit="flop/s", provenance="measured"),
        },
    )
    card = Device(
        index=0,
        type="cuda",
        name="Test GPU",
        uuid="GPU-0",
        memory_total_bytes=known(80 * 2**30, "bytes"),
        memory_available_bytes=known(79 * 2**30, "bytes"),
    )
    devices = (card, device) if gpu else (device,)
    return HardwareProfile(created="2026-11-21T08:00:00+00:00", seconds_spent=9.0, host=host, devices=devices)


def make_trial(
    number: int, config: TrainingConfig, step_time_s: float | None, *, tokens: int = 1024, **given: Any
) -> Trial:
    facts: dict[str, Any] = {
        "number": number,
        "purpose": "search",
        "config": config,
        "outcome": Outcome.OK,
        "phase": "done",
        "seconds_spent": 12.0,
        "peak_memory": PeakMemory(resident_bytes=3 * 2**30, limit_bytes=8 * 2**30),
    }
    if step_time_s is not None:
        rate = tokens / step_time_s
        facts |= {
            "step_time_s": interval(step_time_s),
            "tokens_per_s": Interval(median=rate, low=rate * 0.98, high=rate * 1.02, samples=9),
            "method": "whole_steps",
        }
    return Trial(**(facts | given))


def named(plan: Plan) -> str | None:
    """What a user types to name the plan's function; None where it is of none."""
    return str(Call.of(plan.workload)) if plan.workload.kind == "function" else None


ADAMW: dict[str, Any] = {"lr": 0.0005, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
LANGUAGE_TRAINING = TrainingFacts(
    optimizer="torch.optim.adamw.AdamW",
    groups=(GroupFacts(tensors=148, elements=124439808, options=ADAMW),),
    max_grad_norm=1.0,
    schedule=None,
    seed=0,
)
"""As a search reads it of a language model that a configuration describes."""


def make_plan(config: TrainingConfig | None = None, **given: Any) -> Plan:
    """A plan of a 16-sequence GPT-2 search in which bf16 with compiled blocks won over plain fp32.

    With another workload, the micro-batches of its trials divide that one's global batch, and the plan does not know
    what it trains with.
    """
    config = config or TrainingConfig(
        micro_batch=4, precision="bf16", compile="block", attention="sdpa", checkpointing="every_2"
    )
    global_batch, length = 16, 64
    options = {"learning_rate": 0.0005, "max_grad_norm": 1.0, "seed": 0}
    spec = make_spec(model="gpt2", sequence_length=length, global_batch=global_batch, options=options)
    known = {"identity": "0123456789abcdef", "defaults_used": ("global batch 16 sequences (--global-batch)",)}
    spec = spec.model_copy(update=known)
    batch = given.get("workload", spec).global_batch
    plain = TrainingConfig(micro_batch=math.gcd(2, batch))
    baseline = make_trial(0, plain, 8.0, purpose="baseline")
    trials = (
        baseline,
        make_trial(1, config, 2.5),
        make_trial(2, TrainingConfig(micro_batch=math.gcd(8, batch)), 7.5),
        make_trial(
            3,
            TrainingConfig(micro_batch=math.gcd(16, batch)),
            None,
            outcome=Outcome.OUT_OF_MEMORY,
            detail="host",
            reason="3.1 GiB over the limit of 8.0 GiB in warmup",
            phase="warmup",
        ),
    )
    measured = Measurement(
        step_time_s=interval(2.5),
        tokens_per_s=interval(409.6),
        peak_memory_bytes=3 * 2**30,
        mfu=0.31,
        mfu_peak_source="measured matmul, bfloat16",
        method="whole_steps",
        trials=(1,),
    )
    lost = measured.model_copy(update={"step_time_s": interval(7.5), "tokens_per_s": interval(136.5), "trials": (2,)})
    facts: dict[str, Any] = {
        "created": "2026-11-21T08:10:00+00:00",
        "study": "feedfacefeedface",
        "workload": spec,
        "config": config,
        "accumulation": max(1, batch // (config.micro_batch * config.dp)),
        "device": "cpu",
        "hardware": make_hardware(gpu=given.get("device") == "cuda"),
        "prediction": Prediction(
            step_time_s=2.4,
            step_time_low_s=2.0,
            step_time_high_s=3.0,
            peak_memory_bytes=2.9 * 2**30,
            peak_memory_low_bytes=2.5 * 2**30,
            peak_memory_high_bytes=3.4 * 2**30,
            verdict="fits",
            bound="compute",
            model_flops=3.1e11,
        ),
        "measurement": measured,
        "baseline": baseline,
        "speedup": interval(3.2, 0.03),
        "alternatives": (
            Alternative(
                config=trials[2].config, measurement=lost, speed_ratio=interval(0.333), why="67 % slower: fp32 matmuls"
            ),
        ),
        "parity": Parity(
            passed=True,
            tolerance=0.02,
            worst_gradient_difference=0.004,
            worst_update_difference=0.003,
            worst_group="blocks",
            loss_difference=0.0002,
            global_batch=4,
            sequence_length=64,
            changes_numerics=True,
            note="checked on 4 sequences of 64 tokens",
        ),
        "choices": (
            Choice(knob="micro_batch", value=4, reason="8 gains less than 1 % and takes 1.1 GiB more"),
            Choice(knob="precision", value="bf16", reason="matmuls measured 3.9 times as fast as fp32 here"),
        ),
        "left_out": (
            LeftOutFamily(
                family="micro_batch=16 without checkpointing",
                limit="memory limit of 8.0 GiB",
                by="predicted 11.1 GiB, 3.1 GiB over",
                configurations=24,
            ),
        ),
        "evidence": trials,
        "notes": ("Timed beside nothing else.",),
        "environment": Environment(
            autoplan="0.1.0", torch="2.13.0", python="3.11.9", transformers="5.23.0", platform="Linux"
        ),
        "training": None if "workload" in given else LANGUAGE_TRAINING,
    }
    return Plan(**(facts | given)).sealed()


def make_ledger(config: TrainingConfig, plain: TrainingConfig) -> tuple[WorkLine, ...]:
    """Where a search of ten minutes spent its time: nine looks, then the proof of one configuration."""
    pieces = [
        ("setup", None, 15.0),
        ("baseline", plain, 47.0),
        *[("look", config, 235.0 / 9)] * 9,
        ("hand setting", plain, 0.0),
        ("parity", config, 50.0),
        *[("claim", config, 35.5)] * 4,
    ]
    lines, began_s = [], 0.0
    for kind, whose, seconds in pieces:
        lines.append(WorkLine(kind=kind, config=whose, began_s=began_s, seconds=seconds, predicted_s=20.0, gain=0.04))
        began_s += seconds
    return tuple(lines)


def make_plain_plan(**given: Any) -> Plan:
    """A plan that is the plain run: the rounds did not tell the leader from it."""
    found = make_plan()
    plain = found.baseline.config
    claim = Claim(claimed=False, why_not="nothing faster was found", rounds=4, spread=0.01, spread_repeats=4)
    facts: dict[str, Any] = {
        "measurement": found.measurement.model_copy(
            update={"step_time_s": interval(8.0), "tokens_per_s": interval(128.0), "trials": (0,)}
        ),
        "accumulation": 8,
        "speedup": Interval(median=1.0, low=1.0, high=1.0, samples=4),
        "claim": claim,
        "parity": PLAIN_PARITY,
        "evidence": (*found.evidence, make_trial(4, found.config, 7.9, purpose="claim", round=0)),
        "ledger": make_ledger(found.config, plain),
        "choices": (
            Choice(
                knob="precision",
                value="fp32",
                reason="not told apart from precision=bf16 (trial 1), side by side: the plan is simpler",
            ),
        ),
    }
    return make_plan(plain, **(facts | given))

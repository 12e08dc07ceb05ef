"""Makes the Plan out of a finished search's record: measurement, speed-up, why each knob has its value, what lost."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

from autoplan.planner.plan import Alternative, Choice, Environment, Measurement, Parity, Plan
from autoplan.planner.search.selection import Entry, enter, rank
from autoplan.planner.search.session import Session
from autoplan.planner.trials.measure import invert, ratio_interval
from autoplan.planner.trials.outcome import Interval, Trial
from autoplan.probes.profile import Device
from autoplan.strategies.config import KNOBS, TrainingConfig

PEAK_DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
SHOWN_VARIABLES = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "CUDA_", "NCCL_", "GLOO_")
MAX_ALTERNATIVES = 5


def make_plan(session: Session, winner: Entry, parity: Parity, baseline: Trial) -> Plan:
    """The plan for a verified winner."""
    ground = session.ground
    entries = enter(session.store.trials)
    base = next((entry for entry in entries if entry.config == baseline.config), None)
    base_times = base.step_times if base is not None else [_time(baseline)]
    return Plan(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        study=session.store.identity,
        workload=ground.spec,
        config=winner.config,
        accumulation=winner.config.accumulation(ground.spec.global_batch),
        device=ground.device,
        hardware=ground.hardware,
        prediction=session.predict(winner.config),
        measurement=measurement_of(session, winner),
        baseline=baseline,
        speedup=speed_ratio(winner, base_times),
        alternatives=tuple(_alternatives(session, winner, entries)),
        parity=parity,
        choices=tuple(_choices(session, winner, entries)),
        left_out=ground.left_out,
        evidence=session.store.trials,
        notes=tuple(session.notes),
        environment=read_environment(),
    )


def measurement_of(session: Session, entry: Entry) -> Measurement:
    """What was measured of a configuration, all runs that count together."""
    spec = session.ground.spec
    items = spec.global_batch * (spec.sequence_length or 1)
    flops = session.predict(entry.config).model_flops
    peak, source = peak_rate(session.ground.hardware.device(session.ground.device), entry.config.precision)
    step = entry.step_time
    mfu = None
    if flops and peak:
        mfu = flops / step.median / (peak * entry.config.world_size if session.ground.device == "cuda" else peak)
    runs = entry.runs
    return Measurement(
        step_time_s=step,
        tokens_per_s=invert(step, items),
        peak_memory_bytes=entry.peak_memory_bytes or None,
        mfu=mfu,
        mfu_peak_source=source if mfu is not None else None,
        method=entry.first.method or "whole_steps",
        trials=tuple(run.number for run in runs),
    )


def peak_rate(device: Device, precision: str) -> tuple[float | None, str | None]:
    """The dense peak in FLOP/s that MFU is held against, and where it comes from: datasheet, else measured."""
    dtype = PEAK_DTYPES[precision]
    sheet = device.datasheet_peak_flops_per_s.get(dtype)
    if sheet is not None and sheet.value:
        return sheet.value, f"datasheet of {device.datasheet_name}, {dtype}, dense"
    measured = device.peak_flops_per_s.get(dtype)
    if measured is not None and measured.value:
        return measured.value, f"best {dtype} matmul measured on this machine"
    return None, None


def speed_ratio(entry: Entry, reference: Sequence[Interval]) -> Interval:
    """How many times faster an entry is than the reference's runs."""
    return ratio_interval(entry.step_times, reference)


def _time(trial: Trial) -> Interval:
    assert trial.step_time_s is not None, "a good trial has a step time"
    return trial.step_time_s


def _alternatives(session: Session, winner: Entry, entries: Sequence[Entry]) -> list[Alternative]:
    """The next best, with how they compare and why they are not the plan."""
    found = []
    for entry in rank(entries):
        if entry.config == winner.config:
            continue
        ratio = speed_ratio(entry, winner.step_times)
        parity = session.store.parity_of(entry.config)
        if parity is not None and not parity.passed:
            why = "it fails parity: it would not train the same thing"
        elif ratio.low > 1.0:
            why = "measured faster in a single run, but not among the finalists"
        elif ratio.high >= 1.0:
            why = _tie_reason(winner, entry)
        else:
            why = f"{_percent_slower(ratio.median)} slower"
        found.append(
            Alternative(config=entry.config, measurement=measurement_of(session, entry), speed_ratio=ratio, why=why)
        )
    return found[:MAX_ALTERNATIVES]


def _tie_reason(winner: Entry, other: Entry) -> str:
    text = "cannot be told apart in speed; "
    difference = other.peak_memory_bytes - winner.peak_memory_bytes
    if difference > 0.05 * winner.peak_memory_bytes:
        return text + f"the plan takes {difference / 2**30:.2f} GiB less memory"
    if len(other.config.knobs_off_default()) > len(winner.config.knobs_off_default()):
        return text + "the plan is simpler"
    return text + "the plan has the better median"


def _percent_slower(ratio: float) -> str:
    return f"{(1 - ratio) * 100:.0f} %" if ratio > 0.5 else f"{1 / ratio:.1f} times"


# Why each knob has its value.


def _choices(session: Session, winner: Entry, entries: Sequence[Entry]) -> list[Choice]:
    return [
        Choice(knob=knob, value=getattr(winner.config, knob), reason=_reason(session, winner, entries, knob))
        for knob in KNOBS
        if knob in winner.config.knobs_off_default() or len(session.ground.space.values.get(knob, ())) > 1
    ]


def _reason(session: Session, winner: Entry, entries: Sequence[Entry], knob: str) -> str:
    """Fixed, the only one, measured against the trial that differs least, or the cost model's word."""
    value = getattr(winner.config, knob)
    if knob in session.options.fixed:
        return "fixed by you"
    if len(session.ground.space.values.get(knob, ())) <= 1:
        return _only_reason(session, knob)
    predicted = _predicted_reason(session, winner.config, knob)
    others = [entry for entry in entries if getattr(entry.config, knob) != value]
    if not others:
        return f"not measured otherwise; {predicted}"
    other = min(others, key=lambda entry: (len(_differences(entry.config, winner.config)), entry.step_time.median))
    rest = [name for name in _differences(other.config, winner.config) if name != knob]
    ratio = winner.step_time.median / other.step_time.median
    rival = f"{knob}={getattr(other.config, knob)} (trial {other.first.number})"
    if rest:
        return f"{_compare(ratio)} {rival}, which differs in {', '.join(rest)} too; taken alone, {predicted}"
    if ratio > 1.02:
        return f"{rival} was faster in its single run, but did not hold as a finalist or failed parity"
    if ratio >= 0.98:
        return f"as fast as {rival}; " + _tie_reason(winner, other).partition("; ")[2]
    return f"measured: {_compare(ratio)} {rival}"


def _differences(a: TrainingConfig, b: TrainingConfig) -> list[str]:
    return [knob for knob in KNOBS if getattr(a, knob) != getattr(b, knob)]


def _compare(ratio: float) -> str:
    if ratio < 0.98:
        return f"{1 / ratio:.2f} times as fast as"
    return "as fast as" if ratio <= 1.02 else f"{1 / ratio:.2f} times as fast (one run) as"


def _only_reason(session: Session, knob: str) -> str:
    for family in session.ground.left_out:
        if family.family.startswith(f"{knob}="):
            return f"the only value here ({family.family} left out: {family.limit})"
    return "the only value here"


def _predicted_reason(session: Session, config: TrainingConfig, knob: str) -> str:
    """What the calibrated cost model expects of the other values, all else equal."""
    mine = session.predict(config)
    near: list[str] = []
    values = list(session.ground.space.values.get(knob, ()))
    place = values.index(getattr(config, knob)) if getattr(config, knob) in values else 0
    for value in sorted(values, key=lambda value: abs(values.index(value) - place))[1:]:
        other = config.model_copy(update={knob: value})
        if other not in session.picker.legal:
            continue
        prediction = session.predict(other)
        change = prediction.step_time_s / mine.step_time_s - 1
        near.append(f"{knob}={value} {abs(change):.0%} {'slower' if change > 0 else 'faster'}")
    if not near:
        return "no other value is legal with the rest of the plan and predicted to fit"
    return "the calibrated cost model expects " + ", ".join(near[:4])


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """What is installed and set here."""
    source = os.environ if variables is None else variables
    return Environment(
        autoplan=_version("autoplan") or "source",
        torch=_version("torch") or "not installed",
        python=platform.python_version(),
        transformers=_version("transformers"),
        platform=platform.platform(),
        variables={name: value for name, value in sorted(source.items()) if name.startswith(SHOWN_VARIABLES)},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

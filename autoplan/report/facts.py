"""The facts of a plan, as rows of text: the terminal and the HTML page show the same text; and its Pareto front."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.baseline import YOURS, is_plain_run, run_words
from autoplan.planner.records.plan import DISTURBED, Measurement
from autoplan.planner.records.trials import Claim, Interval, LeftOutFamily, Outcome, Parity, Trial
from autoplan.planner.search.options import Candidate
from autoplan.planner.search.selection import collect_runs
from autoplan.planner.trials.measure import RUN_SPREAD, SLICED
from autoplan.report.pieces import ledger_end_s, minutes, time_words
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.units import format_bytes, format_number, format_seconds


class Rows(NamedTuple):
    """A table: its headings, and as many cells in each row."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def percent(share: float | None) -> str:
    """`31.0 %`; `unknown` for None."""
    return "unknown" if share is None else f"{share * 100:.1f} %"


def with_interval(interval: Interval | None, unit: str = "", *, words: Callable[[float], str] = format_number) -> str:
    """`1,234 tokens/s (1,220 to 1,250)`."""
    if interval is None:
        return "not measured"
    numbers = [words(value) for value in (interval.median, interval.low, interval.high)]
    return f"{numbers[0]}{unit} ({numbers[1]} to {numbers[2]})"


def baseline(plan: Plan) -> Measurement | Trial:
    """The baseline as it was measured beside the plan, where it was; else its one trial at the start.

    The speed-up is computed from the runs side by side, so the table shows those.
    """
    if plan.claim is None:  # else the plan's own baseline has the figures of those runs
        for alternative in plan.alternatives:
            if alternative.config == plan.baseline.config and alternative.measurement is not None:
                return alternative.measurement
    return plan.baseline


def baseline_mfu(plan: Plan) -> float | None:
    """Model FLOPs/s of the baseline over the peak that the plan's own MFU is a share of.

    The same peak for both, so that the two figures differ by the speed-up alone.
    """
    step = baseline(plan).step_time_s
    if plan.measurement.mfu is None or step is None:
        return None
    return plan.measurement.mfu * plan.measurement.step_time_s.median / step.median


def headline(plan: Plan) -> str:
    """How much faster the plan is than the baseline, what that rests on, and a bound against the hand setting."""
    if is_baseline(plan):
        return no_gain_words(plan)
    parts = "; step times put together from parts of a step" if plan.measurement.method == "parts" else ""
    return _against_baseline(plan) + parts + _claim_basis(plan.claim) + _against_hand(plan)


def headline_clause(plan: Plan) -> str:
    """The headline for a screen of few lines: how step times were made and how runs differ is left to `headline`."""
    if is_baseline(plan):
        return no_gain_words(plan)
    text = _against_baseline(plan).replace(" the speed of the plain baseline", " the plain run")
    text = text.replace(f" the speed of {YOURS}", f" {YOURS}")
    return text + _claim_basis(plan.claim).partition(", runs differ")[0] + _against_hand(plan).partition(" (")[0]


def plan_line(plan: Plan) -> str:
    """`plan of gpt2 (cpu): 3.03 times (2.90 to 3.16) the plain run, ...: micro_batch=1 precision=bf16`."""
    state = "" if plan.unverified is None else "UNVERIFIED "
    return f"{state}plan of {plan.workload.name} ({plan.device}): {headline_clause(plan)}: {plan.config.describe()}"


def is_baseline(plan: Plan) -> bool:
    """Whether the plan is the baseline: nothing faster was found, or proved."""
    return plan.config == plan.baseline.config


def no_gain_words(plan: Plan) -> str:
    """`no gain found in 10 m: the plan is the plain run`, and what makes that uncertain."""
    spent_s = ledger_end_s(plan.ledger)
    plain = reference_words(plan, "the plain run")
    text = f"no gain found{f' in {minutes(spent_s)}' if spent_s else ''}: the plan is {plain}"
    why_not = None if plan.claim is None else plan.claim.why_not
    return text + (f"; {why_not.partition('; ')[2]}" if why_not and "; " in why_not else "")


def reference_words(plan: Plan, plain: str = "the plain baseline") -> str:
    """The run that the plan is compared with: your setting with its knobs, the plain run, or what replaces either."""
    config, own = plan.baseline.config, plan.workload.own_setting
    words = run_words(config, own, plain, whole=True)
    if own is None and not is_plain_run(config):
        return f"{words} (the plain run does not fit)"
    return words if own is None or plan.has_own_baseline else f"{words} ({YOURS} does not run here)"


def baseline_name(plan: Plan) -> str:
    """What the baseline is called in a table or a drawing: `yours`, or `plain`."""
    return "yours" if plan.has_own_baseline else "plain"


def may_go_on(plan: Plan) -> bool:
    """Whether a larger budget may change a plan that is the baseline."""
    if plan.objective.name == "memory" or any(trial.purpose == "claim" for trial in plan.evidence):
        return True
    return plan.untried is not None and plan.untried.tried_next is not False


def _against_baseline(plan: Plan) -> str:
    """`1.42 times (1.35 to 1.50) the speed of the plain baseline`, or why that is not claimed."""
    text = f"{with_interval(plan.speedup, ' times')} the speed of {reference_words(plan)}"
    return text if plan.claim is None or plan.claim.why_not is None else f"{text} - {plan.claim.why_not}"


def _against_hand(plan: Plan) -> str:
    """The bound that the looks give: `at least 1.6 times the hand setting (...)`; it has no rounds of its own."""
    hand = plan.hand
    if hand is None:
        if plan.claim is None or plan.has_own_baseline:
            return ""
        return "; the hand setting was not looked at, and nothing is claimed against it"
    if hand.config == plan.baseline.config:
        return "; the baseline is the hand setting too"
    what, bound = f"the hand setting ({hand.config.describe()})", hand.speedup
    if hand.config == plan.config:
        return f"; it is {what}"
    if hand.claim.why_not is not None and hand.claim.why_not.startswith("disturbed"):
        return f"; nothing is claimed against {what}: {hand.claim.why_not.partition(': ')[2]}"
    if bound.low > 1.0:
        return f"; at least {format_number(bound.low)} times {what}"
    if bound.high >= 1.0:
        return f"; not told apart from {what}"
    why = ", which fails parity" if hand.config in plan.failed_parity else ""
    return f"; at most {format_number(bound.high)} times {what}{why}"


def _claim_basis(claim: Claim | None) -> str:
    """The measurements that the speed-up rests on."""
    if claim is None or not claim.rounds:
        return "" if claim is None else f"; from single trials, as the best of {claim.chosen_from}"
    rounds = f"{claim.rounds} round{'s' if claim.rounds > 1 else ''} side by side"
    repeats = f"measured over {claim.spread_repeats} repeats" if claim.spread_repeats else "assumed"
    if not claim.spread_repeats and claim.spread not in (RUN_SPREAD, SLICED.sd):
        repeats = "by how the speed of the cores changes"
    return f"; {rounds}, runs differ by {percent(claim.spread)} ({repeats})"


def comparison(plan: Plan) -> Rows:
    """The baseline against the plan."""
    base, best, unit = baseline(plan), plan.measurement, plan.workload.unit
    steps = [with_interval(one.step_time_s, words=format_seconds) for one in (base, best)]
    rows: list[tuple[str, ...]] = [
        (f"{unit}/s", with_interval(base.tokens_per_s), with_interval(best.tokens_per_s)),
        ("speed-up", "1", with_interval(plan.speedup)),
        ("step time", *steps),
        ("peak memory", format_bytes(base.peak_memory_bytes), format_bytes(best.peak_memory_bytes)),
        ("MFU", percent(baseline_mfu(plan)), percent(best.mfu)),
        ("timed by", method_words(base.method), method_words(best.method)),
    ]
    return Rows(("", f"baseline ({baseline_name(plan)})", "plan"), rows)


def method_words(method: str | None) -> str:
    """How a step was timed, as text."""
    return {"whole_steps": "whole steps", "parts": "parts of a step", None: "not timed"}.get(method, str(method))


def configuration(plan: Plan) -> Rows:
    """Each knob that the plan sets, and why; then those it leaves as they are, with a reason if there is one."""
    reasons = {choice.knob: choice.reason for choice in plan.choices}
    chosen = plan.config.knobs_off_default()
    rows: list[tuple[str, ...]] = [(knob, value_words(value), reasons.get(knob, "")) for knob, value in chosen.items()]
    ranks = f" x {plan.config.dp} data-parallel ranks" if plan.config.dp > 1 else ""
    product = f"{plan.config.micro_batch} x {plan.accumulation}{ranks} = {plan.workload.global_batch}"
    rows.insert(1, ("accumulation", str(plan.accumulation), f"keeps the global batch: {product}"))
    values = plan.config.model_dump()
    kept = [knob for knob in reasons if knob in values and knob not in chosen]
    rows += [(knob, value_words(values[knob]), reasons[knob]) for knob in kept]
    return Rows(("knob", "value", "why"), rows)


def value_words(value: object) -> str:
    """A knob's value; None is what torch does by itself."""
    return "torch's own" if value is None else str(value)


def by_reason(families: Sequence[LeftOutFamily]) -> list[LeftOutFamily]:
    """The families with the values of one knob together where the same limit rules them out by as much."""
    together: dict[tuple[str, str, str], list[LeftOutFamily]] = {}
    for family in families:
        knob, is_value, _ = family.family.partition("=")
        is_one = is_value and " " not in family.family
        together.setdefault((knob if is_one else family.family, family.limit, family.by), []).append(family)
    return [
        same[0].model_copy(
            update={
                "family": ", ".join([same[0].family, *(f.family.removeprefix(f"{knob}=") for f in same[1:])]),
                "configurations": sum(family.configurations for family in same),
            }
        )
        for (knob, _, _), same in together.items()
    ]


def left_out_rows(families: Sequence[LeftOutFamily]) -> Rows:
    """The configurations that were never tried: which limit ruled them out, and by how much."""
    rows: list[tuple[str, ...]] = [(f.family, f.limit, f.by, str(f.configurations)) for f in by_reason(families)]
    return Rows(("ruled out", "limit", "by how much", "how many"), rows)


def candidate_rows(candidates: Sequence[Candidate]) -> Rows:
    """The space of a dry run: what the cost model says of each."""
    rows: list[tuple[str, ...]] = []
    for candidate in candidates:
        said = candidate.prediction
        step = f"{format_seconds(said.step_time_s)} ({format_seconds(said.step_time_low_s)} to "
        step += f"{format_seconds(said.step_time_high_s)})"
        memory = f"{format_bytes(said.peak_memory_bytes)} (up to {format_bytes(said.peak_memory_high_bytes)})"
        if said.host_memory_bytes:
            memory += f", and {format_bytes(said.host_memory_bytes)} on the host"
        rows.append((candidate.config.describe(), step, memory, said.verdict.replace("_", " "), said.bound))
    return Rows(("configuration", "step time", "peak memory", "memory", "bound by"), rows)


def alternatives(plan: Plan) -> Rows:
    """The next best."""
    rows: list[tuple[str, ...]] = [
        (
            alternative.config.describe(),
            with_interval(None if alternative.measurement is None else alternative.measurement.tokens_per_s),
            "disturbed" if alternative.why.startswith(DISTURBED) else with_interval(alternative.speed_ratio),
            alternative.why,
        )
        for alternative in plan.alternatives
    ]
    return Rows(("next best", f"{plan.workload.unit}/s", "of the plan's speed", "why not"), rows)


def trial_rows(trials: Sequence[Trial], unit: str) -> Rows:
    """Every trial: what it ran, how it ended."""
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        end = "ok" if trial.outcome is Outcome.OK else f"{trial.outcome.value}: {trial.reason or trial.phase}"
        rows.append(
            (
                str(trial.number),
                trial.purpose,
                trial.config.describe(),
                with_interval(trial.tokens_per_s),
                format_bytes(trial.peak_memory_bytes),
                format_seconds(trial.seconds_spent),
                end + (" (from the record)" if trial.resumed else ""),
            )
        )
    return Rows(("#", "for", "configuration", f"{unit}/s", "peak memory", "took", "outcome"), rows)


def workload_line(spec: WorkloadSpec) -> str:
    """`gpt2, 1,024 tokens a sequence, global batch 32 sequences`; a function's own figures are not known at first."""
    length = f", {spec.sequence_length:,} tokens a sequence" if spec.sequence_length else ""
    samples = "sequences" if spec.sequence_length else "samples"
    if "global_batch" in spec.open_fields:
        return f"{spec.name}{length}, the global batch that the function gives"
    return f"{spec.name}{length}, global batch {spec.global_batch} {samples}"


def workload_notes(spec: WorkloadSpec) -> Iterator[tuple[str, str]]:
    """The facts of a workload besides its sizes: topic and text of each line.

    They say what throughput counts, how the size of the batches varies, and what no digest covers.
    """
    if spec.counted is not None:
        yield f"{spec.unit}/s", f"counts {spec.counted.describe()}"
    if spec.batch_sizes is not None:
        yield "batches", spec.batch_sizes.describe(spec.counted)
    if spec.unhashed:
        text = (
            f"{', '.join(spec.unhashed)}: a change of them is not seen, since they could only be hashed by their type"
        )
        yield "not hashed", text


def hardware_line(plan: Plan) -> str:
    """The device in a line."""
    device = plan.hardware.device(plan.device)
    cores = f", {device.cores} cores" if device.cores else ""
    nodes = "" if plan.nodes is None else f"{plan.nodes.describe()}, each node: "
    return f"{nodes}{device.name} ({device.type}{cores}, {format_bytes(device.memory_total_bytes.value)})"


def objective_words(plan: Plan) -> str | None:
    """The objective of the search, and the cost of a million units; None: throughput, without a price."""
    wanted = plan.objective
    cost = wanted.cost_per_million(plan.measurement.tokens_per_s.median, plan.config.world_size)
    price = "" if cost is None else f"; a million {plan.workload.unit} cost {format_number(cost)}"
    if wanted.name == "throughput" and not price:
        return None
    return wanted.describe() + price


class NextStep(NamedTuple):
    """What is done with a plan.

    Attributes:
        words: In a sentence.
        code: In the user's own program, where the plan was loaded as `plan`; "": there is nothing to apply.
        export: The command that writes it for a program without autoplan; "": none is offered.
    """

    words: str
    code: str = ""
    export: str = ""


def next_step(plan: Plan, path: str) -> NextStep:
    """The next step with a plan in a file, by what the plan was made of."""
    own, is_as_it_was = plan.workload.own_setting, plan.workload.taken_from == "" or plan.workload.is_step
    if is_baseline(plan) and (plan.has_own_baseline or (own is None and is_as_it_was and is_plain_run(plan.config))):
        return NextStep(f"nothing to apply: the plan is {run_words(plan.config, own)}")
    file, code, target = shlex.quote(path), _applying(plan), _export_target(plan)
    export = "" if target is None else f"autoplan export {file} --to {target}"
    call = code.splitlines()[0].partition(" = ")[2].partition("  #")[0]
    if plan.workload.kind not in ("function", "object") and export:
        return NextStep(f"{export}; or {call} in your script", code, export)
    words = f"{call} in your script, then autoplan run {file} SCRIPT"
    return NextStep(f"{words}; or {export}" if export else words, code, export)


def _applying(plan: Plan) -> str:
    """The lines of a program that trains by the plan."""
    samples = f"{plan.config.micro_batch * plan.accumulation} samples on each data-parallel rank"
    steps = f"for batch in loader:  # {samples}\n    result = run.step(batch)\n"
    match plan.workload.taken_from:
        case "":
            own = "plan.prepare(model, optimizer, loss)"
            is_here = plan.workload.kind == "object"
            return f"run = {own}\n{steps}" if is_here else f"run = plan.prepare()  # of your own: {own}\n{steps}"
        case "training loop":
            return f"run, loader = plan.apply_to(model, optimizer, loader, loss)\n{steps}"
        case "step function":
            return "step = plan.apply_to(make_step)\nfor index in range(steps):\n    loss = step(index)\n"
        case "LightningModule":
            call = "settings = plan.apply_to(module, datamodule)"
            return f"{call}\ntrainer = lightning.Trainer(**settings.trainer_arguments)\n"
        case _:
            return "trainer = plan.apply_to(trainer)\ntrainer.train()\n"


def _export_target(plan: Plan) -> str | None:
    """An export target that carries the plan and needs no autoplan; None: there is none, or it may have no shards."""
    config, spec = plan.config, plan.workload
    if not spec.taken_from and spec.kind != "object":
        return None if config.pp > 1 or (config.dp_shard > 1 and config.rounds_steps) else "pytorch"
    if config.tp * config.pp * config.dp_shard > 1 or spec.taken_from in ("", "step function"):
        return None
    return {"training loop": "accelerate", "LightningModule": "lightning"}.get(spec.taken_from, "transformers")


def loading(plan: Plan) -> Rows:
    """The settings of the loader that were measured beside the step."""
    rows = [] if plan.loading is None else plan.loading.rows
    return Rows(("loader", "samples/s", "waiting for data", "first batch", "measured"), rows)


def loading_words(plan: Plan) -> str | None:
    """The loader's setting, and how long the step waits; None: the search was given no loader."""
    found = plan.loading
    if found is None:
        return None
    own = "" if found.own_samples_per_s is None else f"; the step alone {format_number(found.own_samples_per_s)}"
    rate = "" if found.samples_per_s is None else f" ({format_number(found.samples_per_s)} samples/s{own})"
    beside = "" if found.batches == "dataset" else "; the step ran on make_batch's batches, beside the loader"
    return found.describe() + rate + beside


def measured_words(plan: Plan) -> str:
    """`401 tokens/s, a step in 81.6 s, 5.36 GiB of memory; plain: 133 tokens/s, 247 s, 6.30 GiB`."""
    base, best, unit = baseline(plan), plan.measurement, plan.workload.unit
    text = f"{format_number(best.tokens_per_s.median)} {unit}/s, a step in {format_seconds(best.step_time_s.median)}"
    text += f", {format_bytes(best.peak_memory_bytes)} of memory"
    if is_baseline(plan) or base.tokens_per_s is None or base.step_time_s is None:
        return text
    before = f"{format_number(base.tokens_per_s.median)} {unit}/s, {format_seconds(base.step_time_s.median)}"
    return f"{text}; {baseline_name(plan)}: {before}, {format_bytes(base.peak_memory_bytes)}"


def changed_words(plan: Plan) -> str | None:
    """The knobs that differ from the baseline: `precision=bf16 (fp32), compile=block (off)`; None: none does."""
    ours, plain = plan.config.model_dump(), plan.baseline.config.model_dump()
    changed = [f"{k}={value_words(v)} ({value_words(plain[k])})" for k, v in ours.items() if v != plain[k]]
    return ", ".join(changed) or None


def untried_clause(plan: Plan) -> str | None:
    """How many configurations were not tried, and what a longer search would try next; None: it is not known."""
    words = untried_words(plan)
    if words is None:
        return None
    return "; ".join(words.split("; ")[:2]).partition(": predicted")[0].replace(" were not tried;", ";", 1)


def untried_words(plan: Plan) -> str | None:
    """The configuration that a longer search tries next, and its possible gain; None: all were tried, or not known."""
    return None if plan.untried is None else plan.untried.describe("the plan's")


def about(plan: Plan) -> list[tuple[str, str]]:
    """The objective, the workload, and where the time went: topic and text of each line."""
    objective, time = objective_words(plan), time_words(plan.ledger, plan.workload.own_setting)
    lines = [] if objective is None else [("objective", objective)]
    lines += workload_notes(plan.workload)
    return lines if time is None else [*lines, ("time", time)]


def remarks(plan: Plan) -> list[tuple[str, str]]:
    """The other facts of a plan: topic and text of each line."""
    said = (("loader", loading_words(plan)), ("untried", untried_words(plan)))
    lines = [(topic, text) for topic, text in said if text is not None]
    if plan.measurement.mfu_peak_source:
        lines.append(("MFU", f"share of the peak: {plan.measurement.mfu_peak_source}; the same peak for both columns"))
    return [*lines, *(("note", note) for note in plan.notes)]


def parity_words(parity: Parity) -> str:
    """The result of a parity check, in a line."""
    if not parity.finished:
        return f"NOT FINISHED; {parity.note}"
    if parity.passed and not parity.global_batch and not parity.checks:
        return parity.note  # of a plan that needs no check
    changed = "changes the numerics within tolerance" if parity.changes_numerics else "the same numerics"
    verdict = f"passed, {changed}" if parity.passed else "FAILED"
    note = f"; {parity.note.rstrip('.')}" if parity.note else ""
    if parity.checks and all(check.name.startswith("losses") for check in parity.checks):  # of a step of its own
        return f"{verdict}{note}"
    return (
        f"{verdict}; largest difference in gradients {parity.worst_gradient_difference:.2g} and in the "
        f"update {parity.worst_update_difference:.2g} of {parity.tolerance:.2g} allowed, in {parity.worst_group}{note}"
    )


# The front of throughput and memory over the measured trials: what one search says of both at once.


class Point(NamedTuple):
    """A configuration that no other beats in both throughput and memory.

    Attributes:
        config: The configuration.
        items_per_s: Tokens (or samples) a second: the median over its runs.
        peak_memory_bytes: The highest peak of its runs, of one rank.
        share: Of the best throughput.
        cost_per_million: What a million tokens (or samples) cost; None without a price.
    """

    config: TrainingConfig
    items_per_s: float
    peak_memory_bytes: int
    share: float
    cost_per_million: float | None


def pareto_front(plan: Plan) -> list[Point]:
    """The front, fastest first; empty where no trial has a peak.

    Left out are configurations that failed parity, and those whose loss was not the baseline's and that no check
    passed. Only the plan's own parity is known to have passed: another point is checked when a search makes it the
    plan (`--objective memory --min-throughput SHARE`).
    """
    found = []
    for runs in (one.as_look for one in collect_runs(plan.evidence)):
        items = [run.items_per_step for run in runs.runs if run.items_per_step]
        rates = [run.tokens_per_s.median for run in runs.runs if run.tokens_per_s is not None]
        doubtful = runs.config != plan.config and any(run.loss_differs for run in runs.runs)
        if not rates or not runs.peak_memory_bytes or doubtful or runs.config in plan.failed_parity:
            continue
        rate = sum(items) / len(items) / runs.step_time.median if items else sorted(rates)[len(rates) // 2]
        found.append((rate, runs.peak_memory_bytes, runs.config))
    best = max((rate for rate, _, _ in found), default=0.0)
    front: list[Point] = []
    for rate, memory, config in sorted(found, key=lambda one: (-one[0], one[1])):
        if not front or memory < front[-1].peak_memory_bytes:
            cost = plan.objective.cost_per_million(rate, config.world_size)
            front.append(Point(config, rate, memory, rate / best, cost))
    return front


def pareto_rows(plan: Plan) -> Rows:
    """The front as a table."""
    unit, priced = plan.workload.unit, plan.objective.price_per_hour is not None
    rows: list[tuple[str, ...]] = [
        (
            point.config.describe() + (" (plan)" if point.config == plan.config else ""),
            format_number(point.items_per_s),
            f"{point.share:.0%}",
            format_bytes(point.peak_memory_bytes),
            *([format_number(point.cost_per_million)] if point.cost_per_million is not None else []),
        )
        for point in pareto_front(plan)
    ]
    cost = (f"cost of a million {unit}",) if priced else ()
    return Rows(("throughput against memory", f"{unit}/s", "of the best", "peak memory", *cost), rows)


def pareto_document(plan: Plan) -> list[dict[str, object]]:
    """The front for programs."""
    return [
        {
            "config": point.config.model_dump(mode="json"),
            f"{plan.workload.unit}_per_s": point.items_per_s,
            "share_of_best": point.share,
            "peak_memory_bytes": point.peak_memory_bytes,
            "cost_per_million": point.cost_per_million,
            "is_plan": point.config == plan.config,
        }
        for point in pareto_front(plan)
    ]

"""The space of a search: every legal configuration, and what was left out, with the reason.

Only legal candidates are made: the product of what each technique offers here, micro-batches that divide the global
batch, and the rules that couple knobs. What the user fixed or bounded narrows it. Loads no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.cost.columns import ConfigTable
from autoplan.planner.records.trials import LeftOutFamily
from autoplan.planner.space.bounds import Bound
from autoplan.strategies.analysis.facts import Choices, LeftOut
from autoplan.strategies.config import (
    DEGREES,
    KNOBS,
    LOSSY,
    PLAIN,
    TrainingConfig,
    knob_values,
    knobs,
    micro_batches,
)
from autoplan.strategies.knob_text import check_knob
from autoplan.strategies.techniques.degrees import with_gradient_sync
from autoplan.strategies.techniques.rules import RULES, Rule, incompatible

LOSSY_REASON = "it loses bits at each step, which a few steps cannot judge; tried by your word alone: --numerics lossy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The legal candidates, and the families that were left out.

    Attributes:
        candidates: Each legal configuration once, in a fixed order.
        left_out: What is not among them, and why.
        values: The values each knob takes over the candidates, in a fixed order.
    """

    candidates: ConfigTable
    left_out: tuple[LeftOutFamily, ...]
    values: Mapping[str, tuple[Any, ...]]

    def narrowed(self, candidates: ConfigTable, left_out: Sequence[LeftOutFamily]) -> Space:
        """The space with some of its candidates, and why the others are not among them."""
        used = {knob: candidates.used(knob) for knob in self.values}
        values = {knob: tuple(value for value in known if value in used[knob]) for knob, known in self.values.items()}
        return replace(self, candidates=candidates, left_out=(*self.left_out, *left_out), values=values)


def generate(
    choices: Sequence[Choices],
    *,
    global_batch: int,
    fixed: Mapping[str, Any] | None = None,
    bounds: Mapping[str, Bound] | None = None,
    degrees: Sequence[Mapping[str, Any]] = ({},),
    degrees_left_out: Sequence[LeftOut] = (),
) -> Space:
    """Makes the space.

    Args:
        choices: What each technique offers for this workload on this machine.
        global_batch: Samples per optimizer step; never changed.
        fixed: Knobs the user fixed.
        bounds: Knobs the user bounded.
        degrees: The legal combinations of degrees; one rank: the empty one.
        degrees_left_out: What is not among them.

    Raises:
        ConfigError: a fixed or bounded knob that leaves nothing, with the reason.
        WorkloadError: the micro-batch must be fixed by the user, and was not.
    """
    fixed, bounds = dict(fixed or {}), dict(bounds or {})
    for knob in (*fixed, *bounds):
        knob_values(knob)
    one_by_one = [choice for choice in choices if choice.knob not in DEGREES]
    values: dict[str, list[Any]] = {"micro_batch": list(micro_batches(global_batch))}
    values |= {choice.knob: list(choice.values) for choice in one_by_one}
    dropped = [left_out for choice in one_by_one for left_out in choice.left_out]
    for knob in set(values) - {*fixed, *bounds}:
        if knobs()[knob].unpriced:
            values[knob] = [getattr(PLAIN, knob)]
    for knob in list(values):
        values[knob] = narrow(knob, values[knob], dropped, fixed, bounds)
    combinations = _combinations(degrees, degrees_left_out, fixed, bounds)
    bases = list(_bases(values["micro_batch"], combinations, global_batch))
    others = {knob: allowed for knob, allowed in values.items() if knob != "micro_batch"}
    candidates = _products(bases, others, global_batch)
    if not candidates:
        asked = [f"{k}={v}" for k, v in fixed.items()] + [f"{k}={b.describe()}" for k, b in bounds.items()]
        raise ConfigError(
            f"the fixed and bounded knobs leave no legal configuration: {', '.join(asked)}",
            hint=_illegal_hint(bases, others, global_batch),
        )
    left_out = [_family_of(d, len(candidates) // max(1, len(values.get(d.knob, ())))) for d in dropped]
    left_out += [_family_of(d, d.configurations) for d in degrees_left_out]
    used = {knob: _in_order(knob, candidates.used(knob)) for knob in KNOBS}
    return Space(candidates=candidates, left_out=tuple(left_out), values=used)


def without_lossy(choices: Sequence[Choices]) -> list[Choices]:
    """The choices without the values that lose bits at each step, which are left out with the way to get them.

    What a technique leaves out by itself keeps its own reason.
    """
    kept = []
    for choice in choices:
        dropped = [value for value in choice.values if value in LOSSY.get(choice.knob, ())]
        reasons = (LeftOut(knob=choice.knob, value=value, reason=LOSSY_REASON) for value in dropped)
        values = tuple(value for value in choice.values if value not in dropped)
        kept.append(Choices(knob=choice.knob, values=values, left_out=(*choice.left_out, *reasons)))
    return kept


def narrow(
    knob: str, offered: list[Any], dropped: list[LeftOut], fixed: Mapping[str, Any], bounds: Mapping[str, Bound]
) -> list[Any]:
    """The values of a knob that the user allows.

    Raises:
        ConfigError: none of those offered, or a fixed one that is not offered, with the reason.
    """
    if knob in fixed:
        value = check_knob(knob, fixed[knob])
        if value in offered or (knob == "threads" and value is not None):
            return [value]
        if knob == "micro_batch" and not offered:
            return [value]
        raise ConfigError(f"{knob}={value} is not possible here: {_why_not(knob, value, dropped)}", hint=_hint(offered))
    if knob == "micro_batch" and not offered:
        raise WorkloadError(
            "the micro-batch of this workload must be fixed by you: " + _why_not(knob, None, dropped),
            hint="Fix it with --fix micro_batch=N, the micro-batch that the training is meant to have.",
        )
    if knob not in bounds:
        return offered
    allowed = [value for value in offered if bounds[knob].allows(value)]
    if not allowed:
        raise ConfigError(
            f"no value of {knob} that is possible here is within {bounds[knob].describe()}", hint=_hint(offered)
        )
    return allowed


def _why_not(knob: str, value: Any, dropped: Sequence[LeftOut]) -> str:
    reasons = [drop.reason for drop in dropped if drop.knob == knob and (value is None or drop.value == value)]
    if reasons:
        return reasons[0]
    if knob == "micro_batch":
        return "it does not divide the global batch, which is never changed"
    return "this workload does not offer it on this device"


def _hint(offered: Sequence[Any]) -> str:
    return "Possible here: " + ", ".join(map(str, offered)) + "."


def _family_of(left_out: LeftOut, configurations: int) -> LeftOutFamily:
    """The family that was left out, as the plan keeps it.

    Args:
        left_out: A value, or a combination of degrees.
        configurations: How many configurations it stands for.
    """
    return LeftOutFamily(family=left_out.family, limit=left_out.reason, by=left_out.by, configurations=configurations)


def _combinations(
    degrees: Sequence[Mapping[str, Any]],
    left_out: Sequence[LeftOut],
    fixed: Mapping[str, Any],
    bounds: Mapping[str, Bound],
) -> list[Mapping[str, Any]]:
    """The combinations of degrees, with the exchange knobs, that the user allows; ConfigError where there is none."""
    knob, asked = "gradient_sync", None
    if knob in fixed:
        asked = [check_knob(knob, fixed[knob])]
    elif knob in bounds:
        asked = [value for value in knob_values(knob) or () if bounds[knob].allows(value)]
    varied, reasons = with_gradient_sync(degrees, asked)
    combinations = [d for d in varied if _degrees_allowed(d, fixed, bounds)]
    if not combinations:
        named = ", ".join(f"{knob}={value}" for knob, value in fixed.items() if knob in DEGREES)
        raise ConfigError(
            f"no combination of degrees is left with {named or 'these bounds'}",
            hint="".join(f"{reason}. " for reason in reasons[:3]) + _degrees_hint(degrees, left_out),
        )
    return combinations


def _degrees_allowed(degrees: Mapping[str, Any], fixed: Mapping[str, Any], bounds: Mapping[str, Bound]) -> bool:
    for knob in DEGREES:
        value = degrees.get(knob, getattr(PLAIN, knob))
        if knob in fixed and value != fixed[knob]:
            return False
        if knob in bounds and not bounds[knob].allows(value):
            return False
    return True


def _degrees_hint(degrees: Sequence[Mapping[str, Any]], left_out: Sequence[LeftOut]) -> str:
    texts = [", ".join(f"{k}={v}" for k, v in d.items()) or "one rank" for d in degrees[:8]]
    reasons = [f"{found.family}: {found.reason}" for found in left_out[:3]]
    return "Possible here: " + "; ".join(texts) + ". " + " ".join(reasons) + " Use --nproc N for more ranks."


def _bases(sizes: Sequence[int], degrees: Sequence[Mapping[str, Any]], global_batch: int) -> Iterator[TrainingConfig]:
    """Each combination of degrees with each micro-batch that keeps the global batch, all other knobs plain.

    With a pipeline a step is one pass: more passes would leave stages idle more often.
    """
    for combination in degrees:
        first = PLAIN.model_copy(update=dict(combination))
        fitting = set(micro_batches(global_batch, first.dp))
        for micro_batch in sizes:
            if micro_batch not in fitting:
                continue
            base = first.model_copy(update={"micro_batch": micro_batch})
            if base.pp == 1 or base.accumulation(global_batch) == base.pp_microbatches:
                yield base


def _products(bases: Sequence[TrainingConfig], values: Mapping[str, Sequence[Any]], global_batch: int) -> ConfigTable:
    """Each base with each combination of the other knobs' values that goes with it, base by base.

    The answer is `incompatible`'s, for many configurations at once: each rule is asked once per combination of what it
    reads.
    """
    sizes = [len(allowed) for allowed in values.values()]
    places = np.indices(sizes, dtype=np.min_scalar_type(max(sizes, default=0)))
    all_codes = dict(zip(values, places.reshape(len(sizes), math.prod(sizes)), strict=True))
    reads = [[knob for knob in values if knob in rule.reads] for rule in RULES]
    answers: dict[tuple[Any, ...], NDArray[np.bool_]] = {}
    known: dict[bytes, NDArray[np.int32]] = {}
    legal = []
    for base in bases:
        refused = []
        for number, (rule, read) in enumerate(zip(RULES, reads, strict=True)):
            key = (number, *(getattr(base, knob) for knob in rule.reads if knob not in read))
            if key not in answers:
                answers[key] = _refused_by(rule, base, {knob: values[knob] for knob in read}, global_batch)
            refused.append(answers[key])
        text = b"".join(one.tobytes() for one in refused)
        if text not in known:
            goes = np.ones(math.prod(sizes), dtype=np.bool_)
            for read, one in zip(reads, refused, strict=True):
                goes &= ~one[tuple(all_codes[knob] for knob in read)]
            known[text] = np.flatnonzero(goes).astype(np.int32)
        legal.append(known[text])
    table, counts = ConfigTable.of(bases), [len(found) for found in legal]
    row = np.concatenate(legal) if legal else np.zeros(0, dtype=np.int32)
    codes = {knob: np.repeat(column, counts) for knob, column in table.codes.items()}
    codes |= {knob: column[row] for knob, column in all_codes.items() if len(values[knob]) > 1}
    return ConfigTable({**table.values, **values}, codes, len(row))


def _refused_by(
    rule: Rule, base: TrainingConfig, values: Mapping[str, Sequence[Any]], global_batch: int
) -> NDArray[np.bool_]:
    """The values that a rule refuses beside a configuration, with an axis for each of these knobs."""
    refused = np.zeros([len(allowed) for allowed in values.values()], dtype=np.bool_)
    for place in np.ndindex(refused.shape):
        row = {knob: allowed[at] for (knob, allowed), at in zip(values.items(), place, strict=True)}
        refused[place] = rule.incompatible(base.model_copy(update=row), global_batch) is not None
    return refused


def _illegal_hint(bases: Sequence[TrainingConfig], values: Mapping[str, Sequence[Any]], global_batch: int) -> str:
    """The first reasons why no configuration is legal."""
    if not bases:
        return f"micro_batch x dp_replicate x dp_shard must divide the global batch of {global_batch}."
    found = [incompatible(base, global_batch) for base in bases]
    if None in found:
        base = bases[found.index(None)]
        rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
        found = [incompatible(base.model_copy(update=row), global_batch) for row in rows]
    return "".join(f"{reason}. " for reason in list(dict.fromkeys(found))[:3] if reason is not None).strip()


def _in_order(knob: str, used: set[Any]) -> tuple[Any, ...]:
    allowed = knob_values(knob)
    if allowed is not None:
        return tuple(value for value in allowed if value in used)
    return tuple(sorted(used, key=lambda value: (value is not None, value or 0)))

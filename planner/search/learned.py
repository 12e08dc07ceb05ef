"""What searches on a device have learnt, kept for the next one, of another model too.

In: a finished (or ended) search. Out: a line in a file per device and version of torch; and, for the next search, a
`TakenOver`: where its cost model, its expected compile times and its spread between runs start.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from autoplan.files import read_regular, replace_file
from autoplan.planner.cost.calibrate import FACTORS, PRIOR_SD, Calibration
from autoplan.planner.records import Trial
from autoplan.planner.search.trial_cost import KeptCosts
from autoplan.planner.trials.measure import RUN_SPREAD, Spread
from autoplan.record import Record

VERSION = 1
MOST_STUDIES = 20
"""Of each device the newest so many searches are kept."""

OTHER_MODEL_SHARE = 0.5
"""How much a factor differs between models on one device, as a share of what it is taken to be off before any trial.
Assumed."""

TOLD_SHARE = 0.2
"""A search has told something of a factor if it knows it by this share more than the assumption did."""

LEAST_FREEDOM = 4
"""The spread of earlier searches counts from so many measured repeats on."""

LEAST_SPREAD = 0.01
"""The least spread that is taken over: another model may be less quiet."""

LOCK_S = 5.0


class LearnedStudy(Record):
    """What one search taught."""

    study: str = Field(description="identity of the study")
    workload: str
    when: str = Field(description="ISO date and time")
    trials: int = Field(ge=0)
    calibration: Calibration
    costs: KeptCosts
    spread: float = Field(ge=0, le=10, description="between runs of one configuration: standard deviation, as a share")
    freedom: int = Field(ge=0, description="measured repeats behind it")


class Learned(Record):
    """The file of a device."""

    version: int = VERSION
    device: str = Field(description="its name, for people")
    torch: str | None
    studies: tuple[LearnedStudy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver:
    """Where a search starts.

    Attributes:
        calibration: Of the cost model's factors of time; None: its own assumptions.
        costs: What trials cost.
        assumed_spread: Between runs of one configuration, for what is not measured yet.
        text: What was taken over, for the screen and the plan; None: nothing.
    """

    calibration: Calibration | None = None
    costs: KeptCosts | None = None
    assumed_spread: float = RUN_SPREAD
    text: str | None = None


NOTHING = TakenOver()


def learned_path(store: Path | None, fingerprint: str, device: str) -> Path:
    """The file of a device: the fingerprint is of the machine, its driver and the version of torch.

    Args:
        store: The folder that `--store` names; None: the user's state folder.
        fingerprint: Of the machine.
        device: cuda or cpu.
    """
    if store is None:
        import platformdirs

        store = Path(platformdirs.user_state_dir("autoplan"))
    return store / "learned" / f"{fingerprint}-{device}.json"


def load_learned(path: Path) -> tuple[Learned | None, str | None]:
    """The file of a device, and a sentence where it cannot be used."""
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"what earlier searches learnt ({path}) cannot be read: {error}; this search starts without it"
    try:
        learned = Learned.model_validate_json(text)
    except ValidationError:
        return None, f"what earlier searches learnt ({path}) is damaged or of another version; it is not used"
    if learned.version != VERSION or not all(map(_is_sound, learned.studies)):
        return None, f"what earlier searches learnt ({path}) is damaged or of another version; it is not used"
    return learned, None


def _is_sound(study: LearnedStudy) -> bool:
    """Whether the figures are those of a calibration: a covariance of the factors, and nothing that is not finite."""
    matrix = study.calibration.covariance
    figures = [*study.calibration.factors.values(), *study.costs.cold.values(), *(v for row in matrix for v in row)]
    return (
        set(study.calibration.factors) == set(FACTORS)
        and [len(row) for row in matrix] == [len(FACTORS)] * len(FACTORS)
        and all(math.isfinite(value) and abs(value) < 1e3 for value in figures)
        and all(matrix[i][i] > 0 for i in range(len(FACTORS)))
        and all(value > 0 for value in study.costs.cold.values())
    )


def take_over(learned: Learned | None, study: str) -> TakenOver:
    """What the searches other than `study` say together."""
    others = [] if learned is None else [one for one in learned.studies if one.study != study and one.trials]
    if not others:
        return NOTHING
    calibration, told = _pool(others)
    spread, freedom = _pool_spread(others)
    parts = [f"the calibration of predicted times ({', '.join(told)})"] if told else []
    compiled = any(one.costs.cold for one in others)
    parts.append(f"what starting {'and compiling ' if compiled else ''}a trial costs")
    if freedom >= LEAST_FREEDOM:
        parts.append(f"the spread between runs ({spread:.1%} over {freedom} repeats)")
    names = ", ".join(dict.fromkeys(one.workload for one in others[-3:]))
    text = (
        f"taken over from {len(others)} earlier search{'es' if len(others) > 1 else ''} on this device "
        f"({names}{', ...' if len(others) > 3 else ''}; the newest {_age(others[-1].when)}): {'; '.join(parts)}. "
        "--fresh starts without it"
    )
    return TakenOver(
        calibration=calibration if told else None,
        costs=_pool_costs(others),
        assumed_spread=max(spread, LEAST_SPREAD) if freedom >= LEAST_FREEDOM else RUN_SPREAD,
        text=text,
    )


def _pool(studies: Sequence[LearnedStudy]) -> tuple[Calibration, list[str]]:
    """The factors as all studies see them, each as far as its own trials pinned it down; and which were.

    Each study's posterior is taken apart into the assumption and what its trials said. What they said counts with its
    own variance and that between models.
    """
    theta, variance, told = np.zeros(len(FACTORS)), np.zeros(len(FACTORS)), []
    for index, name in enumerate(FACTORS):
        prior = 1 / PRIOR_SD[name] ** 2
        precision, weighted = prior, 0.0
        for study in studies:
            posterior = 1 / study.calibration.covariance[index][index]
            said = posterior - prior
            if said <= TOLD_SHARE * prior:
                continue
            mean = study.calibration.factors[name] * posterior / said
            weight = 1 / (1 / said + (OTHER_MODEL_SHARE * PRIOR_SD[name]) ** 2)
            precision += weight
            weighted += weight * mean
        theta[index], variance[index] = weighted / precision, 1 / precision
        if precision > prior:
            told.append(name)
    newest = studies[-1].calibration
    return (
        newest.model_copy(
            update={
                "factors": dict(zip(FACTORS, map(float, theta), strict=True)),
                "covariance": tuple(tuple(map(float, row)) for row in np.diag(variance)),
                "memory_base_bytes": 0.0,
                "trials": sum(study.trials for study in studies),
            }
        ),
        told,
    )


def _pool_spread(studies: Sequence[LearnedStudy]) -> tuple[float, int]:
    freedom = sum(study.freedom for study in studies)
    squares = sum(study.freedom * study.spread**2 for study in studies)
    return (math.sqrt(squares / freedom), freedom) if freedom else (RUN_SPREAD, 0)


def _pool_costs(studies: Sequence[LearnedStudy]) -> KeptCosts:
    """Medians over the studies that saw a figure themselves; where none did, what the newest took over."""
    costs = [study.costs for study in studies]

    def pooled(name: str, values: dict[int, float]) -> float:
        own = [value for index, value in values.items() if costs[index].saw(name)]
        return float(np.median(own)) if own else values[max(values)]

    scopes = {scope for one in costs for scope in one.cold}
    return KeptCosts(
        fixed_s=pooled("fixed_s", {index: one.fixed_s for index, one in enumerate(costs)}),
        cold={
            scope: pooled(scope, {index: one.cold[scope] for index, one in enumerate(costs) if scope in one.cold})
            for scope in sorted(scopes)
        },
        warm_share=pooled("warm_share", {index: one.warm_share for index, one in enumerate(costs)}),
        slow_factor=pooled("slow_factor", {index: one.slow_factor for index, one in enumerate(costs)}),
    )


def _age(when: str) -> str:
    try:
        seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError):
        return "of an unknown day"
    days = int(seconds // 86400)
    if days >= 1:
        return f"{days} day{'s' if days > 1 else ''} old"
    return f"{max(0, int(seconds // 3600))} h old" if seconds >= 3600 else f"{max(0, int(seconds // 60))} min old"


def starting_point(own: Path, path: Path, *, study: str, begins: bool, fresh: bool) -> tuple[TakenOver, str | None]:
    """Where a search starts, and a sentence where the device's file cannot be used.

    What a study began with stays with it: each later call of it starts from the same.

    Args:
        own: The study's own copy.
        path: The device's file.
        study: Its identity.
        begins: It has no trial yet.
        fresh: It starts from zero.
    """
    if own.exists() or not begins:
        learned, note = load_learned(own)
        return take_over(learned, study), note
    learned, note = (None, None) if fresh else load_learned(path)
    kept = learned or Learned(device="", torch=None)
    with contextlib.suppress(OSError):
        replace_file(own, kept.model_dump_json() + "\n")
    return take_over(learned, study), note


def keep_learned(path: Path, entry: LearnedStudy, *, device: str, torch: str | None) -> str | None:
    """Adds what a search learnt to the device's file; returns why it could not.

    What an earlier call of the same search wrote is replaced.

    Args:
        path: The device's file.
        entry: What the search learnt.
        device: Its name, for people.
        torch: Version of torch.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_S):
            known, _ = load_learned(path)
            others = () if known is None else tuple(one for one in known.studies if one.study != entry.study)
            learned = Learned(device=device, torch=torch, studies=(*others, entry)[-MOST_STUDIES:])
            replace_file(path, learned.model_dump_json(indent=1) + "\n")
    except (OSError, Timeout) as error:
        return f"what this search learnt could not be kept in {path.parent}: {error}"
    return None


def learnt(
    study: str, workload: str, trials: Sequence[Trial], *, calibration: Calibration, costs: KeptCosts, spread: Spread
) -> LearnedStudy | None:
    """What a search learnt; None where it measured fewer than two configurations."""
    if len({trial.config for trial in trials if trial.step_time_s is not None}) < 2:
        return None
    return LearnedStudy(
        study=study,
        workload=workload,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        trials=len(trials),
        calibration=calibration,
        costs=costs,
        spread=spread.sd if spread.freedom else 0.0,
        freedom=spread.freedom,
    )

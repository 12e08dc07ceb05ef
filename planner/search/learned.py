"""What a search has learnt of a device, kept for the next one, of another model too.

In: a finished (or ended) search. Out: a file per device and version of torch, which the next search there replaces; and
for the next search a `TakenOver`: where its cost model, its expected compile times and its spread between runs start.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from autoplan.files import read_regular, replace_file
from autoplan.planner.cost.calibrate import FACTORS, PRIOR_SD, Calibration
from autoplan.planner.search.trial_cost import KeptCosts
from autoplan.planner.trials.measure import RUN_SPREAD
from autoplan.record import Record

VERSION = 2

OTHER_MODEL_SHARE = 0.5
"""How much a factor differs between models on one device, as a share of what it is taken to be off before any trial.
Assumed."""

TOLD_SHARE = 0.2
"""A search has told something of a factor if it knows it by this share more than the assumption did."""

LEAST_FREEDOM = 4
"""The spread of an earlier search counts from so many measured repeats on."""

LEAST_SPREAD = 0.01
"""The least spread that is taken over: another model may be less quiet."""


class Learned(Record):
    """What the last search on a device taught."""

    version: int = VERSION
    device: str = Field(description="its name, for people")
    torch: str | None
    study: str = Field(description="identity of the study")
    workload: str
    when: str = Field(description="ISO date and time")
    trials: int = Field(ge=0)
    calibration: Calibration = Field(description="by its own trials alone")
    costs: KeptCosts = Field(description="what it did not see itself is as it was taken over")
    spread: float = Field(ge=0, le=10, description="between runs of one configuration: standard deviation, as a share")
    freedom: int = Field(ge=0, description="measured repeats behind it")


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
        learned = Learned.model_validate_json(read_regular(path))
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"what an earlier search learnt ({path}) cannot be read: {error}; this search starts without it"
    except ValidationError:
        learned = None
    if learned is None or learned.version != VERSION or not _is_sound(learned):
        return None, f"what an earlier search learnt ({path}) is damaged or of another version; it is not used"
    return learned, None


def _is_sound(learned: Learned) -> bool:
    """Whether the figures are those of a calibration: a covariance of the factors, and nothing that is not finite."""
    matrix = learned.calibration.covariance
    figures = [*learned.calibration.factors.values(), *learned.costs.cold.values(), *(v for row in matrix for v in row)]
    return (
        set(learned.calibration.factors) == set(FACTORS)
        and [len(row) for row in matrix] == [len(FACTORS)] * len(FACTORS)
        and all(math.isfinite(value) and abs(value) < 1e3 for value in figures)
        and all(matrix[i][i] > 0 for i in range(len(FACTORS)))
        and all(value > 0 for value in learned.costs.cold.values())
    )


def take_over(learned: Learned | None, study: str) -> TakenOver:
    """What the last search says, unless it was `study` itself."""
    if learned is None or learned.study == study or not learned.trials:
        return NOTHING
    calibration, told = _widened(learned.calibration)
    parts = [f"the calibration of predicted times ({', '.join(told)})"] if told else []
    parts.append(f"what starting {'and compiling ' if learned.costs.cold else ''}a trial costs")
    quiet = learned.freedom >= LEAST_FREEDOM
    if quiet:
        parts.append(f"the spread between runs ({learned.spread:.1%} over {learned.freedom} repeats)")
    text = (
        f"taken over from the last search on this device ({learned.workload}; {_age(learned.when)}): "
        f"{'; '.join(parts)}. --fresh starts without it"
    )
    return TakenOver(
        calibration=calibration if told else None,
        costs=learned.costs,
        assumed_spread=max(learned.spread, LEAST_SPREAD) if quiet else RUN_SPREAD,
        text=text,
    )


def _widened(found: Calibration) -> tuple[Calibration, list[str]]:
    """The factors for another model, each as far as the search's own trials pinned it down; and which they did.

    The posterior is taken apart into the assumption and what the trials said; what they said counts with its own
    variance and that between models.
    """
    theta, variance, told = np.zeros(len(FACTORS)), np.square(list(PRIOR_SD.values())), []
    for index, name in enumerate(FACTORS):
        prior, posterior = 1 / variance[index], 1 / found.covariance[index][index]
        said = posterior - prior
        if said <= TOLD_SHARE * prior:
            continue
        weight = 1 / (1 / said + (OTHER_MODEL_SHARE * PRIOR_SD[name]) ** 2)
        theta[index] = weight * found.factors[name] * posterior / said / (prior + weight)
        variance[index] = 1 / (prior + weight)
        told.append(name)
    return (
        found.model_copy(
            update={
                "factors": dict(zip(FACTORS, map(float, theta), strict=True)),
                "covariance": tuple(tuple(map(float, row)) for row in np.diag(variance)),
                "memory_base_bytes": 0.0,
            }
        ),
        told,
    )


def _age(when: str) -> str:
    try:
        hours = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(when)).total_seconds() / 3600
    except (ValueError, TypeError):
        return "of an unknown day"
    return f"{hours / 24:.0f} days old" if hours >= 48 else f"{max(0, int(hours))} h old"


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
    elif fresh:
        return NOTHING, None
    else:
        learned, note = load_learned(path)
        if learned is not None:
            with contextlib.suppress(OSError):
                replace_file(own, learned.model_dump_json() + "\n")
    return take_over(learned, study), note


def keep_learned(path: Path, learned: Learned) -> str | None:
    """Writes what a search learnt as the device's file; returns why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, learned.model_dump_json(indent=1) + "\n")
    except OSError as error:
        return f"what this search learnt could not be kept in {path.parent}: {error}"
    return None

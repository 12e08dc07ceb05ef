"""Tables of candidates of a real space that were all run for real, several times: which are recorded, and the reader.

benchmarks/search_tables.py records them; benchmarks/search_replay.py replays them. Older tables have two processes of
each candidate, and one step time of each process; those of EARLIER are bounded to a few knobs, too.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.probes.profile import CollectiveReading, HardwareProfile
from autoplan.strategies.config import KNOBS, TrainingConfig
from benchmarks.accuracy_local import GLOBAL_BATCH

EARLIER = Path(__file__).parent / "results" / "trials_saved"
LIMIT_BYTES = 8 << 30
SETUP, TRIALS = "setup.json.gz", "trials.jsonl"
"""The files of a table: what it was begun with, and a line for each trial."""

MOST_LOOKED_AT = 1500
"""Legal candidates among which the next one of a table is looked for, drawn by the seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One workload as recorded: its profile as the search had it, and the candidates' trials.

    A round is a pass over all candidates: one process of each. `planned` is how many were to be recorded.
    """

    name: str
    bounds: tuple[str, ...]
    legal: int
    profile: ModelProfile
    hardware: HardwareProfile
    rounds: tuple[list[Trial], ...]
    global_batch: int
    planned: int

    @property
    def candidates(self) -> list[TrainingConfig]:
        """The configurations, in the order in which they ran."""
        return [trial.config for trial in self.rounds[0]]

    @property
    def processes(self) -> dict[TrainingConfig, list[Trial]]:
        """By candidate: its trial of each round."""
        return {trials[0].config: list(trials) for trials in zip(*self.rounds, strict=True)}

    @property
    def plain(self) -> list[TrainingConfig]:
        """The plain runs, the largest micro-batch first."""
        return sorted(filter(is_plain, self.candidates), key=lambda config: -config.micro_batch)

    @property
    def seconds(self) -> np.ndarray[Any, Any]:
        """Step time of each candidate, the geometric mean of its rounds; infinite where it did not run in all."""
        return np.exp(np.mean(np.log(self._round_seconds), axis=0))

    @property
    def _round_seconds(self) -> np.ndarray[Any, Any]:
        return np.array([[_seconds(trial) for trial in trials] for trials in self.rounds])

    @property
    def peaks(self) -> np.ndarray[Any, Any]:
        """Peak memory of each candidate in bytes, the highest of its rounds."""
        return np.array([[trial.peak_memory_bytes or 0 for trial in trials] for trials in self.rounds]).max(axis=0)

    @property
    def apart(self) -> np.ndarray[Any, Any]:
        """How far two rounds of each candidate that ran in all are apart, as shares of the later; the mean of pairs."""
        times = self._round_seconds[:, np.isfinite(self.seconds)]
        return np.mean([abs(a / b - 1) for a, b in itertools.combinations(times, 2)], axis=0)

    @property
    def finished(self) -> bool:
        """Whether all candidates were measured in each round."""
        return len(self.candidates) == self.planned

    @property
    def disturbed(self) -> int:
        """How many of the trials were disturbed by other work."""
        return sum(trial.disturbed is not None for trials in self.rounds for trial in trials)

    @property
    def noise(self) -> float:
        """The noise floor: the median of `apart`, so that a disturbed minute of the record does not raise it."""
        return float(np.median(self.apart))

    def describe(self) -> str:
        """A sentence on what was recorded."""
        best, near = self.seconds.min(), max(0.02, self.noise)
        compiled = sum(config.compile != "off" for config in self.candidates)
        within = f" within {' '.join(self.bounds)}" if self.bounds else ""
        return (
            f"{self.name}: {len(self.candidates)} candidates ({compiled} compiled) of {self.legal}{within}; its "
            f"processes are {self.noise:.1%} apart (median; more than 25 %: {np.sum(self.apart > 0.25)} of "
            f"{len(self.apart)}); the best takes {best:.3f} s, {np.sum(self.seconds <= best * (1 + near))} are within "
            f"{near:.1%} of it"
        )


def is_plain(config: TrainingConfig) -> bool:
    """Whether nothing but the micro-batch is set: what a search may begin with."""
    return set(config.knobs_off_default()) == {"micro_batch"}


def _seconds(trial: Trial) -> float:
    good = trial.outcome is Outcome.OK and trial.step_time_s is not None
    return trial.step_time_s.median if good else math.inf  # type: ignore[union-attr]


def choose(legal: Sequence[TrainingConfig], eager: int, compiled: int, seed: int = 0) -> list[TrainingConfig]:
    """The plain runs, and so many eager and compiled candidates spread over the knobs; in an order drawn by the seed.

    Each value of each knob that varies occurs. Beyond that, each next one is that whose pairs of values were taken
    least so far: the pairs cover what single values leave confounded. The plain runs, and what it takes that each value
    occurs, are there even where they are more than was asked for.
    """
    rng = random.Random(seed)
    varied = [knob for knob in KNOBS if len({getattr(config, knob) for config in legal}) > 1]

    def values(config: TrainingConfig) -> frozenset[tuple[str, Any]]:
        return frozenset((knob, getattr(config, knob)) for knob in varied)

    def pairs(config: TrainingConfig) -> list[tuple[Any, ...]]:
        return list(itertools.combinations([(knob, getattr(config, knob)) for knob in varied], 2))

    taken = [config for config in legal if is_plain(config)]
    left = [config for config in legal if not is_plain(config)]
    rng.shuffle(left)
    of = {config: values(config) for config in legal}
    missing = frozenset().union(*of.values()) - frozenset().union(*(of[config] for config in taken))
    while missing:
        # compiled ones only for what no other has: each costs a compilation
        news = {config: len(missing & of[config]) for config in left}
        widest = max(left, key=lambda config: (config.compile == "off" and news[config] > 0, news[config]))
        left.remove(widest)
        taken.append(widest)
        missing -= of[widest]
    uses = Counter(pair for config in taken for pair in pairs(config))
    for is_compiled, most in ((False, eager), (True, compiled)):
        rest = [config for config in left if (config.compile != "off") is is_compiled][:MOST_LOOKED_AT]
        pairs_of = {config: pairs(config) for config in rest}
        there = sum((config.compile != "off") is is_compiled for config in taken)
        for _ in range(min(most - there, len(rest))):
            fewest = min(rest, key=lambda config: sum(uses[pair] for pair in pairs_of[config]))
            rest.remove(fewest)
            taken.append(fewest)
            uses.update(pairs_of[fewest])
    rng.shuffle(taken)
    return taken


def only_used(profile: ModelProfile, configs: Sequence[TrainingConfig]) -> ModelProfile:
    """The profile with the variants that predictions of these configurations may use."""
    half = {config.precision in ("bf16", "fp16") for config in configs}
    attentions, losses = {config.attention for config in configs}, {config.loss for config in configs}
    kept = {
        text: variant
        for text, variant in profile.variants.items()
        if (variant.key.precision == "half") in half
        and variant.key.attention in attentions
        and variant.key.loss in losses
    }
    return profile.model_copy(update={"variants": kept})


def read(folder: Path) -> list[Recorded]:
    """The tables of a folder, by name; of one that is not finished, the candidates that have all their processes."""
    found = [_read_document(path) for path in sorted(folder.glob("*.json.gz"))]
    found += [read_table(path.parent) for path in sorted(folder.glob(f"*/{SETUP}"))]
    return [recorded for recorded in found if recorded.candidates]


def read_setup(table: Path) -> dict[str, Any]:
    """The setup that a table was begun with."""
    setup: dict[str, Any] = json.loads(gzip.decompress((table / SETUP).read_bytes()))
    return setup


def processes_of(setup: dict[str, Any]) -> int:
    """How many processes of each candidate a table is to have."""
    return int(setup.get("processes", 2))


def read_table(table: Path) -> Recorded:
    """A table of benchmarks/search_tables.py: its candidates that have all their processes, in the order of the first.

    Of a trial that was measured again because it had been disturbed, the last line counts. A torn last line is left
    out.
    """
    setup = read_setup(table)
    passes: list[dict[int, Trial]] = [{} for _ in range(processes_of(setup))]
    lines = (table / TRIALS).read_text().split("\n")[:-1] if (table / TRIALS).exists() else []
    for document in map(json.loads, lines):
        passes[document["pass"]][document["candidate"]] = Trial.model_validate(document["trial"])
    whole = [number for number in passes[0] if all(number in one for one in passes)]
    return Recorded(
        name=table.name,
        bounds=tuple(setup["bounds"]),
        legal=setup["legal"],
        profile=_profile_of(setup),
        hardware=hardware_of(setup),
        rounds=tuple([one[number] for number in whole] for one in passes),
        global_batch=setup["global_batch"],
        planned=len(setup["candidates"]),
    )


def _profile_of(setup: dict[str, Any]) -> ModelProfile:
    """The model's profile; fields that earlier versions had are left out."""
    fields = {name: value for name, value in setup["profile"].items() if name in ModelProfile.model_fields}
    return ModelProfile.model_validate(fields)


def hardware_of(setup: dict[str, Any]) -> HardwareProfile:
    """The machine's profile; what earlier versions kept of collectives is left out."""
    known = CollectiveReading.model_fields
    collectives = [{name: one[name] for name in one if name in known} for one in setup["hardware"]["collectives"]]
    return HardwareProfile.model_validate(setup["hardware"] | {"collectives": collectives})


def _read_document(path: Path) -> Recorded:
    """A table as an earlier recorder wrote it: one document."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    rounds = tuple([Trial.model_validate(trial) for trial in trials] for trials in document["rounds"])
    return Recorded(
        name=path.name.removesuffix(".json.gz"),
        bounds=tuple(document["bounds"]),
        legal=document["legal"],
        profile=_profile_of(document),
        hardware=hardware_of(document),
        rounds=rounds,
        global_batch=GLOBAL_BATCH,
        planned=len(rounds[0]),
    )

"""The samples of one trial, by stretches of its window: those of disturbed stretches are set aside and measured again.

In: samples as they are timed, and a `LoadMonitor`. Out: the samples that count, and why they are disturbed if they are.
A stretch lasts `SHORTEST_STRETCH_S` at least, one step at most where steps take longer. All ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.planner.records import RECOMPILED
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.rank_sync import RankSync

MOST_RECOMPILES = 2
"""So many stretches with a compilation are not counted as time spent on measuring; further ones are."""

Parts = dict[str, list[float]]


@dataclass(kw_only=True)
class Stretches:
    """Samples, in seconds by part of a step.

    Attributes:
        load: Judges each stretch.
        ranks: Makes all ranks judge alike.
        most_extra_s: Time that may be spent on measuring again.
        clean: Samples of stretches in which nothing else used the device.
        aside: Samples of the other stretches.
        current: Samples of the stretch that is not judged yet.
        problem: Why the last samples were set aside.
    """

    load: LoadMonitor
    ranks: RankSync
    most_extra_s: float
    clean: Parts = field(default_factory=dict)
    aside: Parts = field(default_factory=dict)
    current: Parts = field(default_factory=dict)
    problem: str | None = None
    _lost_s: float = 0.0
    _compiling_s: float = 0.0
    _recompiles: int = 0
    _began: bool = False

    def begin(self) -> None:
        """Begins a stretch; samples of an unfinished one are dropped."""
        self.current = {}
        self._began = True
        self.load.begin()

    def add(self, times: Mapping[str, list[float]]) -> None:
        """Adds samples to the stretch, and judges it if it is long enough."""
        if not self._began:
            self.begin()
        _extend(self.current, times)
        if self.is_long_enough():
            self.close()

    def is_long_enough(self) -> bool:
        """Whether the stretch can be judged: the kernel's figures are coarse."""
        return self.ranks.any(self.load.is_long_enough)

    def is_clean(self) -> bool:
        """Whether nothing has disturbed the stretch up to now; it goes on."""
        return not self.ranks.any(self.load.end() is not None)

    def close(self) -> bool:
        """Judges the stretch and begins another; returns whether it was clean."""
        seconds = self.load.seconds
        found = self.load.end()
        recompiled = found == RECOMPILED
        flags = self.ranks.largest([float(found is not None), float(recompiled), seconds])
        disturbed, any_recompiled, seconds = flags[0] > 0, flags[1] > 0, flags[2]
        if disturbed:
            elsewhere = (
                f"{RECOMPILED} on another rank" if any_recompiled else "the device of another rank was disturbed"
            )
            self._set_aside(found or elsewhere, seconds, recompiled=any_recompiled)
        else:
            _extend(self.clean, self.current)
        self.begin()
        return not disturbed

    def _set_aside(self, reason: str, seconds: float, *, recompiled: bool) -> None:
        """Keeps the samples apart. `recompiled` and the seconds are those of all ranks: `extra_s` ends measuring."""
        self.problem = reason
        self.load.discard(reason)
        _extend(self.aside, self.current)
        if recompiled and self._recompiles < MOST_RECOMPILES:
            self._recompiles += 1
            self._compiling_s += seconds
        else:
            self._lost_s += seconds

    @property
    def extra_s(self) -> float:
        """Seconds that measuring may take longer because of what was set aside."""
        return self._compiling_s + min(self._lost_s, self.most_extra_s)

    def so_far(self) -> Parts:
        """The samples that count if nothing more comes: those not set aside."""
        found: Parts = {}
        _extend(found, self.clean)
        _extend(found, self.current)
        return found

    def everything(self) -> Parts:
        """All samples, also those that were set aside."""
        found = self.so_far()
        _extend(found, self.aside)
        return found


def _extend(parts: Parts, more: Mapping[str, list[float]]) -> None:
    for part, seconds in more.items():
        parts.setdefault(part, []).extend(seconds)

"""Stretches on several ranks: what one rank sees decides on all of them, and all agree on the time that is left.

Two ranks in threads here; what they exchange is the largest of their values, as in a trial.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autoplan.planner.records.trials import RECOMPILED
from autoplan.planner.trials.load import MOST_RECOMPILES, LoadMonitor, Stretches
from autoplan.planner.trials.ranks import RankSync

CPU = torch.device("cpu")
OTHERS = "other work took 48% of the CPU time"
RANKS = 2


class Exchange:
    """Where two threads leave their values; a thread that waits for another in vain raises an error."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=10)
        self.given: dict[int, list[float]] = {}


class ThreadSync(RankSync):
    """The ranks' agreement, between threads. Counts the exchanges."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(RANKS, CPU)
        self.exchange, self.rank, self.calls = exchange, rank, 0

    def largest(self, values: Sequence[float]) -> list[float]:
        self.calls += 1
        self.exchange.given[self.rank] = list(values)
        self.exchange.barrier.wait()
        found = [max(pair) for pair in zip(*self.exchange.given.values(), strict=True)]
        self.exchange.barrier.wait()
        return found


class ScriptedLoad(LoadMonitor):
    """Says of each stretch what the test says. Each lasts a second, on the second rank two."""

    def __init__(self, problems: Sequence[str | None], rank: int) -> None:
        super().__init__(device=CPU, root_pid=os.getpid())
        self.problems, self.rank = list(problems), rank

    @property
    def seconds(self) -> float:
        return 1.0 + self.rank

    @property
    def is_long_enough(self) -> bool:
        return True

    def end(self) -> str | None:
        return self.problems.pop(0)


def on_two_ranks(*problems: tuple[str | None, str | None]) -> list[Stretches]:
    """The stretches of both ranks, after as many as there are problems: of each, what the two ranks see."""
    exchange = Exchange()

    def rank(number: int) -> Stretches:
        load = ScriptedLoad([pair[number] for pair in problems], number)
        stretches = Stretches(load=load, ranks=ThreadSync(exchange, number), most_extra_s=1.5)
        for _ in problems:
            stretches.add({"step": [0.1]})
        return stretches

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


@pytest.mark.parametrize(
    ("problems", "extra_s"),
    [
        ([(RECOMPILED, None)], 2.0),  # a compilation counts whole: the seconds of the slower rank
        ([(None, RECOMPILED)], 2.0),
        ([(RECOMPILED, OTHERS)], 2.0),
        ([(None, OTHERS)], 1.5),  # other work only up to the limit
        ([(RECOMPILED, None)] * (MOST_RECOMPILES + 1), 2.0 * MOST_RECOMPILES + 1.5),
        ([(None, None)], 0.0),
    ],
)
def test_all_ranks_have_the_same_time_left(problems: list[tuple[str | None, str | None]], extra_s: float):
    one, other = on_two_ranks(*problems)
    assert one.extra_s == other.extra_s == extra_s
    assert one.aside == other.aside and one.clean == other.clean
    assert isinstance(one.ranks, ThreadSync) and isinstance(other.ranks, ThreadSync)
    assert one.ranks.calls == other.ranks.calls


def test_a_rank_says_what_it_saw_or_that_another_did():
    one, other = on_two_ranks((RECOMPILED, None))
    assert (one.problem, other.problem) == (RECOMPILED, f"{RECOMPILED} on another rank")
    one, other = on_two_ranks((None, OTHERS))
    assert (one.problem, other.problem) == ("the device of another rank was disturbed", OTHERS)

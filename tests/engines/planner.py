"""A planner as a process of its own: the real search on a shared record, over runs that are drawn (stand_in.py).

    python -m tests.engines.planner URL FOLDER [--lease S] [--run S] [--seed N] [--hours H]

On stdout it says what it does, one line of JSON each: {"work": "look", ...}, at last {"status": ..., "plan": ...}.
A run takes `--run` real seconds, so that something can end the planner in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.records.trials import Trial
from autoplan.planner.search.next_work import Work
from autoplan.planner.store import database
from autoplan.planner.store.store import Store
from autoplan.planner.trials.runner import TrialOrder
from tests.planner.search.stand_in import Observer, Searches, World, usual_s


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


@dataclass(kw_only=True)
class SlowWorld(World):
    run_s: float = 0.1

    def run(self, order: TrialOrder) -> Trial:
        time.sleep(self.run_s)
        return super().run(order)


class Speaker(Observer):
    def on_work(self, work: Work, best: Trial | None, budget: Any) -> None:
        say(work=work.kind, config=None if work.config is None else work.config.describe())

    def on_note(self, text: str) -> None:
        say(note=text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lease", type=float, default=database.LEASE_S)
    parser.add_argument("--run", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", default="autoplan")
    parser.add_argument("--hours", type=float, help="--max-device-hours, of drawn time")
    given = parser.parse_args(arguments)
    database.LEASE_S, database.BEAT_S = given.lease, given.lease / 9
    patch = pytest.MonkeyPatch()
    share_plan = Store.share_plan

    def slow_share(store: Store) -> None:
        say(work="end", config=None)
        share_plan(store)
        time.sleep(given.run)

    patch.setattr(Store, "share_plan", slow_share)

    def passes(config: Any) -> bool:
        time.sleep(given.run)
        return True

    world = SlowWorld(run_s=given.run, predicted=lambda config: 0.6, width=4.0, sd=0.02, passes=passes, seed=given.seed)
    # the size of the micro-batch changes nothing: the fastest ones are told apart in pairs, if at all
    world.seconds = lambda config: usual_s(config.model_copy(update={"micro_batch": 8}))
    searches = Searches(given.folder, patch)
    options = {"budget": 3000.0, "storage": given.url, "sampler": given.sampler, "max_device_hours": given.hours}
    found = searches.search(world, observer=Speaker(), **options)
    plan = found.result.plan
    say(
        status=found.result.status,
        reason=found.result.reason,
        plan=None if plan is None else plan.model_dump(mode="json"),
    )


if __name__ == "__main__":
    main()

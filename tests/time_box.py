"""A time box for live searches: `python -m tests.time_box search ...` is `autoplan search ...` within it.

How many rounds a claim has, and when a pair is made, is tested by searches without processes
(tests/planner/search/stand_in.py). A live search shows that real processes do each piece, and makes few of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def set_time_box(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Two rounds of a claim and of a staircase, and no pairs; `change` is what sets an attribute."""
    from autoplan.planner.search import claim, next_work
    from autoplan.planner.verify import climb

    change(claim, "MOST_ROUNDS", claim.LEAST_ROUNDS)
    change(claim, "ROUNDS_WITHOUT_HOPE", claim.LEAST_ROUNDS)
    change(claim, "ROUNDS_AGAIN", 1)
    change(climb, "ROUNDS", claim.LEAST_ROUNDS)
    change(climb, "ROUNDS_AGAIN", 1)
    change(next_work, "LEAST_PAIR_GAIN", math.inf)


if __name__ == "__main__":
    from autoplan.cli import main

    set_time_box()
    main()

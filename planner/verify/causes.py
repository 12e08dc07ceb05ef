"""Why a training is slower than its plan, as far as it can be seen: the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.errors import AutoplanError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import Difference, find_differences
from autoplan.planner.records.trials import RECOMPILED, Window
from autoplan.planner.verify.verdict import find_causes

DATA_SHARE = 0.05
"""Waiting for batches for more of the time than this is a cause: a plan's trials do not load data."""

LARGER = 1.1
"""Batches with so many times the plan's positions are a cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The observations of one window.

    Attributes:
        problem: What the monitor of the load says; None: nothing.
        window: Its figures.
        data_share: Of the time, waiting for batches; None: not known.
        positions_per_step: Tokens with padding, of a step over all ranks; None: not known.
    """

    problem: str | None
    window: Window | None
    data_share: float | None
    positions_per_step: float | None


def describe_causes(plan: Plan, seen: Seen, differences: Sequence[Difference]) -> list[str]:
    """The causes of a slow window, in sentences; never empty.

    Args:
        plan: The plan.
        seen: In the window.
        differences: Between where the plan was found and here.
    """
    texts = []
    if seen.problem is not None and seen.problem.startswith(RECOMPILED):
        texts.append(f"{RECOMPILED}: shapes or modes change between steps")
    if seen.data_share is not None and seen.data_share > DATA_SHARE:
        texts.append(
            f"the training waited {seen.data_share:.0%} of the time for batches, and the plan's trials load none: more "
            "loader workers, or batches that are prepared before"
        )
    measured = _positions(plan)
    if measured is not None and seen.positions_per_step is not None and seen.positions_per_step > LARGER * measured:
        texts.append(
            f"batches are larger than measured: {seen.positions_per_step:,.0f} {plan.workload.unit} with padding a "
            f"step, {measured:,.0f} then"
        )
    window = seen.window
    if window is not None and window.disturbed is not None and window.disturbed.startswith(RECOMPILED):
        window = window.model_copy(update={"disturbed": None})
    causes = find_causes(plan, window, differences)
    if not texts or any(cause.kind != "unknown" for cause in causes):
        texts += [cause.text for cause in causes]
    return texts


def _positions(plan: Plan) -> float | None:
    """Of a step's batch with padding, as the search saw them."""
    sizes = plan.workload.batch_sizes
    return None if sizes is None else sizes.positions.mean


def differences_here(plan: Plan) -> list[Difference]:
    """The differences between where a plan was found and here; none if this machine cannot be read."""
    from autoplan.probes.run import read_host_profile

    try:
        return find_differences(plan, read_host_profile())
    except (AutoplanError, OSError):
        return []

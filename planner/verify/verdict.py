"""The verdict of a verification, with its reasons, from a parity check and one trial here.

In: the plan, a `Parity`, a `Trial`, this machine. Out: a `Verification`. Nothing is run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import Difference
from autoplan.planner.records.trials import Interval, Outcome, Parity, Trial, Window
from autoplan.planner.trials.measure import RUN_SPREAD, Spread, invert, ratio_interval
from autoplan.probes.nvml import SLOWDOWNS
from autoplan.record import Record

Verdict = Literal[
    "holds", "faster", "slower", "does_not_fit", "does_not_run", "trains_otherwise", "not_checked", "did_not_run"
]
CauseKind = Literal["others", "clocks", "quota", "hardware", "versions", "environment", "unknown"]

EXIT_CODES: dict[Verdict, int] = {"holds": 0, "faster": 0, "did_not_run": 4}
"""Of `autoplan verify`; 3 for each other verdict. One that is slower because of what passes (`BUSY`) ends with 4, as a
busy device does."""

BUSY: tuple[CauseKind, ...] = ("others", "clocks", "quota")

LEAST_DIFFERENCE = RUN_SPREAD
"""A plan holds where the speed differs by less than this, however narrow the intervals are: they were measured in one
sitting, and runs of the same configuration on other days differ by about as much (MLPerf Training's imaging tasks)."""

OTHERS_CPU_SHARE, OTHERS_GPU_SHARE = 0.25, 0.05
"""Of the cores, and of the GPU: more by other processes is a cause, also where no step was disturbed by it alone."""

QUOTA_SHARE = 0.05
"""A quota that stops the processes for more of the time than this is a cause."""

CLOCK_SHARE = 0.03
"""A median clock that is lower by more than this is a cause."""

CORE_FACTOR = 1.1
"""So many times as slow a core is a cause: a fixed calculation on it scatters by a few percent on a quiet machine."""


class Cause(Record):
    """Why a plan is slower here than where it was measured, as far as it can be seen."""

    kind: CauseKind
    text: str


class Verification(Record):
    """The result of `verify`: the verdict, the speed against the plan's, likely causes."""

    verdict: Verdict
    text: str = Field(description="the verdict as a sentence")
    speed_ratio: Interval | None = Field(description="tokens/s here over the plan's; None where it did not run")
    spread: str = Field(description="between runs of one configuration, and how that is known")
    causes: tuple[Cause, ...] = Field(default=(), description="of a slower speed, the likeliest first")
    parity: Parity
    trial: Trial
    memory_limit_bytes: int
    exit_code: int


def judge(
    plan: Plan, parity: Parity, trial: Trial, differences: Sequence[Difference], memory_limit_bytes: int
) -> Verification:
    """The verdict on a plan.

    Args:
        plan: The plan.
        parity: Of its configuration, here.
        trial: One of its configuration, here.
        differences: Between where it was found and here.
        memory_limit_bytes: Of the trial.
    """
    known, spread = plan.claim, Spread()  # between runs of one configuration, as the plan's search measured it
    if known is not None:
        spread = Spread(sd=known.spread, freedom=known.spread_repeats, assumed=max(RUN_SPREAD, known.spread))
    ratio = None
    if trial.outcome is Outcome.OK and trial.tokens_per_s is not None:
        here, then = invert(trial.tokens_per_s, 1.0), invert(plan.measurement.tokens_per_s, 1.0)
        ratio = ratio_interval([here], [then], spread)
    verdict, text = _decide(parity, trial, ratio)
    causes = tuple(find_causes(plan, trial.window, differences)) if verdict == "slower" else ()
    busy = any(cause.kind in BUSY for cause in causes)
    return Verification(
        verdict=verdict,
        text=text,
        speed_ratio=ratio,
        spread=spread.describe(),
        causes=causes,
        parity=parity,
        trial=trial,
        memory_limit_bytes=memory_limit_bytes,
        exit_code=4 if busy else EXIT_CODES.get(verdict, 3),
    )


def _decide(parity: Parity, trial: Trial, ratio: Interval | None) -> tuple[Verdict, str]:
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return "does_not_fit", f"the plan does not fit here: {trial.reason}"
    if trial.did_not_run:
        return "did_not_run", f"nothing is known of it: {trial.reason}"
    if ratio is None:
        return "does_not_run", f"the plan does not run here: {trial.outcome.value}: {trial.reason}"
    if not parity.finished:
        return "not_checked", f"the plan could not be checked here: {parity.note}"
    if not parity.passed:
        return "trains_otherwise", "the plan fails the parity check here: it would not train the same thing"
    share = f"{ratio.median:.0%} of the plan's speed ({ratio.low:.0%} to {ratio.high:.0%})"
    if ratio.low > 1.0 and ratio.median > 1.0 + LEAST_DIFFERENCE:
        return "faster", f"it is faster here: {share}"
    if ratio.high < 1.0 and ratio.median < 1.0 - LEAST_DIFFERENCE:
        return "slower", f"it is slower here: {share}"
    return "holds", f"the plan holds: {share}"


def find_causes(plan: Plan, window: Window | None, differences: Sequence[Difference]) -> list[Cause]:
    """Why a plan may be slower than it was measured: what was seen while it ran, then what differs.

    Args:
        plan: The plan.
        window: What others did while it ran here; None: not known.
        differences: Between where it was found and here.
    """
    same_hardware = all(difference.kind != "hardware" for difference in differences)
    causes = [] if window is None else list(_seen(plan, window, same_hardware))
    causes += [Cause(kind=difference.kind, text=difference.text) for difference in differences]
    nothing = "nothing that explains it was seen: the same hardware and versions, and nothing else ran"
    return causes or [Cause(kind="unknown", text=nothing)]


def _seen(plan: Plan, window: Window, same_hardware: bool) -> Iterator[Cause]:
    slowed = sorted(SLOWDOWNS.intersection(window.clock_events))
    if slowed:
        yield Cause(kind="clocks", text=f"the GPU was throttled ({', '.join(slowed)})")
    then, now = _then(plan, "sm_clock_hz"), window.sm_clock_hz
    if not slowed and then is not None and now is not None and now < (1.0 - CLOCK_SHARE) * then:
        text = f"the GPU's clock was {now / 1e6:.0f} MHz, and {then / 1e6:.0f} MHz where the plan was measured"
        yield Cause(kind="clocks", text=text)
    there, here = _then(plan, "core_s") if same_hardware else None, window.core_s
    if there is not None and here is not None and here > CORE_FACTOR * there:
        text = f"a fixed calculation took {here * 1e3:.2f} ms, and {there * 1e3:.2f} ms there"
        yield Cause(kind="clocks", text=f"the cores were slower than where the plan was measured: {text}")
    if window.disturbed is not None and not slowed:
        yield Cause(kind="others", text=window.disturbed)
    elif window.gpu_others_share is not None and window.gpu_others_share > OTHERS_GPU_SHARE:
        yield Cause(kind="others", text=f"other processes took {window.gpu_others_share:.0%} of the GPU")
    elif (window.others_cpu_share or 0.0) > OTHERS_CPU_SHARE:
        yield Cause(kind="others", text=f"other processes took {window.others_cpu_share:.0%} of the cores")
    if window.throttled_s > QUOTA_SHARE * window.seconds:
        share = window.throttled_s / max(window.seconds, 1e-9)
        text = f"the container's CPU quota was used up: processes stood still for {share:.1f} s a second"
        yield Cause(kind="quota", text=text)


def _then(plan: Plan, figure: Literal["sm_clock_hz", "core_s"]) -> float | None:
    """A figure of the windows of the trials that the plan's speed is of: the median."""
    windows = [trial.window for trial in plan.evidence if trial.number in plan.measurement.trials]
    known = [value for window in windows if (value := getattr(window, figure, None))]
    return statistics.median(known) if known else None

"""The harness that sets promises beside what mends give."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.planner.records.trials import Interval
from tests.planner.diagnose.test_diagnose import SCRIPTS
from tests.planner.diagnose.tried import agrees, all_agree, in_process, row_of, together


def interval(median: float, low: float, high: float) -> Interval:
    return Interval(median=median, low=low, high=high, samples=3)


def finding(cause: str, gain: Interval, *, measured: bool = True) -> dict[str, Any]:
    return {"cause": cause, "gain": gain.model_dump(), "measured": measured}


@pytest.mark.parametrize(
    ("promise", "measured", "gave", "same"),
    [
        (interval(2.0, 1.9, 2.1), True, interval(2.15, 2.1, 2.2), True),  # within 10 %
        (interval(2.0, 1.5, 2.6), True, interval(2.4, 1.9, 2.9), True),  # each in the other's interval
        (interval(2.0, 1.9, 2.6), True, interval(2.4, 2.3, 2.9), False),
        (interval(2.0, 2.0, 2.0), False, interval(1.5, 1.4, 1.6), True),  # "up to"
        (interval(2.0, 2.0, 2.0), False, interval(0.9, 0.8, 1.0), False),
    ],
)
def test_a_promise_agrees_with_what_the_mend_gave(
    promise: Interval, measured: bool, gave: Interval, same: bool
) -> None:
    assert agrees(finding("saving", promise, measured=measured), gave) == same


@pytest.mark.parametrize(
    ("name", "causes", "first"),
    [
        ("glyph_ae", ["saving"], "yes"),
        ("glyph_ae", ["fused", "saving"], "later"),
        ("glyph_ae", ["fused"], "no"),
        ("glyph_ae", [], "no"),
        ("energy_mlp", [], "none, right"),
        ("energy_mlp", ["fused"], "WRONG: it is healthy"),
        ("nobody_judged_it", ["fused"], "open"),
    ],
)
def test_a_row_says_whether_the_planted_cause_was_named_first(name: str, causes: list[str], first: str) -> None:
    gain = interval(2.0, 1.9, 2.1)
    row = row_of(name, {"findings": [finding(cause, gain) for cause in causes]}, "planted", gain)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == [name, "planted", ", ".join(causes) or "nothing", first]
    if "saving" in causes:
        assert cells[4] == "2.00 (1.90 to 2.10)" and cells[6] == "yes"


def test_promises_of_two_causes_add_what_they_take_from_a_step() -> None:
    both = [finding("sync", interval(2.0, 2.0, 2.0), measured=False), finding("batches", interval(1.25, 1.0, 1.6))]
    whole = together(both)
    assert not whole["measured"] and whole["gain"]["samples"] == 3
    assert [round(whole["gain"][side], 2) for side in ("median", "low", "high")] == [3.33, 2.0, 8.0]
    assert agrees(together(both[1:]), interval(1.3, 1.2, 1.4))
    assert all_agree(both, interval(2.5, 2.4, 2.6)) and all_agree(both, interval(1.9, 1.8, 2.0))
    assert not all_agree(both[1:], interval(2.5, 2.4, 2.6)) and not all_agree(both, interval(4.0, 3.9, 4.1))
    at_hand = finding("batches", interval(2.2, 2.0, 2.4))
    assert agrees(together([at_hand]), interval(1.5, 1.4, 1.6)), "making them takes something"
    assert not agrees(together([at_hand]), interval(2.7, 2.5, 2.9))


@pytest.mark.slow
def test_steps_are_timed_in_fresh_processes_and_hooks_are_put_on_and_off() -> None:
    assert in_process("--steps-of", SCRIPTS / "healthy.py", 0.5) > 0
    pairs = in_process("--attached", SCRIPTS / "healthy.py", 2.0)
    assert pairs and all(plain > 0 and attached > 0 for plain, attached in pairs)

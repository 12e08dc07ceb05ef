"""A small part of benchmarks/false_wins.py: real trials of the same configuration against itself, quiet and loaded."""

import pytest

from benchmarks.false_wins import exact_interval, run_pairs

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def test_the_same_against_itself_is_not_claimed_to_be_faster():
    """Five pairs: one false win may be chance (2.5 % each); two are seen once in 160 such runs."""
    pairs = list(run_pairs("same", 5, busy=False, minutes=0.4))
    assert sum(pair["claimed"] for pair in pairs) <= 1
    assert len(pairs) >= 2


def test_with_a_second_busy_process_nothing_is_claimed_and_the_reason_is_said():
    pairs = list(run_pairs("planted", 2, busy=True, minutes=0.3))
    assert pairs
    for pair in pairs:
        assert not pair["claimed"] and pair["why_not"].startswith("disturbed: not a claim (other work")
        assert pair["speedup"][1] <= 1.0 <= pair["speedup"][2]


def test_the_exact_interval_is_clopper_and_pearsons():
    assert exact_interval(0, 200)[1] == pytest.approx(0.0183, abs=1e-3)
    assert exact_interval(5, 100) == pytest.approx((0.0164, 0.1128), abs=1e-3)

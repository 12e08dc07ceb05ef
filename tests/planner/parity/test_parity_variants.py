"""No false alarm: a hundred correct ways to run small workloads in each precision all pass the parity check."""

import pytest

from tests.planner.parity.variants import MODELS, variants, verdict

ALL = list(variants())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_there_are_a_hundred(precision):
    found = [name for name, _, knobs in ALL if knobs.get("precision", "fp32") == precision]
    assert len(found) >= 100 and set(found) == set(MODELS)


def cases():
    """All variants; one in 15 of them belongs to `make test`, which has to end within minutes."""
    for number, (name, seed, knobs) in enumerate(ALL):
        marks = [pytest.mark.slow] if number % 15 == 0 else [pytest.mark.slow, pytest.mark.exhaustive]
        label = f"{name}-{seed}-" + "-".join(map(str, knobs.values()))
        yield pytest.param(name, seed, knobs, marks=marks, id=label)


@pytest.mark.parametrize(("name", "seed", "knobs"), cases())
def test_a_correct_variant_passes(name, seed, knobs):
    parity = verdict(name, seed, knobs)
    assert parity.passed, parity.failures

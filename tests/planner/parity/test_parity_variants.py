"""No false alarm: about a hundred correct ways to run small workloads all pass the parity check."""

import pytest

from autoplan.strategies.config import TrainingConfig
from tests.contracts.parity_contract import check_parity
from tests.planner.parity.variants import MODELS, micro_batch_of, variants

ALL = list(variants())


def test_there_are_a_hundred():
    assert len(ALL) >= 100
    assert {name for name, _, _ in ALL} == set(MODELS)


def cases():
    """All variants; every seventh of them belongs to `make test`, which has to end within minutes."""
    for number, (name, seed, knobs) in enumerate(ALL):
        marks = [pytest.mark.slow] if number % 7 == 0 else [pytest.mark.slow, pytest.mark.exhaustive]
        label = f"{name}-{seed}-" + "-".join(map(str, knobs.values()))
        yield pytest.param(name, seed, knobs, marks=marks, id=label)


@pytest.mark.parametrize(("name", "seed", "knobs"), cases())
def test_a_correct_variant_passes(name, seed, knobs):
    config = TrainingConfig.model_validate({"micro_batch": micro_batch_of(name)} | knobs)
    parity = check_parity(MODELS[name](seed), config)
    assert parity.passed, parity.failures

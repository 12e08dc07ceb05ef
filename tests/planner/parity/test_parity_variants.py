"""No false alarm: about a hundred correct ways to run small workloads all pass the parity check."""

import pytest

from autoplan.strategies.config import TrainingConfig
from tests.contracts.parity_contract import check_parity
from tests.planner.parity.variants import MODELS, micro_batch_of, variants

ALL = list(variants())


def test_there_are_a_hundred():
    assert len(ALL) >= 100
    assert {name for name, _, _ in ALL} == set(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed", "knobs"),
    ALL,
    ids=[f"{name}-{seed}-" + "-".join(map(str, knobs.values())) for name, seed, knobs in ALL],
)
def test_a_correct_variant_passes(name, seed, knobs):
    config = TrainingConfig.model_validate({"micro_batch": micro_batch_of(name)} | knobs)
    parity = check_parity(MODELS[name](seed), config)
    assert parity.passed, parity.failures

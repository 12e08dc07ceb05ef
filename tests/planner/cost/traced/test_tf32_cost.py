"""What TF32 is predicted to take where the trace has timed the products of fp32 tensors."""

from __future__ import annotations

import pytest

from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.cost.traced.step_time import _group_seconds
from autoplan.planner.trace.model_profile import LinearFit, OperationGroup
from tests.planner.cost.traced.test_fp8_cost import columns, config, h100, timed


def product(**facts: object) -> OperationGroup:
    rows = LinearFit(fixed=0.0, per_sample=2048.0)
    sizes = {"m": rows, "n": LinearFit(fixed=4096.0, per_sample=0.0), "k": LinearFit(fixed=4096.0, per_sample=0.0)}
    given = {
        "name": "aten.mm",
        "kind": "matmul",
        "dtype": "float32",
        "phase": "forward",
        "segment": "block",
        "count": 1.0,
        "flops": LinearFit(fixed=0.0, per_sample=2.0 * 2048 * 4096 * 4096),
        "measured_s": 1.0,
        "measured_samples": 4.0,
    }
    return OperationGroup.model_validate(given | sizes | facts)


@pytest.mark.parametrize("sizes_known", [True, False])
def test_a_product_that_was_timed_in_fp32_is_faster_in_tf32_by_the_rates(sizes_known: bool) -> None:
    """Both have one traced variant, so what was timed was taken for both."""
    rates = from_device(h100(*timed("float32", 5e13), *timed("tf32", 4e14), sheet=False).device("cuda"))
    both = columns(config(precision="fp32"), config(precision="tf32"))
    none = LinearFit(fixed=0.0, per_sample=0.0)
    group = product() if sizes_known else product(m=none)
    plain, fast = _group_seconds(group, rates, both)
    assert plain == pytest.approx(1.0) and fast == pytest.approx(1 / 8, rel=0.05)
    other = product(kind="memory", bytes_moved=LinearFit(fixed=0.0, per_sample=1.0), flops=none)
    assert _group_seconds(other, rates, both).tolist() == [1.0, 1.0]

"""What products in fp8 are predicted to take: which of a trace's products, their casts, and where they gain."""

from __future__ import annotations

import numpy as np
import pytest

from autoplan.planner.cost.traced.candidates import from_configs
from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.cost.traced.step_time import cast_seconds, fp8_shares
from autoplan.planner.trace.build_profile import profile_workload
from autoplan.planner.trace.model_profile import ModelProfile, TraceRequest, VariantKey
from autoplan.probes import catalog
from autoplan.probes.profile import HardwareProfile, OperationReading
from autoplan.record import Reading
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_hardware
from tests.strategies.tiny import LLAMA, language

HALF = VariantKey(precision="half")
WIDE = {
    "num_hidden_layers": 4,  # with fewer the blocks are not told from the rest
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}


def trace(**fields: int) -> ModelProfile:
    workload = language(LLAMA | fields, length=fields.get("max_position_embeddings", 64), global_batch=16)
    return profile_workload(workload, "cpu", identity="test", request=TraceRequest(variants=(HALF,)))


@pytest.fixture(scope="module")
def wide() -> ModelProfile:
    return trace(**WIDE)


@pytest.fixture(scope="module")
def small() -> ModelProfile:
    """None of whose layers is taken."""
    return trace()


def h100(*operations: OperationReading, sheet: bool = True) -> HardwareProfile:
    found = catalog.find("H100 SXM 80GB")
    assert found is not None
    peaks = {
        dtype: Reading(value=figure.value, unit="flop/s", provenance="datasheet")
        for dtype, figure in found.peak_flops_per_s.items()
    }
    hardware = make_hardware(gpu=True)
    card = hardware.device("cuda").model_copy(
        update={
            "operations": operations,
            "datasheet_peak_flops_per_s": peaks if sheet else {},
            "memory_bandwidth_bytes_per_s": Reading(value=2.8e12, unit="bytes/s", provenance="measured"),
        }
    )
    return hardware.model_copy(update={"devices": (card,)})


def timed(dtype: str, rate: float) -> list[OperationReading]:
    """Products that reach a rate at every size."""
    sizes = [(512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 4096)]
    return [
        OperationReading(
            kind="matmul",
            dtype=dtype,
            shape=size,
            seconds=Reading(value=2 * float(np.prod(size)) / rate, unit="s", provenance="measured"),
            rate=Reading(value=rate, unit="flop/s", provenance="measured"),
        )
        for size in sizes
    ]


def config(**knobs: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"micro_batch": 4, "precision": "bf16"} | knobs)


def columns(*configs: TrainingConfig):
    return from_configs(configs, 16, device="cuda", num_blocks=4)


def test_the_products_of_the_layers_that_are_taken(wide: ModelProfile, small: ModelProfile) -> None:
    """Keys and values are too small for either recipe, and the head lies outside of the blocks."""
    assert wide.linear_weights == ((1024, 4096, 8), (4096, 4096, 8), (4096, 14336, 4), (14336, 4096, 8))
    variant = wide.variants[HALF.text()]
    shares = fp8_shares(variant, wide, columns(config(), config(fp8="tensorwise"), config(fp8="rowwise")))
    taken = [variant.groups[place] for place in shares]
    assert all(share.tolist() == [0.0, 1.0, 1.0] for share in shares.values())
    assert all(group.kind == "matmul" and group.segment == "block" for group in taken)
    for phase, products in (("forward", 5), ("backward", 10)):
        assert sum(group.count for group in taken if group.phase == phase) == products
    assert not fp8_shares(small.variants[HALF.text()], small, columns(config(fp8="tensorwise")))
    assert not fp8_shares(variant, wide, columns(config())), "nothing to do without the knob"


def test_casts_are_counted_in_bytes(wide: ModelProfile) -> None:
    """The output of up: 8192 tokens of 4096 numbers in bf16, and a weight of 14336 x 4096 in fp32 or bf16."""
    variant = wide.variants[HALF.text()]
    up = next(g for g in variant.groups if g.kind == "matmul" and g.phase == "forward" and g.n.fixed == 14336)
    rates = from_device(h100().device("cuda"))
    c = columns(config(fp8="tensorwise"), config(fp8="tensorwise", parameters="bf16"))
    x, w = 4 * 2048 * 4096, 14336 * 4096
    assert cast_seconds(up, rates, c) * 2.8e12 == pytest.approx([34 * x + (34 - 6) * w, 34 * x + 34 * w])
    c = columns(*(config(fp8="tensorwise", compile="block", parameters=form) for form in ("own", "bf16")))
    assert cast_seconds(up, rates, c) * 2.8e12 == pytest.approx([5 * x + (9 - 6) * w, 5 * x + 5 * w])


def test_it_gains_compiled_and_not_otherwise_or_in_small_micro_batches_of_small_models(
    wide: ModelProfile, small: ModelProfile
) -> None:
    def gain(profile: ModelProfile, **knobs: object) -> float:
        estimator = Estimator(profile, h100(), device="cuda", global_batch=16, memory_limit_bytes=None)
        plain, fast = estimator.estimate([config(**knobs), config(**knobs, fp8="tensorwise")])
        return plain.step_time_s / fast.step_time_s

    assert gain(wide, compile="block") > 1.05
    assert gain(wide) < 1.0
    assert gain(wide, compile="block") > gain(wide, compile="block", micro_batch=1), "weights are cast for fewer tokens"
    assert gain(small, compile="block") == 1.0


def test_the_parts_have_a_factor_of_their_own(wide: ModelProfile) -> None:
    estimator = Estimator(wide, h100(), device="cuda", global_batch=16, memory_limit_bytes=None)
    plain, fast = estimator.estimate([config(compile="block"), config(compile="block", fp8="rowwise")])
    assert "matmul/fp8" not in plain.time_parts_s
    gone = plain.time_parts_s["matmul/half"] - fast.time_parts_s["matmul/half"]
    assert gone > 0.5 * plain.time_parts_s["matmul/half"], "most products are of the blocks"
    assert 0.5 * gone < fast.time_parts_s["matmul/fp8"] < gone, "half of their time, and the casts"
    assert fast.step_time_high_s / fast.step_time_s > plain.step_time_high_s / plain.step_time_s, "less sure"


def test_rates_measured_in_proportion_or_twice_those_of_bf16() -> None:
    size = (np.array([8192.0]), np.array([4096.0]), np.array([4096.0]))

    def ratio(hardware: HardwareProfile) -> float:
        rates = from_device(hardware.device("cuda"))
        return float((rates.matmul_fit("bfloat16").seconds(*size) / rates.matmul_fit("float8").seconds(*size))[0])

    both = [*timed("float32", 5e13), *timed("bfloat16", 6e14), *timed("float8", 9e14)]
    assert ratio(h100(*both)) == pytest.approx(1.5, rel=0.02), "the probe's, not the datasheet's"
    assert ratio(h100(*both[:8])) == pytest.approx(2.0, rel=0.02), "beside bf16's, by the datasheet's peaks"
    assert ratio(h100(*both[:8], sheet=False)) == pytest.approx(2.0, rel=0.02)
    assert 1.5 < ratio(h100()) < 2.01, "both from the datasheet"

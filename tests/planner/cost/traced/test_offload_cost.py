"""Offload in the cost model: bytes leave the device for the host; the rate of the link says what a step shows of it."""

from __future__ import annotations

import numpy as np
import pytest

from autoplan.planner.cost.offload import ASSUMED_LINK_BYTES_PER_S, PINNED, host_link
from autoplan.planner.cost.traced.estimator import CostTable, Estimator
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Reading
from autoplan.strategies.config import TrainingConfig
from tests.planner.cost.test_one_core import machine, model_of_eight_blocks


def with_link(rate: float | None) -> HardwareProfile:
    """A machine whose device has a measured link to the host."""
    found = machine()
    if rate is None:
        return found
    reading = {"pinned": Reading(value=rate, unit="bytes/s", provenance="measured")}
    gpu = found.device("cpu").model_copy(
        update={"host_to_device_bytes_per_s": reading, "device_to_host_bytes_per_s": reading}
    )
    return found.model_copy(update={"devices": (gpu,)})


def table(rate: float | None, *configs: dict[str, object], elements: int = 400_000_000) -> CostTable:
    model = model_of_eight_blocks()
    factor = elements / model.parameters
    model = model.model_copy(
        update={
            "parameters": elements,
            "trainable": elements,
            "parameter_bytes": 4 * elements,
            "block_parameters": model.block_parameters * factor,
            "optimizer_state_bytes_per_parameter": 8.0,
        }
    )
    estimator = Estimator(model, with_link(rate), device="cpu", global_batch=16, memory_limit_bytes=None)
    return estimator.table([TrainingConfig.model_validate({"micro_batch": 2} | config) for config in configs])


def test_the_probe_of_the_link_is_read_and_else_assumed() -> None:
    assert host_link(with_link(9e9), "cpu").to_host_bytes_per_s == 9e9
    assert host_link(machine(), "cpu").to_device_bytes_per_s == ASSUMED_LINK_BYTES_PER_S


def test_states_leave_the_device_for_the_host() -> None:
    found = table(20e9, {}, {"offload": "optimizer"})
    elements = 400_000_000
    assert found.memory.optimizer.tolist() == [8.0 * elements, 0.0]
    assert found.host_bytes.tolist() == pytest.approx([0.0, PINNED * 8.0 * elements])
    saved = found.live_bytes[0] - found.live_bytes[1]
    assert 0.5 * 8.0 * elements < saved < 8.0 * elements  # a piece of the states stays


@pytest.mark.parametrize("value", ["optimizer", "activations"])
def test_a_slower_link_costs_more(value: str) -> None:
    times = [table(rate, {}, {"offload": value}).step_time_s for rate in (60e9, 6e9, 0.6e9)]
    plain, moved = (np.array(column) for column in zip(*times, strict=True))
    assert len(set(plain.round(12))) == 1
    assert np.all(np.diff(moved) > 0) and np.all(moved >= plain)


def test_the_slowest_link_takes_the_time_of_the_bytes() -> None:
    elements, rate = 400_000_000, 1e8
    found = table(rate, {}, {"offload": "optimizer"})
    assert found.step_time_s[1] - found.step_time_s[0] == pytest.approx(2 * 8.0 * elements / rate)


def test_shards_on_the_host_leave_activations_and_gathered_blocks_on_the_device() -> None:
    shards = {"dp_shard": 2, "reshard_after_forward": True, "gradient_sync": "every"}
    found = table(20e9, shards, shards | {"offload": "parameters"})
    assert found.memory.parameters[1] == found.memory.optimizer[1] == found.memory.gradients[1] == 0.0
    assert found.memory.gathered[1] == found.memory.gathered[0] > 0
    assert found.host_bytes[1] == pytest.approx(PINNED * 16.0 * 400_000_000 / 2)
    assert found.step_time_s[1] > found.step_time_s[0]


def test_a_prediction_says_what_lies_on_the_host() -> None:
    model = model_of_eight_blocks()
    estimator = Estimator(model, machine(), device="cpu", global_batch=16, memory_limit_bytes=None)
    plain, moved = estimator.estimate(
        [TrainingConfig(micro_batch=2), TrainingConfig(micro_batch=2, offload="activations")]
    )
    assert plain.host_memory_bytes == 0.0 < moved.host_memory_bytes

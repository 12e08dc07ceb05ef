"""The micro-batches of a step on the device, and what keeps the host from waiting on CUDA."""

import pytest
import torch

from autoplan.strategies.workloads.batch import MOVED_AT_ONCE_BYTES, _host_bytes, device_micro_batches, move_batch

CPU = torch.device("cpu")


def test_the_micro_batches_are_those_of_the_batch_in_order():
    batch = {"x": torch.arange(12).view(6, 2), "pair": (torch.ones(6), "text")}
    micros = list(device_micro_batches(batch, 2, CPU))
    assert [micro["x"].tolist() for micro in micros] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert all(micro["pair"][1] == "text" and len(micro["pair"][0]) == 2 for micro in micros)


def test_what_is_moved_counts_the_bytes_of_the_host():
    assert _host_bytes({"x": torch.zeros(4, 8), "y": [torch.zeros(4, dtype=torch.int64), 3]}) == 4 * 8 * 4 + 4 * 8


def test_a_batch_moves_to_the_cpu_as_it_is():
    batch = (torch.ones(2, 3), "text")
    assert move_batch(batch, CPU)[0] is batch[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("samples", [8, 2 * MOVED_AT_ONCE_BYTES // (1 << 20)])
def test_on_cuda_the_host_waits_for_no_copy(samples: int):
    device = torch.device("cuda", 0)
    batch = {"x": torch.randn(samples, 1 << 18), "odd": torch.zeros(1, 4).expand(samples, 4)}
    list(device_micro_batches({"x": batch["x"]}, samples // 4, device))  # pinned memory and the stream are made
    torch.cuda.set_sync_debug_mode("error")
    try:
        micros = list(device_micro_batches({"x": batch["x"]}, samples // 4, device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat([micro["x"] for micro in micros]).cpu(), batch["x"])
    moved = move_batch(batch, device)
    assert torch.equal(moved["odd"].cpu(), batch["odd"])

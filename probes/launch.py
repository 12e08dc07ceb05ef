"""What it costs the host to start one small operation: the lower bound of a step that launches many kernels."""

from __future__ import annotations

import time

import torch

from autoplan.probes.timing import summarise
from autoplan.record import Reading

# below the depth of CUDA's launch queue (about 1000), where launching would wait for the GPU
CALLS = 200


def probe_launch(device: torch.device, *, repeats: int = 15) -> Reading:
    """Seconds of host time per small in-place addition through torch's eager path (no autograd).

    On CUDA the launches are timed without waiting for the kernels; on CPU it is the whole call.
    """
    x = torch.zeros(1, device=device)
    samples = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            x.add_(1.0)
        samples.append((time.perf_counter() - started) / CALLS)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    timing = summarise(samples[2:])
    return Reading(
        value=timing.seconds,
        unit="s",
        provenance="measured",
        spread=timing.spread,
        source=f"{repeats} x {CALLS} in-place additions of one element",
    )

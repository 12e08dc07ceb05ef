"""The clock of a GPU: seconds of kernels alone, without the host's part. Runs in a rank."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

LEAD_BYTES = 256 << 20
"""Of the buffer that is cleared before a sample: at 1 to 5 TB/s that takes 50 to 250 us, where its launch takes 5. It
is larger than the caches, so that the operands of the first call after it come from memory."""

LEAD_SHARE = 1 / 16
"""Of the free memory of the GPU, what that buffer takes at the most."""

MOST_LEAD_S = 0.02
"""However long the host took: the first call of a kernel loads it, which says nothing about the next."""

HOST_FACTOR = 1.5
"""The work before a sample takes the GPU so many times as long as the host needed for the last sample."""


class CudaClock:
    """Times calls on a GPU: from the start of the first kernel to the end of the last one.

    Between two events on an idle stream lies also the time until the host has launched the first kernel, and from one
    kernel to the next: two to three times the kernel's own, for small ones. So other work is queued first, which takes
    the GPU longer than the host needs to launch all that is timed; the kernels then run back to back. (Triton's
    `do_bench` clears a buffer before each call, which does the same.) A call that waits for the GPU is timed with the
    host's part.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_s = 0.0  # of one call, in the last sample

    def sample(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds that so many calls take together."""
        self._queue(HOST_FACTOR * self._host_s * calls)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self._host_s = (time.perf_counter() - started) / calls
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0  # elapsed_time is in milliseconds

    def _queue(self, seconds: float) -> None:
        """Queues work that takes the GPU at least so long, and a little more."""
        lead, lead_s = _lead_work(self.device)
        for _ in range(pieces(seconds, lead_s)):
            lead.zero_()


def pieces(seconds: float, piece_s: float) -> int:
    """How many pieces of work are queued so that they take so many seconds, and one more; not without end."""
    return 1 + math.ceil(min(seconds, MOST_LEAD_S) / piece_s)


@functools.cache
def _lead_work(device: torch.device) -> tuple[torch.Tensor, float]:
    """A buffer on the GPU, and the seconds that clearing it takes there."""
    size = min(LEAD_BYTES, int(LEAD_SHARE * torch.cuda.mem_get_info(device)[0]))
    lead = torch.zeros(size, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):  # the first one loads the kernel
        lead.zero_()
    begin.record()
    for _ in range(10):
        lead.zero_()
    end.record()
    end.synchronize()
    return lead, max(begin.elapsed_time(end) / 1000.0 / 10, 1e-6)

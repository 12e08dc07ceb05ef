"""Rates: how long a device takes for a matrix product, an attention, a pass over memory; measured, or from datasheets.

A product of (m x k) and (k x n) takes, where it was measured, a sum of terms with a physical meaning,

    t = 2mnk / peak + a mn + b nk + c mk + launch,

fitted to the probe's readings without negative terms: products, results written, weights read, inputs read. Where only
a datasheet is known, the roofline of `planner.cost.roofline`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.prediction import BANDWIDTH_EFFICIENCY
from autoplan.planner.cost.roofline import (
    FP8_EFFICIENCY,
    LAUNCH_S,
    DatasheetProducts,
    attention_rate,
    matmul_efficiency_of,
    processors_of,
)
from autoplan.probes import catalog
from autoplan.probes.profile import Device

# torch's eager path per operation, autograd and module calls included, beside the probe's bare in-place addition
AUTOGRAD_OVERHEAD = 6.0

# Of the dense peaks, where no datasheet has them: every chip of the catalogue that has both is at 2
FLOAT8_OVER_BFLOAT16 = 2.0

MEASURED_BY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "matmul/full": (("matmul",), ("float32",)),
    "matmul/half": (("matmul",), ("bfloat16",)),
    "attention": (("sdpa_train",), ("float32", "bfloat16")),
    "memory": (("copy", "add"), ("float32",)),
    "fused_memory": (("copy", "add"), ("float32",)),
    "first_touch": (("first_touch",), ("float32",)),
    "optimizer": (("copy", "add"), ("float32",)),
}
"""The readings behind each factor of the calibration."""

USUAL_SPREAD = 0.25
"""Interquartile range over the median up to which the priors of the factors allow for it: torch.utils.benchmark calls
more than that severe."""

_BYTES = {"float32": 4.0, "tf32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}


@dataclass(kw_only=True, slots=True)
class MatmulFit:
    """Seconds of a matrix product in one dtype: coefficients of 2mnk, mn, nk, mk and a constant.

    `misaligned`: so many times as long where a size of the weight is no multiple of 8 (`is_aligned`), which keeps a
    GPU's kernels from loading whole vectors: measured on an H100 7.3 in bfloat16, 2.8 in tf32, 1 in float32.
    """

    coefficients: Floats
    misaligned: float = 1.0

    @property
    def flops_per_s(self) -> float:
        """What the largest products reach."""
        return float(1 / self.coefficients[0])

    def seconds(self, m: Floats, n: Floats, k: Floats, batch: float | Floats = 1.0) -> Floats:
        """Seconds of one product of each size, or of a batch of them, which is one launch."""
        c = self.coefficients
        return batch * (c[0] * 2 * m * n * k + c[1] * m * n + c[2] * n * k + c[3] * m * k) + c[4]


@dataclass(kw_only=True, slots=True)
class Rates:
    """The speed of one device: its work per second.

    Attributes:
        matmul: A linear fit per dtype.
        attention_flops_per_s: Fused attention per dtype, FLOPs as torch's counter has them (no causal discount).
        memory_bytes_per_s: Reads and writes together.
        dispatch_s: Host time per eager operation, autograd included.
        first_touch_s_per_byte: What a page that was not there before costs more than one that was; CPU only.
        thread_speed: FLOP/s of products by the number of threads; CPU only.
        threads: The cores of the CPU; 0: no CPU, or not known.
        ranks_per_host: So many ranks at most share the cores; infinite: all of them.
        assumed: What no probe measured, in sentences.
        casts_apart: Casts to 8 bits are operations of their own (torchao), not part of others (Transformer Engine).
        doubts: For a calibration factor, how uncertain the rates behind it are beyond the usual: the standard deviation
            of a logarithm. A factor has one if its rates had little time or were measured under load.
    """

    device: str
    matmul: Mapping[str, MatmulFit | DatasheetProducts]
    attention_flops_per_s: dict[str, Any]
    memory_bytes_per_s: Any
    dispatch_s: float
    first_touch_s_per_byte: float = 0.0
    thread_speed: dict[int, float] = field(default_factory=dict)
    threads: int = 0
    ranks_per_host: float = np.inf
    assumed: list[str] = field(default_factory=list)
    doubts: dict[str, float] = field(default_factory=dict)
    casts_apart: bool = True

    def matmul_fit(self, dtype: str) -> MatmulFit | DatasheetProducts:
        """The fit of a dtype, or of float32 where that one was never measured."""
        return self.matmul.get(dtype) or self.matmul["float32"]

    def attention_rate(self, dtype: str) -> Any:
        """FLOP/s of fused attention in a dtype; `plain`: of attention by two products."""
        known = self.attention_flops_per_s
        return known[dtype if dtype in known else "float32"]

    def thread_slowdown(self, threads: Floats, ranks: float | Floats = 1.0) -> Floats:
        """How much longer the products of one rank take on its threads than on all cores, by the measured speeds.

        Each of several ranks has its share of the cores as threads unless it is told otherwise; more threads than cores
        take turns. On CUDA it is 1.

        Args:
            threads: Of each rank; 0: its share.
            ranks: All of them.
        """
        if self.device != "cpu" or not (self.threads or self.thread_speed):
            return np.ones_like(np.asarray(threads, dtype=np.float64))
        cores, _, own = self._shares(threads, ranks)
        known = np.array(sorted(self.thread_speed) or (1.0, cores), dtype=np.float64)
        speeds = np.array([self.thread_speed[int(count)] for count in known] if self.thread_speed else known)
        slower = np.interp(cores, known, speeds) / np.interp(np.minimum(own, cores), known, speeds)
        return np.asarray(self.turns(threads, ranks) * slower)

    def turns(self, threads: Floats, ranks: float | Floats = 1.0) -> Floats:
        """How many threads of all ranks take turns on a core; at least 1, and on CUDA 1."""
        if self.device != "cpu" or not (self.threads or self.thread_speed):
            return np.ones_like(np.asarray(threads, dtype=np.float64))
        cores, sharing, own = self._shares(threads, ranks)
        return np.asarray(np.maximum(sharing * own / cores, 1.0))

    def memory_slowdown(self, threads: Floats, ranks: float | Floats = 1.0) -> Floats:
        """The same of passes over memory, whose bandwidth the ranks share, and which half of the cores use up.

        Measured: one of two cores reaches 83 % of what both do. On more cores assumed.
        """
        if self.device != "cpu" or not self.threads:
            return np.ones_like(np.asarray(threads, dtype=np.float64))
        cores, sharing, own = self._shares(threads, ranks)
        return np.asarray(np.maximum(sharing, cores / (2 * own)))

    def _shares(self, threads: Floats, ranks: float | Floats) -> tuple[float, Floats, Floats]:
        """The cores, how many ranks share them, and the threads of each rank."""
        wanted = np.asarray(threads, dtype=np.float64)
        cores = float(self.threads or max(self.thread_speed))
        sharing = np.maximum(np.minimum(ranks, self.ranks_per_host), 1.0)
        return cores, sharing, np.where(wanted > 0, wanted, np.maximum(cores // sharing, 1.0))


def from_device(device: Device) -> Rates:
    """Rates from a probed device, filled up from its datasheet; what neither knows is assumed and said."""
    assumed: list[str] = []
    matmul: dict[str, MatmulFit | DatasheetProducts] = {}
    for dtype in ("float32", "tf32", "bfloat16", "float16", "float8"):
        fit = _measured_fit(device, dtype) or _beside_bfloat16(device, dtype, matmul) or _datasheet_fit(device, dtype)
        if fit is not None:
            matmul[dtype] = fit
    if "float32" not in matmul:
        # a machine that was never probed: a product per cycle and lane of some 3 GHz core with 512-bit vectors
        cores = device.cores or 1
        matmul["float32"] = MatmulFit(coefficients=np.array([1 / (5e10 * cores), 0, 0, 0, 5e-6]))
        assumed.append("matmul rate: not measured, 50 GFLOP/s a core")
    attention = {}
    for dtype in ("float32", "bfloat16", "float16"):
        rate = device.best_rate("sdpa_train", dtype)
        if rate is not None:
            # the probe counts 6bhs^2d for causal forward and backward; torch's counter 4 + 10 = 14 without the mask
            attention[dtype] = rate * 14 / 6
    if not attention:
        for dtype, fit in matmul.items():
            attention[dtype] = float(attention_rate(fit.flops_per_s))
        assumed.append("attention rate: not measured, a share of the matmul rate")
    bandwidth, sheet = device.memory_bandwidth_bytes_per_s, device.datasheet_memory_bandwidth_bytes_per_s
    if bandwidth is not None and bandwidth.value is not None:
        memory = bandwidth.value
    elif sheet is not None and sheet.value is not None:
        memory = BANDWIDTH_EFFICIENCY * sheet.value
        assumed.append("memory bandwidth: a share of the datasheet's")
    else:
        memory = 10e9
        assumed.append("memory bandwidth: not measured, 10 GB/s")
    launch = device.kernel_launch_s.value if device.kernel_launch_s is not None else None
    return Rates(
        device=device.type,
        matmul=matmul,
        attention_flops_per_s=attention,
        memory_bytes_per_s=memory,
        dispatch_s=launch * AUTOGRAD_OVERHEAD if launch is not None else LAUNCH_S,
        first_touch_s_per_byte=_first_touch_s_per_byte(device),
        thread_speed={
            r.shape[3]: r.rate.value
            for r in device.readings("matmul_threads")
            if len(r.shape) == 4 and r.rate.value is not None
        },
        threads=device.cores or 0,
        assumed=assumed,
        doubts={factor: _doubt(device, kinds, dtypes) for factor, (kinds, dtypes) in MEASURED_BY.items()},
    )


def _doubt(device: Device, kinds: tuple[str, ...], dtypes: tuple[str, ...]) -> float:
    """Of readings that vary as usual 0; a normal distribution's interquartile range is 1.35 standard deviations."""
    readings = [reading.rate for kind in kinds for dtype in dtypes for reading in device.readings(kind, dtype)]
    spreads = [reading.spread or 0.0 for reading in readings]
    return max(0.0, statistics.median(spreads) - USUAL_SPREAD) / 1.35 if spreads else 0.0


def _first_touch_s_per_byte(device: Device) -> float:
    """Seconds per byte of the probe's touch of new memory, without the writing itself."""
    rate = device.best_rate("first_touch", "float32")
    if device.type != "cpu" or not rate:
        return 0.0
    bandwidth = device.memory_bandwidth_bytes_per_s
    writing = 1 / bandwidth.value if bandwidth is not None and bandwidth.value else 0.0
    return max(1 / rate - writing, 0.0)


ALIGNED_TO = 8
"""Numbers: 16 bytes of a 16-bit format, which a GPU loads at once (NVIDIA, Matrix Multiplication Background Guide,
section 4)."""


def is_aligned(*sizes: float) -> bool:
    """Whether a GPU's kernels load whole vectors along each of these sizes."""
    return all(size % ALIGNED_TO == 0 for size in sizes)


def _measured_fit(device: Device, dtype: str) -> MatmulFit | None:
    points = [
        (*r.shape[:3], r.seconds.value)
        for r in device.readings("matmul", dtype)
        if r.seconds.value and len(r.shape) == 3
    ]
    aligned = [point for point in points if device.type == "cpu" or is_aligned(*point[:3])]
    if len(aligned) < 3:
        return None
    fit = MatmulFit(coefficients=fit_matmul(np.array(aligned, dtype=np.float64)))
    others = [
        seconds / float(fit.seconds(*np.array([sizes]).T)[0]) for *sizes, seconds in points if not is_aligned(*sizes)
    ]
    if device.type == "cuda" and others:
        fit.misaligned = max(1.0, statistics.median(others))
    return fit


def _beside_bfloat16(
    device: Device, dtype: str, known: Mapping[str, MatmulFit | DatasheetProducts]
) -> MatmulFit | None:
    """float8 that was not measured beside bfloat16 that was: its fit with products faster by the ratio of the
    datasheet's peaks (2 where it has not both), and operands of half the bytes; results stay in bf16."""
    plain = known.get("bfloat16")
    if dtype != "float8" or not isinstance(plain, MatmulFit):
        return None
    peaks = [device.datasheet_peak_flops_per_s.get(name) for name in (dtype, "bfloat16")]
    mine, other = (peak.value if peak is not None else None for peak in peaks)
    faster = mine / other if mine and other else FLOAT8_OVER_BFLOAT16
    return MatmulFit(coefficients=plain.coefficients * np.array([1 / faster, 1.0, 0.5, 0.5, 1.0]))


def _datasheet_fit(device: Device, dtype: str) -> DatasheetProducts | None:
    peak = device.datasheet_peak_flops_per_s.get(dtype)
    if peak is None or peak.value is None:
        return None
    sheet = catalog.find(device.datasheet_name) if device.datasheet_name else None
    bandwidth = device.datasheet_memory_bandwidth_bytes_per_s
    reached = matmul_efficiency_of(sheet) * (FP8_EFFICIENCY if dtype == "float8" else 1.0)
    return DatasheetProducts(
        flops_per_s=reached * peak.value,
        memory_bytes_per_s=np.inf if bandwidth is None or bandwidth.value is None else bandwidth.value,
        processors=processors_of(sheet),
        width=_BYTES[dtype],
    )


def fit_matmul(points: Floats) -> Floats:
    """Least squares of relative errors over (m, n, k, seconds) rows, no coefficient negative.

    Five terms at most, so every subset of them is tried and the best without a negative one is kept.
    """
    m, n, k, seconds = points.T
    terms = np.stack([2 * m * n * k, m * n, n * k, m * k, np.ones_like(m)], axis=1) / seconds[:, None]
    scale = terms.max(axis=0)
    best, best_error = np.zeros(5), np.inf
    for count in range(1, min(5, len(points)) + 1):
        for others in itertools.combinations(range(1, 5), count - 1):
            chosen = [0, *others]
            solved, *_ = np.linalg.lstsq(terms[:, chosen] / scale[chosen], np.ones(len(points)), rcond=None)
            if (solved < 0).any():
                continue
            off = (terms[:, chosen] / scale[chosen]) @ solved - 1
            error = float(off @ off)
            if error < best_error * 0.999:
                best_error = error
                best = np.zeros(5)
                best[chosen] = solved / scale[chosen]
    return best

"""Work on a chip of which only the datasheet is known: the roofline (Williams et al. 2009), with what tiles leave idle.

Both front ends take products, attention and the host's launches from here, wherever no probe measured them. Constants
that say "tables" were set by the step times of llm-foundry, fms-fsdp and vTrain (docs/accuracy.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.prediction import BANDWIDTH_EFFICIENCY
from autoplan.probes.catalog import ChipSheet

# Where the datasheet does not print it; it only rounds work up to whole waves of tiles.
ASSUMED_PROCESSORS = 100.0
# The share of the dense peak that large matrix products reach in a training loop, before any calibration; what tiles,
# the filling of inner loops, launches and passes over memory cost comes on top (`DatasheetProducts`). By architecture:
# - Hopper, 0.57: chosen while building on the published tables that set the constants of the closed form
#   (docs/accuracy.md); no record says how. On their H100 rows in bf16 (llm-foundry 37, fms-fsdp 4), uncalibrated, it
#   gives a mean error of 8.5 % and a bias of -3.5 %; the smallest mean error is 8.4 %, at 0.56 (9.8 % at 0.52, 9.9 %
#   at 0.60, 13.9 % at 0.65). One torch.mm alone was published at 0.79 of an H100's peak; why training stays below was
#   not measured.
# - The default, 0.74: chosen in the same way. On their A100 rows (llm-foundry 69, fms-fsdp 4, vTrain 660) it gives a
#   mean error of 9.5 % and a bias of +0.1 %; the smallest mean error is 9.3 %, at 0.78, with a bias of -1.8 %.
# - Blackwell, assumed: as Hopper. Volta, assumed: between the two. No table of theirs was looked at.
# - CDNA 3, assumed: what the best product of Azure's published MI300X results reaches (Azure/AI-benchmarking-guide,
#   ND MI300X v5: 1,160 TFLOP/s of 2,614.9 in fp8). No training run was looked at.
MATMUL_EFFICIENCY = {"Hopper": 0.57, "Blackwell": 0.57, "Volta": 0.65, "CDNA 3": 0.44}
DEFAULT_MATMUL_EFFICIENCY = 0.74
# cuBLAS's and CUTLASS's common tile of a product's result. Source: NVIDIA "Matrix Multiplication Background".
TILE = 128.0
# What a product's inner loop costs to fill and drain, in elements of k (CUTLASS: prologue of some stages of 32): tables
K_FILL = 96.0
# fp8 products reach less of their peak: tables (llm-foundry's fp8 rows)
FP8_EFFICIENCY = 0.8
# Fused attention's share of the rate of large products (FlashAttention-2, arXiv 2307.08691 figures 4 to 6: 50-70 % of
# what products reach, backward lower): tables
FLASH_EFFICIENCY = 0.5
# Plain attention's two products are batched ones of small k: tables (vTrain)
EAGER_EFFICIENCY = 0.85
# Of a width of heads that is not known: between the usual 64 and 128.
ASSUMED_HEAD_DIM = 96.0
# Host seconds per operation of an eager block, Python, autograd and module hooks included (0.9 ms a block forward):
# tables (vTrain's smallest models). The probe's figure is a bare in-place addition, several times less.
LAUNCH_S = 3.3e-5


def processors_of(sheet: ChipSheet | None) -> float:
    """Multiprocessors (SMs), or compute units (AMD); assumed for a chip that is not in the catalogue."""
    known = None if sheet is None else sheet.multiprocessors
    return ASSUMED_PROCESSORS if known is None else known.value


def matmul_efficiency_of(sheet: ChipSheet | None) -> float:
    """The share of the dense peak that large products reach."""
    return MATMUL_EFFICIENCY.get("" if sheet is None else sheet.architecture, DEFAULT_MATMUL_EFFICIENCY)


@dataclass(kw_only=True, slots=True)
class DatasheetProducts:
    """Seconds of a matrix product in one dtype on a chip of which only the datasheet is known.

    Tiles of 128 x 128 go to the multiprocessors in waves; where there are fewer tiles than those, k is split. Source:
    NVIDIA "Matrix Multiplication Background User's Guide", tile and wave quantization.

    Attributes:
        flops_per_s: What large products reach.
        memory_bytes_per_s: The datasheet's bandwidth.
        processors: Multiprocessors.
        width: Bytes of an element.
        misaligned: How many times as long products take whose rows are not whole 16 bytes.
    """

    flops_per_s: Any
    memory_bytes_per_s: Any
    processors: Any
    width: Any
    misaligned: float = 1.0

    def seconds(self, m: Floats, n: Floats, k: Floats, batch: float | Floats = 1.0) -> Floats:
        """Seconds of one product of each size, or of a batch of them at once; none with a size of 0."""
        some = np.asarray(batch * m * n * k) > 0
        m, n, k, batch = (np.where(some, size, 1.0) for size in (m, n, k, batch))
        tiles = batch * np.ceil(m / TILE) * np.ceil(n / TILE)
        used = (m * n) / (np.ceil(m / TILE) * np.ceil(n / TILE) * TILE * TILE)
        units = np.where(tiles < self.processors, tiles * np.clip(np.floor(k / 512), 1, 8), tiles)
        waves = np.ceil(units / self.processors)
        busy = units / (waves * self.processors)
        filled = k / (k + K_FILL)
        work = 2 * batch * m * n * k / (self.flops_per_s * used * busy * filled)
        moved = batch * self.width * (m * k + k * n + m * n) / (BANDWIDTH_EFFICIENCY * self.memory_bytes_per_s)
        return np.where(some, np.maximum(work, moved), 0.0)


def attention_rate(flops_per_s: float | Floats, head_dim: float | Floats = ASSUMED_HEAD_DIM) -> float | Floats:
    """FLOP/s of fused causal attention, counted without the mask's discount, which the kernel takes."""
    return 2 * FLASH_EFFICIENCY * head_dim / (head_dim + 24) * flops_per_s

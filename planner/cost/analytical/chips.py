"""Chips and links of a cluster by name: from the catalogue, with the shorthands that people use."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.errors import UsageError
from autoplan.probes import catalog
from autoplan.probes.catalog import ChipSheet

# Chips that are sold in several forms, by the form that fills eight-GPU servers; said on screen as an assumption.
SHORTHANDS = {
    "h100": "H100 SXM",
    "h100 80gb": "H100 SXM",
    "a100": "A100 SXM 80GB",
    "a100 80gb": "A100 SXM 80GB",
    "a100 40gb": "A100 SXM 40GB",
    "v100": "V100 SXM2 32GB",
    "4090": "RTX 4090",
    "3090": "RTX 3090",
    "5090": "RTX 5090",
    "rtx4090": "RTX 4090",
    "rtx3090": "RTX 3090",
    "rtx5090": "RTX 5090",
    "a10g": "A10",
}
PCIE_LANES = 16
# What large products reach of the peak in a training loop, at the clocks that the power limit leaves: 0.7 to 0.8 on
# A100, 0.6 to 0.7 on H100 (cuBLAS in published training profiles); assumed, and the first thing calibration corrects.
MATMUL_EFFICIENCY = {"Hopper": 0.57, "Blackwell": 0.57, "Volta": 0.65}
DEFAULT_MATMUL_EFFICIENCY = 0.74
DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A chip as the closed form needs it; `assumed` says what is no datasheet figure."""

    sheet: ChipSheet
    intra_bytes_per_s: float
    processors: float
    matmul_efficiency: float
    assumed: tuple[str, ...]

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s in a precision; None where the chip has no units for it."""
        figure = self.sheet.peak_flops_per_s.get(DTYPES[precision])
        return None if figure is None else figure.value


def find_chip(name: str) -> Chip:
    """The chip of a name or a shorthand.

    Raises:
        UsageError: not in the catalogue; the hint has the near names.
    """
    assumed: list[str] = []
    short = SHORTHANDS.get(catalog.normalise(name.replace("_", " ")))
    sheet = catalog.find(name.replace("_", " "))
    if sheet is None and short is not None:
        sheet = catalog.find(short)
        if sheet is not None:
            assumed.append(f"{name} is taken as the {sheet.name}")
    if sheet is None:
        near = catalog.near_names(name)
        known = ", ".join(sorted(chip.name.removeprefix("NVIDIA ") for chip in catalog.chips().values()))
        raise UsageError(
            f"no chip is called {name!r}",
            hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"Known are: {known}.",
        )
    if sheet.nvlink is not None and sheet.nvlink_links:
        intra = catalog.link_reading(sheet.nvlink, sheet.nvlink_links)
    else:
        intra = catalog.link_reading(sheet.pcie or "PCIe 3", PCIE_LANES)
    assert intra.value is not None, f"{sheet.name} names a link that the catalogue has"
    processors = sheet.multiprocessors.value if sheet.multiprocessors is not None else 100.0
    return Chip(
        sheet=sheet,
        intra_bytes_per_s=intra.value,
        processors=processors,
        matmul_efficiency=MATMUL_EFFICIENCY.get(sheet.architecture, DEFAULT_MATMUL_EFFICIENCY),
        assumed=tuple(assumed),
    )

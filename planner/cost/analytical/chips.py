"""Chips of a cluster by the names that people write: from the catalogue, with the shorthands for those sold in forms.

In: a name ("H100", "a100_sxm4-80gb"). Out: a `Chip`: its datasheet, the bandwidth inside a node, the share of its peak
that matrix products reach, and what was assumed. A name that may mean several chips is an error that names them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.errors import UsageError
from autoplan.probes import catalog
from autoplan.probes.catalog import ChipSheet

# The form that a name without one is taken for (docs/probes.md, "Datasheets"), said on screen as an assumption: the one
# that fills eight-GPU servers. Keys as `catalog.normalise` writes them. The A10G, which AWS alone has, is an A10 with
# another power limit and without a datasheet.
DEFAULT_FORMS = {
    "h100": "H100 SXM 80GB",
    "h10080gb": "H100 SXM 80GB",
    "a100": "A100 SXM 80GB",
    "a10080gb": "A100 SXM 80GB",
    "a10040gb": "A100 SXM 40GB",
    "v100": "V100 SXM2 32GB",
    "a10g": "A10 24GB",
}
PCIE_LANES = 16
# Where the datasheet does not print it; it only rounds work up to whole waves of tiles.
ASSUMED_PROCESSORS = 100.0
# The share of the dense peak that large matrix products reach in a training loop, before any calibration; what tiles,
# the filling of inner loops, launches and passes over memory cost comes on top (step_time.py). By architecture:
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
DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A chip as the closed form needs it.

    Attributes:
        sheet: Its datasheet.
        intra_bytes_per_s: Bandwidth between GPUs of a node, per GPU and direction.
        processors: Multiprocessors (SMs), or compute units (AMD).
        matmul_efficiency: Share of the dense peak that large matrix products reach before any calibration.
        assumed: What was assumed, in sentences.
    """

    sheet: ChipSheet
    intra_bytes_per_s: float
    processors: float
    matmul_efficiency: float
    assumed: tuple[str, ...]

    def peak(self, precision: str) -> float | None:
        """Dense FLOP/s in a precision; None where the datasheet gives none."""
        figure = self.sheet.peak_flops_per_s.get(DTYPES[precision])
        return None if figure is None else figure.value


def find_chip(name: str) -> Chip:
    """The chip of a name: a whole name, a default form, or part of a name that only one chip has.

    Raises:
        UsageError: not in the catalogue, or several chips have the name; the text or the hint says how to write each.
    """
    sheet, assumed = _find_sheet(name)
    if sheet.gpu_link is not None and sheet.gpu_links:
        intra = catalog.link_reading(sheet.gpu_link, sheet.gpu_links)
    else:
        intra = catalog.link_reading(sheet.pcie or "PCIe 3", PCIE_LANES)
    assert intra.value is not None, f"{sheet.name} names a link that the catalogue has"
    return Chip(
        sheet=sheet,
        intra_bytes_per_s=intra.value,
        processors=sheet.multiprocessors.value if sheet.multiprocessors is not None else ASSUMED_PROCESSORS,
        matmul_efficiency=MATMUL_EFFICIENCY.get(sheet.architecture, DEFAULT_MATMUL_EFFICIENCY),
        assumed=assumed,
    )


def _find_sheet(name: str) -> tuple[ChipSheet, tuple[str, ...]]:
    """The datasheet of a name, and what was assumed to find it."""
    exact = catalog.find(name)
    if exact is not None:
        return exact, ()
    default = DEFAULT_FORMS.get(catalog.normalise(name))
    matching = catalog.matching(default if default is not None else name)
    if len(matching) == 1:
        return matching[0], (f"{name} is taken as the {matching[0].name}",)
    if matching:
        raise UsageError(
            f"the chip {name!r} is ambiguous: the catalogue has {len(matching)} of this name",
            hint=f"Write {' or '.join(repr(sheet.short_name) for sheet in matching)}.",
        )
    near = catalog.near_names(name)
    known = ", ".join(sorted(sheet.short_name for sheet in catalog.chips().values()))
    raise UsageError(
        f"no chip is called {name!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "") + f"Known are: {known}.",
    )

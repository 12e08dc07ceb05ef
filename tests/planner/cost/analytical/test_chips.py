"""Names of chips: written any way, defaults said, ambiguous ones asked back, and no chip taken for another."""

from __future__ import annotations

import pytest

from autoplan.errors import UsageError
from autoplan.planner.cost.analytical.cluster import DEFAULT_FORMS, find_chip
from autoplan.planner.cost.roofline import MATMUL_EFFICIENCY
from autoplan.probes import catalog


@pytest.mark.parametrize(
    "name, sheet",
    [
        ("h100 sxm5", "NVIDIA H100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB"),
        ("a100_sxm4-80gb", "NVIDIA A100 SXM 80GB"),
        ("RTX-4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("A6000", "NVIDIA RTX A6000 48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada 48GB"),
        ("L40", "NVIDIA L40 48GB"),
        ("L40S", "NVIDIA L40S 48GB"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X 192GB"),
    ],
)
def test_a_whole_name_is_found_however_it_is_written(name: str, sheet: str) -> None:
    chip = find_chip(name)
    assert (chip.sheet.name, chip.assumed) == (sheet, ())


@pytest.mark.parametrize(
    "name, sheet",
    [
        ("H100", "NVIDIA H100 SXM 80GB"),
        ("H100-80GB", "NVIDIA H100 SXM 80GB"),
        ("a100", "NVIDIA A100 SXM 80GB"),
        ("A100 40 GB", "NVIDIA A100 SXM 40GB"),
        ("V100", "NVIDIA V100 SXM2 32GB"),
        ("A10G", "NVIDIA A10 24GB"),
        ("H800-80GB", "NVIDIA H800 SXM 80GB"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("RTX PRO 6000 Max-Q", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation 96GB"),
    ],
)
def test_a_default_form_or_part_of_a_name_is_said(name: str, sheet: str) -> None:
    chip = find_chip(name)
    assert chip.sheet.name == sheet
    assert chip.assumed == (f"{name} is taken as the {sheet}",)


@pytest.mark.parametrize(
    "name, writings",
    [
        ("A100 SXM", ("A100 SXM 40GB", "A100 SXM 80GB")),
        ("A100-PCIe", ("A100 PCIe 40GB", "A100 PCIe 80GB")),
        ("V100 SXM2", ("V100 SXM2 16GB", "V100 SXM2 32GB")),
        (
            "RTX PRO 6000",
            (
                "RTX PRO 6000 Blackwell Max-Q Workstation 96GB",
                "RTX PRO 6000 Blackwell Server 96GB",
                "RTX PRO 6000 Blackwell Workstation 96GB",
            ),
        ),
    ],
)
def test_an_ambiguous_name_is_asked_back_and_each_writing_is_found(name: str, writings: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="ambiguous") as caught:
        find_chip(name)
    for writing in writings:
        assert repr(writing) in str(caught.value.hint)
        assert find_chip(writing).assumed == ()


@pytest.mark.parametrize("name", ["80GB", "SXM", "Server Edition", "RTX 4090 Laptop", "L40S 24GB", "H1000", ""])
def test_what_names_no_chip_of_the_catalogue_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no chip is called"):
        find_chip(name)


def test_default_forms_are_for_names_that_several_chips_or_none_have() -> None:
    for key, form in DEFAULT_FORMS.items():
        assert catalog.normalise(key) == key, "keys are compared as they are normalised"
        assert catalog.find(form) is not None
        assert catalog.find(key) is None and len(catalog.matching(key)) != 1, f"{key} needs no default"


def test_each_architecture_with_a_constant_of_its_own_is_in_the_catalogue() -> None:
    assert set(MATMUL_EFFICIENCY) <= {chip.architecture for chip in catalog.chips().values()}


def test_an_mi300x_talks_over_its_seven_infinity_fabric_links() -> None:
    assert find_chip("MI300X").intra_bytes_per_s == pytest.approx(7 * 64e9)

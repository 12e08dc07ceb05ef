"""The catalogue: every figure has a source, peaks are dense, and no chip is taken for another."""

from __future__ import annotations

from collections import Counter

import pytest

from autoplan.probes import catalog
from autoplan.probes.catalog import ChipSheet

CHIPS = sorted(catalog.chips().items())


@pytest.mark.parametrize("file, chip", CHIPS, ids=[file for file, _ in CHIPS])
def test_every_figure_of_a_chip_has_a_source(file: str, chip: ChipSheet) -> None:
    figures = [chip.memory_bytes, chip.memory_bandwidth_bytes_per_s, *chip.peak_flops_per_s.values()]
    figures += [chip.last_level_cache_bytes] if chip.last_level_cache_bytes is not None else []
    for figure in figures:
        assert figure.source in chip.sources, f"{file}: {figure.source}"
        assert figure.value > 0 and figure.printed
    assert all(source.url.startswith("https://") and source.title for source in chip.sources.values())


@pytest.mark.parametrize("file, chip", CHIPS, ids=[file for file, _ in CHIPS])
def test_peaks_are_dense_and_in_order(file: str, chip: ChipSheet) -> None:
    peaks = {dtype: figure.value for dtype, figure in chip.peak_flops_per_s.items()}
    assert set(peaks) <= {"float32", "tf32", "bfloat16", "float16", "float8", "float4"}
    assert 1e12 < peaks["float32"] < 1e15
    narrow = [peaks[d] for d in ("tf32", "bfloat16", "float8", "float4") if d in peaks]
    assert narrow == sorted(narrow), "a narrower dtype is not slower"
    for dtype, figure in chip.peak_flops_per_s.items():
        if "sparsity" in figure.printed:
            assert figure.note and "dense" in figure.note, f"{file} {dtype}: how does the dense figure follow?"
    assert 100e9 < chip.memory_bandwidth_bytes_per_s.value < 30e12
    assert 1 << 30 < chip.memory_bytes.value < 1 << 40


# What one multiprocessor computes in a clock is fixed by its generation, so the dense 16-bit peak is one of few
# multiples of the vector float32 peak: a sparse figure, or that of another card, is not. Some cards have half the rate.
TENSOR_RATIOS = {
    "Volta": (8,),
    "Turing": (8,),
    "Ampere": (2, 4, 16),
    "Ada Lovelace": (2, 4),
    "Hopper": (14, 15, 16),
    "Blackwell": (2, 4, 30),
    "CDNA 3": (8,),
}


@pytest.mark.parametrize("file, chip", CHIPS, ids=[file for file, _ in CHIPS])
def test_dense_16_bit_peaks_fit_the_generation(file: str, chip: ChipSheet) -> None:
    peaks = chip.peak_flops_per_s
    ratio = peaks["float16"].value / peaks["float32"].value
    assert any(ratio == pytest.approx(multiple, rel=0.05) for multiple in TENSOR_RATIOS[chip.architecture]), ratio


@pytest.mark.parametrize("file, chip", CHIPS, ids=[file for file, _ in CHIPS])
def test_clocks_are_those_of_a_gpu(file: str, chip: ChipSheet) -> None:
    """Vector float32: 64 or 128 lanes a multiprocessor (256 on CDNA 3), two operations a clock of 1.3 to 2.7 GHz."""
    assert chip.multiprocessors is not None
    per_clock = chip.peak_flops_per_s["float32"].value / chip.multiprocessors.value / 2
    assert any(1.3e9 < per_clock / lanes < 2.7e9 for lanes in (64, 128, 256)), per_clock


def test_no_name_means_two_chips() -> None:
    names = Counter(
        name
        for chip in catalog.chips().values()
        for name in {catalog.normalise(alias) for alias in (chip.name, *chip.aliases)}
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    "driver_name, sheet",
    [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 SXM 40GB"),
        ("A100-SXM4-80GB", "NVIDIA A100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe 80GB"),
        ("NVIDIA H200", "NVIDIA H200 SXM 141GB"),
        ("nvidia geforce  rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA A40", "NVIDIA A40 48GB"),
        ("NVIDIA L40", "NVIDIA L40 48GB"),
        ("NVIDIA RTX A4000", "NVIDIA RTX A4000 16GB"),
        ("NVIDIA RTX 4500 Ada Generation", "NVIDIA RTX 4500 Ada 24GB"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation 96GB",
        ),
    ],
)
def test_driver_names_are_found(driver_name: str, sheet: str) -> None:
    found = catalog.find(driver_name)
    assert found is not None and found.name == sheet


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H1000",
        "NVIDIA A40-48Q",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "NVIDIA RTX 5000 Ada Generation Laptop GPU",
        "NVIDIA H100",
        "NVIDIA",
        "",
        "Some Accelerator 9000",
    ],
)
def test_a_name_that_only_looks_alike_is_unknown(name: str) -> None:
    assert catalog.find(name) is None


def test_part_of_a_name_matches_all_that_it_may_mean() -> None:
    assert [chip.short_name for chip in catalog.matching("a100_sxm")] == ["A100 SXM 40GB", "A100 SXM 80GB"]
    assert [chip.short_name for chip in catalog.matching("L40")] == ["L40 48GB"], "a whole name is one chip"
    assert catalog.matching("NVIDIA GeForce RTX 4090 Laptop GPU") == ()


def test_near_names_are_for_people() -> None:
    assert "NVIDIA GeForce RTX 4090" in catalog.near_names("RTX 4090 D")
    assert catalog.near_names("zzzzzz") == ()


def test_the_sparse_headline_is_not_taken() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        sheet = catalog.find(name)
        assert sheet is not None
        assert sheet.peak_flops_per_s["bfloat16"].value == pytest.approx(989.4e12, rel=0.001)
        assert sheet.peak_flops_per_s["tf32"].value == pytest.approx(494.7e12, rel=0.001)


def test_links_have_sources_and_unique_names() -> None:
    seen = Counter[str]()
    for family in catalog.link_families().values():
        for link in family.links:
            figure = link.bandwidth_bytes_per_s
            assert figure.source in family.sources and figure.note and figure.value > 0
            seen.update({catalog.normalise(alias) for alias in link.aliases})
    assert [name for name, count in seen.items() if count > 1] == []


@pytest.mark.parametrize(
    "name, count, bytes_per_s",
    [
        ("NVLink 3", 12, 300e9),
        ("NVLink 4", 18, 450e9),
        ("NVLink 5", 18, 900e9),
        ("PCIe Gen4", 16, 31.5e9),
        ("PCIe 5", 16, 63.0e9),
        ("NDR", 1, 50e9),
        ("RoCE 100", 1, 12.5e9),
        ("Infinity Fabric 4", 7, 448e9),
    ],
)
def test_link_rates_one_direction(name: str, count: int, bytes_per_s: float) -> None:
    assert catalog.link_reading(name, count).value == pytest.approx(bytes_per_s, rel=0.002)


def test_an_unknown_link_has_no_rate() -> None:
    reading = catalog.link_reading("NVLink 9", 4)
    assert reading.value is None and "not in the catalogue" in (reading.reason or "")


def test_chips_name_links_that_exist() -> None:
    for file, chip in catalog.chips().items():
        for name in (chip.gpu_link, chip.pcie):
            assert name is None or catalog.find_link(name) is not None, f"{file}: {name}"
        assert (chip.gpu_link is None) == (chip.gpu_links == 0), file

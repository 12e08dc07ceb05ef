"""The catalogue of datasheets: what vendors print about chips and links, as JSON files, each figure with its source.

    *.json         one chip each, as `ChipSheet`
    links/*.json   one family of links each, as `LinkFamily`: nvlink, infinity_fabric, pcie, infiniband, ethernet

In: the name of a chip or of a link. Out: its sheet, or None. Peaks are dense. Headlines are often "with sparsity",
twice the dense figure: `printed` keeps the text of the source and `note` says how the value follows from it.
`find` takes a whole name, for names that a driver gives: an unknown chip is unknown, and is measured. `matching` takes
part of a name too, for names that people write: it returns every sheet that the name may mean.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from autoplan.record import Reading, Record

FOLDER = Path(__file__).parent


class Source(Record):
    """A document."""

    title: str
    url: str


class Figure(Record):
    """A printed figure in SI units; `source` is a key of the sheet's `sources`."""

    value: float
    source: str
    printed: str = Field(description="as the source prints it")
    note: str | None = Field(default=None, description="how the value follows from it")


class ChipSheet(Record):
    """The datasheet of one chip in one form factor with one size of memory."""

    name: str
    vendor: str
    architecture: str
    compute_capability: str | None = None
    aliases: tuple[str, ...] = Field(description="every name that the driver or a user may give it")
    memory_bytes: Figure
    memory_bandwidth_bytes_per_s: Figure
    peak_flops_per_s: dict[str, Figure] = Field(description="dense: float32, tf32, bfloat16, float16, float8")
    last_level_cache_bytes: Figure | None = None
    multiprocessors: Figure | None = None
    gpu_link: str | None = Field(default=None, description="NVLink or Infinity Fabric: a name in the link catalogue")
    gpu_links: int = Field(default=0, description="how many of these links a GPU has")
    pcie: str | None = Field(default=None, description="a name in the link catalogue")
    sources: dict[str, Source]

    @property
    def short_name(self) -> str:
        """The name without the vendor, as one writes it on a command line: "A100 SXM 80GB"."""
        return self.name.removeprefix(f"{self.vendor} ")

    def reading(self, figure: Figure, unit: str) -> Reading:
        """A figure of this sheet as a `Reading`."""
        return Reading(value=figure.value, unit=unit, provenance="datasheet", source=_cite(figure, self.sources))


class LinkSheet(Record):
    """One generation of a link: bytes per second in one direction of one link, lane or port."""

    name: str
    kind: Literal["nvlink", "infinity_fabric", "pcie", "network"]
    per: Literal["link", "lane", "port"]
    bandwidth_bytes_per_s: Figure
    aliases: tuple[str, ...]


class LinkFamily(Record):
    """A file of the link catalogue."""

    sources: dict[str, Source]
    links: tuple[LinkSheet, ...]


def find(name: str) -> ChipSheet | None:
    """The sheet of a chip by its whole name, as the driver or a user writes it; None if it is not in the catalogue.

    Case, spaces, punctuation and the vendor in front do not matter; every word does: "RTX 4090 D" is not "RTX 4090".
    """
    return _chips_by_alias().get(normalise(name))


def matching(name: str) -> tuple[ChipSheet, ...]:
    """Every sheet that a name may mean, by sheet name: the one that has this name, else each that has all its words.

    A name must contain the model ("A100", "4090"): "80GB" or "SXM" alone match nothing. "A100 SXM" matches the sheets
    with 40 and with 80 GB; a word that no name of a sheet has ("4090 Laptop") matches nothing.
    """
    exact = find(name)
    if exact is not None:
        return (exact,)
    words = set(_words(name))
    return tuple(
        sorted(
            (chip for chip in chips().values() if _model_word(chip) in words and words <= _words_of(chip)),
            key=lambda chip: chip.name,
        )
    )


def near_names(name: str, count: int = 3) -> tuple[str, ...]:
    """Catalogue names that look like this one, for the text of an error; never to be used in its place."""
    known = {normalise(alias): chip.name for alias, chip in _aliases()}
    close = difflib.get_close_matches(normalise(name), known, n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(known[key] for key in close))[:count]


def find_link(name: str) -> LinkSheet | None:
    """The sheet of a link generation: "NVLink 4", "PCIe Gen5", "NDR"; None if it is not in the catalogue."""
    return _links_by_alias().get(normalise(name))


def link_reading(name: str, count: int) -> Reading:
    """Bytes per second in one direction over `count` links, lanes or ports of a generation."""
    link = find_link(name)
    if link is None:
        return Reading.unknown("bytes/s", f"{name!r} is not in the catalogue of links")
    sources = next(f.sources for f in link_families().values() if link in f.links)
    return Reading(
        value=link.bandwidth_bytes_per_s.value * count,
        unit="bytes/s",
        provenance="datasheet",
        source=f"{count} x {link.name}; {_cite(link.bandwidth_bytes_per_s, sources)}",
    )


def normalise(name: str) -> str:
    """The key that names are compared by: lower-case letters and digits alone, without the vendor in front."""
    return "".join(_words(name))


@cache
def chips() -> dict[str, ChipSheet]:
    """Every chip of the catalogue, by file name."""
    return {p.name: ChipSheet.model_validate_json(p.read_text()) for p in sorted(FOLDER.glob("*.json"))}


@cache
def link_families() -> dict[str, LinkFamily]:
    """Every file of the link catalogue, by file name."""
    paths = sorted((FOLDER / "links").glob("*.json"))
    return {path.name: LinkFamily.model_validate_json(path.read_text()) for path in paths}


def _aliases() -> list[tuple[str, ChipSheet]]:
    return [(alias, chip) for chip in chips().values() for alias in (chip.name, *chip.aliases)]


@cache
def _chips_by_alias() -> dict[str, ChipSheet]:
    return {normalise(alias): chip for alias, chip in _aliases()}


@cache
def _links_by_alias() -> dict[str, LinkSheet]:
    links = [link for family in link_families().values() for link in family.links]
    return {normalise(alias): link for link in reversed(links) for alias in link.aliases}


def _words(name: str) -> list[str]:
    """Lower-case words without punctuation and without the vendor in front; 80 GB, 80GiB and 80G are all 80gb."""
    sized = re.sub(r"\b(\d+)\s*g(?:i?b)?\b", r"\1gb", name.lower().replace("_", " "))
    words = re.sub(r"[^a-z0-9]+", " ", sized).split()
    return words[1:] if words[:1] in (["nvidia"], ["amd"]) else words


def _words_of(chip: ChipSheet) -> set[str]:
    """The words of all names of a chip."""
    return {word for alias in (chip.name, *chip.aliases) for word in _words(alias)}


def _model_word(chip: ChipSheet) -> str:
    """The word that names the model: the first one with a digit in the name of the sheet."""
    return next(word for word in _words(chip.name) if any(letter.isdigit() for letter in word))


def _cite(figure: Figure, sources: dict[str, Source]) -> str:
    note = f" ({figure.note})" if figure.note else ""
    return f'{sources[figure.source].title}: "{figure.printed}"{note}'

"""Datasheets: what makers print about chips and links, as JSON files, each figure with its source.

Peaks are dense. Headlines often are "with sparsity", twice the dense figure; `printed` keeps the text of the
source and `note` says how the value follows from it. A chip is found by one of its names, never by part of
one: an unknown chip is unknown, and is measured.
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
    power_w: Figure | None = None
    last_level_cache_bytes: Figure | None = None
    multiprocessors: Figure | None = None
    nvlink: str | None = Field(default=None, description="a name in the link catalogue")
    nvlink_links: int = 0
    pcie: str | None = Field(default=None, description="a name in the link catalogue")
    sources: dict[str, Source]

    def reading(self, figure: Figure, unit: str) -> Reading:
        """A figure of this sheet as a `Reading`."""
        return Reading(value=figure.value, unit=unit, provenance="datasheet", source=_cite(figure, self.sources))


class LinkSheet(Record):
    """One generation of a link: bytes per second in one direction of one link, lane or port."""

    name: str
    kind: Literal["nvlink", "pcie", "network"]
    per: Literal["link", "lane", "port"]
    bandwidth_bytes_per_s: Figure
    aliases: tuple[str, ...]


class LinkFamily(Record):
    """A file of the link catalogue."""

    sources: dict[str, Source]
    links: tuple[LinkSheet, ...]


def find(name: str) -> ChipSheet | None:
    """The sheet of a chip by name, as the driver or a user writes it; None if it is not in the catalogue.

    Case, spaces, punctuation and a leading "NVIDIA" do not matter; every word does: "RTX 4090 D" is not "RTX 4090".
    """
    return _chips_by_alias().get(normalise(name))


def near_names(name: str, count: int = 3) -> tuple[str, ...]:
    """Catalogue names that look like this one, for the text of an error; never to be used in its place."""
    known = {normalise(alias): chip.name for alias, chip in _aliases()}
    close = difflib.get_close_matches(normalise(name), known, n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(known[key] for key in close))[:count]


def find_link(name: str) -> LinkSheet | None:
    """The sheet of a link generation: "NVLink 4", "PCIe Gen5", "NDR"; None if it is not in the catalogue."""
    for family in link_families().values():
        for link in family.links:
            if normalise(name) in {normalise(alias) for alias in link.aliases}:
                return link
    return None


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
    """Lower case, runs of other characters as one space, without the maker's name in front."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return " ".join(words[1:] if words[:1] == ["nvidia"] else words)


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


def _cite(figure: Figure, sources: dict[str, Source]) -> str:
    note = f" ({figure.note})" if figure.note else ""
    return f'{sources[figure.source].title}: "{figure.printed}"{note}'

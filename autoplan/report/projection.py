"""A projection on the screen: where its parts come from, and how far off it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30


def show_anchor(document: dict[str, Any], screen: Console) -> None:
    """Prints the anchor, where each part comes from, and the options that hand the best layout to a search."""
    anchor = document["anchor"]
    kind = "the same kind of device" if anchor["same_kind"] else "another kind of device"
    _say(screen, f"\nanchor: {anchor['trials']} trials on {anchor['ranks']} x {anchor['device']}; this is {kind}")
    for part, source in anchor["sources"].items():
        _say(screen, f"  {part}: {source}")
    _say(screen, f"\nto search from it there: autoplan search {document['best'][0]['search_flags']} ...")


def show_against(document: dict[str, Any], screen: Console) -> None:
    """Prints projections beside what was measured, a line each."""
    anchor = document["anchor"]
    _say(screen, f"projected from {anchor['device']} (study {anchor['study']})")
    _say(screen, "plan | run | ranks | predicted (90 %) | measured | error | inside | memory: error | inside")
    for row in document["rows"]:
        if row["problem"] is not None:
            _say(screen, f"{row['plan']} | {row['what']} | not compared: {row['problem']}")
            continue
        low, step, high = (format_seconds(row[f"predicted{end}_s"]) for end in ("_low", "", "_high"))
        cells = [row["plan"], row["what"], str(row["ranks"]), f"{step} ({low} to {high})"]
        cells += [format_seconds(row["measured_s"]), f"{row['error']:+.1%}", "yes" if row["inside"] else "no"]
        if "memory_error" in row:
            cells += [f"{row['memory_error']:+.1%}", "yes" if row["memory_inside"] else "no"]
        _say(screen, " | ".join(cells))
    if document["compared"]:
        _say(
            screen,
            f"{document['compared']} compared: {document['mean_error']:.1%} off in the mean, {document['inside']} "
            "inside their interval",
        )


def _say(screen: Console, text: str) -> None:
    screen.print(text, markup=False, soft_wrap=True)

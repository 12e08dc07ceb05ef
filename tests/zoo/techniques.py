"""The table technique x kind of model, from the spaces of the zoo's workloads: offered, refused, and why.

    python -m tests.zoo.techniques [names] [--endings FOLDER] > table.md

Each workload is inspected as a search does it. With --endings, the folder of `tests.zoo.run --keep`, what the trace and
the parity check refused in those searches is listed too. docs/models.md has the table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autoplan.strategies.analysis.facts import WorkloadFacts
from tests.zoo.catalogue import Entry, pick
from tests.zoo.one import read

COLUMNS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("micro_batch", ()),
    ("precision", ("bf16",)),
    ("checkpointing", ("full",)),
    ("attention", ("eager", "sdpa")),
    ("loss", ("fused",)),
    ("compile", ("block",)),
    ("compile", ("model",)),
    ("optimizer_step", ("fused",)),
)
"""A knob, and the values of which one has to be offered; no values: more than one value has to be."""

MOST_NAMES = 8


@dataclass(kw_only=True)
class Found:
    """What the searches of one kind of model are offered.

    Attributes:
        workloads: How many there are.
        offered: By column, how many of them are offered the technique.
    """

    workloads: int = 0
    offered: dict[str, int] = field(default_factory=dict)


def title(column: tuple[str, tuple[object, ...]]) -> str:
    """A column in words: `compile=block`, or the knob where one of several values will do."""
    knob, values = column
    return f"{knob}={values[0]}" if len(values) == 1 else knob


def inspect(entry: Entry) -> WorkloadFacts:
    """The facts of a workload on this machine's CPU, as a search reads them."""
    from autoplan.probes.run import read_host_profile
    from autoplan.strategies.inspect import inspect_workload
    from autoplan.strategies.workloads.sources import make_spec

    micro_batch = entry.fix.get("micro_batch")
    spec = make_spec(model=entry.reference)
    if micro_batch is not None:
        spec = spec.model_copy(update={"options": dict(spec.options) | {"fixed_micro_batch": micro_batch}})
    return inspect_workload(spec, read_host_profile(), "cpu")


def refusals(facts: WorkloadFacts) -> dict[str, str]:
    """By column, why a technique is not offered; the columns that are offered are left out."""
    found = {}
    for column in COLUMNS:
        knob, values = column
        choices = facts.knob(knob)
        offered = any(value in choices.values for value in values) if values else len(choices.values) > 1
        if not offered:
            reasons = [left.reason for left in choices.left_out if not values or left.value in values]
            found[title(column)] = same_words(next(iter(reasons), "there is one value"))
    return found


def same_words(reason: str) -> str:
    """A reason without what differs from model to model: measured numbers, names of classes and modules."""
    reason = re.sub(r"it differs by [\d.e+-]+", "it differs", reason)
    reason = re.sub(r"^it would train something else: \S+ \((\w+)\)(?: and \d+ more like it)?", r"\1", reason)
    reason = re.sub(r"fixes the micro-batch to \d+", "fixes the micro-batch", reason)
    reason = re.sub(r"^\w+ has no scaled", "the model has no scaled", reason)
    return re.sub(r"counts [\d.e+]+ items of a batch, and the fused one [\d.e+]+", "counts other items", reason)


def table(kinds: dict[str, Found]) -> Iterator[str]:
    """A row for each kind of model: to how many of its workloads a technique is offered."""
    titles = [title(column) for column in COLUMNS]
    yield "| kind of model | workloads | " + " | ".join(f"`{one}`" for one in titles) + " |"
    yield "|" + " --- |" * (len(titles) + 2)
    for kind, found in kinds.items():
        cells = [_share(found.offered.get(one, 0), found.workloads) for one in titles]
        yield f"| {kind} | {found.workloads} | " + " | ".join(cells) + " |"


def _share(offered: int, workloads: int) -> str:
    return "all" if offered == workloads else "none" if offered == 0 else f"{offered} of {workloads}"


def reasons(refused: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    """For each technique and reason the workloads that it holds for."""
    yield "| not offered | why | workloads |"
    yield "| --- | --- | --- |"
    for (what, why), names in refused.items():
        yield f"| `{what}` | {why.replace('|', '/')} | {_listed(names)} |"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def after_the_trace(entries: Iterable[Entry], folder: Path) -> dict[tuple[str, str], list[str]]:
    """What the trace and the parity check refused in the searches whose endings lie in a folder."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        ending = read(entry.name, folder)
        for family, why in ending.left_out.items():
            if why.startswith("it does not run with this model"):
                found.setdefault((family, why.partition(": ")[2]), []).append(entry.name)
        for note in ending.notes:
            config, failed, why = note.partition(" was the fastest left, but fails parity: ")
            if failed:
                found.setdefault((config, why), []).append(entry.name)
    return found


def main() -> int:
    """Prints the tables; 1 where a workload could not be inspected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="names or kinds; all where none is given")
    parser.add_argument("--endings", type=Path, help="the folder that tests.zoo.run kept")
    chosen = parser.parse_args()
    kinds: dict[str, Found] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    entries = [entry for entry in pick(chosen.names) if entry.expected == "plans" and not entry.missing]
    bad = 0
    for entry in entries:
        try:
            against = refusals(inspect(entry))
        except Exception as error:  # one that fails never stops the others
            bad += 1
            print(f"{entry.name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        found = kinds.setdefault(entry.kind, Found())
        found.workloads += 1
        for column in COLUMNS:
            name = title(column)
            if name in against:
                refused.setdefault((name, against[name]), []).append(entry.name)
            else:
                found.offered[name] = found.offered.get(name, 0) + 1
    print("\n".join([*table(kinds), "", *reasons(dict(sorted(refused.items())))]))
    if chosen.endings is not None:
        print("\n".join(["", *reasons(after_the_trace(entries, chosen.endings))]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

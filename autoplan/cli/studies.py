"""autoplan ls and autoplan clean: the searches that were made here, and how their records are removed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli import output
from autoplan.errors import StoreBusyError, StoreError, UsageError
from autoplan.units import format_bytes, format_seconds, parse_duration_s

if TYPE_CHECKING:
    from autoplan.planner.store.studies import Study

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The folder of records. Default: the one in your state folder."),
]
StorageOption = Annotated[
    str | None, typer.Option("--storage", metavar="URL", help="The PostgreSQL database, where --storage was given.")
]


def ls_command(
    store: StoreOption = None, storage: StorageOption = None, json_output: output.JsonOption = False
) -> None:
    """List the searches that were made here.

    Each with its age, size and result. They are the folders of the store, which autoplan clean removes.
    """
    place, studies = _list(store, storage)
    if json_output:
        output.print_json({"status": "ok", "store": str(place), "searches": [_document(one) for one in studies]})
        return
    _show(studies)
    size = format_bytes(sum(one.size_bytes for one in studies))
    output.say(f"{len(studies)} search(es), {size}, in {place}")


def clean_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SEARCH]...", help="As autoplan ls names them. Default: all.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Only those that old: 30d, 12h.")
    ] = None,
    store: StoreOption = None,
    storage: StorageOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: output.JsonOption = False,
) -> None:
    """Remove the records of searches.

    It lists them and asks first. A search that runs is never removed. Plan files elsewhere stay.
    """
    from autoplan.planner.store.database import remove_shared
    from autoplan.planner.store.studies import remove_study

    least_s = 0.0 if older_than is None else parse_duration_s(older_than, option="--older-than")
    place, studies = _list(store, storage)
    chosen = _named(names, studies, place) if names else [one for one in studies if one.status != "running"]
    chosen = [one for one in chosen if one.age_s >= least_s]
    if chosen and not yes:
        _show(chosen, stderr=json_output)
        if not _is_wanted(chosen, place):
            chosen = []
    removed: list[Study] = []
    failed: list[StoreBusyError | StoreError] = []
    for one in chosen:
        try:
            remove_shared(place, one.name) if isinstance(place, str) else remove_study(one)
        except (StoreBusyError, StoreError) as error:
            failed.append(error)
        else:
            removed.append(one)
    if failed:
        why = "; ".join(error.flag_message for error in failed)
        went = ", ".join(one.name for one in removed) or "none"
        hints = dict.fromkeys(error.flag_hint for error in failed if error.flag_hint)
        raise type(failed[0])(f"{len(failed)} search(es) not removed: {why}. Removed: {went}", hint=" ".join(hints))
    if json_output:
        output.print_json({"status": "ok", "store": str(place), "removed": [one.name for one in removed]})
    else:
        print(f"removed {len(removed)} search(es), {format_bytes(sum(one.size_bytes for one in removed))}")


def _named(names: list[str], studies: list[Study], place: Path | str) -> list[Study]:
    """The searches that are named, each by its whole name or by a beginning that fits no other.

    Raises:
        UsageError: a name is empty, or fits none or several.
        StoreBusyError: one of them runs.
    """
    chosen: dict[str, Study] = {}
    for name in names:
        if not name:
            raise UsageError(
                "the name of a search is empty, which would fit every search",
                hint="Name the search as autoplan ls does, or name none to remove all.",
            )
        found = [one for one in studies if one.name == name] or [one for one in studies if one.name.startswith(name)]
        if not found:
            raise UsageError(f"there is no search {name} in {place}", hint="autoplan ls lists them.")
        if len(found) > 1:
            fits = ", ".join(one.name for one in found)
            raise UsageError(
                f"{name} is the beginning of {len(found)} searches, and has to fit one: {fits}",
                hint="Give more of the name, or each name.",
            )
        if found[0].status == "running":
            raise StoreBusyError(
                f"{found[0].name} runs, and a search that runs is never removed; nothing was removed",
                hint="End it first, or leave it out.",
            )
        chosen[found[0].name] = found[0]
    return list(chosen.values())


def _is_wanted(studies: list[Study], place: Path | str) -> bool:
    """The answer of a person; UsageError if there is nobody to ask."""
    if not sys.stdin.isatty():
        raise UsageError("autoplan clean asks first, and nobody can answer here", hint="Add --yes.")
    size = format_bytes(sum(one.size_bytes for one in studies))
    sys.stderr.write(f"Remove these {len(studies)} search(es), {size}, from {place}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _list(store: Path | None, storage: str | None) -> tuple[Path | str, list[Study]]:
    """The folder of the records, or the URL of their database, and the searches in it."""
    from autoplan.planner.store.database import check_storage, list_shared
    from autoplan.planner.store.store import study_folder
    from autoplan.planner.store.studies import list_studies

    if storage is None:
        folder = study_folder(store, "any").parent
        return folder, list_studies(folder)
    if store is not None:
        raise UsageError("--store and --storage were given", hint="Give one of them.")
    url = check_storage(storage)
    return url, list_shared(url)


def _show(studies: list[Study], *, stderr: bool = False) -> None:
    from autoplan.report import facts, terminal

    rows: list[tuple[str, ...]] = [
        (
            one.name,
            format_seconds(one.age_s) if one.age_s < 2 * 86_400 else f"{one.age_s / 86_400:.0f} days",
            format_bytes(one.size_bytes),
            str(one.summary.get("model", "unknown")),
            str(one.trials),
            _result(one),
        )
        for one in studies
    ]
    content = facts.Rows(("search", "age", "size", "workload", "trials", "result"), rows)
    terminal.show_table(output.console(stderr=stderr), content, title="Searches", right=(4,))


def _result(study: Study) -> str:
    """How it ended, in words; the speed-up of a plan."""
    if study.speedup is None:
        return study.status.replace("_", " ") + ("; the same command goes on" if study.status == "stopped" else "")
    median, low, high = (study.speedup[key] for key in ("median", "low", "high"))
    return "no gain: the plan is the baseline" if median == 1 else f"{median:.2f} times ({low:.2f} to {high:.2f})"


def _document(study: Study) -> dict[str, object]:
    return dataclasses.asdict(study) | {"folder": None if study.folder is None else str(study.folder)}

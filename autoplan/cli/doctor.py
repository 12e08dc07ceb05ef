"""autoplan doctor: what is installed here, and which feature misses what; with a script, why it is slow."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import output, plans
from autoplan.errors import UsageError
from autoplan.files import folder_bytes
from autoplan.units import format_bytes

NEEDED = ("torch", "transformers", "optuna", "pydantic", "numpy")

FEATURES = {
    "torchao": "products in fp8, optimizer states in 8 bits (--numerics lossy)",
    "liger-kernel": "kernels=liger",
    "triton": "torch.compile on CUDA, and what loss=fused compiles there",
    "accelerate": "Trainers, and the check of autoplan export --to transformers or accelerate",
    "trl": "Trainers of TRL",
    "lightning": "LightningModules, and autoplan.LightningWatch",
    "psycopg": "a study in PostgreSQL (--storage)",
}
"""Packages that are not always installed, and what each is for."""

Row = tuple[str, ...]


def doctor_command(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="A Python file that trains. Without it: what is installed.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="What the script is given.")] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", metavar="NAME", help="A module that trains, as after python -m.")
    ] = None,
    time_box: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="How long the script runs, with what starts it.")
    ] = "60s",
    nproc: Annotated[
        int, typer.Option("--nproc", metavar="N", help="Ranks of a script for torchrun, on this machine.")
    ] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="What the script may take: 8GiB. Default: 80% of all."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Keep a trace of three steps here, for Perfetto.")
    ] = None,
    quiet: plans.QuietOption = False,
    json_output: output.JsonOption = False,
) -> None:
    """Say why a script is slow; without one, what is installed.

    Each suspected cause is removed while the script runs, and whole steps are measured. Nothing it writes is kept.
    """
    words = [*([] if script is None else [script]), *(arguments or [])]
    if module is not None:
        words.insert(0, module)  # what follows are its arguments
    if not words:
        for option, given in (("--trace", trace is not None), ("--nproc", nproc != 1)):
            if given:
                hint = "Give the script first: autoplan doctor train.py."
                raise UsageError(f"{option} was given without a script", hint=hint)
        _show_installed(json_output)
        return
    from autoplan.planner.diagnose.run import diagnose
    from autoplan.report import diagnosis

    with output.progress("", quiet=quiet) as tell:  # what is refused at once is not said to have started
        found = diagnose(
            words[0],
            words[1:],
            module=module is not None,
            budget=time_box,
            nproc=nproc,
            memory_limit=memory_limit,
            trace=trace,
            on_progress=tell,
        )
    if json_output:
        output.print_json({"status": "ok"} | diagnosis.document(found))
    else:
        diagnosis.show_diagnosis(output.console(stderr=False), found)


def _show_installed(json_output: bool) -> None:
    tables = {"Software": software(), "Machine": machine(), "Folders": folders()}
    if json_output:
        keys = ("what", "found", "about")
        document = {
            title.lower(): [dict(zip(keys, row, strict=True)) for row in rows] for title, rows in tables.items()
        }
        output.print_json({"status": "ok"} | document)
        return
    from autoplan.report import facts, terminal

    for title, rows in tables.items():
        content = facts.Rows(("", "found", "about"), list(rows))
        terminal.show_table(output.console(stderr=False), content, title=title)


def software() -> list[Row]:
    """Packages and compilers: what, the version or `missing`, and what it is for."""
    from autoplan.planner.plan.key_tables import installed_version

    rows: list[Row] = [(name, installed_version(name) or "missing", "every search") for name in NEEDED]
    rows += [(name, installed_version(name) or "missing", what) for name, what in FEATURES.items()]
    for what, variable, names in (
        ("C++ compiler", "CXX", ("g++", "clang++")),
        ("C compiler", "CC", ("gcc", "clang")),
    ):
        found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), "missing")
        rows.append((what, found, f"torch.compile on {'CPU' if variable == 'CXX' else 'CUDA'}"))
    return rows


def machine() -> list[Row]:
    """The host and its limits, as autoplan probe shows them, and the devices that a search could use."""
    from autoplan.cli.probe import host_rows
    from autoplan.probes.run import read_host_profile

    profile = read_host_profile()
    memory = ((device, format_bytes(device.memory_available_bytes.value)) for device in profile.devices)
    devices = [(f"--device {device.type}", device.name, f"{free} free") for device, free in memory]
    return [*host_rows(profile.host), *devices]


def folders() -> list[Row]:
    """Where autoplan keeps what: the place, its size, and what removes it."""
    import platformdirs

    places = {
        platformdirs.user_state_dir("autoplan"): "records of searches (autoplan ls, autoplan clean)",
        platformdirs.user_cache_dir("autoplan"): "measurements of the machine, compiled code; may be deleted",
        platformdirs.user_log_dir("autoplan"): "tracebacks of autoplan's own bugs; may be deleted",
    }
    return [(place, _size(Path(place)), what) for place, what in places.items()]


def _size(folder: Path) -> str:
    """The size of all its files; whether it can be written, if it is there or can be made."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.access(nearest, os.W_OK):
        return "cannot be written"
    return format_bytes(folder_bytes(folder))

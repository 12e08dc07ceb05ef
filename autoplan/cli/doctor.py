"""autoplan doctor: what is installed here, and which feature misses what."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

from autoplan.cli import output
from autoplan.files import folder_bytes
from autoplan.units import format_bytes

NEEDED = ("torch", "transformers", "optuna", "pydantic", "numpy")

FEATURES = {
    "torchao": "products in fp8, optimizer states in 8 bits (--numerics lossy)",
    "liger-kernel": "kernels=liger, and one of the kernels of loss=fused on CUDA",
    "triton": "torch.compile on CUDA, and kernels of loss=fused there",
    "accelerate": "Trainers, and the check of autoplan export --to transformers or accelerate",
    "trl": "Trainers of TRL",
    "lightning": "LightningModules, and autoplan.LightningWatch",
    "psycopg": "a study in PostgreSQL (--storage)",
}
"""Packages that are not always installed, and what each is for."""

Row = tuple[str, ...]


def doctor_command(json_output: output.JsonOption = False) -> None:
    """Show what is installed, and what is missing for which feature.

    Nothing is measured, and torch is not loaded: it takes a second. `autoplan probe` measures the machine.
    """
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
    rows: list[Row] = [(name, _version(name), "every search") for name in NEEDED]
    rows += [(name, _version(name), what) for name, what in FEATURES.items()]
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _size(folder: Path) -> str:
    """The size of all its files; whether it can be written, if it is there or can be made."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        return "cannot be written"
    return format_bytes(folder_bytes(folder))

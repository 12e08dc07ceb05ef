"""A cache of measured profiles per machine, so that a second run does not measure again.

In and out: `CachedProfile`, as a JSON file named by the machine's fingerprint.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs
from pydantic import Field, ValidationError

from autoplan.files import read_regular
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record

# raise it when what is measured, or how, changes: older files are then not found
PROBES_VERSION = 4


class CachedProfile(Record):
    """A file of the cache: the profile, how long its probes were allowed to take and how disturbed they were."""

    budget_s: float
    others_cpu_share: float = Field(
        default=0.0, description="share of the CPU time that other processes took during the measurement"
    )
    profile: HardwareProfile


def cache_path(fingerprint: str, device: str, cache_dir: Path | None = None) -> Path:
    """Where the profile of a machine is kept.

    Args:
        fingerprint: Of the machine (`HardwareProfile.fingerprint`).
        device: Which kind of device was measured: "cuda" or "cpu".
        cache_dir: None takes the user's cache folder.
    """
    folder = cache_dir or Path(platformdirs.user_cache_dir("autoplan")) / "probes"
    return folder / f"{fingerprint}-{device}-v{PROBES_VERSION}.json"


def load_cached(path: Path) -> tuple[CachedProfile | None, str | None]:
    """Read a file of the cache.

    Returns:
        The profile and None; None and None where there is no file; None and a sentence where it is unusable.
    """
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the cached profile {path} cannot be read ({error}); measured again"
    try:
        return CachedProfile.model_validate_json(text), None
    except ValidationError:
        return None, f"the cached profile {path} is damaged or of another version; measured again"


def save_cached(path: Path, cached: CachedProfile) -> str | None:
    """Write a file of the cache in one step (a temporary file, then a rename); returns why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(cached.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        return f"the profile could not be kept in {path.parent} ({error}): the next run measures again"
    return None

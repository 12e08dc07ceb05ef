"""Whose code a plan names: a plan is data from anywhere, and the file of its workload runs only for who trusts it.

A workload `file.py:function` is code. It runs without a flag where
- the user names the file, on the command line or in the call;
- the file is the program that is running; or
- this user's own state folder has a search of that file with the same source and options (`remember_code` notes it).
Anything else needs `--trust-code` or `trust_code=True`.
"""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.errors import PlanError, UsageError, WorkloadError
from autoplan.files import is_private_file, make_private_folder, replace_file

if TYPE_CHECKING:
    from autoplan.strategies.workloads.spec import WorkloadSpec

TRAINING_CODE = ("code", "model")
"""The parts of a workload's digests without which another thing is trained."""

_MAX_NOTE_BYTES = 64 << 20
_MAX_SOURCE_BYTES = 16 << 20


def remember_code(spec: WorkloadSpec, study: str) -> None:
    """Notes, in the user's state folder, that they searched this file; other workloads carry no code.

    It is a note only: what cannot be written costs the flag `--trust-code` later.
    """
    if spec.kind != "function":
        return
    path = _note_of(study)
    try:
        make_private_folder(path.parent)
        replace_file(path, spec.model_dump_json(), private=True)
    except OSError:
        pass


def require_trust(spec: WorkloadSpec, study: str, *, trust_code: bool, named: bool = False) -> None:
    """Refuses to run the file that a plan names, unless there is a reason to trust it.

    Args:
        spec: The plan's workload.
        study: The identity of the plan's study.
        trust_code: The user said so.
        named: The user named the file.

    Raises:
        PlanError: nobody vouches for the file, or it is not here.
    """
    if spec.kind != "function":
        return
    if not _file_of(spec).is_file():
        raise PlanError(
            f"the plan is of {spec.reference}, and that file is not here",
            hint=f"Say where it is now: --model {_short_reference(spec)}.",
        )
    if trust_code or named or _is_running(spec) or _was_searched(spec, study):
        return
    raise PlanError(
        f"the plan names code that would run here: {spec.reference}. It was not searched with these options by this "
        "user, or it changed since",
        hint="Read that file first. To run it: --trust-code, prepare(trust_code=True), or name it: --model "
        f"{_short_reference(spec)}. With every part handed to prepare() it is not needed.",
    )


def with_named_workload(spec: WorkloadSpec, model: str) -> WorkloadSpec:
    """The spec with the place that the user names: a plan may have been found in another folder, or elsewhere.

    Args:
        spec: The plan's workload.
        model: `file.py:function` or `file.py`; or a config.json or a folder, where the plan has one.

    Raises:
        UsageError: the plan's workload is of another kind, or there is no such file.
        WorkloadError: no such function in it.
    """
    from autoplan.strategies.workloads.function_file import check_function

    if spec.kind not in ("function", "config", "folder"):
        raise UsageError(
            f"--model is {model!r}, and the plan's workload is {spec.name}, which is no file",
            hint="Leave out --model.",
        )
    if spec.kind == "function":
        function = spec.reference.rpartition(":")[2]
        path, name = check_function(model if ".py:" in model else f"{model}:{function}")
        if name != function:
            raise UsageError(
                f"--model names the function {name}, and the plan is of {function}",
                hint=f"Give --model {path.name}:{function}.",
            )
        return spec.model_copy(update={"reference": f"{path}:{name}"})
    path = Path(model).expanduser().resolve()
    if not (path.is_dir() if spec.kind == "folder" else path.is_file()):
        raise UsageError(
            f"--model is {model!r}, and the plan is of a {'folder' if spec.kind == 'folder' else 'config.json'}",
            hint="Give the place where it is now.",
        )
    return spec.model_copy(update={"reference": str(path)})


def refuse_odd_file(spec: WorkloadSpec) -> None:
    """Refuses a workload whose file is no ordinary one: a device or a pipe would be read for ever.

    Raises:
        PlanError: it is not a regular file, or too large for what it should be.
    """
    if spec.kind not in ("function", "config", "folder"):
        return
    if spec.kind == "function" and not re.search(r"\.py:[^\W\d]\w*\Z", spec.reference):
        raise PlanError(
            f"the plan's workload is {spec.reference!r}, which is not of the form file.py:function",
            hint="The plan was edited: make it again with autoplan search.",
        )
    file = _file_of(spec) if spec.kind == "function" else Path(spec.reference)
    if spec.kind == "folder":
        file = file / "config.json"
    try:
        status = file.stat()
    except (OSError, ValueError):
        return  # it is not here: who needs it will say so
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SOURCE_BYTES:
        raise PlanError(
            f"the plan's workload is {spec.reference}, and {file} is no file of up to {_MAX_SOURCE_BYTES >> 20} MiB",
            hint="The plan was edited, or something else is there now.",
        )


def code_changes(spec: WorkloadSpec) -> tuple[str, ...]:
    """The parts of the training code that are others here and now than when the plan was found."""
    from autoplan.strategies.workloads.sources import changed_parts

    return tuple(part for part in changed_parts(spec) if part in TRAINING_CODE)


def _is_running(spec: WorkloadSpec) -> bool:
    """Whether the file is the program itself, which calls us: its code runs already."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(program, str):
        return False
    return Path(program).resolve() == _file_of(spec)


def _was_searched(spec: WorkloadSpec, study: str) -> bool:
    """Whether this user searched the same function of the same file, with these options and this source."""
    if not re.fullmatch("[0-9a-f]{16}", study):
        return False  # not an identity: it would name a file elsewhere
    return any(
        known is not None
        and known.kind == "function"
        and (known.reference, known.options, known.arguments) == (spec.reference, spec.options, spec.arguments)
        and "code" in known.digests
        and not _changed_or_gone(known)
        for known in (_read_note(_note_of(study)), _read_plan(study))
    )


def _changed_or_gone(known: WorkloadSpec) -> bool:
    """As the digests of our own record say, not those of the plan."""
    try:
        return bool(code_changes(known)) or not _file_of(known).is_file()
    except (WorkloadError, OSError):
        return True


def _state_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("autoplan"))


def _note_of(study: str) -> Path:
    return _state_folder() / "code" / f"{study}.json"


def _read_note(path: Path) -> WorkloadSpec | None:
    from autoplan.strategies.workloads.spec import WorkloadSpec

    try:
        return WorkloadSpec.model_validate_json(_read_private(path))
    except (OSError, ValueError):
        return None


def _read_plan(study: str) -> WorkloadSpec | None:
    """The workload of the plan in the user's own store, of searches before there were notes."""
    import json

    from autoplan.strategies.workloads.spec import WorkloadSpec

    try:
        document = json.loads(_read_private(_state_folder() / "studies" / study / "plan.json"))
        return WorkloadSpec.model_validate(document["workload"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_private(path: Path) -> bytes:
    """The bytes of a file that is the user's own.

    Raises:
        OSError: it is not there, or somebody else could have written it.
    """
    if not is_private_file(path) or path.stat().st_size > _MAX_NOTE_BYTES:
        raise PermissionError(1, "it is not the user's own", str(path))
    return path.read_bytes()


def _file_of(spec: WorkloadSpec) -> Path:
    """The file of a `file.py:function`."""
    return Path(spec.reference.rpartition(":")[0])


def _short_reference(spec: WorkloadSpec) -> str:
    file, _, function = spec.reference.rpartition(":")
    return f"{Path(file).name}:{function}"

"""Whose code a plan runs: a plan is data from anywhere, and never chooses by itself what is called.

A workload `file.py:function` is code. The function, its options and the arguments after `--` are those that
- the user names, on the command line or in the call: `--model 'train.py:workload seed=3 -- --lr 0.5'`; or that
- the user's own note of a search made here has (`remember_code` writes it), where the file is as it was then.
A plan that says otherwise is refused, with both names. Batch size and sequence length are the plan's.
"""

from __future__ import annotations

import json
import re
import shlex
import stat
from pathlib import Path
from typing import Any, NamedTuple

from autoplan.errors import PlanError, UsageError, WorkloadError
from autoplan.files import is_private_file, make_private_folder, read_regular, replace_file
from autoplan.planner.records.plan_file import one_line
from autoplan.strategies.workloads.function_file import NAMED
from autoplan.strategies.workloads.spec import WorkloadSpec

TRAINING_CODE = ("code", "model")
"""The parts of a workload's digests without which another thing is trained."""

FORM = "file.py:function NAME=VALUE ... -- ARGUMENTS"
"""How a call is written in one text; a value is a number, true, false, null or a text."""

_MAX_SOURCE_BYTES = 16 << 20
_MAX_SHOWN = 1000
"""Characters of a call of a plan that are shown."""

_FORMS = {"function": "file.py:function", "config": "file", "folder": "folder"}
_OURS = "fixed_micro_batch"
"""An option that is autoplan's own: no function gets it."""


class Call(NamedTuple):
    """The part of a file that is called, and its options and arguments.

    Attributes:
        file: Its path, as it was written.
        function: "" if the file alone was named.
        options: What the function gets by name, besides batch size and sequence length.
        arguments: What sys.argv has after the file's name during the call.
    """

    file: str
    function: str
    options: dict[str, Any]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, spec: WorkloadSpec) -> Call:
        file, _, function = spec.reference.rpartition(":")
        options = {name: value for name, value in spec.options.items() if name != _OURS}
        return cls(file, function, options, spec.arguments)

    @classmethod
    def parse(cls, text: str) -> Call:
        """Reads FORM, or a file alone.

        Raises:
            UsageError: it is neither.
        """
        found = NAMED.match(text)
        if found is None or text[found.end() :][:1].strip():
            return cls(text, "", {}, ())
        try:
            words = shlex.split(text[found.end() :])
        except ValueError as error:
            raise UsageError(f"{text!r} cannot be read: {error}", hint=f"The form is {FORM!r}.") from None
        end = words.index("--") if "--" in words else len(words)
        options = dict(word.partition("=")[::2] for word in words[:end])
        if not all("=" in word for word in words[:end]):
            raise UsageError(f"{text!r} has words that are no NAME=VALUE", hint=f"The form is {FORM!r}.")
        values = {name: _read_value(value) for name, value in options.items()}
        return cls(found["file"], found["function"], values, tuple(words[end + 1 :]))

    def __str__(self) -> str:
        values = {
            name: value if isinstance(value, str) and _read_value(value) == value else json.dumps(value)
            for name, value in self.options.items()
        }
        words = [f"{name}={value}" for name, value in values.items()]
        words += ["--", *self.arguments] if self.arguments else []
        return " ".join([f"{_near(self.file)}:{self.function}", *map(shlex.quote, words)])

    def matches(self, other: Call) -> bool:
        """Whether both call the same with the same, wherever the file is."""
        return self[1:] == other[1:]


def remember_code(spec: WorkloadSpec, study: str) -> None:
    """Notes, in the user's state folder, that they searched this file; other workloads carry no code.

    It is a note only: where it cannot be written, the user names the workload later.
    """
    if spec.kind != "function":
        return
    path = _note_of(study)
    try:
        make_private_folder(path.parent)
        replace_file(path, spec.model_dump_json(), private=True)
    except OSError:
        pass


def own_workload(spec: WorkloadSpec, study: str, model: str | None = None) -> WorkloadSpec:
    """The workload of a plan, where the user or their own search named what is called.

    Args:
        spec: The plan's workload.
        study: The identity of the plan's study.
        model: What the user names: FORM; `file.py` alone, where their own search has the rest; or, where the plan has
            one, a config.json or a folder. None: nothing.

    Returns:
        The spec with the place, the function, the options and the arguments that were named.

    Raises:
        PlanError: the plan alone says what would be called, something else was named, or the file is not here.
        UsageError: what was named is of another kind, or does not exist.
        WorkloadError: the file has no such function, or one that is somebody else's.
    """
    if spec.kind != "function":
        return spec if model is None else _moved(spec, model)
    from autoplan.strategies.workloads.function_file import check_function, file_of

    refuse_odd_file(spec)
    said = Call.of(spec)
    named = None if model is None else Call.parse(model)
    if named is None and not Path(said.file).is_file():
        raise PlanError(
            f"the plan is of {_shown(said)}, and that file is not here", hint=f"Say where it is: {_how(said)}."
        )
    if named is not None:
        place = f"{file_of(named.file)}:{named.function or said.function}"
        spec = spec.model_copy(update={"reference": place})
        refuse_odd_file(spec)
    path, _ = check_function(spec.reference)
    calls = _own_calls(said, named, study)
    own = next((call for call in calls if call.matches(said)), None)
    if own is None and calls:
        who = "your search was of" if named is None or not named.function else "what you named is"
        raise PlanError(
            f"the plan is of {_shown(said)}, and {who} {_shown(calls[-1])}",
            hint=f"A plan does not choose what is called. If the plan is right: {_how(said, str(path))}. Else search "
            "again.",
        )
    if own is None:
        raise PlanError(
            f"the plan names code that would run here: {_shown(said)}. Nobody but the plan says so: it is no search of "
            "yours, or the file changed since",
            hint=f"Read that file first. To run it, name what is called: {_how(said, str(path))}. With every part "
            "handed to prepare() it is not needed.",
        )
    fixed = {_OURS: spec.options[_OURS]} if _OURS in spec.options else {}
    update = {"reference": f"{path}:{own.function}", "options": own.options | fixed, "arguments": own.arguments}
    return spec.model_copy(update=update)


def _own_calls(said: Call, named: Call | None, study: str) -> list[Call]:
    """The allowed calls: those in the user's own search of the plan's study, and last the one that the user named."""
    if named is not None and (named.options or named.arguments):
        return [named]
    note = _own_note(study)
    noted = [] if note is None else [Call.of(note)]
    if named is None:
        return [] if note is None or noted[0].file != said.file or _changed_or_gone(note) else noted
    if not named.function:
        return noted
    return [*(call for call in noted if call.function == named.function), named]


def _moved(spec: WorkloadSpec, model: str) -> WorkloadSpec:
    """The spec of a config.json or a folder with the place that the user names."""
    if spec.kind not in ("config", "folder"):
        raise UsageError(
            f"--model is {model!r}, and the plan's workload is {spec.name}, which is no file",
            hint="Leave out --model.",
        )
    path = Path(model).expanduser().resolve()
    if not (path.is_dir() if spec.kind == "folder" else path.is_file()):
        raise UsageError(
            f"--model is {model!r}, and the plan is of a {'folder' if spec.kind == 'folder' else 'config.json'}",
            hint="Give the place where it is now.",
        )
    return spec.model_copy(update={"reference": str(path)})


def _read_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list) else value


def _shown(call: Call) -> str:
    text = one_line(str(call))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _how(call: Call, place: str | None = None) -> str:
    """The option to type for a call, or its form if the call is too long."""
    text = one_line(str(call._replace(file=place or Path(call.file).name)))
    typed = shlex.quote(text) if len(text) <= _MAX_SHOWN else repr(FORM)
    return f"--model {typed}"


def _near(file: str) -> str:
    """The path from the current folder, where the file is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


_SECRET_NAME = re.compile(
    r"(?:^|[-_.])(?:(?:api|access|private|secret|auth)[-_.]?(?:key|token)|(?<!pad[-_])(?<!eos[-_])(?<!bos[-_])token|"
    r"password|passwd|passphrase|pwd|secret|credentials?)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(?:hf|sk|pk|gh[opsur]|github_pat|glpat|xox[abprs])[-_][\w-]{16,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\..*|"
    r"(?=.*[0-9])(?=.*[a-f])[0-9a-f]{32,}|\w[\w+.-]*://[^/\s:@]*:[^/\s@]+@.*"
)
"""The forms of secrets: keys of services, hexadecimal keys, and addresses with a password."""


def secrets_note(spec: WorkloadSpec) -> str | None:
    """A sentence on the arguments and options that look like secrets, by name or by position; None: none does.

    A plan has them as they are, and so has a script made of it.
    """
    found = [name for name, value in spec.options.items() if isinstance(value, str) and _is_secret(name, value)]
    for number, word in enumerate(spec.arguments):
        name, equals, value = word.partition("=")
        following = spec.arguments[number + 1] if number + 1 < len(spec.arguments) else ""
        if name.startswith("-") and _is_secret(name.lstrip("-"), value if equals else following):
            found.append(name)
        elif _SECRET_VALUE.fullmatch(word) and not (number and spec.arguments[number - 1] in found):
            found.append(f"argument {number + 1}")
    if not found:
        return None
    return (
        f"{one_line(', '.join(found))[:_MAX_SHOWN]} of the workload may be a secret, and the plan and what is exported "
        "of it have it as it is: hand it over in a file or an environment variable, or keep those files to yourself"
    )


def _is_secret(name: str, value: str) -> bool:
    return bool(value and (_SECRET_NAME.search(name) or _SECRET_VALUE.fullmatch(value)))


def refuse_odd_file(spec: WorkloadSpec) -> None:
    """Refuses a workload whose file is no ordinary one: a device or a pipe would be read for ever.

    Raises:
        PlanError: it is not a regular file, or too large for what it should be.
    """
    if spec.kind not in ("function", "config", "folder"):
        return
    is_call = re.search(r"\.py:[^\W\d]\w*\Z", spec.reference) is not None
    if is_call != (spec.kind == "function") or (not is_call and NAMED.fullmatch(spec.reference)):
        raise PlanError(
            f"the plan's workload is {spec.reference!r}, which is no {_FORMS[spec.kind]}",
            hint="The plan was edited: make it again with autoplan search.",
        )
    file = Path(Call.of(spec).file if is_call else spec.reference)
    try:
        if spec.kind == "folder" and stat.S_ISDIR(file.stat().st_mode):
            file = file / "config.json"
        status = file.stat()
    except (OSError, ValueError):
        return  # it is not here: who needs it will say so
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SOURCE_BYTES:
        raise PlanError(
            f"the plan's workload is {spec.reference}, and {file} is no file of up to {_MAX_SOURCE_BYTES >> 20} MiB",
            hint="The plan was edited, or something else is there now.",
        )


def _own_note(study: str) -> WorkloadSpec | None:
    """The workload of a study's search, from this user's own record; None: it has none, or one without code.

    A note that somebody else could have written is none.
    """
    if not re.fullmatch("[0-9a-f]{16}", study):
        return None  # not an identity: it would name a file elsewhere
    path = _note_of(study)
    try:
        known = WorkloadSpec.model_validate_json(read_regular(path)) if is_private_file(path) else None
    except (OSError, ValueError):
        return None
    return known if known is not None and known.kind == "function" else None


def _changed_or_gone(known: WorkloadSpec) -> bool:
    """As the digests of our own record say, not those of the plan."""
    from autoplan.strategies.workloads.sources import changed_parts

    try:
        gone = not Path(Call.of(known).file).is_file()
        return gone or any(part in TRAINING_CODE for part in changed_parts(known))
    except (WorkloadError, OSError):
        return True


def _note_of(study: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("autoplan")) / "code" / f"{study}.json"

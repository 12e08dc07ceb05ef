"""The file of a plan: what is read of it before anything is made of it, and the digests that show an edit.

In: a path. Out: a document of plain JSON values, with limits on its size and depth, finite numbers, and texts that a
terminal can show. Reading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from autoplan.errors import PlanError

MAX_FILE_BYTES = 64 << 20
"""A plan has some 2 KiB per trial: this is one of 30,000 trials."""

MAX_DEPTH = 24
"""Lists and objects inside each other; the plans of this version have 8."""

MAX_INTEGER = 2**63 - 1

# The measured part: what the search trained, how, and what it found. Places, names and sentences are not in it.
SEALED = ("accumulation", "baseline", "config", "device", "evidence", "hardware", "measurement", "parity", "speedup")
SEALED_ALSO = ("claim", "environment", "hand", "nodes", "training", "unverified", "workload")
_FREE_OF_WORKLOAD = ("reference", "name", "defaults_used", "notes", "unhashed", "payload")

# What a terminal takes as a command, and what other programs take as the end of a line: C0 and C1 without tab and
# newline, DEL, the separators of Unicode, the marks that reverse the direction of text (CVE-2021-42574), surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile(r"[\t\n]")


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a plan file.

    Raises:
        PlanError: it cannot be read, is too large, is not a JSON object, or has values that no plan has.
    """
    text = _read_text(path)
    try:
        document = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
            object_pairs_hook=_refuse_repeated,
        )
    except RecursionError:
        raise _not_a_plan(path, f"it is nested more than {MAX_DEPTH} deep") from None
    except _ValueOfNoPlan as error:
        raise _not_a_plan(path, str(error)) from None
    except ValueError as error:
        if not text.lstrip().startswith("{"):
            what = "is not a plan: a plan is a JSON file" if text.strip() else "is empty"
            raise PlanError(
                f"{path} {what}",
                hint="Name the file that autoplan search wrote (plan.json unless --out said another).",
            ) from None
        raise PlanError(
            f"{path} is not JSON: {error}",
            hint="The file may be cut short. The search's store keeps its record: run the same autoplan search "
            "again, and it writes the plan without repeating a trial.",
        ) from error
    if not isinstance(document, dict):
        raise _not_a_plan(path, f"it holds {type(document).__name__}, not an object")
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [one for value in level for one in (value.values() if isinstance(value, dict) else value)]
        level = [one for one in level if isinstance(one, dict | list)]
    if level:
        raise _not_a_plan(path, f"it is nested more than {MAX_DEPTH} deep")
    return document


def digests_of_document(document: Mapping[str, Any]) -> dict[str, str]:
    """16 hex digits (SHA-256) for each section of the measured part of a plan's document, by the section's name.

    They are of the values, not of the text: white space, the order of keys, and 1.0 or 1 make no difference.
    """
    found = {}
    for section in (*SEALED, *SEALED_ALSO):
        value = document.get(section)
        if section == "workload" and isinstance(value, dict):
            value = {key: item for key, item in value.items() if key not in _FREE_OF_WORKLOAD}
        if value is not None:
            same_numbers = json.loads(json.dumps(value), parse_int=_float_if_exact)
            text = json.dumps(same_numbers, sort_keys=True, separators=(",", ":"))
            found[section] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def edited_sections(document: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The sections whose digests are not those in the document; None: it has no digests (an earlier version's)."""
    seal = document.get("seal")
    if not isinstance(seal, dict) or not seal:
        return None
    now = digests_of_document(document)
    return tuple(section for section in sorted(now.keys() | seal.keys()) if now.get(section) != seal.get(section))


def shown_text(text: str) -> str:
    r"""A text whose control characters are written out (`\x1b`), so that no terminal takes them as commands."""

    def written_out(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _CONTROLS.sub(written_out, text)


def one_line(text: str) -> str:
    """A text on one line, without control characters: for comments, headings and errors."""
    return shown_text(_LINE.sub(" ", text))


def with_shown_texts(value: Any) -> Any:
    """The document with each text, keys too, as `shown_text` has it."""
    if isinstance(value, str):
        return shown_text(value)
    if isinstance(value, list):
        return [with_shown_texts(item) for item in value]
    if isinstance(value, dict):
        return {shown_text(key): with_shown_texts(item) for key, item in value.items()}
    return value


def first_problem(error: ValidationError) -> str:
    """The first value of a document that a record refuses, and why, on one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return one_line(f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}")[:500]


class _ValueOfNoPlan(Exception):
    """A JSON value that no plan has."""


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "Give the path of a plan. There is none yet? autoplan search --model gpt2 writes plan.json."
        if isinstance(error, IsADirectoryError):
            hint = f"Give the plan file in it, for example {path / 'plan.json'}."
        raise PlanError(f"{path} cannot be read: {reason}", hint=hint) from error
    if len(data) > MAX_FILE_BYTES:
        raise PlanError(
            f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, so it is no plan",
            hint="Write plans with autoplan search.",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_a_plan(path, f"it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _not_a_plan(path: Path, reason: str) -> PlanError:
    return PlanError(
        f"{path} is not a plan: {reason}",
        hint="Write plans with autoplan search; autoplan schema prints what a plan contains.",
    )


def _refuse_constant(text: str) -> NoReturn:
    raise _ValueOfNoPlan(f"it has the number {text}; a plan's numbers are finite")


def _parse_int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INTEGER:
        raise _ValueOfNoPlan(f"it has a whole number of {len(text)} digits; a plan's are below 2**63")
    return int(text)


def _parse_float(text: str) -> float:
    if not math.isfinite(float(text)):  # 1e999
        raise _ValueOfNoPlan("it has a number that is not finite; a plan's numbers are")
    return float(text)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _ValueOfNoPlan(f"it has {one_line(name)[:80]!r} twice in one object")
        found[name] = value
    return found


def _float_if_exact(text: str) -> float:
    """A whole number as a float, where that is exact: other programs write 1.0 as 1."""
    return float(text) if abs(int(text)) < 2**53 else int(text)


def load_notes(path: Path, edited: tuple[str, ...] | None) -> tuple[str, ...]:
    """Sentences that a person is told about a plan's file."""
    if edited is None:
        return (f"an earlier version wrote {path}: without digests of what was measured, an edit does not show",)
    if edited:
        return (
            f"{path} was edited after the search wrote it (changed: {', '.join(edited)}): its figures do not belong to "
            "it. Run the same autoplan search again to get the original",
        )
    return ()

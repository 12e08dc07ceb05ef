"""Where workloads come from: makes specs from what the user gave, and workloads from specs.

`make_spec` runs in the planner's own process and loads no torch; `load_workload` runs in a rank.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads import registry
from autoplan.strategies.workloads.data_files import changed_files
from autoplan.strategies.workloads.digests import digest, installed_versions
from autoplan.strategies.workloads.frameworks import read_in_rank
from autoplan.strategies.workloads.function_file import (
    NAMED,
    check_function,
    command_line,
    import_function,
    local_sources,
)
from autoplan.strategies.workloads.registry import own_length, read_config_file, weight_files, weights_stamp
from autoplan.strategies.workloads.spec import DEFAULT_GLOBAL_BATCH, WorkloadSpec, check_count
from autoplan.text import writable

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload

DEFAULT_LONGEST_SEQUENCE = 8192  # some models take far more (131072 for Llama 3.2); too much for a default
LANGUAGE_OPTIONS = ("learning_rate", "weight_decay", "max_grad_norm", "seed", "fixed_micro_batch")

Option = str | int | float | bool | None


def make_spec(
    *,
    model: str,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    options: Mapping[str, Option] | None = None,
    arguments: Sequence[str] = (),
) -> WorkloadSpec:
    """The spec of what `--model` names.

    Args:
        model: A built-in name, a config.json, a folder with a config.json (and weights), or `file.py:function`.
        sequence_length: Tokens per sequence; None: the model's own length, at most DEFAULT_LONGEST_SEQUENCE.
        global_batch: Samples per optimizer step; None: DEFAULT_GLOBAL_BATCH, or what the function says.
        options: learning_rate, weight_decay, max_grad_norm, seed, fixed_micro_batch; a function takes what it
            declares.
        arguments: What sys.argv has after the file's name while a function's file is imported and the function runs.

    Raises:
        WorkloadError: an unknown model, a broken file, or a number out of range.
    """
    if model != writable(model):
        raise WorkloadError(
            f"{writable(model)} is no text in UTF-8, so no record or plan can name it", hint="Rename the file."
        )
    check_count("the global batch", global_batch, "--global-batch 32")
    check_count("the sequence length", sequence_length, "--seq-len 1024")
    chosen: dict[str, Option] = {
        key: value for key, value in (options or {}).items() if value is not None or key == "max_grad_norm"
    }
    if chosen.get("max_grad_norm") == 0:
        chosen["max_grad_norm"] = None  # clipping to 0 would clear the gradients
    if NAMED.fullmatch(model):  # with max_grad_norm None the function is asked for no clipping, and must take that
        return _function_spec(model, sequence_length, global_batch, chosen, tuple(arguments))
    if arguments:
        raise WorkloadError(
            f"arguments were given ({' '.join(arguments)[:80]}), and {model!r} is no function that would read them",
            hint="Arguments after -- are for --model or --trainer file.py:function.",
        )
    _check_language_options(model, chosen)
    if not model.strip():
        raise WorkloadError("no model was named", hint="For example: --model gpt2")
    name, path = registry.canonical_name(model), Path(model).expanduser()
    kind = "model" if name is not None else "folder" if path.is_dir() else "config"
    if kind == "config" and not (path.suffix == ".json" or path.is_file()):
        raise _unknown_model(model)
    fields = _read_fields(kind, name or str(path))
    reference = name or str(path.resolve())
    name = name or (path.resolve().name if kind == "folder" else str(fields["model_type"]))
    return _language_spec(kind, reference, name, fields, sequence_length, global_batch, chosen)


def _check_language_options(model: str, options: Mapping[str, Option]) -> None:
    unknown = sorted(set(options) - set(LANGUAGE_OPTIONS))
    if unknown:
        raise WorkloadError(
            f"{model} takes no option {', '.join(unknown)}",
            hint=f"Language models take {', '.join(LANGUAGE_OPTIONS)}; a file.py:function takes what it declares.",
        )


def _unknown_model(model: str) -> WorkloadError:
    if model.endswith(".py"):
        there = Path(model).expanduser().is_file()
        return WorkloadError(
            f"{model} names no function of that file" if there else f"there is no file {model} here",
            hint=f"Name a function that returns the workload: --model {model if there else 'train.py'}:make_workload.",
        )
    near = registry.near_names(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return WorkloadError(
            f"{model} looks like a name of the Hugging Face Hub, and nothing is downloaded",
            hint=f"Download it first (hf download {model} --local-dir DIR) and give that folder: --model DIR."
            + (f" Built in, without weights: {' or '.join(near)}." if near else ""),
        )
    return WorkloadError(
        f"{model!r} is no built-in model, no file and no folder here",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "")
        + f"Built in are {', '.join(registry.list_models())}; else give a config.json, a model folder or "
        "file.py:function.",
    )


def changed_parts(spec: WorkloadSpec) -> tuple[str, ...]:
    """The parts of a spec whose digests are others here and now: `code`, `data`, `model`, `weights`, `versions`.

    A missing digest is a changed one. Empty where nothing changed, and where it cannot be known: its files are not
    here, or it was made of Python objects, of which only the versions and the data files are compared (`plan.prepare`
    compares the objects that it is given).
    """
    if spec.kind == "model" and spec.reference not in registry.list_models():
        return ()  # no path is made of the name of a model
    if spec.kind == "object":
        now = {"versions": digest(installed_versions())}
    else:
        try:
            made = make_spec(
                model=spec.reference,
                sequence_length=spec.sequence_length,
                global_batch=spec.global_batch,
                options=spec.options,
                arguments=spec.arguments,
            )
        except WorkloadError:
            return ()
        now = {part: value for part, value in made.digests.items() if part != "settings"}
    changed = {part for part, value in now.items() if spec.digests.get(part) != value}
    return tuple(sorted(changed | ({"data"} if changed_files(spec.sources.get("data files", {})) else set())))


def changed_pieces(spec: WorkloadSpec) -> list[str]:
    """The files behind `changed_parts`: sources that changed or are new, data files, and packages."""
    found = changed_files(spec.sources.get("data files", {}))
    then = spec.sources.get("files", {})
    if spec.kind == "function" and then:
        try:
            now = local_sources(check_function(spec.reference)[0])
        except WorkloadError:
            now = then
        found += [name for name in sorted(then | now) if then.get(name) != now.get(name)]
    versions = spec.sources.get("versions", {})
    installed = installed_versions()
    found += [
        f"{package} {versions.get(package, 'none')} -> {installed.get(package, 'none')}"
        for package in sorted(versions | installed)
        if versions and versions.get(package) != installed.get(package)
    ]
    return found


def spec_from_objects(workload: Workload | None = None, **parts: Any) -> WorkloadSpec:
    """The spec of Python objects: see `autoplan.strategies.workloads.objects.spec_from_objects`, which this calls."""
    from autoplan.strategies.workloads import objects

    return objects.spec_from_objects(workload, **parts)


def load_workload(spec: WorkloadSpec) -> Workload:
    """The workload of a spec. Loads torch and, for language models, transformers; downloads nothing.

    Raises:
        WorkloadError: the files or functions behind it are missing, fail, or return the wrong thing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if spec.kind in ("object", "function"):
        from autoplan.strategies.workloads.user_errors import with_checked_batches

        workload = with_checked_batches(_of_users(spec))
    else:
        workload = _language_model(spec)
    finds = workload.find_unused_parameters or spec.find_unused_parameters
    return dataclasses.replace(workload, find_unused_parameters=finds)


def _language_model(spec: WorkloadSpec) -> Workload:
    from autoplan.strategies.workloads.language_model import language_model_workload

    folder = Path(spec.reference)
    weights = folder if spec.kind == "folder" and weight_files(folder) else None
    assert spec.sequence_length is not None, "specs of language models have a length"
    return language_model_workload(
        _read_fields(spec.kind, spec.reference),
        name=spec.name,
        sequence_length=spec.sequence_length,
        global_batch=spec.global_batch,
        options=spec.options,
        weights=weights,
    )


def _read_fields(kind: str, reference: str) -> dict[str, Any]:
    """The configuration of a language model."""
    if kind == "model":
        return registry.read_config(reference)
    return read_config_file(Path(reference) / "config.json" if kind == "folder" else Path(reference))


def _language_spec(
    kind: Any,
    reference: str,
    name: str,
    fields: dict[str, Any],
    sequence_length: int | None,
    global_batch: int | None,
    options: dict[str, Option],
) -> WorkloadSpec:
    longest = own_length(fields)
    said = []
    if sequence_length is None:
        if longest is None:
            raise WorkloadError(
                f"the configuration of {name} states no sequence length", hint="Give one, for example --seq-len 1024."
            )
        sequence_length = min(longest, DEFAULT_LONGEST_SEQUENCE)
        own = "the model's own length" if sequence_length == longest else f"the model itself takes up to {longest}"
        said.append(f"sequence length {sequence_length} ({own}); change it with --seq-len")
    elif longest is not None and sequence_length > longest and fields["model_type"] != "t5":
        raise WorkloadError(
            f"a sequence length of {sequence_length} is more than the {longest} positions of {name}",
            hint=f"Give --seq-len {longest} or less.",
        )
    if global_batch is None:
        global_batch = DEFAULT_GLOBAL_BATCH
        said.append(f"global batch {global_batch} sequences per optimizer step; change it with --global-batch")
    has_weights = kind == "folder" and weight_files(Path(reference))
    digests = {
        "model": digest(fields),
        "settings": digest([sequence_length, global_batch, options]),
        "weights": digest(weights_stamp(Path(reference)) if has_weights else ""),
        "versions": digest(installed_versions()),
    }
    return WorkloadSpec(
        kind=kind,
        reference=reference,
        name=name,
        sequence_length=sequence_length,
        global_batch=global_batch,
        unit="tokens",
        options=options,
        identity=digest(digests),
        digests=digests,
        sources={"versions": installed_versions()},
        defaults_used=tuple(said),
    )


def _function_spec(
    text: str,
    sequence_length: int | None,
    global_batch: int | None,
    options: dict[str, Option],
    arguments: tuple[str, ...],
) -> WorkloadSpec:
    path, function = check_function(text)
    files = local_sources(path)
    digests = {
        "code": digest([files, function]),
        "settings": digest([sequence_length, global_batch, options, *([list(arguments)] if arguments else [])]),
        "versions": digest(installed_versions()),
    }
    open_fields = [
        name for name, value in (("global_batch", global_batch), ("sequence_length", sequence_length)) if value is None
    ]
    return WorkloadSpec(
        kind="function",
        reference=f"{path}:{function}",
        name=f"{path.stem}:{function}",
        sequence_length=sequence_length,
        global_batch=global_batch or DEFAULT_GLOBAL_BATCH,
        unit="tokens" if sequence_length else "samples",
        options=options,
        arguments=arguments,
        sources={"files": files, "versions": installed_versions()},
        open_fields=tuple(open_fields),
        identity=digest(digests),
        digests=digests,
    )


def _of_users(spec: WorkloadSpec) -> Workload:
    """The workload of objects or of a function, as the spec asks for it."""
    from autoplan.strategies.workloads.objects import unpack

    if spec.kind == "object":
        workload = unpack(spec)
    else:
        with command_line(spec.reference, spec.arguments):
            workload = _call_function(spec)
    changes: dict[str, Any] = {} if "global_batch" in spec.open_fields else {"global_batch": spec.global_batch}
    fixed = spec.options.get("fixed_micro_batch")
    if fixed is not None:
        changes["fixed_micro_batch"] = int(fixed)
    return dataclasses.replace(workload, **changes)


def _call_function(spec: WorkloadSpec) -> Workload:
    from autoplan.strategies.workloads.workload import Workload

    function = import_function(spec.reference)
    given: dict[str, Any] = {key: value for key, value in spec.options.items() if key != "fixed_micro_batch"}
    if "global_batch" not in spec.open_fields:
        given["global_batch"] = spec.global_batch
    if spec.sequence_length is not None:
        given["sequence_length"] = spec.sequence_length
    taken = inspect.signature(function).parameters
    untaken = sorted(set(given) - set(taken) - {"global_batch", "sequence_length"})
    if untaken:
        raise WorkloadError(
            f"{spec.reference} takes no {', '.join(untaken)}",
            hint=f"It takes {', '.join(taken) or 'nothing'}; add a parameter of that name to the function.",
        )
    try:
        workload = function(**{key: value for key, value in given.items() if key in taken})
        workload = read_in_rank(workload) or workload
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{spec.reference} raised {type(error).__name__}: {error}",
            hint="Run the function by itself in Python; it returns an autoplan.Workload.",
        ) from error
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{spec.reference} returned {type(workload).__name__}; it returns an autoplan.Workload or a Trainer",
            hint="End the function with: return autoplan.Workload(name=..., build_model=..., make_batch=..., ...)",
        )
    if spec.sequence_length is not None and workload.sequence_length != spec.sequence_length:
        raise WorkloadError(
            f"{spec.reference} makes sequences of {workload.sequence_length}, and {spec.sequence_length} was asked for",
            hint="Leave out --seq-len, or give the function a parameter sequence_length.",
        )
    return workload

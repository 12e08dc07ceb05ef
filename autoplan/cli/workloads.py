"""The workload that a command line names: --model or --trainer, its options, and the arguments after --."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.errors import UsageError

if TYPE_CHECKING:
    from autoplan.strategies.workloads.spec import WorkloadSpec


def named_workload(model: str | None, trainer: str | None) -> str:
    """The workload that --model or --trainer names; UsageError if neither or both are given."""
    if model is not None and trainer is not None:
        raise UsageError("--model and --trainer were given", hint="Give one of them.")
    from autoplan.strategies.workloads.function_file import NAMED

    if trainer is not None and not NAMED.fullmatch(trainer):
        raise UsageError(
            f"--trainer is {trainer!r}; it is file.py:function", hint="For example: --trainer train.py:make_trainer"
        )
    named = model if trainer is None else trainer
    if named is None:
        raise UsageError("no workload was named", hint="For example: --model gpt2, or --trainer train.py:make_trainer")
    return named


def make_spec(
    model: str,
    sequence_length: int | None,
    global_batch: int | None,
    arguments: list[str] | None = None,
    **options: Any,
) -> WorkloadSpec:
    """The workload that the options name; WorkloadError says what is wrong with them."""
    from autoplan.strategies.workloads import sources

    given = {name: value for name, value in options.items() if value is not None}
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None  # how a spec says: no clipping
    return sources.make_spec(
        model=model,
        sequence_length=sequence_length,
        global_batch=global_batch,
        options=given,
        arguments=arguments or (),
    )

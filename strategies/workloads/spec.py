"""WorkloadSpec: how a workload is found again, in another process or another run. Data; loads no torch.

`autoplan.strategies.workloads.sources` makes specs from what the user gave, and workloads from specs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from autoplan.errors import WorkloadError
from autoplan.record import Record


class WorkloadSpec(Record):
    """What is trained, by reference.

    `identity` is a hash of all that makes the training what it is: the model's configuration, the source of the
    user's functions, the sequence length, the global batch, the options.
    """

    kind: Literal["model", "config", "folder", "function", "object"]
    reference: str = Field(description="gpt2; a path of a config.json or a folder; file.py:function; a Python name")
    name: str
    sequence_length: int | None
    global_batch: int
    unit: Literal["tokens", "samples"] = "tokens"
    options: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="learning_rate, max_grad_norm, seed, ... as the source takes them"
    )
    payload: str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="objects of a library call, cloudpickled in base64; never written to a plan",
    )
    open_fields: tuple[str, ...] = Field(
        default=(),
        description="global_batch and sequence_length where the user's function decides them and has not been asked "
        "yet; inspection (strategies/inspect.py) fills them in and empties this",
    )
    identity: str
    digests: dict[str, str] = Field(
        default_factory=dict,
        description="a hash per part of what is trained (model, loss, optimizer, data, weights, versions, ...); the "
        "identity is made of them; empty in specs of earlier versions",
    )
    unhashed: tuple[str, ...] = Field(default=(), description="types of values that no digest covers")
    defaults_used: tuple[str, ...] = Field(
        default=(), description="what the user did not give, in sentences for the screen"
    )


DEFAULT_GLOBAL_BATCH = 32


def check_count(what: str, value: object, example: str) -> None:
    """Raises WorkloadError unless the value is None or a whole number of at least 1."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return
    raise WorkloadError(f"{what} is {value!r}; it is a whole number of at least 1", hint=f"For example: {example}")


def hash_identity(document: Mapping[str, Any]) -> str:
    """16 hex digits over a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]

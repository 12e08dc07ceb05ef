"""WorkloadSpec: how a workload is found again, in another process or another run. Data; loads no torch.

`autoplan.strategies.sources` makes specs from what the user gave, and workloads from specs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autoplan.probes.profile import Record


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
    defaults_used: tuple[str, ...] = Field(
        default=(), description="what the user did not give, in sentences for the screen"
    )

"""The knobs of where tensors lie, how memory is managed, and whose kernels run. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autoplan.strategies.knob import Knob

Allocator = Annotated[
    Literal["own", "keep", "expandable"],
    Knob(
        technique="allocator",
        numerics="none",
        memory_only="leaves torch's allocator as it is",
        memory_only_on="cuda",
        left_out="keep: CUDA, a C library that is not glibc; expandable: CPU",
        without="the allocators stay as they are",
    ),
    Field(
        description="own: as it is; for the whole process, keep (CPU): the C library holds on to freed memory, which "
        "the next micro-step takes without page faults (glibc); expandable (CUDA): segments that grow, not pieces",
    ),
]

Kernels = Annotated[
    Literal["own", "liger"],
    Knob(
        technique="kernels",
        device="cuda",
        left_out="no liger-kernel; it does not know the model; anything compiled; tensor parallelism, a pipeline",
        without="the model keeps its own norms, rotary embeddings and gated MLPs",
    ),
    Field(
        description="own: norms, rotary embeddings and gated MLPs as the model has them; liger: Liger's kernels for "
        "them, in runs that are not compiled",
    ),
]

Offload = Annotated[
    Literal["none", "optimizer", "activations", "parameters"],
    Knob(
        technique="offload",
        device="cuda",
        memory_only="moves nothing between the device and the host",
        last_resort=True,
        left_out="any configuration without it fits; the host's memory cannot hold it; tensor parallelism, a pipeline; "
        "parameters: without `dp_shard >= 2`; optimizer: one that looks at all parameters together",
        without="what the plan keeps on the host stays on the device, where it may not fit",
    ),
    Field(
        description="what lies in the host's memory: none; optimizer (its states; the step runs on the device, piece "
        "by piece); activations (what the backward needs); parameters (FSDP2 shards, gradients, states and the step)",
    ),
]

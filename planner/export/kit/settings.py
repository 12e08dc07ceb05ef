"""The constants that the kit asks: what a plan says, as an export has it at its top. Here they are the plain run's.

Their values in an export are those of `planner/export/companion.py`.
"""

from __future__ import annotations

from typing import Any

# The batch.
GLOBAL_BATCH: int = 1
MICRO_BATCH: int = 1
ACCUMULATION: int = 1
LOCAL_BATCH: int = 1
SEQUENCE_LENGTH: int | None = None

# The workload.
DEVICE: str = "cpu"
MODEL_JSON: str = "{}"
MODEL_FOLDER: str = ""
LEARNING_RATE: float = 0.0
WEIGHT_DECAY: float = 0.0
MAX_GRAD_NORM: float | None = None
SEED: int = 0
USER_FILE: str = ""
USER_FUNCTION: str = ""
USER_OPTIONS: dict[str, Any] = {}
USER_ARGUMENTS: list[str] = []
UNIT: str = "tokens"
COUNTED_ITEMS: int = 1
ITEMS: int = 1
LOADER_ARGUMENTS: dict[str, Any] = {}

# What the workload trains with, in a loop of one's own: parameter groups as (names, options), all where no names; the
# names of what is in no group.
MAKES_OPTIMIZERS: bool = False
GROUPS: list[tuple[list[str], dict[str, Any]]] = []
UNHELD: list[str] = []
OPTIMIZER: str = ""
SCHEDULE: str = ""
SCHEDULE_FUNCTION: str = ""
SCHEDULE_OPTIONS: dict[str, Any] = {}
OWN_CHECKPOINTING: bool = False

# The tool of such a loop, and what it is given.
TOOL: str = ""
CONFIG_FILE: str = ""
MIXED_PRECISION: str = "no"
SYNCS_LAST: bool = False
ARGUMENTS: dict[str, Any] = {}
STRATEGY: str = ""
STRATEGY_OPTIONS: dict[str, Any] = {}
PLUGIN_OPTIONS: dict[str, Any] = {}

# The knobs, and what follows from them.
PRECISION: str = "fp32"
CHECKPOINTING: str = "none"
CHECKPOINT_EVERY: int = 1
COMPILE: str = "off"
COMPILE_MODE: str = "default"
CUDA_GRAPHS: bool = False
ATTENTION: str = "own"
ATTENTION_KERNEL: str = ""
MASKLESS: bool = False
KERNELS: str = "own"
FP8: str = "off"
LOSS: str = "full"
HEAD: str = ""
OPTIMIZER_STEP: str = "own"
OFFLOAD: str = "none"
PARAMETERS: str = "own"
OPTIMIZER_STATE: str = "own"
THREADS: int | None = None
ALLOCATOR: str = "own"
BATCH_NORM: str = "own"
BLOCKS: bool = False

# Several ranks.
RANKS: int = 1
DP_REPLICATE: int = 1
DP_SHARD: int = 1
TP: int = 1
TENSOR_PLAN: dict[str, Any] = {}
DDP: bool = False
FIND_UNUSED: bool = False
FSDP: bool = False
RESHARD_AFTER_FORWARD: bool = True
GRADIENT_SYNC: str = "last"

"""TrainingConfig: every knob of a training run, frozen and validated, with the arithmetic of the degrees.

A config says how a workload is run, never what is trained: the global batch, the loss, dropout, the schedule and
the frozen parameters belong to the workload. `micro_batch x accumulation x dp_replicate x dp_shard` equals the
global batch exactly; accumulation is derived, never set.

Importing this module loads no torch: the planner's own process reads configs too.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError

from autoplan.errors import ConfigError
from autoplan.record import Record

Checkpointing = Literal["none", "selective", "every_4", "every_3", "every_2", "full"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Compile = Literal["off", "block", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
Attention = Literal["own", "eager", "sdpa"]
LossHead = Literal["full", "fused"]
OptimizerStep = Literal["own", "for_loop", "foreach", "fused"]
Allocator = Literal["own", "keep"]
GradientSync = Literal["last", "every"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


class TrainingConfig(Record):
    """One way to run a workload. Defaults are the plain run: fp32, nothing applied, one device."""

    micro_batch: int = Field(ge=1, description="samples per forward and backward on one data-parallel rank")
    checkpointing: Checkpointing = Field(
        default="none",
        description="which activations are recomputed in the backward: none; selective (the per-operation policy "
        "keeps matmuls and attention); every_k (each k-th repeated block); full (each repeated block)",
    )
    precision: Precision = Field(
        default="fp32",
        description="fp32; tf32 (fp32 storage, TF32 matmuls, CUDA); bf16 or fp16 autocast over fp32 parameters, "
        "fp16 with dynamic loss scaling",
    )
    compile: Compile = Field(default="off", description="torch.compile: off, each repeated block, the whole model")
    compile_mode: CompileMode = Field(default="default", description="mode of torch.compile; default when off")
    attention: Attention = Field(
        default="own", description="own: as the model has it; eager; sdpa: torch's scaled_dot_product_attention"
    )
    loss: LossHead = Field(
        default="full",
        description="full: as the workload has it; fused: output head and cross-entropy in one operation that never "
        "holds all logits (torch's linear_cross_entropy where it exists, else chunks with recomputation)",
    )
    optimizer_step: OptimizerStep = Field(
        default="own", description="own: as the workload's optimizer has it; torch's for-loop, foreach or fused form"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU: intra-operation threads per rank; None: torch's")
    allocator: Allocator = Field(
        default="own",
        description="CPU: own leaves the C library as it is; keep has it hold on to freed memory, which the next "
        "micro-step then takes without page faults (glibc; for the whole process)",
    )
    dp_replicate: int = Field(default=1, ge=1, description="data-parallel replicas (DDP; the outer degree of HSDP)")
    dp_shard: int = Field(default=1, ge=1, description="ranks over which FSDP2 shards parameters and states")
    reshard_after_forward: bool = Field(
        default=True, description="FSDP2: free gathered parameters after the forward (ZeRO-3) or keep them (ZeRO-2)"
    )
    fsdp_prefetch: int = Field(
        default=0,
        ge=0,
        description="FSDP2: blocks whose parameters are gathered ahead, in forward and backward; 0: torch's own order",
    )
    gradient_sync: GradientSync = Field(
        default="last",
        description="FSDP2, when gradients accumulate: scattered over the ranks at the last micro-step alone (whole "
        "gradients are kept until then) or at every one (a share is kept; more is sent)",
    )
    ddp_bucket_mb: int = Field(
        default=25, ge=1, description="DDP: MiB of gradients per all-reduce; 25 is torch's own (its first bucket: 1)"
    )
    ddp_static_graph: bool = Field(
        default=False, description="DDP: the graph is promised to be the same at every step (torch's static_graph)"
    )
    tp: int = Field(default=1, ge=1, description="tensor-parallel degree, with sequence parallel")
    pp: int = Field(default=1, ge=1, description="pipeline stages (physical)")
    pp_schedule: PipelineSchedule = Field(default="1f1b", description="pipeline schedule, when pp > 1")
    pp_microbatches: int = Field(
        default=1, ge=1, description="micro-batches per pipeline pass, when pp > 1; accumulation is a multiple of it"
    )
    virtual_stages: int = Field(default=1, ge=1, description="stages per pipeline rank (interleaved schedules)")

    @property
    def dp(self) -> int:
        """Data-parallel degree: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks: dp_replicate x dp_shard x tp x pp."""
        return self.dp * self.tp * self.pp

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per optimizer step on one data-parallel rank.

        Raises:
            ConfigError: micro_batch x dp does not divide the global batch.
        """
        per_micro_step = self.micro_batch * self.dp
        if global_batch % per_micro_step:
            raise ConfigError(
                f"micro_batch {self.micro_batch} x dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} = "
                f"{per_micro_step} does not divide the global batch of {global_batch}",
                hint=f"micro_batch can be {', '.join(map(str, micro_batches(global_batch, self.dp))) or 'nothing'} "
                f"at {self.dp} data-parallel ranks; the global batch itself is never changed.",
            )
        return global_batch // per_micro_step

    def knobs_off_default(self) -> dict[str, Any]:
        """The knobs that differ from the plain run, micro_batch always among them."""
        plain = TrainingConfig(micro_batch=self.micro_batch)
        return {
            name: value
            for name, value in self.model_dump().items()
            if name == "micro_batch" or value != getattr(plain, name)
        }

    def describe(self) -> str:
        """One line for people: `micro_batch=4 precision=bf16 compile=block`."""
        return " ".join(f"{name}={value}" for name, value in self.knobs_off_default().items())


KNOBS: tuple[str, ...] = tuple(TrainingConfig.model_fields)


def micro_batches(global_batch: int, dp: int = 1) -> list[int]:
    """Every micro-batch that keeps the global batch: the divisors of global_batch / dp, ascending."""
    if dp < 1 or global_batch < 1 or global_batch % dp:
        return []
    share = global_batch // dp
    return [size for size in range(1, share + 1) if share % size == 0]


def knob_values(knob: str) -> tuple[Any, ...] | None:
    """The closed list of a knob's values, or None for a number; ConfigError for an unknown knob."""
    import difflib

    if knob not in TrainingConfig.model_fields:
        near = difflib.get_close_matches(knob, KNOBS, n=3)
        raise ConfigError(
            f"{knob!r} is not a knob",
            hint=("Did you mean " + " or ".join(near) + "? " if near else "") + f"The knobs are {', '.join(KNOBS)}.",
        )
    annotation = TrainingConfig.model_fields[knob].annotation
    if annotation is bool:
        return (True, False)
    return get_args(annotation) if get_origin(annotation) is Literal else None


def parse_knob(text: str) -> tuple[str, Any]:
    """Reads `knob=value` as the command line gives it.

    Raises:
        ConfigError: no `=`, an unknown knob, or a value the knob does not take.
    """
    knob, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is not of the form knob=value", hint="For example: --fix precision=bf16")
    knob = knob.strip().replace("-", "_")
    return knob, check_knob(knob, value.strip())


def check_knob(knob: str, value: Any) -> Any:
    """The value in the knob's own type.

    Raises:
        ConfigError: an unknown knob, or a value the knob does not take.
    """
    allowed = knob_values(knob)
    try:
        config = TrainingConfig.model_validate({"micro_batch": 1} | {knob: value}, strict=False)
    except ValidationError:
        least = 0 if knob == "fsdp_prefetch" else 1
        rule = "one of " + ", ".join(map(str, allowed)) if allowed else f"a whole number of at least {least}"
        raise ConfigError(f"{knob}={value!r} is not a value of {knob}", hint=f"{knob} takes {rule}.") from None
    return getattr(config, knob)

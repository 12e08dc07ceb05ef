"""TrainingConfig: every knob of a training run, frozen and validated, with the arithmetic of the degrees.

A config says how a workload is run, never what is trained: the global batch, the loss, dropout, the schedule and
the frozen parameters belong to the workload. `micro_batch x accumulation x dp_replicate x dp_shard` equals the
global batch exactly; accumulation is derived, never set.

Importing this module loads no torch: the planner's own process reads configs too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, model_validator

from autoplan.errors import ConfigError
from autoplan.record import Record

Checkpointing = Literal["none", "selective", "every_4", "every_3", "every_2", "full"]
Fp8 = Literal["off", "tensorwise", "rowwise"]
Attention = Literal["own", "eager", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]

CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The modes of torch.compile that record CUDA graphs."""

SLOW_COMPILE_MODES = ("max-autotune-no-cudagraphs", "max-autotune")
"""The modes of torch.compile that time many kernels for each matrix product: they compile for minutes."""

ATTENTION_BACKENDS = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
}
"""By value of attention: the one kernel of scaled_dot_product_attention that may run (torch.nn.attention)."""

CHECKPOINT_EVERY = {"selective": 1, "every_4": 4, "every_3": 3, "every_2": 2, "full": 1}
"""By value of checkpointing: one of how many repeated blocks is wrapped."""

OPTIMIZER_FLAGS = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""By value of optimizer_step: the flags of torch's optimizers."""

INTERLEAVED_SCHEDULES = ("interleaved_1f1b", "zero_bubble")
"""The pipeline schedules with several stages per rank."""

TORCHAO_INSTALL = 'pip install "autoplan[cuda]" (or torchao)'

GONE: Mapping[str, Any] = {"gelu": "own", "fsdp_prefetch": 0, "ddp_bucket_mb": 25, "ddp_static_graph": False}
"""Knobs that earlier plans have, each at the value with which torch does as it does by itself."""

Role = Literal["run", "rank_count", "layout", "exchange"]
"""run: any run has it, whatever its ranks. rank_count: ranks along one axis of the device mesh. layout: how the ranks
of one combination of degrees split the model and the steps. exchange: how data-parallel ranks exchange parameters and
gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Another knob that a knob needs: a number of at least so much, or one of some values.

    Attributes:
        knob: The other knob.
        at_least: The smallest number that will do.
        values: The values that will do, the one that suits every value of the knob last.
        why: Why the knob is refused without it; "": it then has no effect.
    """

    knob: str
    at_least: int = 0
    values: tuple[str, ...] = ()
    why: str = ""

    def is_met(self, value: Any) -> bool:
        """Whether a value of the other knob will do."""
        return value in self.values if self.values else value >= self.at_least

    def describe(self) -> str:
        """`dp_shard >= 2` or `compile=block or model`."""
        return f"{self.knob}={' or '.join(self.values)}" if self.values else f"{self.knob} >= {self.at_least}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Facts about a knob besides its values and its description, which its field holds.

    Attributes:
        technique: The file of strategies/techniques/ that applies it.
        numerics: What its other values change: nothing; rounding (the same sums in another order, about 1e-6 relative
            in fp32); or the numerics (the plan says so and passes the parity check at that precision).
        role: Whether it belongs to a combination of degrees, and how.
        device: The one device type on which it has more than its plain value.
        needs: What it goes with: without it, it has no effect or is refused (`Need.why`).
        excludes: By other knob, why that one keeps its plain value beside this one.
        unpriced: Why the cost model does not read it: a search then varies it only if the user names its values.
        memory_only: For a knob whose other values only save memory: what its plain value saves, in words. A search
            tries the other values only if the plain one may not fit.
        memory_only_on: The one device type on which that is so; None: all.
        risks: By value that loses bits at each step (parameters, optimizer states, products in fewer bits), what a
            plan says of it: what the few steps of a parity check cannot show. A search has these values only with
            `--numerics lossy`.
        made_by_torchao: The values that torchao makes.
        must_gain: A search tries its other values only where they are predicted to be faster than the plain one.
        last_resort: A search offers its other values only if no configuration with the plain one is sure to fit.
        offered: The values that a search offers, in words, where the knob has no closed list.
        left_out: When a search leaves values out, in words, besides what `device`, `needs` and `excludes` say.
        without: What happens in a tool that does not carry its value, in words after "with the tool".
    """

    technique: str
    numerics: Literal["none", "rounding", "changes"] = "rounding"
    role: Role = "run"
    device: Literal["cpu", "cuda"] | None = None
    needs: tuple[Need, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    unpriced: str = ""
    memory_only: str = ""
    memory_only_on: Literal["cpu", "cuda"] | None = None
    risks: Mapping[str, str] = field(default_factory=dict)
    made_by_torchao: tuple[str, ...] = ()
    must_gain: bool = False
    last_resort: bool = False
    offered: str = ""
    left_out: str = ""
    without: str = ""


_RANKS = Knob(
    technique="data_parallel", role="rank_count", left_out="data-parallel ranks do not divide the global batch"
)
_SHARDS = (Need(knob="dp_shard", at_least=2),)
_STAGES = (Need(knob="pp", at_least=2),)
_NOT_COMPARED = dict.fromkeys(("tp", "pp"), "it was not compared over such ranks")


class TrainingConfig(Record):
    """One way to run a workload. Defaults are the plain run: fp32, nothing applied, one device.

    A knob is a field with a `Knob`: its description and metadata are here, and every list of knobs is made from them.
    """

    micro_batch: Annotated[
        int,
        Knob(
            technique="micro_batch",
            offered="every divisor of the global batch over the data-parallel ranks",
            left_out="modules depend on the micro-batch and nobody fixed it",
        ),
    ] = Field(ge=1, description="samples per forward and backward on one data-parallel rank; accumulation follows")
    checkpointing: Annotated[
        Checkpointing, Knob(technique="checkpointing", numerics="none", left_out="no repeated blocks, or too few")
    ] = Field(
        default="none",
        description="which activations are recomputed in the backward: none; selective (the per-operation policy "
        "keeps matmuls and attention); every_k (each k-th repeated block); full (each repeated block)",
    )
    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16"],
        Knob(
            technique="precision",
            numerics="changes",
            left_out="tf32 and bf16: CUDA before compute capability 8.0; tf32: CPU; the search drops what the probes "
            "measure as slower",
        ),
    ] = Field(
        default="fp32",
        description="fp32; tf32 (fp32 storage, TF32 matmuls, CUDA); bf16 or fp16 autocast over fp32 parameters, "
        "fp16 with dynamic loss scaling",
    )
    fp8: Annotated[
        Fp8,
        Knob(
            technique="fp8",
            numerics="changes",
            device="cuda",
            made_by_torchao=("tensorwise", "rowwise"),
            must_gain=True,
            needs=(
                Need(knob="precision", values=("bf16",), why="all but the products of linear layers stays in bf16"),
            ),
            excludes=_NOT_COMPARED,
            left_out="no `--numerics lossy`; compute capability below 8.9 (`rowwise`: 9.0); no torchao; no linear "
            "layer that is large enough; no gain is predicted",
            without="the products of linear layers stay in bf16, which takes longer than measured",
            risks={
                "tensorwise": "activations and weights keep 4 bits of mantissa in the products of linear layers, "
                "gradients of outputs 3, and a whole tensor has one scale: beside outliers, which grow over a long "
                "training, small numbers become zero. A few steps cannot show that",
                "rowwise": "activations, weights and gradients of outputs keep 4 bits of mantissa in the products of "
                "linear layers, with a scale for each row: outliers, which grow over a long training, hide small "
                "numbers of their row alone. A few steps cannot show what that does to the loss",
            },
        ),
    ] = Field(
        default="off",
        description="products of large linear layers in 8-bit floating point (torchao): off; tensorwise: one scale "
        "for each tensor; rowwise: one for each row or column, in powers of two",
    )
    compile: Annotated[
        Literal["off", "block", "model"],
        Knob(technique="compilation", left_out="no compiler; `block`: no repeated blocks; `model`: a pipeline"),
    ] = Field(default="off", description="torch.compile: off, each repeated block, the whole model")
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"],
        Knob(
            technique="compilation",
            device="cuda",
            needs=(Need(knob="compile", values=("block", "model"), why="nothing is compiled"),),
            left_out="modes with CUDA graphs need `compile=model`",
        ),
    ] = Field(default="default", description="mode of torch.compile; default when off")
    attention: Annotated[
        Attention,
        Knob(
            technique="attention",
            left_out="the model is not one of transformers and holds none; it has that one already; the single "
            "kernels: CPU, fp32 (but for `sdpa_efficient`), attention that needs a mask, a shape that they refuse",
        ),
    ] = Field(
        default="own",
        description="own: as the model has it; eager; sdpa: torch's scaled_dot_product_attention, which picks a "
        "kernel; sdpa_flash, sdpa_cudnn, sdpa_efficient: that kernel and no other",
    )
    batch_norm: Annotated[
        Literal["own", "sync"],
        Knob(
            technique="batch_norm",
            device="cuda",
            needs=(Need(knob="dp_replicate", at_least=2),),
            excludes=dict.fromkeys(("tp", "pp"), "statistics are shared over data-parallel ranks alone"),
            unpriced="what SyncBatchNorm exchanges is a few numbers per channel; it was never measured",
            left_out="no BatchNorm in training mode; HSDP",
            without="each rank normalises its own micro-batch",
        ),
    ] = Field(
        default="own",
        description="own: each data-parallel rank normalises its own micro-batch; sync: SyncBatchNorm, over the "
        "micro-batches of all of them, which trains as BatchNorm does at micro_batch x dp samples",
    )
    kernels: Annotated[
        Literal["own", "liger"],
        Knob(
            technique="kernels",
            device="cuda",
            excludes={"compile": "Inductor fuses norms and gates by itself"} | _NOT_COMPARED,
            left_out="no liger-kernel; it does not know the model",
            without="the model keeps its own norms, rotary embeddings and gated MLPs",
        ),
    ] = Field(
        default="own",
        description="own: norms, rotary embeddings and gated MLPs as the model has them; liger: Liger's kernels for "
        "them, in runs that are not compiled",
    )
    loss: Annotated[
        Literal["full", "fused"],
        Knob(
            technique="loss",
            left_out="no linear output head; more is done with the logits than a cross-entropy; few classes",
            without="all logits are computed, without the fused loss, which takes more memory",
        ),
    ] = Field(
        default="full",
        description="full: as the workload has it; fused: output head and cross-entropy in one operation that never "
        "keeps all logits (torch's linear_cross_entropy if it exists, else chunks with recomputation)",
    )
    optimizer_step: Annotated[
        Literal["own", "for_loop", "foreach", "fused"],
        Knob(technique="optimizer", left_out="the optimizer's class takes no such flag; no kernels on the device"),
    ] = Field(
        default="own", description="own: as the workload's optimizer has it; torch's for-loop, foreach or fused form"
    )
    parameters: Annotated[
        Literal["own", "bf16", "bf16_stochastic"],
        Knob(
            technique="parameters",
            numerics="changes",
            needs=(Need(knob="precision", values=("bf16",), why="products of bf16 parameters are in bf16"),),
            excludes=_NOT_COMPARED,
            left_out="no `--numerics lossy`; no parameter in fp32; a long accumulation",
            without="parameters and gradients stay as your model has them, which takes more memory than measured",
            risks={
                "bf16": "the forward and the gradients see parameters of 8 bits of mantissa, and gradients of "
                "micro-batches are added up in bf16; the fp32 master copies keep every update. A few steps cannot "
                "show what this does to the loss of a long training",
                "bf16_stochastic": "there is no fp32 copy. An update that is smaller than the last bit of a parameter "
                "(0.4 to 0.8 % of it) arrives by chance: right on average, as noise in each step. A few steps cannot "
                "show what the noise does to a long training with a small learning rate",
            },
        ),
    ] = Field(
        default="own",
        description="own: as the model has them; bf16: stored in bf16, with bf16 gradients, and stepped on fp32 master "
        "copies in the optimizer; bf16_stochastic: no copies, each step is rounded up or down by chance",
    )
    optimizer_state: Annotated[
        Literal["own", "bf16", "8bit"],
        Knob(
            technique="optimizer",
            numerics="changes",
            memory_only="rounds no moments",
            made_by_torchao=("8bit",),
            excludes=_NOT_COMPARED,
            left_out="no `--numerics lossy`; another optimizer than torch's Adam and AdamW; amsgrad; `8bit`: no "
            "torchao",
            without="the moments stay in the dtype of the parameters, which takes more memory than measured",
            risks={
                "bf16": "Adam's moments keep 8 bits of mantissa, rounded by chance: the second moment changes by a "
                "thousandth a step, less than its last bit. It is right on average and noisy; a few steps cannot show "
                "what that does to a long training",
                "8bit": "Adam's moments keep 8 bits, with a scale for each 256: small ones beside a large one lose "
                "most of their bits, which a few steps, with moments that have just begun, cannot show",
            },
        ),
    ] = Field(
        default="own",
        description="how Adam's two moments are kept between steps: own: as the optimizer makes them; bf16: in bf16, "
        "rounded up or down by chance; 8bit: in torchao's 8 bits with a scale for each 256",
    )
    threads: Annotated[
        int | None,
        Knob(
            technique="threads",
            device="cpu",
            offered="torch's own, powers of two up to the cores, the cores",
            without="the number of threads is another",
        ),
    ] = Field(default=None, ge=1, description="CPU: intra-operation threads per rank; None: torch's")
    allocator: Annotated[
        Literal["own", "keep", "expandable"],
        Knob(
            technique="allocator",
            numerics="none",
            memory_only="leaves torch's allocator as it is",
            memory_only_on="cuda",
            left_out="keep: CUDA, a C library that is not glibc; expandable: CPU",
            without="the allocators stay as they are",
        ),
    ] = Field(
        default="own",
        description="own: as it is; for the whole process, keep (CPU): the C library holds on to freed memory, which "
        "the next micro-step takes without page faults (glibc); expandable (CUDA): segments that grow, not pieces",
    )
    offload: Annotated[
        Literal["none", "optimizer", "activations", "parameters"],
        Knob(
            technique="offload",
            device="cuda",
            memory_only="moves nothing between the device and the host",
            last_resort=True,
            excludes=_NOT_COMPARED,
            left_out="any configuration without it fits; the host's memory cannot hold it; parameters: without "
            "`dp_shard >= 2`; optimizer: one that looks at all parameters together",
            without="what the plan keeps on the host stays on the device, where it may not fit",
        ),
    ] = Field(
        default="none",
        description="what lies in the host's memory: none; optimizer (its states; the step runs on the device, piece "
        "by piece); activations (what the backward needs); parameters (FSDP2 shards, gradients, states and the step)",
    )
    dp_replicate: Annotated[int, _RANKS] = Field(
        default=1, ge=1, description="data-parallel replicas (DDP; the outer degree of HSDP)"
    )
    dp_shard: Annotated[int, _RANKS] = Field(
        default=1, ge=1, description="ranks over which FSDP2 shards parameters and states"
    )
    reshard_after_forward: Annotated[
        bool,
        Knob(technique="data_parallel", numerics="none", role="layout", needs=_SHARDS, left_out="`True`: a pipeline"),
    ] = Field(
        default=True, description="FSDP2: free gathered parameters after the forward (ZeRO-3) or keep them (ZeRO-2)"
    )
    gradient_sync: Annotated[
        Literal["last", "every"],
        Knob(
            technique="data_parallel",
            role="exchange",
            needs=(Need(knob="dp_shard", at_least=2, why="without FSDP2 every rank keeps whole gradients"),),
            # torch 2.13: PipelineStage.backward_maybe_with_nosync turns FSDP2's reduction off before every backward
            excludes={"pp": "torch's stages reduce gradients once per pass"},
            memory_only="sends less",
            left_out="`every`: one micro-batch per step; `last` fits as well",
        ),
    ] = Field(
        default="last",
        description="FSDP2, when gradients accumulate: scattered over the ranks at the last micro-step alone (whole "
        "gradients are kept until then) or at every one (a share is kept; more is sent)",
    )
    tp: Annotated[
        int,
        Knob(
            technique="tensor_parallel",
            role="rank_count",
            left_out="no plan of the model's projections; heads or sequence do not divide; more ranks than a node has",
        ),
    ] = Field(default=1, ge=1, description="tensor-parallel degree, with sequence parallel")
    pp: Annotated[
        int,
        Knob(
            technique="pipeline_parallel",
            role="rank_count",
            left_out="the model has no single row of blocks, or fewer blocks than stages",
        ),
    ] = Field(default=1, ge=1, description="pipeline stages (physical)")
    pp_schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"],
        Knob(
            technique="pipeline_parallel",
            role="layout",
            needs=_STAGES,
            left_out="`zero_bubble`: several data-parallel ranks, or anything compiled, fused or recomputed",
        ),
    ] = Field(default="1f1b", description="pipeline schedule, when pp > 1")
    pp_microbatches: Annotated[
        int,
        Knob(
            technique="pipeline_parallel",
            role="layout",
            needs=_STAGES,
            offered="the micro-batches of a step",
            left_out="fewer than stages",
        ),
    ] = Field(
        default=1, ge=1, description="micro-batches per pipeline pass, when pp > 1; accumulation is a multiple of it"
    )
    virtual_stages: Annotated[
        int,
        Knob(
            technique="pipeline_parallel",
            role="layout",
            needs=_STAGES,
            offered="1 or 2",
            left_out="fewer blocks than stages; goes with `interleaved_1f1b` and `zero_bubble` alone",
        ),
    ] = Field(default=1, ge=1, description="stages per pipeline rank (interleaved schedules)")

    @model_validator(mode="before")
    @classmethod
    def _without_gone_knobs(cls, value: Any) -> Any:
        """Earlier plans load where they left the knobs that are gone alone."""
        if not isinstance(value, dict):
            return value
        for name, plain in GONE.items():
            if value.get(name, plain) != plain:
                raise ConfigError(
                    f"{name}={value[name]}: there is no such knob any more", hint="Search again, or leave it out."
                )
        return {name: one for name, one in value.items() if name not in GONE}

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
        return {
            name: value
            for name, value in self.model_dump().items()
            if name == "micro_batch" or value != getattr(PLAIN, name)
        }

    @property
    def rounds_steps(self) -> bool:
        """Whether steps round what they keep: parameters, optimizer states or both."""
        return self.parameters != "own" or self.optimizer_state != "own"

    def risks(self) -> list[str]:
        """A sentence for each lossy choice: what the parity check cannot show of it."""
        values = {name: getattr(self, name) for name in LOSSY}
        return [f"{name}={v}: {knobs()[name].risks[v]}" for name, v in values.items() if v in LOSSY[name]]

    def describe(self) -> str:
        """One line for people: `micro_batch=4 precision=bf16 compile=block`."""
        return " ".join(f"{name}={value}" for name, value in self.knobs_off_default().items())


PLAIN = TrainingConfig(micro_batch=1)
"""The plain run, at the smallest micro-batch: what any knob is that a mapping of knobs does not name."""


LEFT_BY_TOOLS = ("fp8", "parameters", "optimizer_state", "kernels", "offload", "loss")
"""Knobs that no tool with steps of its own carries."""


def not_carried(config: TrainingConfig, tool: str, names: Iterable[str] = LEFT_BY_TOOLS) -> list[str]:
    """Sentences on what of a configuration a tool does not carry, and what happens without.

    Args:
        config: The configuration.
        tool: The tool.
        names: The knobs that it does not have.
    """
    found = []
    for name in names:
        value, without = getattr(config, name), knobs()[name].without
        assert without, f"the Knob of {name} does not say what happens without it"
        if value != getattr(PLAIN, name):
            found.append(f"{name}={value}: with {tool} {without}")
    return found


@functools.cache
def knobs() -> Mapping[str, Knob]:
    """The metadata of every knob by its name, in the order of the fields."""
    found: dict[str, Knob] = {}
    for name, info in TrainingConfig.model_fields.items():
        (found[name],) = (part for part in info.metadata if isinstance(part, Knob))  # each field carries exactly one
    return MappingProxyType(found)


def knob_values(knob: str) -> tuple[Any, ...] | None:
    """The closed list of a knob's values, or None for a number; ConfigError for an unknown knob."""
    import difflib

    if knob not in TrainingConfig.model_fields:
        near = difflib.get_close_matches(knob, KNOBS, n=3)
        if knob == "accumulation":
            raise ConfigError(
                "accumulation is not a knob: it is the global batch over micro_batch x data-parallel ranks",
                hint="Fix micro_batch; accumulation follows.",
            )
        raise ConfigError(
            f"{knob!r} is not a knob",
            hint=("Did you mean " + " or ".join(near) + "? " if near else "") + f"The knobs are {', '.join(KNOBS)}.",
        )
    annotation = TrainingConfig.model_fields[knob].annotation
    if annotation is bool:
        return (True, False)
    return get_args(annotation) if get_origin(annotation) is Literal else None


KNOBS: tuple[str, ...] = tuple(knobs())

NUMBERS: tuple[str, ...] = tuple(knob for knob in KNOBS if knob_values(knob) is None)
"""The knobs that are numbers; the others have a closed list of values."""

RANK_COUNTS: tuple[str, ...] = tuple(name for name, knob in knobs().items() if knob.role == "rank_count")
"""Their product is the number of ranks."""

EXCHANGE_KNOBS: tuple[str, ...] = tuple(name for name, knob in knobs().items() if knob.role == "exchange")
"""The knobs of how data-parallel ranks exchange parameters and gradients."""

MEMORY_ONLY: tuple[str, ...] = tuple(name for name, knob in knobs().items() if knob.memory_only)
"""The knobs whose other values only save memory, and cost time."""

LOSSY: Mapping[str, tuple[str, ...]] = {name: tuple(knob.risks) for name, knob in knobs().items() if knob.risks}
"""By knob, its lossy values."""

UNPRICED: Mapping[str, str] = {name: knob.unpriced for name, knob in knobs().items() if knob.unpriced}
"""The knobs that the cost model does not read, each with the reason. A search varies them only on request."""

DEGREES: tuple[str, ...] = tuple(name for name, knob in knobs().items() if knob.role != "run")
"""The knobs that say how ranks share the work; they come as whole combinations, not one by one."""


def micro_batches(global_batch: int, dp: int = 1) -> list[int]:
    """Every micro-batch that keeps the global batch: the divisors of global_batch / dp, ascending."""
    if dp < 1 or global_batch < 1 or global_batch % dp:
        return []
    share = global_batch // dp
    return [size for size in range(1, share + 1) if share % size == 0]

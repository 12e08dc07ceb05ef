"""Sections of the exported PyTorch script for several ranks: their mesh, how they share the batch and the gradients.

In: a plan. Out: Python source, taken from `strategies/techniques/`: what DDP, FSDP2, HSDP and tensor parallelism are
there is what they are in the script. Nothing of it is in a script for one rank.
"""

from __future__ import annotations

import pprint
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.nearest import refusal
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import PLAIN, TrainingConfig

MESH = "techniques/mesh.py"
DATA_PARALLEL = "techniques/data_parallel.py"
TENSOR_PARALLEL = "techniques/tensor_parallel.py"

_MESH_NAMES = (
    *("AXES", "world_size", "make_mesh", "axis_size", "axis_rank", "data_position", "sum_over_axes"),
    *("local_tensor", "shard_count", "GlobalNormClipper", "rank_seed"),
)
_AFFINITY_NAMES = ("place_rank", "local_position", "share_of_nodes", "near_gpu", "read_gpu_node", "read_node_cpus")
_TENSOR_NAMES = (
    *("split_model", "_held", "_place_collectives", "_on_input", "split_sequence", "gather_sequence"),
    *("sum_scatter_sequence", "sum_whole", "reduce_partial_gradients", "local", "_Splitter", "_is_whole", "_matmul"),
    *("_colwise_forward", "_rowwise_forward", "_vocabulary_forward", "_LocalView", "_replicated_forward"),
)
DATA_AXES = ("dp_replicate", "dp_shard")


def has_ranks(config: TrainingConfig) -> bool:
    """Whether the script is for several ranks."""
    return config.world_size > 1


def uses_ddp(config: TrainingConfig) -> bool:
    """As techniques/data_parallel.py: DDP for replicas of plain parameters."""
    return config.dp > 1 and config.dp_shard == 1 and config.tp == 1


def uses_fsdp(config: TrainingConfig) -> bool:
    """FSDP2 for shards, and for replicas of tensor-parallel parameters."""
    return config.dp > 1 and not uses_ddp(config)


def refuse_pipelines(plan: Plan) -> None:
    """Refuses a plan with pipeline stages: it cuts the model by what one forward of it shows, when the run is built.

    Raises:
        ExportError: it has some.
    """
    if plan.config.pp > 1:
        raise refusal("a script of autoplan's own code", "pipeline parallelism", f"pp={plan.config.pp}")


def rank_settings(plan: Plan) -> dict[str, Any]:
    """The constants of the degrees and of how ranks exchange, by name."""
    config = plan.config
    if not has_ranks(config):
        return {}
    constants: dict[str, Any] = {
        "RANKS": config.world_size,
        "DP_REPLICATE": config.dp_replicate,
        "DP_SHARD": config.dp_shard,
        "TP": config.tp,
        "LOCAL_BATCH": config.micro_batch * plan.accumulation,
    }
    if uses_ddp(config):
        bucket = config.ddp_bucket_mb
        constants["DDP_BUCKET_MB"] = None if bucket == PLAIN.ddp_bucket_mb else bucket
        constants["DDP_STATIC_GRAPH"] = config.ddp_static_graph
    if uses_fsdp(config):
        constants["RESHARD_AFTER_FORWARD"] = config.reshard_after_forward and config.dp_shard > 1
        constants["FSDP_PREFETCH"] = config.fsdp_prefetch
        constants["GRADIENT_SYNC"] = config.gradient_sync
    if config.batch_norm != "own":
        constants["BATCH_NORM"] = config.batch_norm
    return constants


def tensor_plan_lines(tensor_plan: dict[str, Any] | str, plan: Plan) -> list[str]:
    """How the model is split over tp, as the constant TENSOR_PLAN.

    Raises:
        ExportError: the model cannot be split, or not so many times.
    """
    degree = plan.config.tp
    if isinstance(tensor_plan, str) or tensor_plan["unit"] % degree:
        why = tensor_plan if isinstance(tensor_plan, str) else f"it has {tensor_plan['unit_of']}"
        raise ExportError(
            f"{plan.workload.name} cannot be split over tp={degree} ranks: {why}",
            hint="The workload's files are no longer those that the plan was made from: search again.",
        )
    lines = pprint.pformat(tensor_plan, width=110, sort_dicts=False).splitlines()
    return [
        "# Which projections are split over the tensor-parallel ranks, and how.",
        f"TENSOR_PLAN = {lines[0]}",
        *lines[1:],
    ]


def imports(plan: Plan) -> tuple[set[str], list[str]]:
    """The modules, and the further import lines, that several ranks need."""
    config = plan.config
    if not has_ranks(config):
        return set(), []
    modules = {"os", "sys", *(("functools", "re") if config.tp > 1 else ())}
    lines = [
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
    ]
    if uses_fsdp(config):
        lines += [
            "from torch.distributed.fsdp import (",
            "    CPUOffloadPolicy,",
            "    FSDPModule,",
            "    MixedPrecisionPolicy,",
            "    OffloadPolicy,",
            "    fully_shard,",
            ")",
        ]
    if config.tp > 1:
        lines.append(
            "from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor"
        )
        lines.append("from torch.distributed.tensor.parallel import loss_parallel")
        lines.append("from torch.distributed.tensor.placement_types import _StridedShard")
        lines += [] if config.loss == "fused" else ["from torch.utils.checkpoint import checkpoint"]
    else:
        lines.append("from torch.distributed.tensor import DTensor")
    if uses_ddp(config):
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    return modules, lines


def techniques(plan: Plan) -> list[str]:
    """The functions that several ranks need."""
    config = plan.config
    if not has_ranks(config):
        return []
    overflow = ("agree_on_overflow",) if config.precision == "fp16" else ()
    sections = [
        take(MESH, *_MESH_NAMES, *overflow),
        take("probes/host.py", "parse_id_list"),
        take("techniques/affinity.py", *_AFFINITY_NAMES),
        _RANK_DEVICE,
    ]
    if config.tp > 1:
        sections += [
            take("analysis/tensor_plans.py", "FUSED_STYLE", "TensorPlan"),
            take(TENSOR_PARALLEL, *_TENSOR_NAMES),
            take("techniques/loss.py", "CHUNK_ROWS"),
            *([] if config.loss == "fused" else [take("techniques/loss_kernels.py", "_CHUNK_ELEMENTS", "_most_rows")]),
            *([] if config.loss == "fused" else [take("techniques/loss_kernels.py", "limited_rows")]),
            take(TENSOR_PARALLEL, "VocabularyParallelLoss"),
        ]
    if config.batch_norm != "own":
        sections.append(take("techniques/batch_norm.py", "training_norms", "synchronise"))
    if uses_ddp(config):
        sections.append(take(DATA_PARALLEL, "ddp_gradient_sync", "wrap_ddp"))
    if uses_fsdp(config):
        names = ("GATHER_DTYPES", "gather_dtype", "with_parameters", "set_prefetch", "shard_modules")
        sections.append(take(DATA_PARALLEL, *names, "fsdp_gradient_sync"))
    return sections


_RANK_DEVICE = '''def rank_device(device):
    """This rank's own device, where a kind is given."""
    if world_size() != RANKS:
        raise SystemExit(
            f"this script is for {RANKS} ranks, and {world_size()} run(s). Start it with\\n"
            f"    torchrun --nproc-per-node {RANKS} {sys.argv[0]}"
        )
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device'''


def mesh_lines(config: TrainingConfig) -> list[str]:
    """The first lines of prepare()."""
    if not has_ranks(config):
        return []
    return [
        "    device = rank_device(device)",
        "    mesh = make_mesh((1, DP_REPLICATE, DP_SHARD, TP), device.type)",
        "    place_rank(device)",
    ]


def tensor_lines(config: TrainingConfig) -> list[str]:
    """Lines of prepare() that split the model, after attention and loss."""
    if config.tp == 1:
        return []
    return [
        "    blocks = [name for stack in STACKS for name in stack]",
        '    split_model(model, TensorPlan(**TENSOR_PLAN), mesh["tp"], blocks)',
        '    if TENSOR_PLAN["head"] is not None:',
        "        global loss_sum",
        f'        loss_sum = VocabularyParallelLoss(output_head, mesh["tp"], chunked={config.loss == "fused"})',
    ]


def batch_norm_lines(config: TrainingConfig) -> list[str]:
    """Lines of prepare() for SyncBatchNorm."""
    if config.batch_norm == "own":
        return []
    axis = "dp_replicate" if config.dp_replicate > 1 else "dp_shard"
    return [f'    synchronise(model, mesh.get_group("{axis}"))']


def wrap_lines(config: TrainingConfig) -> list[str]:
    """Lines of prepare() that wrap what a step calls, after everything that changes the inside of the model."""
    if not has_ranks(config):
        return []
    if uses_ddp(config):
        return [
            "    module = wrap_ddp(module, mesh, device, bucket_mb=DDP_BUCKET_MB, static_graph=DDP_STATIC_GRAPH)",
            "    set_sync = ddp_gradient_sync([module])",
        ]
    if not uses_fsdp(config):
        return ["    set_sync = None  # nothing is exchanged between data-parallel ranks"]
    axes = 'mesh["dp_replicate", "dp_shard"]' if config.dp_replicate > 1 else 'mesh["dp_shard"]'
    return [
        "    roots = shard_modules(",
        "        with_parameters(model, [name for stack in [*STACKS, *FROZEN_STACKS] for name in stack]),",
        "        [module],",
        f"        {axes},",
        "        reshard=RESHARD_AFTER_FORWARD,",
        "        gathered=gather_dtype(PRECISION, device.type),",
        "        prefetch=FSDP_PREFETCH,",
        *(['        on_host=OFFLOAD == "parameters",'] if config.offload == "parameters" else []),
        "    )",
        '    set_sync = fsdp_gradient_sync(roots, every=GRADIENT_SYNC == "every")',
    ]

"""The companion module of the export target accelerate: Python source for what its config file cannot say.

In: a plan, the name of the config file, and what is not carried. Out: the source of the module.
"""

from __future__ import annotations

from autoplan.planner.export.base import loader_arguments_source
from autoplan.planner.export.lightning import lightning_source
from autoplan.planner.export.loops import loop_companion
from autoplan.planner.export.model_preparation import OWN_GRADIENTS
from autoplan.planner.export.pytorch.pytorch_training import replays_graphs
from autoplan.planner.plan import Plan
from autoplan.strategies.config import CUDAGRAPH_MODES, PLAIN

PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
"""By value of the knob, accelerate's name; tf32 is a setting of torch besides."""


def companion(plan: Plan, config_file: str, version_line: str, missing: list[str]) -> str:
    """The source of the module."""
    made = loop_companion.makes_optimizers(plan)
    calls = [f"from accelerate.utils import {', '.join(_utilities(plan))}"]
    imports = lightning_source.imports(
        plan, "fabric", calls, optimizers=made, shards=False, own="from accelerate import Accelerator"
    )
    if "import contextlib" not in imports:
        imports.insert(0, "import contextlib")
    imports.insert(1, "import itertools")
    if plan.config.dp_shard > 1 and _gathers_in_bf16(plan):
        imports.insert(
            imports.index("from torch import nn") + 1, "from torch.distributed.fsdp import MixedPrecisionPolicy"
        )
    said = [
        version_line,
        "Loss: train_step divides the summed loss of all micro-batches and ranks by the count of all of them. "
        "Accelerate's own accumulate() takes the mean of the micro-batches' means, which is another loss where their "
        "counts differ.",
        *_rank_lines(plan),
    ]
    items = plan.config.micro_batch * (plan.workload.sequence_length or 1)
    scale = f"ITEMS = {items}  # of a micro-batch without padding; it keeps the loss at the scale of a mean"
    sections = [
        "\n".join(imports),
        loop_companion.constants(plan) + "\n" + scale,
        "\n".join(_make_accelerator_lines(plan, config_file)),
        loader_arguments_source(plan),
        loop_companion.STEPS,
        lightning_source.preparation(plan, "fabric", shards=False),
        "\n".join(_prepare_lines(plan)),
        *loop_companion.optimizers(plan),
        "\n".join(_step_lines(plan)),
    ]
    return loop_companion.module(plan, said=said, missing=missing, docstring=_docstring(made), sections=sections)


def _rank_lines(plan: Plan) -> list[str]:
    if plan.config.dp == 1:
        return []
    return [
        "Samples: accelerate deals micro-batches out to the ranks one by one, in the order of the loader; each global "
        "batch has the same samples, and each rank keeps the BatchNorm statistics of its own."
    ]


def _docstring(made: bool) -> list[str]:
    return [
        "The plan for a loop with accelerate. Started by `accelerate launch --config_file` with the file beside this:",
        "",
        "    accelerator = make_accelerator()",
        "    model = prepare_module(build_model())",
        "    optimizer, schedule = "
        + ("make_optimizers(model)" if made else "...  # your own; it is stepped by train_step"),
        "    loader = DataLoader(dataset, **loader_arguments(), shuffle=True)",
        "    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)",
        "    for micro_batches in steps(loader):",
        "        loss, norm = train_step(accelerator, model, optimizer, schedule, micro_batches, loss_sum)",
    ]


def _gathers_in_bf16(plan: Plan) -> bool:
    return plan.device == "cuda" and plan.config.precision == "bf16"


def _utilities(plan: Plan) -> list[str]:
    config = plan.config
    names = ["set_seed"]
    names += ["DistributedDataParallelKwargs"] if config.dp_replicate > 1 and config.dp_shard == 1 else []
    names += ["FullyShardedDataParallelPlugin"] if config.dp_shard > 1 and _gathers_in_bf16(plan) else []
    return sorted(names)


def _make_accelerator_lines(plan: Plan, config_file: str) -> list[str]:
    config = plan.config
    arguments = ['"cpu": True'] if plan.device == "cpu" else []
    if config.dp_replicate > 1 and config.dp_shard == 1:
        options = ["broadcast_buffers=False", "gradient_as_bucket_view=True"]
        options += [f"bucket_cap_mb={config.ddp_bucket_mb}"] if config.ddp_bucket_mb != PLAIN.ddp_bucket_mb else []
        options += ["static_graph=True"] if config.ddp_static_graph else []
        arguments.append(f'"kwargs_handlers": [DistributedDataParallelKwargs({", ".join(options)})]')
    if config.dp_shard > 1 and _gathers_in_bf16(plan):
        policy = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False"
        arguments.append(
            f'"fsdp_plugin": FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy({policy}))'
        )
    wanted = {"num_processes": "RANKS", "mixed_precision": repr(PRECISIONS[config.precision])}
    if config.dp_shard > 1:
        wanted["distributed_type"] = "'FSDP'"
    return [
        "def make_accelerator(**more):",
        '    """The Accelerator of the plan; `more` are your own arguments (log_with, project_dir, ...).',
        "",
        "    Raises:",
        "        RuntimeError: it was not started with the plan's config file.",
        '    """',
        "    set_seed(SEED)",
        "    arguments = {",
        *(f"        {argument}," for argument in arguments),
        "    }",
        "    accelerator = Accelerator(**(arguments | more))",
        f"    wanted = {{{', '.join(f'{name!r}: {value}' for name, value in wanted.items())}}}",
        "    found = {name: getattr(accelerator, name) for name in wanted}",
        "    if found != wanted:",
        "        raise RuntimeError(",
        '            f"the plan has {wanted}, and this process {found}: start it with "',
        f'            "accelerate launch --config_file " {config_file!r}',
        "        )",
        "    return accelerator",
    ]


def _prepare_lines(plan: Plan) -> list[str]:
    lines = [
        "def prepare(accelerator, model, optimizer, *others):",
        '    """accelerator.prepare(), with the plan\'s units of sharding; the schedule stays outside (accelerate',
        '    would step it once per rank)."""',
    ]
    if plan.config.dp_shard > 1:
        lines += [
            "    blocks = [model.get_submodule(name) for name in model.plan_blocks]",
            '    kinds = {type(getattr(block, "_checkpoint_wrapped_module", block)).__name__ for block in blocks}',
            "    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(kinds)",
        ]
    return [*lines, "    return accelerator.prepare(model, optimizer, *others)"]


def _step_lines(plan: Plan) -> list[str]:
    config = plan.config
    replays = replays_graphs(plan)
    marks = config.compile_mode in CUDAGRAPH_MODES and config.compile != "off"
    lines = [
        "def train_step(accelerator, model, optimizer, schedule, micro_batches, loss_sum):",
        '    """One optimizer step. Returns the loss of the global batch, and the norm of its gradient before clipping',
        "    (None without clipping).",
        "",
        "    Args:",
        "        accelerator, model, optimizer: From make_accelerator() and prepare().",
        "        schedule: From make_optimizers(); None: a constant rate.",
        "        micro_batches: ACCUMULATION batches of MICRO_BATCH samples, from steps(loader).",
        "        loss_sum: loss_sum(model, micro_batch) returns the summed loss and how many items it is the sum of.",
        '    """',
        "    sums = torch.zeros(2, device=accelerator.device)",
    ]
    if replays:
        lines += OWN_GRADIENTS
    lines += ["    for number, micro_batch in enumerate(micro_batches, start=1):"]
    lines += ["        torch.compiler.cudagraph_mark_step_begin()"] if marks else []
    lines += ["        own.attach()"] if replays else []
    if config.gradient_sync == "every" or config.dp == 1:
        lines += ["        sync = contextlib.nullcontext()"]
    else:
        lines += [
            "        last = number == len(micro_batches)",
            "        sync = contextlib.nullcontext() if last else accelerator.no_sync(model)",
        ]
    lines += [
        "        with sync:",
        "            with accelerator.autocast():",
        "                total, count = loss_sum(model, micro_batch)",
        "            accelerator.backward(total * (1 / ITEMS))",
        "        count = torch.as_tensor(count, dtype=torch.float32, device=sums.device)",
        "        sums += torch.stack([total.detach().float(), count])",
    ]
    lines += ["    own.drop_unused()"] if replays else []
    lines += [
        '    sums = accelerator.reduce(sums, reduction="sum")',
        "    # From a mean over ranks of sums over ITEMS to the sum over the count of the whole global batch.",
        "    gradients = [p.grad for p in model.parameters() if p.grad is not None]",
        '    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]',
        "    torch._foreach_mul_(gradients, ITEMS * accelerator.num_processes / sums[1])",
        "    norm = None",
        "    if MAX_GRAD_NORM is not None:",
        "        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)",
        "    optimizer.step()",
        "    if schedule is not None and not accelerator.optimizer_step_was_skipped:",
        "        schedule.step()",
        "    own.clear()" if replays else "    optimizer.zero_grad()",
        "    return sums[0] / sums[1], norm",
    ]
    return lines

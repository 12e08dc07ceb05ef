"""Source of the modules of the targets lightning and fabric: what prepares a model, and what makes the loss the plan's.

In: a plan. Out: Python source with only what the plan uses. The code that finds and wraps blocks is copied from
autoplan's own source files (source_text.py), so that the blocks are those that were measured.
"""

from __future__ import annotations

from autoplan.planner.apply.lightning_arguments import Kind
from autoplan.planner.export.model_preparation import (
    OWN_GRADIENTS,
    allocator_lines,
    attention_name,
    gelu_lines,
    kernel_lines,
    thread_lines,
)
from autoplan.planner.export.pytorch.pytorch_training import (
    CAUSAL_ATTENTION_NAMES,
    CHECKPOINTING_NAMES,
    avoids_masks,
    replays_graphs,
)
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import CHECKPOINT_EVERY, CUDAGRAPH_MODES

_BLOCKS = '''def repeated_blocks(model):
    """The names of the repeated blocks: a list for each run of them that trains, and for each that does not."""
    found = list(_stacks(model, ""))
    trained = [stack for stack in found if any(_trains(block) for _, block in stack)] or found
    frozen = [stack for stack in found if stack not in trained]
    return [[[name for name, _ in stack] for stack in stacks] for stacks in (trained, frozen)]'''

_BLOCK_NAMES = ("_CONTAINERS", "_trains", "_has_two_matrices", "_is_composite", "_is_block_of")


def needs_blocks(plan: Plan) -> bool:
    """Whether something is done to each repeated block."""
    config = plan.config
    return config.checkpointing != "none" or config.compile == "block" or config.dp_shard > 1


def imports(
    plan: Plan, kind: Kind, calls: list[str], *, optimizers: bool, shards: bool = True, own: str | None = None
) -> list[str]:
    """The import lines.

    Args:
        plan: The plan.
        kind: Of the Trainer or of Fabric.
        calls: `from ... import ...` lines of the objects among the arguments.
        optimizers: There is a function `make_optimizers`.
        shards: There is a function `shard` where the plan shards.
        own: The line that imports the tool; None: that of Lightning.
    """
    config = plan.config
    blocks, checkpoints = needs_blocks(plan), config.checkpointing != "none"
    modules = ["ctypes"] if config.allocator == "keep" else []
    modules += ["contextlib"] if checkpoints or (kind == "fabric" and config.gradient_sync == "every") else []
    modules += ["functools"] if checkpoints else []
    modules += ["re"] if optimizers else []
    modules += ["sys"] if avoids_masks(plan) else []
    lines = [f"import {name}" for name in sorted(modules)]
    lines += ["from collections import Counter"] if blocks else []
    names = (["Iterator"] if blocks else []) + (["Sequence"] if replays_graphs(plan) or config.dp_shard > 1 else [])
    lines += [f"from collections.abc import {', '.join(names)}"] if names else []
    lines += ["from typing import Any", "", "import torch", "from torch import nn"]
    if config.checkpointing != "none":
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    CheckpointImpl,",
            "    checkpoint_wrapper,",
            ")",
            "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",
        ]
    if config.dp_shard > 1 and shards:
        lines += ["from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard"]
    lines += ["", *calls]
    if own is None:
        own = "from lightning.pytorch import Callback, Trainer" if kind == "trainer" else "from lightning import Fabric"
    return [*lines, own]


def preparation(plan: Plan, kind: Kind, *, shards: bool = True) -> str:
    """`prepare_module(model)`, `shard(model, mesh)` where `shards` and the plan say so, and what they need."""
    config = plan.config
    sections = [take("workloads/training_mode.py", "EVERYTHING_TRAINS", "enter_training_mode")]
    sections += [take("workloads/training_mode.py", "CHECKPOINTING_FLAGS", "own_checkpointing")]
    if needs_blocks(plan):
        sections.append(take("analysis/structure.py", *_BLOCK_NAMES, "_contains_stack", "_stacks"))
        sections.append(_BLOCKS)
    if config.checkpointing != "none":
        sections.append(take("workloads/training_mode.py", "caching_configs", "_nested"))
        sections.append(take("techniques/checkpointing.py", *CHECKPOINTING_NAMES))
    if plan.device == "cuda":
        sections.append(take("techniques/precision.py", "set_matmul_tf32"))
    if config.attention != "own" or avoids_masks(plan):
        sections.append(take("analysis/structure.py", "language_models"))
    if avoids_masks(plan):
        sections.append(take("techniques/causal_attention.py", *CAUSAL_ATTENTION_NAMES))
    if replays_graphs(plan):
        sections.append(take("techniques/own_gradients.py", "OwnGradients"))
    sections.append("\n".join(_prepare_lines(plan, kind)))
    if config.dp_shard > 1 and shards:
        sections.append(take("techniques/data_parallel.py", "set_prefetch"))
        sections.append("\n".join(_shard_lines(plan)))
    return "\n\n\n".join(sections)


def _prepare_lines(plan: Plan, kind: Kind) -> list[str]:
    config = plan.config
    lines = [
        "def prepare_module(model):",
        '    """Applies to a model what is no setting of the tool; returns the model, which is changed in place.',
        "",
        "    Args:",
        *(
            [
                "        model: What the loss calls: the nn.Module inside a LightningModule, or the LightningModule",
                "            itself where its training_step calls `self(...)`.",
            ]
            if kind == "trainer"
            else ["        model: What the loss calls, an nn.Module."]
        ),
        '    """',
        "    enter_training_mode(model)  # from_pretrained returns evaluation mode, and nothing below changes it",
        "    for part, flag in own_checkpointing(model):",
        "        setattr(part, flag, False)  # the plan decides what is recomputed",
        *thread_lines(config),
        *allocator_lines(config),
    ]
    if config.attention != "own":
        lines += [
            "    for inner in language_models(model):",
            f'        if {attention_name(config)!r} == "eager" or inner._supports_sdpa:',
            f"            inner.set_attn_implementation({attention_name(config)!r})",
        ]
    lines += kernel_lines(config)
    lines += ["    use_maskless_attention(language_models(model))"] if avoids_masks(plan) else []
    lines += gelu_lines(config)
    if config.batch_norm == "sync" and kind == "fabric":  # the Trainer has an argument for it
        lines += ["    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)"]
    if needs_blocks(plan):
        lines += ["    trained, frozen = repeated_blocks(model)"]
        lines += [
            "    if not trained:",
            '        raise ValueError("the model has no repeated blocks, which the plan needs: it is another model")',
        ]
        lines += ["    model.plan_blocks = [name for stack in [*trained, *frozen] for name in stack]  # for shard()"]
    if config.checkpointing != "none":
        lines += _checkpointing_lines(plan)
    lines += _compile_lines(plan)
    lines += [f"    set_matmul_tf32({config.precision == 'tf32'})"] if plan.device == "cuda" else []
    return [*lines, "    return model"]


def _checkpointing_lines(plan: Plan) -> list[str]:
    config = plan.config
    compiled = config.compile != "off"
    lines = [
        "    for settings in caching_configs(model):",
        "        settings.use_cache = False  # a recomputation would append to a key-value cache",
        "    for stack in trained:",
        f"        for name in stack[::{CHECKPOINT_EVERY[config.checkpointing]}]:",
        '            parent, _, child = name.rpartition(".")',
        f"            wrapped = wrap(model.get_submodule(name), selective={config.checkpointing == 'selective'}, "
        f"compiled={compiled})",
        "            setattr(model.get_submodule(parent), child, wrapped)",
    ]
    if config.checkpointing == "selective" and config.precision in ("bf16", "fp16"):
        lines.append("    torch.set_autocast_cache_enabled(False)  # else a recomputation has fewer casts to record")
    return lines


def _compile_lines(plan: Plan) -> list[str]:
    config = plan.config
    options = "dynamic=False" + (f", mode={config.compile_mode!r}" if config.compile_mode != "default" else "")
    if config.compile == "model":
        return [f"    model.compile({options})"]
    if config.compile == "block":
        return [
            "    for name in model.plan_blocks:",
            f"        model.get_submodule(name).compile({options})",
        ]
    return []


def _shard_lines(plan: Plan) -> list[str]:
    config = plan.config
    gathered = {"bf16": "torch.bfloat16"}.get(config.precision) if plan.device == "cuda" else None
    reduced = None if gathered is None else "torch.float32"
    return [
        "def shard(model, mesh):",
        '    """Shards a prepared model over the data-parallel ranks with FSDP2; returns the model.',
        "",
        "    Args:",
        "        model: From prepare_module().",
        "        mesh: The device mesh that Lightning made.",
        '    """',
        f"    policy = MixedPrecisionPolicy(param_dtype={gathered}, reduce_dtype={reduced}, cast_forward_inputs=False)",
        '    options = {"mesh": mesh["data_parallel"], "mp_policy": policy}',
        "    blocks = [model.get_submodule(name) for name in model.plan_blocks]",
        "    blocks = [block for block in blocks if next(block.parameters(), None) is not None]",
        f"    block_options = options | {{'reshard_after_forward': {config.reshard_after_forward}}}",
        "    units = [fully_shard(block, **block_options) for block in blocks]",
        "    fully_shard(model, reshard_after_forward=False, **options)",
        f"    set_prefetch(units, {config.fsdp_prefetch})  # 0: torch's own order",
        "    return model",
    ]


def trainer_parts(plan: Plan) -> str:
    """`global_mean` and the callback of the Trainer."""
    return _GLOBAL_MEAN + "\n\n\n" + "\n".join(_callback_lines(plan)) + "\n\n\n" + _MAKE_TRAINER


_GLOBAL_MEAN = '''def global_mean(module, total, count):
    """What training_step returns, so that the loss is the mean over the whole global batch.

    Args:
        module: The LightningModule.
        total: The summed loss of the micro-batch, a scalar.
        count: How many items (labels, samples) it is the sum of.
    """
    count = torch.as_tensor(count, dtype=torch.float32, device=total.device)
    module.__dict__.setdefault("plan_counts", []).append(count.detach())
    return total * (1 / ITEMS)  # PlanCallback puts the real count in its place'''


def _callback_lines(plan: Plan) -> list[str]:
    config = plan.config
    marks = config.compile_mode in CUDAGRAPH_MODES and config.compile != "off"
    lines = [
        "class PlanCallback(Callback):",
        '    """What no argument of the Trainer says: the count of the global batch',
        "    that the loss is divided by, and settings of each process.",
        '    """',
        "",
    ]
    if config.threads is not None:
        lines += [
            "    def on_fit_start(self, trainer, module):",
            f"        torch.set_num_threads({config.threads})  # Lightning sets another number as it starts processes",
            "",
        ]
    if marks or config.dp_shard > 1:
        lines += ["    def on_train_batch_start(self, trainer, module, batch, batch_idx):"]
        lines += ["        torch.compiler.cudagraph_mark_step_begin()"] if marks else []
        lines += _sync_lines(plan) if config.dp_shard > 1 else []
        lines += [""]
    if replays_graphs(plan):
        lines += [
            "    def on_before_backward(self, trainer, module, loss):",
            "        if not hasattr(self, 'gradients'):  # in memory that no CUDA graph writes to",
            "            trained = [p for p in module.parameters() if p.requires_grad]",
            "            self.gradients = OwnGradients(trained, trainer.optimizers[0])",
            "        self.gradients.attach()",
            "",
        ]
    lines += ["    def on_before_optimizer_step(self, trainer, module, optimizer):"]
    if replays_graphs(plan):
        lines += ["        self.gradients.drop_unused()", "        self.gradients._reached.clear()"]
    return [
        *lines,
        '        counts = module.__dict__.pop("plan_counts", [])',
        "        if not counts:",
        "            return  # training_step does without global_mean: a mean of the micro-batches' means",
        '        count = trainer.strategy.reduce(torch.stack(counts).sum(), reduce_op="sum")',
        "        factor = ITEMS * trainer.accumulate_grad_batches * trainer.world_size / count",
        "        gradients = [p.grad for p in module.parameters() if p.grad is not None]",
        '        torch._foreach_mul_([g.to_local() if hasattr(g, "to_local") else g for g in gradients], factor)',
    ]


def _sync_lines(plan: Plan) -> list[str]:
    every = plan.config.gradient_sync == "every"
    if every:
        return ["        pass  # gradients are scattered at each micro-step, which is what FSDP2 does"]
    return [
        "        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch",
        "        for part in module.modules():",
        "            if isinstance(part, FSDPModule):  # gradients are scattered at the last micro-step alone",
        "                part.set_requires_gradient_sync(last, recurse=False)",
        "                part.set_is_last_backward(last)",
    ]


_MAKE_TRAINER = '''def make_trainer(**more):
    """A Trainer of the plan; `more` are your own arguments (max_epochs, logger, callbacks, ...)."""
    arguments = trainer_arguments()
    callbacks = more.pop("callbacks", None) or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    return Trainer(**(arguments | more | {"callbacks": [*arguments["callbacks"], *callbacks]}))'''


def fabric_parts(plan: Plan) -> str:
    """`make_fabric` and `train_step` of Fabric."""
    return _MAKE_FABRIC + "\n\n\n" + "\n".join(_step_lines(plan))


_MAKE_FABRIC = '''def make_fabric(**more):
    """A Fabric of the plan; `more` are your own arguments (loggers, callbacks, ...)."""
    return Fabric(**(fabric_arguments() | more))'''


def _step_lines(plan: Plan) -> list[str]:
    config = plan.config
    sync = "fabric.no_backward_sync(model, enabled=number < len(micro_batches))"
    marks = config.compile_mode in CUDAGRAPH_MODES and config.compile != "off"
    lines = [
        "def train_step(fabric, model, optimizer, schedule, micro_batches, loss_sum):",
        '    """One optimizer step. Returns the loss of the global batch, and the norm of its gradient before clipping',
        "    (None without clipping).",
        "",
        "    Args:",
        "        fabric, model, optimizer: From make_fabric(), fabric.setup(), fabric.setup_optimizers().",
        "        schedule: From make_optimizers(); None: a constant rate.",
        "        micro_batches: ACCUMULATION batches of MICRO_BATCH samples, this rank's share of the global batch.",
        "        loss_sum: loss_sum(model, micro_batch) returns the summed loss and how many items it is the sum of.",
        '    """',
        "    micro_batches = list(micro_batches)",
        "    sums = torch.zeros(2, device=fabric.device)",
    ]
    if replays_graphs(plan):
        lines += OWN_GRADIENTS
    lines += ["    for number, micro_batch in enumerate(micro_batches, start=1):"]
    lines += ["        torch.compiler.cudagraph_mark_step_begin()"] if marks else []
    lines += ["        own.attach()"] if replays_graphs(plan) else []
    lines += [
        f"        with {'contextlib.nullcontext()' if config.gradient_sync == 'every' else sync}:",
        "            with fabric.autocast():",
        "                total, count = loss_sum(model, micro_batch)",
        "            fabric.backward(total * (1 / ITEMS))",
        "        count = torch.as_tensor(count, dtype=torch.float32, device=sums.device)",
        "        sums += torch.stack([total.detach().float(), count])",
    ]
    lines += ["    own.drop_unused()"] if replays_graphs(plan) else []
    lines += [
        '    sums = fabric.all_reduce(sums, reduce_op="sum")',
        "    # From a mean over ranks of sums over ITEMS to the sum over the count of the whole global batch.",
        "    gradients = [p.grad for p in model.parameters() if p.grad is not None]",
        '    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]',
        "    torch._foreach_mul_(gradients, ITEMS * fabric.world_size / sums[1])",
        "    norm = None",
        "    if MAX_GRAD_NORM is not None:",
        "        options = {'max_norm': MAX_GRAD_NORM, 'error_if_nonfinite': False}",
        "        norm = fabric.clip_gradients(model, optimizer, **options)",
        "    optimizer.step()",
        "    if schedule is not None:",
        "        schedule.step()",
        "    own.clear()" if replays_graphs(plan) else "    optimizer.zero_grad()",
        "    return sums[0] / sums[1], norm",
    ]
    return lines

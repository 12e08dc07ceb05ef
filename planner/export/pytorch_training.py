"""Sections of the exported PyTorch script for training: techniques, the optimizer step, the loop.

In: a plan. Out: Python source with only what the plan uses. The techniques are applied in the order of
`strategies/prepare.py`.
"""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.pytorch_workload import AUTOCAST, any_containers
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import (
    ATTENTION_BACKENDS,
    CHECKPOINT_EVERY,
    CUDAGRAPH_MODES,
    OPTIMIZER_FLAGS,
    TrainingConfig,
)

# What the script takes from techniques/checkpointing.py, techniques/allocator.py and workloads/training_mode.py.
_CHECKPOINTING_NAMES = (
    *("_KEPT_NAMES", "kept_operations", "_policy", "selective_context"),
    *("wrap", "_keeps_statistics", "_contexts_with_statistics", "_statistics_kept"),
)
_TRAINING_MODE_NAMES = (
    *("EVERYTHING_TRAINS", "enter_training_mode", "caching_configs", "_nested", "without_cache"),
    *("CHECKPOINTING_FLAGS", "own_checkpointing", "without_own_checkpointing"),
)
CAUSAL_ATTENTION_NAMES = (
    *("NAME", "PLAIN_ARGUMENTS", "reason_against_maskless", "_register"),
    *("use_maskless_attention", "_choose", "_put_back"),
)
_ALLOCATOR_NAMES = (
    *("can_keep_freed_memory", "keep_freed_memory"),
    *("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD", "LARGEST_MAPPED_BYTES", "NEVER"),
)


def knob_settings(config: TrainingConfig) -> dict[str, Any]:
    """The constants of the knobs that are not at their default, by name."""
    constants: dict[str, Any] = {"PRECISION": config.precision}
    if config.checkpointing != "none":
        constants["CHECKPOINTING"] = config.checkpointing
        constants["CHECKPOINT_EVERY"] = CHECKPOINT_EVERY[config.checkpointing]
    if config.compile != "off":
        constants["COMPILE"] = config.compile
        constants["COMPILE_MODE"] = config.compile_mode
    if config.attention != "own":
        constants["ATTENTION"] = "sdpa" if config.attention in ATTENTION_BACKENDS else config.attention
    if config.attention in ATTENTION_BACKENDS:
        constants["ATTENTION_KERNEL"] = ATTENTION_BACKENDS[config.attention]
    if config.gelu != "own":
        constants["GELU"] = config.gelu
    if config.loss != "full":
        constants["LOSS"] = config.loss
    if config.optimizer_step != "own":
        constants["OPTIMIZER_FLAGS"] = OPTIMIZER_FLAGS[config.optimizer_step]
    if config.threads is not None:
        constants["THREADS"] = config.threads
    return constants


def techniques(plan: Plan, head: str = "") -> str:
    """The functions that the techniques need, and `prepare(device)`, which applies them.

    Args:
        plan: The plan.
        head: The name of the output head whose logits are deferred; "" for none.
    """
    config = plan.config
    sections = []
    sections.append(take("workloads/training_mode.py", *_TRAINING_MODE_NAMES))
    sections.append(take("analysis/training_facts.py", "own_checkpointing_text"))
    if config.checkpointing != "none":
        sections.append(take("techniques/checkpointing.py", *_CHECKPOINTING_NAMES))
    if plan.device == "cuda":
        sections.append(take("techniques/precision.py", "set_matmul_tf32"))
    sections.append(_TRAINING_MODULE)
    if config.allocator == "keep":
        sections.append(take("techniques/allocator.py", *_ALLOCATOR_NAMES))
    if config.gelu != "own":
        sections.append(take("techniques/gelu.py", "WRITTEN_OUT", "written_out", "use_torch_gelu"))
    if replays_graphs(plan):
        sections.append(take("techniques/own_gradients.py", "OwnGradients"))
    if config.attention != "own" or avoids_masks(plan):
        sections.append(take("analysis/structure.py", "language_models"))
    if avoids_masks(plan):
        sections.append(take("techniques/causal_attention.py", *CAUSAL_ATTENTION_NAMES))
    sections.append("\n".join(_prepare_lines(plan, head)))
    return "\n\n\n".join(sections)


def avoids_masks(plan: Plan) -> bool:
    """As techniques/attention.py: where transformers would make a mask tensor that plainly causal attention lacks."""
    return plan.config.tp * plan.config.pp == 1 and (plan.config.compile == "model" or plan.device == "cuda")


def replays_graphs(plan: Plan) -> bool:
    """Whether several micro-steps replay CUDA graphs, so that gradients need memory of their own."""
    return plan.config.compile_mode in CUDAGRAPH_MODES and plan.accumulation > 1


def _prepare_lines(plan: Plan, head: str) -> list[str]:
    config = plan.config
    deferred = config.loss == "fused" and head
    return [
        "def prepare(device):",
        '    """The model with its loss, and the optimizer, as the plan has them."""',
        *(["    torch.set_num_threads(THREADS)"] if config.threads is not None else []),
        *(["    keep_freed_memory()"] if config.allocator == "keep" else []),
        "    torch.manual_seed(SEED)",
        "    with torch.device(device):",
        "        model = build_model()",
        "    model.to(device)",
        "    said = enter_training_mode(model)",
        "    if said is not None:",
        "        print(said)",
        "    if own_checkpointing(model):",
        f"        print(own_checkpointing_text({config.checkpointing!r}))",
        "    module = TrainingModule(model)",
        *(_ATTENTION_LINES if config.attention != "own" else []),
        *(["    use_maskless_attention(language_models(model))"] if avoids_masks(plan) else []),
        *(["    use_torch_gelu(model)"] if config.gelu != "own" else []),
        *(["    defer_logits(model.get_submodule(HEAD))"] if deferred else []),
        *_checkpointing_lines(config),
        *_compile_lines(config),
        *(['    set_matmul_tf32(PRECISION == "tf32")'] if plan.device == "cuda" else []),
        "    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        "    optimizer = build_optimizer(parameters)",
        *(["    module.own_gradients = OwnGradients(parameters, optimizer)"] if replays_graphs(plan) else []),
        "    return module, optimizer, build_schedule(optimizer)",
    ]


_ATTENTION_LINES = [
    "    for inner in language_models(model):",
    '        if ATTENTION == "eager" or inner._supports_sdpa:',
    "            inner.set_attn_implementation(ATTENTION)",
]


def _checkpointing_lines(config: TrainingConfig) -> list[str]:
    if config.checkpointing == "none":
        return []
    compiled = config.compile != "off"
    return [
        "    for stack in STACKS:",
        "        for name in stack[::CHECKPOINT_EVERY]:",
        '            parent, _, child = name.rpartition(".")',
        '            selective = CHECKPOINTING == "selective"',
        f"            wrapped = wrap(model.get_submodule(name), selective=selective, compiled={compiled})",
        "            setattr(model.get_submodule(parent), child, wrapped)",
    ]


def _compile_lines(config: TrainingConfig) -> list[str]:
    options = "dynamic=False" + (", mode=COMPILE_MODE" if config.compile_mode != "default" else "")
    if config.compile == "model":
        return [f"    module.compile({options})"]
    if config.compile == "block":
        return [
            "    for name in [name for stack in [*STACKS, *FROZEN_STACKS] for name in stack]:",
            f"        model.get_submodule(name).compile({options})",
        ]
    return []


_TRAINING_MODULE = '''class TrainingModule(nn.Module):
    """The model with its loss: one forward gives the loss's sum and count."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return loss_sum(self.model, batch)'''


def step(plan: Plan) -> str:
    """`train_step`: one optimizer step at the full global batch."""
    fp16 = plan.config.precision == "fp16"
    counts_items = plan.workload.kind != "function"
    divisor = "float(count_items(batch))"
    if not counts_items:
        divisor += f" if count_items else float({_items(plan)})"
    lines = [
        f"def train_step(module, optimizer, schedule, batch, device{', scaler' if fp16 else ''}):",
        '    """One optimizer step over the global batch; returns its loss: the sum over the count of all of it."""',
        "    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]",
        *(["    caching = caching_configs(module)"] if plan.config.checkpointing != "none" else []),
        "    recomputing = own_checkpointing(module)",
        f"    divisor = {divisor}",
        "    total = torch.zeros((), device=device)",
        "    count = torch.zeros((), device=device)",
        "    micros = device_micro_batches(batch, MICRO_BATCH, device)",
        "    for _ in range(ACCUMULATION):",
        *(["        module.own_gradients.attach()"] if replays_graphs(plan) else []),
        *_micro_step_lines(plan.config),
        *(["    module.own_gradients.drop_unused()"] if replays_graphs(plan) else []),
        *(["    scaler.unscale_(optimizer)"] if fp16 else []),
    ]
    if not counts_items:
        lines += [
            "    if not count_items:  # the count of the batch is known only now",
            "        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], divisor / count)",
        ]
    lines += [
        "    if MAX_GRAD_NORM is not None:",
        "        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)",
        *_optimizer_step_lines(fp16),
        "    if schedule is not None and stepped:",
        "        schedule.step()",
        "    module.own_gradients.clear()" if replays_graphs(plan) else "    optimizer.zero_grad(set_to_none=True)",
        "    return float(total / count)",
    ]
    return "\n\n\n".join([*_batch_helpers(plan), "\n".join(lines)])


def _batch_helpers(plan: Plan) -> list[str]:
    """`device_micro_batches`: the micro-batches of a step on the device; a user's batches may be in any container."""
    if not any_containers(plan):
        return [_CUT, _MOVE]
    parts = [
        take("workloads/containers.py", *_CONTAINERS),
        _BATCH_SIZE,
        take("workloads/batch.py", "slice_batch", "_map_samples", "_is_texts", "move_batch"),
        _SPLIT,
    ]
    return [*parts, _MOVE_ANY if plan.device == "cpu" else take("workloads/transfer.py", *_TRANSFER)]


def _micro_step_lines(config: TrainingConfig) -> list[str]:
    """The body of the loop over the micro-batches."""
    autocast = AUTOCAST.get(config.precision)
    cached = ", cache_enabled=False" if config.checkpointing == "selective" else ""  # as techniques/precision.py
    context = f"torch.autocast(device.type, dtype={autocast}{cached})" if autocast else "contextlib.nullcontext()"
    loss = "(micro_total * (1 / divisor))"
    if config.precision == "fp16":
        loss = f"scaler.scale{loss}"
    kernel = "sdpa_kernel(getattr(SDPBackend, ATTENTION_KERNEL)), " if config.attention in ATTENTION_BACKENDS else ""
    cache = "without_cache(caching), " if config.checkpointing != "none" else ""
    mark = ["        torch.compiler.cudagraph_mark_step_begin()"] if config.compile_mode in CUDAGRAPH_MODES else []
    return [
        "        micro = next(micros)",
        *mark,
        f"        with {kernel}{cache}without_own_checkpointing(recomputing):",
        f"            with {context}:",
        "                micro_total, micro_count = module(micro)",
        f"            {loss}.backward()",
        "        total += micro_total.detach().float()",
        "        count += micro_count",
    ]


def _optimizer_step_lines(fp16: bool) -> list[str]:
    if not fp16:
        return ["    optimizer.step()", "    stepped = True"]
    return [
        "    scale = scaler.get_scale()",
        "    scaler.step(optimizer)",
        "    scaler.update()",
        "    stepped = scaler.get_scale() >= scale",
    ]


_CUT = '''def cut(batch, start, stop):
    """The samples start to stop of a nest of tensors whose first dim counts samples."""
    if isinstance(batch, dict):
        return {key: cut(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(cut(value, start, stop) for value in batch)
    return batch[start:stop] if isinstance(batch, torch.Tensor) and batch.dim() else batch'''

_CONTAINERS = (
    "know_containers",
    "_register",
    "_parts_of_mapping",
    "_make_mapping",
    "_parts_of_dataclass",
    "_make_dataclass",
)
_TRANSFER = ("MOVED_AT_ONCE_BYTES", "device_micro_batches", "_host_bytes", "_copied_ahead", "_copy_stream")

_BATCH_SIZE = '''def batch_size(batch):
    """Samples in a batch: the first dim of its tensors."""
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())'''

_SPLIT = '''def split_batch(batch, micro_batch):
    """The batch in micro-batches, in order."""
    for start in range(0, GLOBAL_BATCH, micro_batch):
        yield slice_batch(batch, start, start + micro_batch)'''

_MOVE_ANY = '''def device_micro_batches(batch, micro_batch, device):
    """The micro-batches of a step on the device, in order."""
    for micro in split_batch(batch, micro_batch):
        yield move_batch(micro, device)'''

_MOVE = '''def move(batch, device):
    """The batch on a device."""
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch


def device_micro_batches(batch, micro_batch, device):
    """The micro-batches of a step on the device, in order."""
    for start in range(0, GLOBAL_BATCH, micro_batch):
        yield move(cut(batch, start, start + micro_batch), device)'''


def _items(plan: Plan) -> str:
    """Tokens, or samples, of a step, as an expression of the script: as many as the search counted."""
    whole = plan.workload.global_batch * (plan.workload.sequence_length or 1)
    counted = round(plan.measurement.tokens_per_s.median * plan.measurement.step_time_s.median)
    if counted != whole:
        return str(counted)
    return "GLOBAL_BATCH * SEQUENCE_LENGTH" if plan.workload.sequence_length else "GLOBAL_BATCH"


def main(plan: Plan) -> str:
    """The main function with the training loop."""
    unit, items = plan.workload.unit, _items(plan)
    fp16 = plan.config.precision == "fp16"
    scaler = "    scaler = torch.amp.GradScaler(device.type)\n" if fp16 else ""
    return f"""def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--device", default=DEVICE)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    module, optimizer, schedule = prepare(device)
{scaler}    for number in range(arguments.steps):
        batch = make_batch(GLOBAL_BATCH, number)
        started = time.perf_counter()
        loss = train_step(module, optimizer, schedule, batch, device{", scaler" if fp16 else ""})
        seconds = time.perf_counter() - started
        print(f"step {{number + 1}}: loss {{loss:.8f}}, {{{items} / seconds:.1f}} {unit}/s", flush=True)


if __name__ == "__main__":
    main()"""

"""Sections of the exported PyTorch script for the loop: one optimizer step, and the main function.

In: a plan. Out: Python source with only what the plan uses.
"""

from __future__ import annotations

from autoplan.planner.apply.loader import setting_of
from autoplan.planner.export.pytorch.pytorch_ranks import has_ranks
from autoplan.planner.export.pytorch.pytorch_training import replays_graphs
from autoplan.planner.export.pytorch.pytorch_workload import AUTOCAST, any_containers
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import ATTENTION_BACKENDS, CUDAGRAPH_MODES, TrainingConfig


def run_fields(plan: Plan) -> list[str]:
    """The fields of the script's class Run, in order: what prepare() makes and a step needs."""
    config = plan.config
    return [
        *("model", "module", "optimizer", "schedule", "device"),
        *(["scaler"] if config.precision == "fp16" else []),
        *(["own_gradients"] if replays_graphs(plan) else []),
        *(["mesh", "clip"] if has_ranks(config) else []),
        *(["set_sync"] if config.dp > 1 else []),
    ]


def run_class(plan: Plan) -> str:
    """The class Run."""
    fields = "\n".join(f"    {name}: Any" for name in run_fields(plan))
    return f'''class Run(NamedTuple):
    """What prepare() makes, and a step works on."""

{fields}'''


def step(plan: Plan) -> str:
    """`train_step`: one optimizer step at the full global batch."""
    config = plan.config
    ranks, fp16 = has_ranks(config), config.precision == "fp16"
    own_gradients = replays_graphs(plan)
    clip = "nn.utils.clip_grad_norm_" if config.parameters == "own" else "clip_in_fp32"
    lines = [
        "def train_step(run, batch):",
        f'    """One optimizer step over {_what_is_given(plan)}; its loss is the sum over the count of the whole',
        '    global batch, its gradient norm that before clipping."""',
        "    module, optimizer, schedule, device = run.module, run.optimizer, run.schedule, run.device",
        "    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]",
        *(["    caching = caching_configs(module)"] if config.checkpointing != "none" else []),
        "    recomputing = own_checkpointing(module)",
        *_divisor_lines(plan),
        "    total = torch.zeros((), device=device)",
        "    count = torch.zeros((), device=device)",
        "    micros = device_micro_batches(batch, MICRO_BATCH, device)",
        f"    for {'number' if config.dp > 1 else '_'} in range(ACCUMULATION):",
        *(["        run.set_sync(number + 1 == ACCUMULATION)"] if config.dp > 1 else []),
        *(["        run.own_gradients.attach()"] if own_gradients else []),
        *_micro_step_lines(config),
        *(["    run.own_gradients.drop_unused()"] if own_gradients else []),
        *(["    reduce_partial_gradients(module)"] if config.tp > 1 else []),
        *_sum_lines(config),
        *(["    run.scaler.unscale_(optimizer)"] if fp16 else []),
        *(["    agree_on_overflow(run.scaler, optimizer)"] if fp16 and ranks else []),
    ]
    if plan.workload.kind == "function":
        gradients = "local_tensor(p.grad)" if ranks else "p.grad"
        lines += [
            "    if not count_items:  # the count of the batch is known only now",
            f"        gradients = [{gradients} for p in parameters if p.grad is not None]",
            "        torch._foreach_mul_(gradients, divisor / count)",
        ]
    lines += [
        "    norm = None",
        "    if MAX_GRAD_NORM is not None:",
        f"        norm = {'run.clip' if ranks else clip}(parameters, MAX_GRAD_NORM)",
        *_optimizer_step_lines(fp16),
        "    if schedule is not None and not skipped:",
        "        schedule.step()",
        "    run.own_gradients.clear()" if own_gradients else "    optimizer.zero_grad(set_to_none=True)",
        "    return StepResult(loss=total / count, grad_norm=norm, skipped=skipped)",
    ]
    return "\n\n\n".join([*_batch_helpers(plan), _rank_batch(plan), take("run.py", "StepResult"), "\n".join(lines)])


def _what_is_given(plan: Plan) -> str:
    return "this rank's share of the global batch" if plan.config.dp > 1 else "the global batch"


def _divisor_lines(plan: Plan) -> list[str]:
    """What the summed loss is divided by: the count of the whole global batch, as strategies/run.py has it."""
    ranks = has_ranks(plan.config)
    share = "float(count_items(batch))"
    if plan.workload.kind == "function":
        items = "LOCAL_BATCH" + (" * SEQUENCE_LENGTH" if plan.workload.sequence_length else "")
        share += f" if count_items else float({items if ranks else counted_items(plan)})"
    if not ranks:
        return [f"    divisor = {share}"]
    return [
        f"    divisor = torch.full((), {share}, device=device)",
        '    divisor = sum_over_axes(run.mesh, divisor, ("dp_replicate", "dp_shard"))',
    ]


def _sum_lines(config: TrainingConfig) -> list[str]:
    if not has_ranks(config):
        return []
    return [
        f'    {name} = sum_over_axes(run.mesh, {name}, ("dp_replicate", "dp_shard"))' for name in ("total", "count")
    ]


def _batch_helpers(plan: Plan) -> list[str]:
    """`device_micro_batches`: the micro-batches of a step on the device; a user's batches may be in any container."""
    if not any_containers(plan):
        parts = [_CUT, _MOVE]
    else:
        parts = [
            take("workloads/containers.py", *_CONTAINERS),
            _BATCH_SIZE,
            take("workloads/batch.py", "slice_batch", "_map_samples", "_is_texts", "move_batch"),
            _SPLIT,
            _MOVE_ANY if plan.device == "cpu" else take("workloads/transfer.py", *_TRANSFER),
        ]
    if has_ranks(plan.config):
        parts = [
            part.replace("range(0, GLOBAL_BATCH, micro_batch)", "range(0, LOCAL_BATCH, micro_batch)") for part in parts
        ]
    return parts


def _rank_batch(plan: Plan) -> str:
    """`rank_batch`: the samples of a step; `TrainingRun.local_share` of them, where ranks share the batch."""
    lines = [
        "def rank_batch(run, number):",
        '    """The samples that train_step takes at a step, counted from 0."""',
    ]
    if plan.config.dp == 1:
        return "\n".join([*lines, "    return make_batch(GLOBAL_BATCH, number)"])
    cut = "slice_batch" if any_containers(plan) else "cut"
    lines += [
        "    rank, _ = data_position(run.mesh)",
        f"    return {cut}(make_batch(GLOBAL_BATCH, number), rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)",
    ]
    return "\n".join(lines)


def _micro_step_lines(config: TrainingConfig) -> list[str]:
    """The body of the loop over the micro-batches."""
    autocast = AUTOCAST.get(config.precision)
    cached = ", cache_enabled=False" if config.checkpointing == "selective" else ""  # as techniques/precision.py
    context = f"torch.autocast(device.type, dtype={autocast}{cached})" if autocast else "contextlib.nullcontext()"
    context += ", HostActivations()" if config.offload == "activations" else ""
    # DDP and FSDP2 average over the data-parallel ranks; the gradient is a sum over them.
    loss = f"(micro_total * ({'DP_REPLICATE * DP_SHARD' if config.dp > 1 else '1'} / divisor))"
    if config.precision == "fp16":
        loss = f"run.scaler.scale{loss}"
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
        return ["    optimizer.step()", "    skipped = False"]
    return [
        "    scale = run.scaler.get_scale()",
        "    run.scaler.step(optimizer)",
        "    run.scaler.update()",
        "    skipped = run.scaler.get_scale() < scale",
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


def counted_items(plan: Plan) -> str:
    """Tokens, or samples, of a step, as an expression of the script: as many as the search counted."""
    whole = plan.workload.global_batch * (plan.workload.sequence_length or 1)
    counted = round(plan.measurement.tokens_per_s.median * plan.measurement.step_time_s.median)
    if counted != whole:
        return str(counted)
    return "GLOBAL_BATCH * SEQUENCE_LENGTH" if plan.workload.sequence_length else "GLOBAL_BATCH"


def loader(plan: Plan) -> list[str]:
    """`make_loader`, for a dataset of the user's own, where the search measured its loader."""
    if setting_of(plan) is None:
        return []
    lines = [
        "def make_loader(run, dataset, collate_fn=None, shuffle=True):",
        '    """The DataLoader of a dataset: for batch in make_loader(run, dataset): train_step(run, batch)."""',
    ]
    if plan.config.dp > 1:
        lines += [
            "    rank, ranks = data_position(run.mesh)",
            "    options = {'num_replicas': ranks, 'rank': rank, 'shuffle': shuffle, 'drop_last': True}",
            "    order = {'sampler': torch.utils.data.distributed.DistributedSampler(dataset, **options)}",
            f"    size = GLOBAL_BATCH // {plan.config.dp}",
        ]
    else:
        lines += ["    order, size = {'shuffle': shuffle}, GLOBAL_BATCH"]
    lines += [
        "    return torch.utils.data.DataLoader(",
        "        dataset, batch_size=size, collate_fn=collate_fn, drop_last=True, **order, **LOADER_ARGUMENTS",
        "    )",
    ]
    return ["\n".join(lines).replace("'", '"')]


def main(plan: Plan) -> str:
    """The main function with the training loop."""
    unit, items = plan.workload.unit, counted_items(plan)
    ranks = has_ranks(plan.config)
    lines = [
        "def main():",
        "    parser = argparse.ArgumentParser(description=__doc__)",
        '    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")',
        '    parser.add_argument("--device", default=DEVICE)',
        "    arguments = parser.parse_args()",
        "    run = prepare(arguments.device)",
        "    for number in range(arguments.steps):",
        "        batch = rank_batch(run, number)",
        "        started = time.perf_counter()",
        "        loss = float(train_step(run, batch).loss)  # reading it waits for the device",
        "        seconds = time.perf_counter() - started",
        *(["        if dist.get_rank() == 0:"] if ranks else []),
        ("    " if ranks else "")
        + f'        print(f"step {{number + 1}}: loss {{loss:.8f}}, {{{items} / seconds:.1f}} {unit}/s", flush=True)',
        *(["    dist.destroy_process_group()"] if ranks else []),
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines)

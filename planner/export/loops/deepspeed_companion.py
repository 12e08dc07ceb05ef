"""The companion module of the export target deepspeed: Python source for what its JSON cannot say.

In: a plan, the name of the configuration file, and what is not carried. Out: the source of the module.
"""

from __future__ import annotations

from autoplan.planner.export.base import loader_arguments_source
from autoplan.planner.export.lightning import lightning_source
from autoplan.planner.export.loops import loop_companion
from autoplan.planner.plan import Plan


def companion(plan: Plan, config_file: str, version_line: str, missing: list[str]) -> str:
    """The source of the module."""
    made = loop_companion.makes_optimizers(plan)
    # DeepSpeed shards by itself, so what makes units of the blocks is not needed.
    whole = plan.model_copy(update={"config": plan.config.model_copy(update={"dp_shard": 1})})
    imports = lightning_source.imports(
        whole, "fabric", ["from deepspeed import comm"], optimizers=made, shards=False, own="import deepspeed"
    )
    imports = ["import itertools", *imports]
    imports.insert(imports.index("import torch") - 1, "from pathlib import Path")
    said = [
        version_line,
        "Loss: train_step hands DeepSpeed the summed loss of each micro-batch over the count of the whole global "
        "batch, times ranks and accumulation, which DeepSpeed divides by. Without that it takes the mean of the "
        "micro-batches' means, which is another loss where their counts differ.",
    ]
    sections = [
        "\n".join(imports),
        loop_companion.constants(plan),
        "\n".join(_initialize_lines(plan, config_file, made)),
        loader_arguments_source(plan),
        loop_companion.STEPS,
        lightning_source.preparation(whole, "fabric", shards=False),
        *loop_companion.optimizers(plan),
        _STEP,
    ]
    return loop_companion.module(plan, said=said, missing=missing, docstring=_docstring(made), sections=sections)


def _docstring(made: bool) -> list[str]:
    given = "" if made else ", optimizer, schedule"
    return [
        "The plan for a loop with DeepSpeed. Use, under torchrun or the launcher `deepspeed`:",
        "",
        "    deepspeed.init_distributed()",
        "    torch.manual_seed(SEED)",
        f"    engine = initialize(prepare_module(build_model()){given})",
        "    sampler = DistributedSampler(dataset)",
        "    loader = DataLoader(dataset, **loader_arguments(), sampler=sampler)",
        "    for micro_batches in steps(loader):",
        "        loss, norm = train_step(engine, micro_batches, loss_sum, count_items)",
    ]


def _initialize_lines(plan: Plan, config_file: str, made: bool) -> list[str]:
    given = "" if made else ", optimizer, schedule"
    lines = [
        f"def initialize(model{given}, **more):",
        '    """The engine of the plan; `more` are your own arguments of deepspeed.initialize.',
        "",
        "    Raises:",
        "        RuntimeError: there are not as many ranks as the plan has.",
        '    """',
    ]
    lines += ["    optimizer, schedule = make_optimizers(model)"] if made else []
    return [
        *lines,
        f"    config = str(Path(__file__).with_name({config_file!r}))",
        "    arguments = {'model': model, 'optimizer': optimizer, 'lr_scheduler': schedule, 'config': config}",
        "    engine = deepspeed.initialize(**(arguments | more))[0]",
        "    if engine.dp_world_size != RANKS:",
        '        raise RuntimeError(f"the plan is for {RANKS} ranks, and {engine.dp_world_size} were started")',
        "    return engine",
    ]


_STEP = '''def train_step(engine, micro_batches, loss_sum, count_items):
    """One optimizer step. Returns the loss of the global batch, and the norm of its gradient before clipping (None in
    fp16 without ZeRO).

    Args:
        engine: From initialize().
        micro_batches: ACCUMULATION batches of MICRO_BATCH samples, this rank's share of the global batch.
        loss_sum: loss_sum(model, micro_batch) returns the summed loss and how many items it is the sum of.
        count_items: count_items(micro_batch) returns how many items that will be, without running the model.
    """
    sums = torch.zeros(2, device=engine.device)
    sums[1] = float(sum(count_items(micro_batch) for micro_batch in micro_batches))
    comm.all_reduce(sums)
    norm = None
    for number, micro_batch in enumerate(micro_batches, start=1):
        micro_batch = {key: value.to(engine.device, non_blocking=True) for key, value in micro_batch.items()}
        total, _ = loss_sum(engine, micro_batch)
        engine.backward(total * (RANKS * ACCUMULATION / sums[1]))
        if number == ACCUMULATION and not engine.zero_optimization() and not engine.torch_autocast_z0_gradscaler:
            norm = torch.nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
        engine.step()  # clips, and steps the optimizer and the schedule, after the last of ACCUMULATION
        sums[0] += total.detach().float()
    total = sums[:1].clone()
    comm.all_reduce(total)
    return total[0] / sums[1], engine.get_global_grad_norm() if norm is None else norm'''

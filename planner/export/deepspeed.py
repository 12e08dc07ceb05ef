"""The export target deepspeed: its JSON configuration, and a companion module.

In: a plan. Out: two files. The names of the keys are in planner/plan/keys/deepspeed.json. The check gives the JSON to
DeepSpeedConfig in a process of its own, at the plan's number of ranks, and compares what it holds with the plan:
DeepSpeed takes unknown keys at the top level without a word.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, Target, companion_name, same_or_error_each
from autoplan.planner.export.companion import (
    check_module,
    head,
    last_part,
    loop_not_carried,
    loop_settings,
    module_text,
)
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, nest, pick_table, version_line, version_notes
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import refuse_model_parallelism
from autoplan.processes import RankContext

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""The precisions that use autocast, and DeepSpeed's name of the dtype."""

BY_TENSOR = ("Adafactor", "Muon", "LBFGS")
"""Optimizers whose step looks at whole tensors; ZeRO gives them flat pieces."""


TAKES = (
    *("model:prepare_module", "deepspeed:initialize", "deepspeed:train_step"),
    *("loop:steps", "loop:loader_arguments"),
)


class DeepspeedTarget(Target):
    """JSON for deepspeed.initialize, and a module for the loop."""

    name = "deepspeed"
    suffix = ".json"

    def render(self, plan: Plan, stem: str) -> Export:
        version = installed_version("deepspeed")
        document = nest(pick_table("deepspeed", version)["keys"], values(plan))
        missing = not_carried(plan)
        constants = settings(plan, f"{stem}.json")
        text = module_text(
            constants,
            TAKES,
            head=head(plan, [version_line("deepspeed", version), _LOSS], missing),
            docstring=_docstring(constants["MAKES_OPTIMIZERS"]),
        )
        files = {f"{stem}.json": json.dumps(document, indent=2) + "\n", companion_name(stem): text}
        return Export(files=files, not_carried=tuple(missing))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        text, module = export.files.values()
        check_module(module, settings(plan, next(iter(export.files))))
        version = installed_version("deepspeed")
        if version is None:
            return ("not read by the real DeepSpeedConfig: install deepspeed to have that checked",)
        place, parts = f"{__name__}:read_back_in_rank", (text, plan.config.world_size)
        given = {"tool": f"deepspeed {version}", "what": "the file"}
        same_or_error_each(expected(plan), read_by_tool(place, parts, env={"DS_ACCELERATOR": "cpu"}, **given))
        return version_notes("deepspeed", version)


def settings(plan: Plan, config_file: str) -> dict[str, Any]:
    """The constants of the module. DeepSpeed shards by itself: no units are made of the blocks."""
    config = plan.config
    by_block = config.checkpointing != "none" or config.compile == "block"
    return loop_settings(plan, "deepspeed", CONFIG_FILE=config_file, FSDP=False, BLOCKS=by_block)


_LOSS = (
    "Loss: train_step hands DeepSpeed the summed loss of each micro-batch over the count of the whole global "
    "batch, times ranks and accumulation, which DeepSpeed divides by. Without that it takes the mean of the "
    "micro-batches' means, which is another loss where their counts differ."
)


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


def stage(plan: Plan) -> int:
    """The stage of ZeRO: 3 where parameters are sharded between uses, 2 where they stay, 0 without shards."""
    if plan.config.dp_shard == 1:
        return 0
    return 3 if plan.config.reshard_after_forward else 2


def values(plan: Plan) -> dict[str, Any]:
    """The values of the file by the plan's term; None: not in the file.

    `train_batch_size` is left out: where a file has it, DeepSpeed compares it with a world of one rank as long as
    there is no process group, and refuses the file.

    Raises:
        ExportError: tensor or pipeline parallelism, replicas of shards, or an optimizer that ZeRO would change.
    """
    config, training = plan.config, plan.training
    refuse_model_parallelism("DeepSpeed's ZeRO", config, replicas_of_shards=False)
    name = "" if training is None else last_part(training.optimizer)
    if stage(plan) and name in BY_TENSOR:
        raise ExportError(
            f"ZeRO gives the optimizer flat pieces of tensors; {name} looks at whole ones and would train otherwise",
            hint="Use plan.prepare() under torchrun, or search with --fix dp_shard=1.",
        )
    autocast = AUTOCAST.get(config.precision)
    return {
        "micro_batch": config.micro_batch,
        "accumulation": plan.accumulation,
        "max_grad_norm": None if training is None else training.max_grad_norm,
        "stage": stage(plan),
        "any_optimizer": True if stage(plan) else None,
        "gradient_dtype": "fp32",
        "autocast": None if autocast is None else True,
        "autocast_dtype": autocast,
        "autocast_modules": None if autocast is None else [],
    }


def not_carried(plan: Plan) -> list[str]:
    """Sentences on what neither file says."""
    config = plan.config
    found = loop_not_carried(plan, "DeepSpeed")
    if stage(plan) and config.gradient_sync == "last" and plan.accumulation > 1:
        found.append(
            "gradient_sync=last: ZeRO scatters gradients at every micro-step, which sends more and keeps less memory"
        )
    if config.dp_shard == 1 and config.gradient_sync == "every":
        found.append("gradient_sync=every: without ZeRO, DeepSpeed reduces gradients at the last micro-step")
    if config.dp_shard > 1 and config.precision in AUTOCAST:
        found.append(
            f"parameters gathered in {config.precision}: they are sent in fp32, so that gradients are summed in fp32 "
            "as measured (lower_precision_safe_modules of torch_autocast is empty; one list says both)"
        )
    if config.compile != "off" and stage(plan) == 3:
        found.append(f"compile={config.compile} as measured: the hooks of ZeRO-3 break the compiled graphs")
    return found


def expected(plan: Plan) -> dict[str, Any]:
    """The values that DeepSpeedConfig holds if the file says what the plan has."""
    written = values(plan)
    dtype = written["autocast_dtype"]
    return written | {
        "unknown keys": [],
        "ranks": plan.config.world_size,
        "global_batch": plan.workload.global_batch,
        "max_grad_norm": written["max_grad_norm"] or 0.0,
        "offload": False,
        "fp16": False,
        "bf16": False,
        "autocast": dtype is not None,
        "autocast_dtype": None if dtype is None else f"torch.{dtype}",
        "any_optimizer": bool(written["any_optimizer"]),
    }


def read_back_in_rank(context: RankContext, text: str, ranks: int) -> dict[str, Any]:
    """The values of DeepSpeedConfig after it read a file for this number of ranks, in this process.

    The other ranks are a fake process group: nothing is sent. A key at the top level that DeepSpeed never looks up is
    unknown; so is one in a section of plain dictionaries.
    """
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
    looked_up: set[str] = set()
    given = _watched(json.loads(text), looked_up)
    config: Any = DeepSpeedConfig(given)
    unknown = sorted(key for key in given if key not in looked_up)
    zero = config.zero_config
    return {
        "unknown keys": unknown,
        "ranks": int(config.world_size),
        "global_batch": int(config.train_batch_size),
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "max_grad_norm": float(config.gradient_clipping),
        "stage": int(config.zero_optimization_stage),
        "offload": zero.offload_optimizer is not None or zero.offload_param is not None,
        "fp16": config.float16_config.enabled,
        "bf16": config.bfloat16_config.enabled,
        "gradient_dtype": config.grad_accum_dtype,
        "autocast": config.torch_autocast_enabled,
        "autocast_dtype": None if config.torch_autocast_dtype is None else str(config.torch_autocast_dtype),
        "autocast_modules": config.torch_autocast_lower_precision_safe_modules,
        "any_optimizer": config.zero_allow_untested_optimizer,
    }


def _watched(document: dict[str, Any], looked_up: set[str]) -> dict[str, Any]:
    """The document, which remembers the keys that it is asked for; copies of it do too."""

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            looked_up.add(key)
            return super().__getitem__(key)

        def get(self, key: Any, default: Any = None) -> Any:
            looked_up.add(key)
            return super().get(key, default)

        def __contains__(self, key: Any) -> bool:
            looked_up.add(key)
            return super().__contains__(key)

        def __copy__(self) -> Watched:
            return Watched(self)

    return Watched(document)

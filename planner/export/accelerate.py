"""The export target accelerate: a config file for `accelerate launch --config_file`, and a companion module.

In: a plan. Out: two files. The names of the keys are in keys/accelerate.json. The check gives the file to accelerate's
own launcher in a process of its own, and compares what a started process would find with the plan: the launcher takes
unknown keys of a section without a word.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoplan.planner.export.base import Export, Target, companion_name, same_or_error_each
from autoplan.planner.export.companion import check_module, head, loop_not_carried, loop_settings, module_text
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, nest, pick_table, version_line, version_notes
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import refusal, refuse_fp16_on_cpu, refuse_model_parallelism
from autoplan.processes import RankContext
from autoplan.strategies.config import LEFT_BY_TOOLS

PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
"""By value of the knob, accelerate's name; tf32 is a setting of torch besides."""

TAKES = (
    *("model:prepare_module", "accelerate:make_accelerator", "accelerate:prepare"),
    *("loop:steps", "loop:loader_arguments", "loop:train_step"),
)


class AccelerateTarget(Target):
    """A YAML file for the launcher, and a module for the loop."""

    name = "accelerate"
    suffix = ".yaml"

    def render(self, plan: Plan, stem: str) -> Export:
        version = installed_version("accelerate")
        line, missing = version_line("accelerate", version), not_carried(plan)
        module = companion_name(stem)
        said = [line, f"The other settings of the plan are in {module}.", *_type_lines(plan)]
        keys = pick_table("accelerate", version)["keys"]
        document = yaml.safe_dump(nest(keys, values(plan)), sort_keys=False)
        constants = settings(plan, f"{stem}.yaml")
        text = module_text(
            constants,
            TAKES,
            head=head(plan, [line, *_loss_lines(plan)], missing),
            docstring=_docstring(constants["MAKES_OPTIMIZERS"]),
        )
        files = {f"{stem}.yaml": head(plan, said, missing) + "\n" + document, module: text}
        return Export(files=files, not_carried=tuple(missing))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        text, module = export.files.values()
        check_module(module, settings(plan, next(iter(export.files))))
        version = installed_version("accelerate")
        if version is None:
            return ("not read by accelerate's own launcher: install accelerate to have that checked",)
        place, tool = f"{__name__}:read_back_in_rank", f"accelerate {version}"
        same_or_error_each(expected(plan), read_by_tool(place, (text,), tool=tool, what="the file"))
        return version_notes("accelerate", version)


def settings(plan: Plan, config_file: str) -> dict[str, Any]:
    """The constants of the module."""
    precision = PRECISIONS[plan.config.precision]
    return loop_settings(plan, "accelerate", CONFIG_FILE=config_file, MIXED_PRECISION=precision)


def _loss_lines(plan: Plan) -> list[str]:
    said = [
        "Loss: train_step divides the summed loss of all micro-batches and ranks by the count of all of them. "
        "Accelerate's own accumulate() takes the mean of the micro-batches' means, which is another loss where their "
        "counts differ.",
    ]
    if plan.config.dp > 1:
        said.append(
            "Samples: accelerate deals micro-batches out to the ranks one by one, in the order of the loader; each "
            "global batch has the same samples, and each rank keeps the BatchNorm statistics of its own."
        )
    return said


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


def values(plan: Plan) -> dict[str, Any]:
    """The values of the file by the plan's term; None: not in the file.

    Raises:
        ExportError: tensor or pipeline parallelism, or shards or fp16 on a CPU.
    """
    config = plan.config
    refuse_model_parallelism("Accelerate", config, replicas_of_shards=True)
    shards = config.dp_shard > 1
    if shards and plan.device == "cpu":
        raise refusal("Accelerate", "shards on a CPU", f"dp_shard={config.dp_shard} for a CPU")
    refuse_fp16_on_cpu(config, plan.device)
    document: dict[str, Any] = {
        "environment": "LOCAL_MACHINE",
        "distributed": "FSDP" if shards else "MULTI_GPU" if config.dp > 1 else "NO",
        "precision": PRECISIONS[config.precision],
        "ranks": config.world_size,
        "machines": 1,
        "machine": 0,
        "port": 0 if config.world_size > 1 else None,
        "use_cpu": plan.device == "cpu",
    }
    if shards:
        document |= {
            "fsdp_version": 2,
            "reshard": config.reshard_after_forward,
            "offload": config.offload == "parameters",
            "units": "TRANSFORMER_BASED_WRAP",
            "cpu_loading": False,
            "checkpointing": False,
            "state_dict": "SHARDED_STATE_DICT",
        }
    if shards and config.dp_replicate > 1:
        document |= {"dp_replicate": config.dp_replicate, "dp_shard": config.dp_shard}
    return document


def not_carried(plan: Plan) -> list[str]:
    """Sentences on what neither file says."""
    config = plan.config
    carried = {"offload"} if config.offload == "parameters" and config.dp_shard > 1 else set()  # offload, above
    names = set(LEFT_BY_TOOLS) - carried
    found = loop_not_carried(plan, "accelerate", sorted(names))
    if config.dp_shard > 1 and config.precision == "fp16":
        found.append("gradients reduced in fp32: under FSDP2, accelerate gathers and reduces in fp16")
    if config.precision in ("bf16", "fp16"):
        found.append("outputs of the model as autocast leaves them: accelerate makes them fp32, which takes memory")
    return found


def _type_lines(plan: Plan) -> list[str]:
    """Why the file says what surprises."""
    said = [
        "checkpointing and compile are not in this file: the companion applies them to the blocks that were measured."
    ]
    if plan.device == "cpu" and plan.config.dp > 1:
        said.append(
            "MULTI_GPU on a CPU is no mistake: with MULTI_CPU, accelerate starts one process. make_accelerator() says "
            "cpu=True, with which the ranks are a group over gloo."
        )
    return said


def expected(plan: Plan) -> dict[str, Any]:
    """The values that a process finds if accelerate started it with the file; see `read_back_in_rank`."""
    of_the_file = ("environment", "distributed", "machines", "machine", "port", "state_dict")
    found = {term: value for term, value in values(plan).items() if term not in of_the_file}
    found |= {"unknown keys": [], "launcher": "torchrun" if plan.config.world_size > 1 else "one process"}
    found |= {"dynamo": "NO", "fsdp": plan.config.dp_shard > 1}
    if plan.config.dp_shard > 1:
        found["units"] = "transformer_auto_wrap_policy"
    return found | ({"tp": 1} if "dp_replicate" in found else {})


def read_back_in_rank(context: RankContext, text: str) -> dict[str, Any]:
    """The values that a process finds if accelerate's launcher starts it with a file: the launcher's arguments, and
    the plugins that a process makes of its variables."""
    import os

    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    path = context.directory / "config.yaml"
    path.write_text(text)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    known = set(vars(arguments))
    arguments, _, _ = _validate_launch_command(arguments)
    document = yaml.safe_load(text)
    sections = [key for key, value in document.items() if isinstance(value, dict)]
    unknown = sorted(key for section in sections for key in document[section] if key not in known)
    several = bool(arguments.multi_gpu or arguments.use_fsdp)
    if several:
        variables = prepare_multi_gpu_env(arguments)
    else:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
    os.environ.update(variables)
    found: dict[str, Any] = {
        "unknown keys": unknown,
        "launcher": "torchrun" if several else "one process",
        "ranks": int(arguments.nproc_per_node) if several else arguments.num_processes,
        "precision": variables["ACCELERATE_MIXED_PRECISION"],
        "dynamo": variables["ACCELERATE_DYNAMO_BACKEND"].upper(),
        "use_cpu": bool(arguments.use_cpu),
        "fsdp": variables.get("ACCELERATE_USE_FSDP") == "true",
    }
    if found["fsdp"]:
        plugin: Any = FullyShardedDataParallelPlugin()  # of the variables, as Accelerator() makes it
        found |= {
            "fsdp_version": plugin.fsdp_version,
            "reshard": plugin.reshard_after_forward,
            "units": getattr(plugin.auto_wrap_policy, "__name__", None),
            "offload": bool(plugin.cpu_offload and getattr(plugin.cpu_offload, "pin_memory", False)),
            "cpu_loading": plugin.cpu_ram_efficient_loading,
            "checkpointing": plugin.activation_checkpointing,
        }
    if variables.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        from accelerate.parallelism_config import ParallelismConfig

        degrees: Any = ParallelismConfig()
        found |= {
            "dp_replicate": degrees.dp_replicate_size,
            "dp_shard": degrees.dp_shard_size,
            "tp": degrees.tp_size,
        }
    return found

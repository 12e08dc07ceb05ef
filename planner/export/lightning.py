"""The export targets lightning and fabric: a Python module for Lightning's Trainer, and one for Fabric.

In: a plan. Out: one file. Lightning reads no configuration file, so the arguments are what `trainer_arguments()` or
`fabric_arguments()` returns; what is no argument is in functions beside it. The check makes a real Trainer or Fabric of
them in its own process and compares every value. The module that runs there is text of autoplan's, with values of the
plan.
"""

from __future__ import annotations

import importlib
import runpy
from typing import Any

from autoplan.planner.export.base import Export, Target, same_or_error_each
from autoplan.planner.export.companion import (
    COMPILES_MODEL,
    check_module,
    head,
    loop_settings,
    module_text,
    optimizer_settings,
    training_not_carried,
)
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, version_line
from autoplan.planner.plan.lightning_arguments import Kind, LightningArguments, drops_fused_step, lightning_arguments
from autoplan.planner.plan.plan import Plan
from autoplan.processes import RankContext


class LightningTarget(Target):
    """A module with `make_trainer(**more)`, `prepare_module(model)` and what goes with them."""

    name = "lightning"
    kind: Kind = "trainer"
    suffix = ".py"
    is_module = True

    def render(self, plan: Plan, stem: str) -> Export:
        arguments = arguments_of(plan, self.kind)
        whole = [COMPILES_MODEL] if plan.config.compile == "model" else []
        training = training_not_carried(plan, "your LightningModule's or loop's")
        not_carried = [*arguments.not_carried, *whole, *training]
        values = settings(plan, self.kind, arguments)
        made = values["MAKES_OPTIMIZERS"]
        takes = ["model:prepare_module", "loop:loader_arguments"]
        if self.kind == "fabric":
            takes += ["fabric:make_fabric", "loop:train_step"]
        else:
            takes += ["lightning:make_trainer", "lightning:global_mean", *(["lightning:optimizers"] if made else [])]
        if plan.config.dp_shard > 1:
            takes.append("model:shard")
        text = module_text(
            values,
            takes,
            head=head(plan, _said(plan, self.kind), not_carried, start=False),
            docstring=_docstring(plan, self.kind, made=made),
            shown=("GLOBAL_BATCH", "MICRO_BATCH", "ACCUMULATION", "ITEMS", "MAX_GRAD_NORM", "SEED"),
        )
        return Export(files={f"{stem}.py": text}, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        version = installed_version("lightning")
        arguments = arguments_of(plan, self.kind)
        if version is not None:
            place = f"{__name__}:read_back_in_rank"
            same_or_error_each(expected(arguments), read_by_tool(place, (text, self.kind), tool=f"lightning {version}"))
        check_module(text, settings(plan, self.kind, arguments))
        note = "not made into a real Trainer or Fabric: install lightning to have that checked"
        return () if version is not None else (note,)


class FabricTarget(LightningTarget):
    """A module with `make_fabric(**more)`, `prepare_module(model)`, `train_step(...)` and what goes with them."""

    name = "fabric"
    kind: Kind = "fabric"


def settings(plan: Plan, kind: Kind, arguments: LightningArguments) -> dict[str, Any]:
    """The constants of the module."""
    training = plan.training
    values = loop_settings(plan, kind)
    if training is not None and values["MAKES_OPTIMIZERS"] and drops_fused_step(plan.config, training.max_grad_norm):
        own = plan.model_copy(update={"config": plan.config.model_copy(update={"optimizer_step": "own"})})
        values |= optimizer_settings(own, training, with_schedule=True)
    if kind == "trainer":  # which has an argument for it
        values["BATCH_NORM"] = "own"
    return values | {
        "ARGUMENTS": arguments.values,
        "STRATEGY": arguments.strategy,
        "STRATEGY_OPTIONS": arguments.strategy_options,
        "PLUGIN_OPTIONS": arguments.plugin_options,
    }


def arguments_of(plan: Plan, kind: Kind) -> LightningArguments:
    """The arguments of a plan's Trainer or Fabric."""
    training = plan.training
    return lightning_arguments(
        plan.config,
        device=plan.device,
        accumulation=plan.accumulation,
        max_grad_norm=None if training is None else training.max_grad_norm,
        find_unused=plan.workload.find_unused_parameters,
        kind=kind,
    )


def _said(plan: Plan, kind: Kind) -> list[str]:
    """Lines about Lightning, for the head of a file."""
    config = plan.config
    loss = (
        "training_step returns global_mean(self, total, count), of its micro-batch's summed loss and count; the "
        "Trainer's own way, a mean of the micro-batches' means, is another loss where their counts differ. At the end "
        "of an epoch the Trainer also steps on fewer micro-batches: its mean is over those"
        if kind == "trainer"
        else "train_step divides the summed loss of all micro-batches and ranks by the count of all of them"
    )
    lines = [
        version_line("lightning", installed_version("lightning")),
        *([f"Lightning starts the {config.world_size} processes itself."] if config.world_size > 1 else []),
        f"Loss: {loss}.",
    ]
    if config.dp > 1:
        order = (
            "the Trainer shuffles the samples, also those of a loader without shuffling, unless it is told "
            "use_distributed_sampler=False"
            if kind == "trainer"
            else "the samples are dealt out one by one in the loader's order, so a global batch has the same ones"
        )
        lines.append(f"Samples: over several ranks {order}; BatchNorm's micro-batches have other samples than on one.")
    if kind == "fabric" and config.precision in ("bf16", "fp16"):
        lines.append(
            f"Inputs: Fabric rounds floating-point inputs of the model to {config.precision} before its first layer, "
            "and its outputs are fp32; token numbers are not changed."
        )
    return lines


def _docstring(plan: Plan, kind: Kind, *, made: bool) -> list[str]:
    """How the module is used; no text of the plan is in it."""
    if kind == "fabric":
        return [
            "The plan for Lightning Fabric. Use:",
            "",
            "    fabric = make_fabric()",
            "    fabric.launch()",
            "    lightning.seed_everything(SEED)",
            "    inner = prepare_module(build_model())",
            "    model = fabric.setup(inner)",
            *(
                ["    optimizer, schedule = make_optimizers(inner)"]
                if made
                else ["    optimizer, schedule = ...  # your own, over inner.parameters()"]
            ),
            "    optimizer = fabric.setup_optimizers(optimizer)",
            "    loader = fabric.setup_dataloaders(DataLoader(dataset, **loader_arguments(), shuffle=True))",
            "    micro_batches = iter(loader)",
            "    for _ in range(len(loader) // ACCUMULATION):",
            "        ahead = itertools.islice(micro_batches, ACCUMULATION)",
            "        loss, norm = train_step(fabric, model, optimizer, schedule, ahead, loss_sum)",
        ]
    return [
        "The plan for Lightning's Trainer. Use:",
        "",
        "    class Module(LightningModule):",
        "        def __init__(self):",
        "            super().__init__()",
        "            self.model = prepare_module(build_model())",
        "",
        *(
            ["        def configure_model(self):", "            shard(self.model, self.device_mesh)", ""]
            if plan.config.dp_shard > 1
            else []
        ),
        "        def configure_optimizers(self):",
        "            return optimizers(self.model)"
        if made
        else '            return ...  # your own; a schedule of steps says {"interval": "step"}',
        "",
        "        def training_step(self, batch, batch_idx):",
        "            total, count = ...  # the summed loss, and how many items it is the sum of",
        "            return global_mean(self, total, count)",
        "",
        "    lightning.seed_everything(SEED)",
        "    make_trainer(max_epochs=1).fit(Module(), DataLoader(dataset, **loader_arguments(), shuffle=True))",
        "",
        "For LightningModules of the package pytorch_lightning, write that name for lightning.pytorch below.",
    ]


# The check.


def expected(arguments: LightningArguments) -> dict[str, Any]:
    """The values that are read back if a module says what the plan has; the accelerator is not among them."""
    values = {name: value for name, value in arguments.values.items() if name != "accelerator"}
    values |= {f"{arguments.strategy}.{key}": value for key, value in arguments.strategy_options.items()}
    values |= {f"MixedPrecision.{key}": value for key, value in arguments.plugin_options.items()}
    return {"precision": "16-mixed"} | values | {"strategy": arguments.strategy or "SingleDeviceStrategy"}


def read_back_in_rank(context: RankContext, text: str, kind: Kind) -> dict[str, Any]:
    """The values of a real Trainer or Fabric, in this process. Without the plan's GPUs it is made for the CPU."""
    import os

    import torch

    os.chdir(context.directory)
    path = context.directory / "exported_module.py"
    path.write_text(text, encoding="utf-8")
    given = runpy.run_path(str(path))[f"{kind}_arguments"]()
    if given["accelerator"] == "cuda" and torch.cuda.device_count() < given["devices"]:
        given["accelerator"] = "cpu"
        if given.get("precision") == "16-mixed":  # which a Trainer on the CPU takes from a plugin alone
            plugins = importlib.import_module(f"lightning.{'pytorch' if kind == 'trainer' else kind}.plugins")
            given |= {"precision": None, "plugins": [plugins.MixedPrecision("16-mixed", "cpu")]}
    if kind == "fabric":
        from lightning import Fabric

        strategy: Any = Fabric(**given).strategy
        found = {"devices": getattr(strategy, "num_processes", 1), "precision": str(strategy.precision.precision)}
        return found | _strategy_values(strategy, strategy.precision)
    from lightning.pytorch import Trainer

    trainer: Any = Trainer(**given, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    algorithm = trainer.gradient_clip_algorithm
    found = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": getattr(algorithm, "value", algorithm),
        "sync_batchnorm": trainer._accelerator_connector._layer_sync is not None,
        "devices": trainer.num_devices,
        "precision": str(trainer.precision),
    }
    return found | _strategy_values(trainer.strategy, trainer.strategy.precision_plugin)


def _strategy_values(strategy: Any, plugin: Any) -> dict[str, Any]:
    """The class of a strategy and the arguments that made it, and those of its precision plugin."""
    name = type(strategy).__name__
    options = dict(getattr(strategy, "_ddp_kwargs", {}))
    degrees = ("data_parallel_size", "tensor_parallel_size")
    options |= {degree: getattr(strategy, f"_{degree}", None) for degree in degrees}
    found = {"strategy": name} | {f"{name}.{key}": value for key, value in options.items()}
    return found | {f"MixedPrecision.{key}": getattr(plugin, key, None) for key in ("precision", "device")}

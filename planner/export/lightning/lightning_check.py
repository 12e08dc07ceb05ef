"""The check of the targets lightning and fabric: a real Trainer or Fabric is made, and says what it took.

In: the text of an exported module. Out: what the object has, by the names of its arguments. The module runs in a
process of its own; it is text of autoplan's, with values of the plan.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.lightning_arguments import PACKAGES, Call, Kind, LightningArguments, installed_version

if TYPE_CHECKING:
    from autoplan.processes import RankContext


def expected(arguments: LightningArguments) -> dict[str, Any]:
    """What `read_back` finds where a module says what the plan has; the accelerator is not among it."""
    values = {name: value for name, value in arguments.values.items() if not isinstance(value, list | Call)}
    values.pop("accelerator")
    for call in arguments.calls():
        values |= {f"{call.name}.{key}": value for key, value in call.options.items()}
    strategy = arguments.values["strategy"]
    values["strategy"] = strategy.name if isinstance(strategy, Call) else "SingleDeviceStrategy"
    return {"precision": "16-mixed"} | values


def read_back(text: str, kind: Kind) -> dict[str, Any]:
    """What a real Trainer or Fabric has after it was made with the arguments of a module, in its own process.

    Raises:
        ExportError: it refuses the arguments.
    """
    return read_by_tool(f"{__name__}:read_back_in_rank", (text, kind), tool=f"lightning {installed_version()}")


def read_back_in_rank(context: RankContext, text: str, kind: Kind) -> dict[str, Any]:
    """What a real Trainer or Fabric has, in this process. Without the plan's GPUs it is made for the CPU."""
    import os

    import torch

    os.chdir(context.directory)
    module = _module(context, text)
    given = module.trainer_arguments() if kind == "trainer" else module.fabric_arguments()
    if given["accelerator"] == "cuda" and torch.cuda.device_count() < given["devices"]:
        given["accelerator"] = "cpu"
        if given.get("precision") == "16-mixed":  # which a Trainer on the CPU takes from a plugin alone
            plugins = importlib.import_module(f"{PACKAGES[kind]}.plugins")
            given |= {"precision": None, "plugins": [plugins.MixedPrecision("16-mixed", "cpu")]}
    return _trainer_values(given) if kind == "trainer" else _fabric_values(given)


def _module(context: RankContext, text: str) -> Any:
    import importlib.util

    path = context.directory / "exported_module.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported_module", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trainer_values(given: dict[str, Any]) -> dict[str, Any]:
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


def _fabric_values(given: dict[str, Any]) -> dict[str, Any]:
    from lightning import Fabric

    strategy: Any = Fabric(**given).strategy
    found = {"devices": getattr(strategy, "num_processes", 1), "precision": str(strategy.precision.precision)}
    return found | _strategy_values(strategy, strategy.precision)


def _strategy_values(strategy: Any, plugin: Any) -> dict[str, Any]:
    """The class of a strategy and the arguments that made it, and those of its precision plugin."""
    name = type(strategy).__name__
    options = dict(getattr(strategy, "_ddp_kwargs", {}))
    degrees = ("data_parallel_size", "tensor_parallel_size")
    options |= {degree: getattr(strategy, f"_{degree}", None) for degree in degrees}
    found = {"strategy": name} | {f"{name}.{key}": value for key, value in options.items()}
    return found | {f"MixedPrecision.{key}": getattr(plugin, key, None) for key in ("precision", "device")}

"""The export targets lightning and fabric: a Python module for Lightning's Trainer, and one for Fabric.

In: a plan. Out: one file. Lightning reads no configuration file, so the arguments are what `trainer_arguments()` or
`fabric_arguments()` returns; what is no argument is in functions beside it. The check makes a real Trainer or Fabric of
them in its own process and compares every value.
"""

from __future__ import annotations

import ast
import pprint
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.apply.key_tables import pick_table
from autoplan.planner.apply.lightning_arguments import (
    Call,
    Kind,
    LightningArguments,
    drops_fused_step,
    installed_version,
    lightning_arguments,
)
from autoplan.planner.export.base import (
    CODING,
    Export,
    comment,
    loader_arguments_source,
    provenance_lines,
    same_or_error,
)
from autoplan.planner.export.lightning import lightning_source
from autoplan.planner.export.lightning.lightning_check import expected, read_back
from autoplan.planner.export.optimizer_source import last_part, optimizer_source, training_of, why_not_made
from autoplan.planner.export.pytorch.pytorch_script import read_constants
from autoplan.planner.plan import Plan


class LightningTarget:
    """A module with `make_trainer(**more)`, `prepare_module(model)` and what goes with them."""

    name = "lightning"
    kind: Kind = "trainer"
    suffix = ".py"
    runs_code = False
    is_module = True

    def render(self, plan: Plan, stem: str) -> Export:
        version = installed_version()
        table = pick_table("lightning", version)
        arguments = _arguments(plan, self.kind, version)
        not_carried = [*arguments.not_carried, *_not_carried(plan)]
        text = _module_text(plan, self.kind, arguments, not_carried, table, version)
        return Export(files={f"{stem}.py": text}, not_carried=tuple(not_carried))

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ExportError(f"the module is not Python: {error}", hint="Please report it.") from error
        constants = read_constants(tree)
        for name, wanted in settings(plan).items():
            same_or_error(name, constants.get(name), wanted)
        if installed_version() is None:
            return ("not made into a real Trainer or Fabric: install lightning to have that checked",)
        found = read_back(text, self.kind)
        for name, value in expected(_arguments(plan, self.kind, installed_version())).items():
            same_or_error(name, found.get(name), value)
        return ()


class FabricTarget(LightningTarget):
    """A module with `make_fabric(**more)`, `prepare_module(model)`, `train_step(...)` and what goes with them."""

    name = "fabric"
    kind: Kind = "fabric"


def settings(plan: Plan) -> dict[str, Any]:
    """The constants at the top of the module, by name."""
    training = training_of(plan)
    return {
        "GLOBAL_BATCH": plan.workload.global_batch,
        "MICRO_BATCH": plan.config.micro_batch,
        "ACCUMULATION": plan.accumulation,
        "ITEMS": plan.config.micro_batch * (plan.workload.sequence_length or 1),
        "MAX_GRAD_NORM": None if training is None else training.max_grad_norm,
        "SEED": 0 if training is None else training.seed,
    }


def _arguments(plan: Plan, kind: Kind, version: str | None) -> LightningArguments:
    training = training_of(plan)
    return lightning_arguments(
        plan.config,
        device=plan.device,
        accumulation=plan.accumulation,
        max_grad_norm=None if training is None else training.max_grad_norm,
        kind=kind,
        version=version,
    )


def _not_carried(plan: Plan) -> list[str]:
    """What neither an argument nor the module's functions do."""
    training = training_of(plan)
    found = []
    if plan.config.compile == "model":
        found.append("compile=model covers the model here, and not its loss, which the measured run compiled with it")
    if training is None:
        found.append(
            "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does "
            "not know: they are your LightningModule's or loop's own. Search again to have them in the plan"
        )
        return found
    reason = why_not_made(training)
    if reason is not None:
        found.append(f"the optimizer {last_part(training.optimizer)} and its schedule, because {reason}: make your own")
    if training.dropout:
        found.append("the random numbers of dropout: the rates are the model's, the masks are drawn anew")
    return found


def _module_text(
    plan: Plan,
    kind: Kind,
    arguments: LightningArguments,
    not_carried: list[str],
    table: dict[str, Any],
    version: str | None,
) -> str:
    training = training_of(plan)
    made = training is not None and why_not_made(training) is None
    calls = [f"from {call.module} import {call.name}" for call in arguments.calls()]
    sections = [
        _head(plan, kind, not_carried, table, version),
        _docstring(plan, kind, made=made),
        "\n".join(lightning_source.imports(plan, kind, calls, optimizers=made)),
        "\n".join(f"{name} = {value!r}{_REMARKS.get(name, '')}" for name, value in settings(plan).items()),
    ]
    functions = [
        _arguments_source(arguments, kind),
        loader_arguments_source(plan),
        lightning_source.preparation(plan, kind),
    ]
    if made:
        functions.append(_optimizer_section(plan, kind))
    functions.append(lightning_source.trainer_parts(plan) if kind == "trainer" else lightning_source.fabric_parts(plan))
    return "\n\n".join(sections[:1]) + "\n" + "\n\n".join(sections[1:]) + "\n\n\n" + "\n\n\n".join(functions) + "\n"


_REMARKS = {
    "ITEMS": "  # of a micro-batch without padding; it keeps the loss at the scale of a mean",
    "MAX_GRAD_NORM": "  # of the whole gradient; None: no clipping",
    "SEED": "  # lightning.seed_everything(SEED) before the model is built",
}


def _head(plan: Plan, kind: Kind, not_carried: list[str], table: dict[str, Any], version: str | None) -> str:
    config = plan.config
    known = f", read back by {table['verified']}" if table["verified"] else ""
    here = f"; {version} is installed here" if version not in (None, table["verified"]) else ""
    loss = (
        "training_step returns global_mean(self, total, count), of its micro-batch's summed loss and count; the "
        "Trainer's own way, a mean of the micro-batches' means, is another loss where their counts differ. At the end "
        "of an epoch the Trainer also steps on fewer micro-batches: its mean is over those"
        if kind == "trainer"
        else "train_step divides the summed loss of all micro-batches and ranks by the count of all of them"
    )
    lines = [
        *provenance_lines(plan),
        f"Written for lightning {table['written_for']}{known}{here}.",
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}."
        + (f" Lightning starts the {config.world_size} processes itself." if config.world_size > 1 else ""),
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
    lines += [f"NOT CARRIED: {text}." for text in not_carried]
    return "\n".join([CODING, comment(lines)])


def _docstring(plan: Plan, kind: Kind, *, made: bool) -> str:
    """How the module is used; no text of the plan is in it."""
    if kind == "fabric":
        lines = [
            '"""The plan for Lightning Fabric. Use:',
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
            '"""',
        ]
        return "\n".join(lines)
    lines = [
        '"""The plan for Lightning\'s Trainer. Use:',
        "",
        "    class Module(LightningModule):",
        "        def __init__(self):",
        "            super().__init__()",
        "            self.model = prepare_module(build_model())",
        "",
        *(_CONFIGURE_MODEL if plan.config.dp_shard > 1 else []),
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
        '"""',
    ]
    return "\n".join(lines)


_CONFIGURE_MODEL = ["        def configure_model(self):", "            shard(self.model, self.device_mesh)", ""]


def _arguments_source(arguments: LightningArguments, kind: Kind) -> str:
    """The function that returns the keyword arguments."""
    lines = [f"        {name!r}: {_value_source(value)}," for name, value in arguments.values.items()]
    if kind == "trainer":
        lines.append("        'callbacks': [PlanCallback()],")
    what = "Trainer" if kind == "trainer" else "Fabric"
    return "\n".join(
        [
            f"def {kind}_arguments():",
            f'    """Keyword arguments of {what}(...)."""',
            "    return {",
            *lines,
            "    }",
        ]
    )


def _value_source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value_source, value))}]"
    return value.source() if isinstance(value, Call) else pprint.pformat(value)


def _optimizer_section(plan: Plan, kind: Kind) -> str:
    from autoplan.planner.export.source_text import take

    training = training_of(plan)
    assert training is not None
    if drops_fused_step(plan.config, training.max_grad_norm):
        plan = plan.model_copy(update={"config": plan.config.model_copy(update={"optimizer_step": "own"})})
    source = "\n".join(optimizer_source(plan, training, with_schedule=True, clean_names=True))
    sections = [take("analysis/structure.py", "clean_name"), source]
    if kind == "trainer":
        sections.append(_OPTIMIZERS)
    return "\n\n\n".join(sections)


_OPTIMIZERS = '''def optimizers(model):
    """What configure_optimizers() returns: the schedule moves with each optimizer step, and not with each epoch."""
    optimizer, schedule = make_optimizers(model)
    if schedule is None:
        return optimizer
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}'''

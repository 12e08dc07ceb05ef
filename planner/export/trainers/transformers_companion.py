"""The companion module of the export targets transformers and trl: what is no training argument.

In: a plan and the name of the file of arguments. Out: a module with `load_arguments()` and `prepare_model(model)`, and
comments with the plan's origin and measurement.
"""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.companion import head, loop_settings, module_text
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import compiles_in_place

TRAINERS = {"transformers": "Trainer", "trl": "SFTTrainer"}


def settings(plan: Plan, tool: str, arguments_file: str, optimizers: dict[str, Any]) -> dict[str, Any]:
    """The constants of the module: what an argument says is at the plain run's value.

    Args:
        plan: The plan.
        tool: transformers or trl.
        arguments_file: Name of the file of arguments, in the same folder.
        optimizers: The constants of `make_optimizers(model)`; empty where the arguments say it all.
    """
    config = plan.config
    in_place = config.compile == "block" or compiles_in_place(config, plan.device)
    values = loop_settings(plan, tool, CONFIG_FILE=arguments_file, CHECKPOINTING="none", MAKES_OPTIMIZERS=False)
    values |= {"COMPILE": config.compile if in_place else "off", "BLOCKS": config.compile == "block"}
    values["OWN_CHECKPOINTING"] = plan.training is not None and plan.training.own_checkpointing
    return values | optimizers


def companion(plan: Plan, values: dict[str, Any], not_carried: list[str], said: list[str]) -> str:
    """The source of the module.

    Args:
        plan: The plan.
        values: Its constants.
        not_carried: Sentences on what the export cannot express.
        said: What the head says of the version and of the loss, in sentences.
    """
    made = values["MAKES_OPTIMIZERS"]
    use = ", optimizers=make_optimizers(model)" if made else ""
    trainer = TRAINERS[values["TOOL"]]
    return module_text(
        values,
        ["transformers:load_arguments", "transformers:prepare_model", *(["loop:make_optimizers"] if made else [])],
        head=head(plan, said, not_carried),
        docstring=[
            "The settings of the plan that are no training arguments. Use:",
            "",
            f"{trainer}(model=prepare_model(model), args=load_arguments(){use}, ...)",
        ],
        shown=(),
    )


def version_line(version: str, verified: str | None) -> str:
    """What the head says of the version of transformers that its key table is for, and was verified on."""
    return f"Written for transformers {version}" + (f", verified on {verified}." if verified else ", not verified.")


LOSS_LINE = (
    "Loss: the Trainer divides the summed loss by the items of the whole global batch, as the plan does, for models "
    "that take num_items_in_batch (the causal language models do). For other models it takes the mean of the "
    "micro-batches' means, which is another loss if their counts differ: then pass compute_loss_func."
)

"""The Python modules of the exports for other trainers: what their own files and arguments cannot say.

In: a plan, the constants of the kit, and what of the kit a target takes. Out: source, and the check of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export.base import CODING, comment, provenance_lines, same_or_error
from autoplan.planner.export.bundle import Bundle
from autoplan.planner.export.plan_settings import constant_lines, plan_settings
from autoplan.planner.export.training import (
    optimizer_settings,
    training_lines,
    training_not_carried,
    training_of,
    why_not_made,
)
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import LEFT_BY_TOOLS, not_carried

SHOWN = ("GLOBAL_BATCH", "MICRO_BATCH", "ACCUMULATION", "RANKS", "MAX_GRAD_NORM", "SEED")
"""Constants that each module for a loop has: for its user, too."""


def loop_settings(plan: Plan, tool: str, **changes: Any) -> dict[str, Any]:
    """The constants of a module for a loop of one's own.

    Args:
        plan: The plan.
        tool: The tool that wraps model and optimizer.
        **changes: Of the plan's constants, where the tool does it by itself.
    """
    config, training = plan.config, training_of(plan)
    fsdp = config.dp_shard > 1
    values = plan_settings(plan) | {
        "TOOL": tool,
        "FSDP": fsdp,
        "BLOCKS": config.checkpointing != "none" or config.compile == "block" or fsdp,
        "SYNCS_LAST": config.dp > 1 and config.gradient_sync == "last",
        # Sentences of not_carried say that the tool leaves these as they are.
        "KERNELS": "own",
        "FP8": "off",
    }
    if training is not None:
        values |= {"MAX_GRAD_NORM": training.max_grad_norm, "SEED": training.seed}
        if why_not_made(training) is None:
            values |= optimizer_settings(plan, training, with_schedule=True)
    return values | changes


def loop_not_carried(plan: Plan, tool: str, names: Iterable[str] = LEFT_BY_TOOLS) -> list[str]:
    """Sentences on the parts of plan and workload that a module for one's own loop does not say.

    Args:
        plan: The plan.
        tool: Whose loop it is.
        names: The knobs that the tool does not have.
    """
    whole = [COMPILES_MODEL] if plan.config.compile == "model" else []
    return not_carried(plan.config, tool, names) + whole + training_not_carried(plan, "your loop's")


COMPILES_MODEL = "compile=model covers the model here, and not its loss, which the measured run compiled with it"


def head(plan: Plan, said: Sequence[str], not_carried: Sequence[str], *, start: bool = True) -> str:
    """The comment at the top of a file.

    Args:
        plan: The plan.
        said: What the target says besides, in sentences.
        not_carried: What is not carried.
        start: Say how many processes the user starts.
    """
    config = plan.config
    batch = (
        f"Global batch: {config.micro_batch} x {plan.accumulation} accumulation"
        + (f" x {config.dp} ranks" if config.dp > 1 else "")
        + f" = {plan.workload.global_batch}."
        + (f" Start {config.world_size} process(es)." if start else "")
    )
    missing = (f"NOT CARRIED: {text}." for text in not_carried)
    return comment([*provenance_lines(plan), *training_lines(plan), batch, *said, *missing])


def module_text(
    values: dict[str, Any], takes: Sequence[str], *, head: str, docstring: Sequence[str], shown: Sequence[str] = SHOWN
) -> str:
    """A whole module.

    Args:
        values: The constants of the kit.
        takes: What it takes of the kit, as `module:name`.
        head: The comment at its top.
        docstring: Lines that say how it is used; no text of the plan is in them.
        shown: Constants that it has whether its code asks them or not.
    """
    bundle = Bundle(values, *takes)
    constants = {name: value for name, value in values.items() if name in bundle.asked or name in shown}
    top = [CODING, head, '"""' + "\n".join(docstring) + '\n"""', "", "from __future__ import annotations", ""]
    parts = ["\n".join(top) + "\n" + "\n\n".join(bundle.imports()), constant_lines(constants), bundle.source()]
    return "\n\n\n".join(part for part in parts if part) + "\n"


def check_module(text: str, values: dict[str, Any]) -> None:
    """Checks that a module is Python and has the plan's constants.

    Raises:
        ExportError: it is not, or has not.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ExportError(
            f"the module is not Python: {error}", hint="Nothing was written. Please report it."
        ) from error
    for name, value in read_constants(tree).items():
        if name in values:
            same_or_error(name, value, values[name])


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """The constants of a module whose values are literals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found

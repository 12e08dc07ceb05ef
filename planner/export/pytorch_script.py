"""Export to a plain PyTorch script that needs no autoplan: the model, the techniques, the step, a loop.

The loss, the batches and the kernels are taken from autoplan's own sources (source_text.py), so the script runs the
code that was measured; only the wiring is written here, and a test holds its losses equal to plan.prepare()'s.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.export import pytorch_parts as parts
from autoplan.planner.export.base import Export, comment, provenance_lines, same_or_error
from autoplan.planner.export.outline import read_outline, stack_source
from autoplan.planner.plan import Plan


class PytorchTarget:
    """A runnable script; its settings stand at its top as constants."""

    name = "pytorch"
    suffix = ".py"

    def render(self, plan: Plan, stem: str) -> Export:
        _refuse_what_cannot_be_carried(plan)
        config = plan.config
        outline = read_outline(plan.workload)
        by_name = config.checkpointing != "none" or config.compile == "block"
        if by_name and not outline.stacks:
            raise ExportError(
                f"{plan.workload.name} has no repeated blocks, which {plan.config.describe()} needs",
                hint="The workload's files are no longer those that the plan was made from: search again.",
            )
        function = plan.workload.kind == "function"
        sections = [
            _head(plan, stem) + "\n\n" + parts.imports(plan, outline.task),
            _settings(plan, outline.stacks if by_name else []),
            parts.user_file(plan) if function else parts.language_model(plan, outline.task),
            parts.techniques(plan),
            parts.step(plan),
            parts.main(plan),
        ]
        return Export(files={f"{stem}.py": "\n\n\n".join(section.strip("\n") for section in sections) + "\n"})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ExportError(f"the script is not Python: {error}", hint="Please report it.") from error
        constants = read_constants(tree)
        for name, wanted in settings(plan).items():
            same_or_error(name, constants.get(name), wanted)
        imported = {name for node in ast.walk(tree) for name in _imports(node)}
        if "autoplan" in imported:
            raise ExportError("the script imports autoplan, which it must not need", hint="Please report it.")
        return ()


def _refuse_what_cannot_be_carried(plan: Plan) -> None:
    config = plan.config
    if config.world_size > 1:
        raise ExportError(
            f"the plan is for {config.world_size} ranks; the script is for one",
            hint="Use plan.prepare() in a script under torchrun, which applies every degree.",
        )
    if plan.workload.kind == "object":
        raise ExportError(
            f"{plan.workload.name} was made of Python objects, of which there is no source to write down",
            hint="Use plan.prepare(model, optimizer, loss) where the objects are, or export to json or yaml.",
        )


def settings(plan: Plan) -> dict[str, Any]:
    """The constants at the script's top; the check reads them back."""
    config, spec = plan.config, plan.workload
    options = _options(plan)
    said: dict[str, Any] = {
        "DEVICE": plan.device,
        "GLOBAL_BATCH": spec.global_batch,
        "MICRO_BATCH": config.micro_batch,
        "ACCUMULATION": plan.accumulation,
    }
    if spec.sequence_length is not None:
        said["SEQUENCE_LENGTH"] = spec.sequence_length
    if spec.kind == "folder":
        said["MODEL_FOLDER"] = spec.reference
    if spec.kind == "function":
        file, _, function = spec.reference.rpartition(":")
        said |= {"USER_FILE": file, "USER_FUNCTION": function, "USER_OPTIONS": _given_to_function(plan)}
    else:
        said |= {
            "LEARNING_RATE": options["learning_rate"],
            "WEIGHT_DECAY": options["weight_decay"],
            "MAX_GRAD_NORM": options["max_grad_norm"],
            "SEED": options["seed"],
        }
    said |= parts.knob_settings(config)
    return said


def _options(plan: Plan) -> dict[str, Any]:
    from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS

    return DEFAULT_OPTIONS | plan.workload.options


def _given_to_function(plan: Plan) -> dict[str, Any]:
    spec = plan.workload
    given = {key: value for key, value in spec.options.items() if key != "fixed_micro_batch"}
    given["global_batch"] = spec.global_batch
    if spec.sequence_length is not None:
        given["sequence_length"] = spec.sequence_length
    return given


def _head(plan: Plan, stem: str) -> str:
    changed = " Numerics: changed, within the tolerance of the parity check." if plan.parity.changes_numerics else ""
    lines = [
        *provenance_lines(plan),
        f"Loss: summed over every micro-batch and divided by the count of the whole global batch.{changed}",
    ]
    return (
        comment(lines)
        + f'\n"""{plan.workload.name} as the plan runs it, in plain PyTorch: python {stem}.py --steps 10"""\n\n'
        + "from __future__ import annotations"
    )


def _settings(plan: Plan, stacks: list[list[str]]) -> str:
    lines = [f"{name} = {value!r}" for name, value in settings(plan).items()]
    if stacks:
        lines.append("# The repeated blocks of the model, by name, one list for each run of them.")
        lines.append("STACKS = [" + ", ".join(stack_source(stack) for stack in stacks) + "]")
    if plan.workload.kind != "function":
        fields = json.dumps(model_fields(plan), indent=4)
        lines.append(f"MODEL_FIELDS = json.loads('''{fields}''')")
    return "\n".join(lines)


def model_fields(plan: Plan) -> dict[str, Any]:
    """The fields of the model's configuration, as transformers' config.json has them."""
    from autoplan.strategies.workloads import registry
    from autoplan.strategies.workloads.sources import read_config_file

    spec = plan.workload
    if spec.kind == "model":
        return registry.read_config(spec.reference)
    path = Path(spec.reference)
    return read_config_file(path / "config.json" if spec.kind == "folder" else path)


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """The literal constants at a script's top."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.split(".")[0]]
    return []

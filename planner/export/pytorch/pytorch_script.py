"""The export target pytorch: a script in plain PyTorch that does not need autoplan.

In: a plan. Out: one file with the settings, the model, the techniques, the step and a loop. The loss, the batches and
the kernels are copied from autoplan's own source files (source_text.py), so the script runs the code that was measured.
A test compares its losses with those of plan.prepare().
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.apply.loader import setting_of
from autoplan.planner.export.base import CODING, Export, comment, provenance_lines, same_or_error
from autoplan.planner.export.model_summary import ModelSummary, stack_source, summarize_model
from autoplan.planner.export.pytorch import pytorch_ranks, pytorch_step, pytorch_training, pytorch_workload
from autoplan.planner.export.source_text import defined_names
from autoplan.planner.export.variables import rank_variables
from autoplan.planner.plan import Plan
from autoplan.strategies.rounding_knobs import rounds_steps


class PytorchTarget:
    """A runnable script; its settings are constants at its top."""

    name = "pytorch"
    suffix = ".py"
    runs_code = True

    def render(self, plan: Plan, stem: str) -> Export:
        _refuse_what_cannot_be_carried(plan)
        config = plan.config
        model = summarize_model(plan.workload)
        needs_blocks = config.checkpointing != "none" or config.compile == "block" or config.fp8 != "off"
        names_blocks = needs_blocks or config.tp > 1 or pytorch_ranks.uses_fsdp(config)
        if needs_blocks and not model.stacks:
            raise ExportError(
                f"{plan.workload.name} has no repeated blocks, which {plan.config.describe()} needs",
                hint="The workload's files are no longer those that the plan was made from: search again.",
            )
        function = plan.workload.kind == "function"
        fields = pytorch_step.run_fields(plan)
        sections = [
            _head(plan, stem) + "\n\n" + pytorch_workload.imports(plan, model.task, model.head),
            _settings_section(plan, model, names_blocks=names_blocks),
            pytorch_workload.user_file(plan, model.head)
            if function
            else pytorch_workload.language_model(plan, model.task, model.head, _padding(plan)),
            pytorch_training.techniques(plan),
            pytorch_step.run_class(plan),
            pytorch_training.prepare(plan, model.head, fields),
            pytorch_step.step(plan),
            *pytorch_step.loader(plan),
            pytorch_step.main(plan),
        ]
        return Export(files={f"{stem}.py": "\n\n\n".join(section.strip("\n") for section in sections) + "\n"})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ExportError(f"the script is not Python: {error}", hint="Please report it.") from error
        _refuse_names_defined_twice(tree)
        constants = read_constants(tree)
        for name, wanted in settings(plan).items():
            same_or_error(name, constants.get(name), wanted)
        if plan.workload.kind != "function":
            same_or_error("MODEL_FIELDS", _read_fields(tree), json.dumps(model_fields(plan), indent=4))
        imported = {name for node in ast.walk(tree) for name in _imports(node)}
        if "autoplan" in imported:
            raise ExportError("the script imports autoplan, but it must run without it", hint="Please report it.")
        return ()


def _refuse_names_defined_twice(tree: ast.Module) -> None:
    """The script takes code of many files, and the later of two definitions would be used by both.

    Raises:
        ExportError: a name is defined twice.
    """
    seen: set[str] = set()
    for node in tree.body:
        for name in defined_names(node):
            if name in seen:
                raise ExportError(f"the script defines {name} twice", hint="Please report it.")
            seen.add(name)


def _refuse_what_cannot_be_carried(plan: Plan) -> None:
    pytorch_ranks.refuse_pipelines(plan)
    if plan.config.dp_shard > 1 and rounds_steps(plan.config):
        raise ExportError(
            f"the script does not carry parameters={plan.config.parameters} "
            f"optimizer_state={plan.config.optimizer_state} on shards: what FSDP2 holds is rounded by autoplan alone",
            hint="Use plan.prepare() or autoplan run, or the targets torchrun and slurm, which run it.",
        )
    if plan.workload.taken_from:
        raise ExportError(
            f"{plan.workload.name} was read from a {plan.workload.taken_from}, whose loop the script would not have",
            hint="Use plan.apply_to(trainer), or export to transformers, json or yaml.",
        )
    if plan.workload.kind == "object":
        raise ExportError(
            f"{plan.workload.name} was made of Python objects; the script needs their source text",
            hint="Use plan.prepare(model, optimizer, loss) where the objects are, or export to json or yaml.",
        )


def settings(plan: Plan) -> dict[str, Any]:
    """The constants at the top of the script, by name; the check reads them back."""
    config, spec = plan.config, plan.workload
    options = _options(plan)
    constants: dict[str, Any] = {
        "DEVICE": plan.device,
        "GLOBAL_BATCH": spec.global_batch,
        "MICRO_BATCH": config.micro_batch,
        "ACCUMULATION": plan.accumulation,
    }
    if spec.sequence_length is not None:
        constants["SEQUENCE_LENGTH"] = spec.sequence_length
    if spec.kind == "folder":
        constants["MODEL_FOLDER"] = spec.reference
    if spec.kind == "function":
        file, _, function = spec.reference.rpartition(":")
        constants |= {"USER_FILE": file, "USER_FUNCTION": function, "USER_OPTIONS": _function_options(plan)}
        constants["USER_ARGUMENTS"] = list(spec.arguments)
    else:
        constants |= {
            "LEARNING_RATE": options["learning_rate"],
            "WEIGHT_DECAY": options["weight_decay"],
            "MAX_GRAD_NORM": options["max_grad_norm"],
            "SEED": options["seed"],
        }
    constants |= pytorch_training.knob_settings(config) | pytorch_ranks.rank_settings(plan)
    setting = setting_of(plan)
    constants |= {} if setting is None else {"LOADER_ARGUMENTS": setting.arguments}
    return constants


def _options(plan: Plan) -> dict[str, Any]:
    from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS

    return DEFAULT_OPTIONS | plan.workload.options


def _function_options(plan: Plan) -> dict[str, Any]:
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
        "Written for torch 2.11 and later; the code of the techniques is that of this version of autoplan.",
    ]
    start = f"python {stem}.py --steps 10"
    if pytorch_ranks.has_ranks(plan.config):
        variables = "".join(f"{name}={value} " for name, value in rank_variables(plan).items())
        start = f"{variables}torchrun --nproc-per-node {plan.config.world_size} {stem}.py --steps 10"
    lines.append(f"Start it: {start}")
    return "\n".join(
        [
            CODING,
            comment(lines),
            '"""The workload as the plan runs it, in plain PyTorch. Run it with --steps 10."""',
            "",
            "from __future__ import annotations",
        ]
    )


def _settings_section(plan: Plan, model: ModelSummary, *, names_blocks: bool) -> str:
    lines = [f"{name} = {value!r}" for name, value in settings(plan).items()]
    if plan.config.loss == "fused" and model.head:
        lines.append(f"HEAD = {model.head!r}  # the output head, whose logits are not computed all at once")
    if names_blocks:
        stacks = model.stacks
        lines.append("# The repeated blocks of the model, by name, one list for each run of them.")
        lines.append("STACKS = [" + ", ".join(stack_source(stack) for stack in stacks) + "]")
        frozen = ", ".join(stack_source(stack) for stack in model.frozen_stacks)
        lines.append(f"FROZEN_STACKS = [{frozen}]  # those of parts that do not train")
    if plan.config.tp > 1:
        lines += pytorch_ranks.tensor_plan_lines(model.tensor_plan, plan)
    if plan.workload.kind != "function":
        lines += ["MODEL_FIELDS = json.loads(", *_text_lines(json.dumps(model_fields(plan), indent=4)), ")"]
    return "\n".join(lines)


def _text_lines(text: str) -> list[str]:
    """A text as Python source, one string for each of its lines: whatever it says, it stays a text."""
    return [f"    {line!r}" for line in text.splitlines(keepends=True)]


def _padding(plan: Plan) -> int | None:
    from autoplan.strategies.workloads.language_model import make_config, padding_token

    return padding_token(make_config(model_fields(plan)))


def model_fields(plan: Plan) -> dict[str, Any]:
    """The fields of the model's configuration, as transformers' config.json has them."""
    from autoplan.strategies.workloads import registry
    from autoplan.strategies.workloads.model_folders import read_config_file

    spec = plan.workload
    if spec.kind == "model":
        return registry.read_config(spec.reference)
    path = Path(spec.reference)
    return read_config_file(path / "config.json" if spec.kind == "folder" else path)


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """The constants at the top of a script whose values are literals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _read_fields(tree: ast.Module) -> str | None:
    """The text that MODEL_FIELDS is read from, if that is all that its line does."""
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="MODEL_FIELDS")],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="json"), attr="loads"),
                    args=[ast.Constant(value=str() as text)],
                    keywords=[],
                ),
            ):
                return text
    return None


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.split(".")[0]]
    return []

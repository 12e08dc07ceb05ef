"""The export target pytorch: a script in plain PyTorch that does not need autoplan.

In: a plan. Out: one file with the settings and the code that trains by them: planner/export/kit/script.py, with all
that it uses of autoplan's own source (bundle.py). So the script runs the code that was measured. Its tests compare
its steps with a plain loop and with plan.prepare().
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from autoplan.errors import ConfigError, ExportError
from autoplan.planner.export.base import Export, Target, comment, provenance_lines
from autoplan.planner.export.bundle import defined_names
from autoplan.planner.export.companion import check_module, module_text, parse_export, plan_settings
from autoplan.planner.export.launch import rank_variables, torchrun_options
from autoplan.planner.export.user_code import run_user_code
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import refusal
from autoplan.processes import RankContext
from autoplan.strategies.workloads.function_file import check_function
from autoplan.strategies.workloads.spec import WorkloadSpec


class PytorchTarget(Target):
    """A runnable script; its settings are constants at its top."""

    name = "pytorch"
    suffix = ".py"
    runs_code = True

    def render(self, plan: Plan, stem: str) -> Export:
        _refuse_what_cannot_be_carried(plan)
        _refuse_other_names(plan)
        model = summarize_model(plan.workload)
        values = settings(plan, model)
        config = plan.config
        by_block = config.checkpointing != "none" or config.compile == "block" or config.fp8 != "off"
        if by_block and not model.has_blocks:
            raise ExportError(
                f"{plan.workload.name} has no repeated blocks, which {config.describe()} needs",
                hint="The workload's files are no longer those that the plan was made from: search again.",
            )
        loader = ["script:make_loader"] if values["LOADER_ARGUMENTS"] else []
        text = module_text(values, ["script:main", *loader], head=_head(plan, stem), docstring=[DOCSTRING], shown=())
        return Export(files={f"{stem}.py": text + '\n\nif __name__ == "__main__":\n    main()\n'})

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        (text,) = export.files.values()
        check_module(text, settings(plan, summarize_model(plan.workload)))
        tree = parse_export(text)
        names = [name for node in tree.body for name in defined_names(node)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ExportError(f"the script defines {twice[0]} twice", hint="Please report it.")
        imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if any(name.partition(".")[0] == "autoplan" for name in imported):
            raise ExportError("the script imports autoplan, but it must run without it", hint="Please report it.")
        return ()


DOCSTRING = "The workload as the plan runs it, in plain PyTorch. Run it with --steps 10."


def _refuse_what_cannot_be_carried(plan: Plan) -> None:
    if plan.config.pp > 1:  # the model is cut by what one forward of it shows, when the run is built
        raise refusal("a script of autoplan's own code", "pipeline parallelism", f"pp={plan.config.pp}")
    if plan.config.dp_shard > 1 and plan.config.rounds_steps:
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


GIVEN_NAMES = ("IGNORE_INDEX", "LossSum", "OutputHead", "SampleBatch", "Workload", "batches_from_dataset")
"""Names that a user's file can import from autoplan in the script: those of load_user_file() in the kit."""

GIVEN_MODULES = ("autoplan", "autoplan.strategies.workloads.workload", "autoplan.strategies.workloads.samples")
"""Where it can import them from."""


def _refuse_other_names(plan: Plan) -> None:
    """Refuses a user's file that needs more of autoplan, as it is imported, than the script has.

    Raises:
        ExportError: such a file.
    """
    if plan.workload.kind != "function":
        return
    path, _ = check_function(plan.workload.reference)
    found = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_not_given(alias.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = str(node.module)
            names = (alias.name for alias in node.names)
            found += [f"{module}.{name}" for name in names if _is_not_given(module, name)]
    if found:
        raise ExportError(
            f"{path} imports {', '.join(found)}, and the script, which runs without autoplan, has of it "
            f"{', '.join(GIVEN_NAMES)}",
            hint="Import it where the workload does not need it: under if __name__ == '__main__', or in another "
            "function. Or use the targets torchrun and slurm, which run autoplan.",
        )


def _is_not_given(module: str, name: str = "*") -> bool:
    """Whether an import would fail where the script stands for autoplan."""
    return module.partition(".")[0] == "autoplan" and (module not in GIVEN_MODULES or name not in (*GIVEN_NAMES, "*"))


def settings(plan: Plan, model: ModelSummary) -> dict[str, Any]:
    """The constants of the script; those that it asks are at its top, and the check reads them back."""
    config, spec = plan.config, plan.workload
    # tokens, or samples, of a step: as many as the search counted
    counted = plan.measurement.tokens_per_s.median * plan.measurement.step_time_s.median
    values = plan_settings(plan) | {"COUNTED_ITEMS": round(counted)}
    if spec.kind == "function":
        file, _, function = spec.reference.rpartition(":")
        given = {key: value for key, value in spec.options.items() if key != "fixed_micro_batch"}
        given["global_batch"] = spec.global_batch
        given |= {} if spec.sequence_length is None else {"sequence_length": spec.sequence_length}
        values |= {"USER_FILE": file, "USER_FUNCTION": function, "USER_OPTIONS": given}
        values["USER_ARGUMENTS"] = list(spec.arguments)
    else:
        from autoplan.strategies.workloads.registry import DEFAULT_OPTIONS, weight_files

        options = DEFAULT_OPTIONS | spec.options
        values |= {name.upper(): options[name] for name in ("learning_rate", "weight_decay", "max_grad_norm", "seed")}
        weights = spec.kind == "folder" and weight_files(Path(spec.reference))
        values["MODEL_FOLDER"] = spec.reference if weights else ""
        values["MODEL_JSON"] = json.dumps(model_fields(plan), indent=4)
    if config.loss == "fused":
        values["HEAD"] = model.head
    if config.tp > 1:
        values["TENSOR_PLAN"] = _tensor_plan(model.tensor_plan, plan)
    return values


def _tensor_plan(tensor_plan: dict[str, Any] | str, plan: Plan) -> dict[str, Any]:
    """How the model is split over tp.

    Raises:
        ExportError: the model cannot be split, or not so many times.
    """
    degree = plan.config.tp
    if isinstance(tensor_plan, str) or tensor_plan["unit"] % degree:
        why = tensor_plan if isinstance(tensor_plan, str) else f"it has {tensor_plan['unit_of']}"
        raise ExportError(
            f"{plan.workload.name} cannot be split over tp={degree} ranks: {why}",
            hint="The workload's files are no longer those that the plan was made from: search again.",
        )
    return tensor_plan


def _head(plan: Plan, stem: str) -> str:
    changed = " Numerics: changed, within the tolerance of the parity check." if plan.parity.changes_numerics else ""
    lines = [
        *provenance_lines(plan),
        f"Loss: summed over every micro-batch and divided by the count of the whole global batch.{changed}",
        "Written for torch 2.11 and later; the code is that of this version of autoplan, as far as the plan uses it.",
    ]
    start = f"python {stem}.py --steps 10"
    if plan.config.world_size > 1:
        variables = "".join(f"{name}={value} " for name, value in rank_variables(plan).items())
        ranks = f"--nproc-per-node {plan.config.world_size}"
        options = ranks if plan.nodes is None else torchrun_options(plan, "FIRST")
        start = f"{variables}torchrun {options} {stem}.py --steps 10"
    lines.append(f"Start it: {start}")
    return comment(lines)


def model_fields(plan: Plan) -> dict[str, Any]:
    """The fields of the model's configuration, as transformers' config.json has them."""
    from autoplan.strategies.workloads.registry import read_config, read_config_file

    spec = plan.workload
    if spec.kind == "model":
        return read_config(spec.reference)
    path = Path(spec.reference)
    return read_config_file(path / "config.json" if spec.kind == "folder" else path)


# What the script must know of the model itself: it is built on the meta device in a process of its own, because that
# loads torch and perhaps the user's code.


class ModelSummary(NamedTuple):
    """The facts that an export needs to know of a model.

    Attributes:
        has_blocks: Whether the model repeats blocks.
        head: The name of the output head whose logits loss=fused defers; "" where the workload's own head splits off.
        tensor_plan: The fields of a TensorPlan, or why the model has none.
    """

    has_blocks: bool
    head: str = ""
    tensor_plan: dict[str, Any] | str = ""


def summarize_model(spec: WorkloadSpec) -> ModelSummary:
    """Builds the model of a workload on the meta device and returns its summary.

    Raises:
        ExportError: the workload cannot be built, or not within the limits of the export.
    """
    return _summarize_model(spec.model_dump_json(), spec.name)


@functools.lru_cache(maxsize=16)
def _summarize_model(spec: str, name: str) -> ModelSummary:
    document = run_user_code(
        f"{__name__}:summarize_in_rank",
        (spec,),
        doing=f"building the model of {name} for the export",
        functions={"load": "the workload's own function or file", "build_model": "build_model()"},  # by phase
        refused=f"the model of {name} could not be built for the export",
        hint="The workload's files must be where they were when the plan was made.",
    )
    return ModelSummary(**document)


def summarize_in_rank(context: RankContext, spec: str) -> dict[str, Any]:
    """Builds the model on the meta device, in this process."""
    context.phase("load")
    import torch

    from autoplan.strategies.analysis.structure import find_structure
    from autoplan.strategies.techniques.loss import output_linear, splits_by_head
    from autoplan.strategies.techniques.tensor_parallel import make_tensor_plan
    from autoplan.strategies.workloads.sources import load_workload

    workload = load_workload(WorkloadSpec.model_validate_json(spec))
    context.phase("build_model")
    with torch.device("meta"):
        model = workload.build_model()
    structure = find_structure(model)
    linear = None if splits_by_head(workload, model) else output_linear(structure)
    try:
        tensor_plan: dict[str, Any] | str = dataclasses.asdict(make_tensor_plan(model, structure, workload, 1))
    except ConfigError as error:
        tensor_plan = error.message
    return {
        "has_blocks": bool(structure.stacks),
        "head": next((name for name, module in model.named_modules() if module is linear), ""),
        "tensor_plan": tensor_plan,
    }

"""The export targets transformers and trl: TrainingArguments or SFTConfig as JSON, and a companion module.

In: a plan. Out: two files. What a configuration is in arguments is said by planner/plan/trainer_arguments.py, which
`plan.apply_to(trainer)` uses too; here it becomes files, with what the workload trains with. What no argument says is
in the companion: `load_arguments()`, `prepare_model(model)`, and `make_optimizers(model)` where the Trainer's own
optimizer and schedule will not do. SFTConfig is TrainingArguments with more fields and other defaults, so trl has the
keys of keys/trl.json besides. The check loads the file with the real class in its own process (the class sets
environment variables) and compares every value.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export, Target, companion_name, same_or_error
from autoplan.planner.export.companion import (
    ADAMW,
    check_module,
    first_rates,
    head,
    last_part,
    loop_settings,
    module_text,
    optimizer_settings,
    why_not_made,
)
from autoplan.planner.export.user_code import read_by_tool
from autoplan.planner.plan.key_tables import installed_version, nest, pick_table, version_line, version_notes
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.trainer_arguments import (
    compiles_in_place,
    loader_values,
    named_arguments,
    plan_values,
    refusal,
)
from autoplan.processes import RankContext
from autoplan.strategies.analysis.training_facts import ScheduleFacts, TrainingFacts


class TransformersTarget(Target):
    """TrainingArguments as JSON for HfArgumentParser.parse_json_file, and a companion module."""

    name = "transformers"
    suffix = ".json"
    trainer = "Trainer"
    not_read = "the real TrainingArguments, which needs accelerate: install 'autoplan[transformers]'"

    def render(self, plan: Plan, stem: str) -> Export:
        trained = trained_parts(plan)
        arguments, not_carried = self.arguments(plan, trained)
        values = settings(plan, self.name, f"{stem}.json", trained.optimizers)
        use = ", optimizers=make_optimizers(model)" if values["MAKES_OPTIMIZERS"] else ""
        text = module_text(
            values,
            ["transformers:load_arguments", "transformers:prepare_model"],
            head=head(plan, self.said(), not_carried),
            docstring=[
                "The settings of the plan that are no training arguments. Use:",
                "",
                f"{self.trainer}(model=prepare_model(model), args=load_arguments(){use}, ...)",
            ],
            shown=(),
        )
        files = {f"{stem}.json": json.dumps(arguments, indent=2) + "\n", companion_name(stem): text}
        return Export(files=files, not_carried=tuple(not_carried))

    def arguments(self, plan: Plan, trained: TrainedParts) -> tuple[dict[str, Any], list[str]]:
        """The keyword arguments, and sentences on what they cannot express; see `training_arguments`."""
        return training_arguments(plan, trained)

    def said(self) -> list[str]:
        """Sentences for the head of the companion."""
        return [version_line("transformers", installed_version("transformers")), _LOSS]

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        text, module = export.files.values()
        check_module(module, settings(plan, self.name, next(iter(export.files)), trained_parts(plan).optimizers))
        version = installed_version(self.name)
        if None in (version, installed_version("accelerate")):
            return (f"not read by {self.not_read}",)
        compare_with_plan(plan, text, read_back_arguments(text, self.name))
        return version_notes(self.name, version)


class TrlTarget(TransformersTarget):
    """SFTConfig as JSON for HfArgumentParser.parse_json_file, and a companion module."""

    name = "trl"
    trainer = "SFTTrainer"
    not_read = "the real SFTConfig: install trl to have that checked"

    def arguments(self, plan: Plan, trained: TrainedParts) -> tuple[dict[str, Any], list[str]]:
        if plan.workload.sequence_length is None:
            raise ExportError(
                f"SFTTrainer trains causal language models on sequences, and {plan.workload.name} has samples",
                hint="Use the target transformers, or plan.prepare() in your own loop.",
            )
        table = pick_table("trl", installed_version("trl"))
        arguments, not_carried = training_arguments(plan, trained)
        if plan.config.checkpointing == "selective":
            arguments[_keys()["checkpointing_options"]] |= {"selective": True}
            not_carried = [text for text in not_carried if not text.startswith("checkpointing=selective")]
            not_carried.append("checkpointing=selective as measured: TRL's own policy says which results are kept")
        if plan.config.loss == "fused":
            not_carried = [text for text in not_carried if not text.startswith("loss=fused")]
            not_carried.append("loss=fused as measured: SFTTrainer's own loss in chunks takes its place (TRL 1.16)")
        of_trl: dict[str, object] = {
            "length": plan.workload.sequence_length,
            "packing": False,
            "padding_free": False,
            "loss_type": "nll",
            "offload_activations": False,
            "count_all_ranks": True,
        }
        return arguments | nest(table["keys"], of_trl), not_carried

    def said(self) -> list[str]:
        return [f"{version_line('trl', installed_version('trl'))} The other keys are those of transformers.", *_TRL]


def _keys() -> dict[str, Any]:
    """The names of the arguments, by the plan's terms, in the transformers that is installed."""
    keys: dict[str, Any] = pick_table("transformers", installed_version("transformers"))["keys"]
    return keys


_LOSS = (
    "Loss: the Trainer divides the summed loss by the items of the whole global batch, as the plan does, for models "
    "that take num_items_in_batch (the causal language models do). For other models it takes the mean of the "
    "micro-batches' means, which is another loss if their counts differ: then pass compute_loss_func."
)
_TRL = [
    "Loss: SFTTrainer sums the loss of each label and divides by the labels of the whole global batch, as the plan "
    "does. From TRL 1.16 on it makes the logits in chunks and never has them all, whatever the plan's loss knob says.",
    "Data: max_length is the plan's sequence length; longer sequences are cut. packing and padding_free are off: the "
    "plan was measured on batches of whole samples.",
]


# The arguments.


def training_arguments(plan: Plan, trained: TrainedParts) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments, and sentences on what they cannot express.

    Args:
        plan: The plan.
        trained: What the workload trains with.

    Raises:
        ExportError: the plan uses tensor or pipeline parallelism, replicas of shards, fp16 on a CPU, or shards on a
            CPU, where accelerate, which the Trainer runs on, leaves FSDP off in silence.
    """
    if plan.config.dp_shard > 1 and plan.device == "cpu":
        raise refusal("The Trainer", "shards on a CPU", f"dp_shard={plan.config.dp_shard} for a CPU")
    keys = _keys()
    values, not_carried = plan_values(plan.config, accumulation=plan.accumulation, device=plan.device, keys=keys)
    values |= {"drop_last": True} | loader_values(setting_of(plan)) | trained.values
    not_carried += trained.not_carried
    if compiles_in_place(plan.config, plan.device):
        not_carried.append(
            "compile=model as an argument, with which accelerate switches TF32 on for an fp32 plan: the companion's "
            "prepare_model() compiles the model"
        )
    return {"output_dir": "trainer-output"} | named_arguments(plan.config, values, keys), not_carried


def compare_with_plan(plan: Plan, text: str, found: dict[str, Any]) -> None:
    """Compares what the real class read with the file, value by value, and with the plan.

    Raises:
        ExportError: a value differs.
    """
    for key, wanted in (json.loads(text) | expected(plan)).items():
        if key in found and key != "use_cpu":
            same_or_error(key, as_written(found[key], wanted), wanted)


def expected(plan: Plan) -> dict[str, Any]:
    """The values of a Trainer's arguments, by their own names, if the file says what the plan has."""
    config, training = plan.config, plan.training
    values: dict[str, Any] = {
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "torch_compile": config.compile == "model" and not compiles_in_place(plan.config, plan.device),
        "gradient_checkpointing": config.checkpointing != "none",
        "dataloader_drop_last": True,
        "max_length": plan.workload.sequence_length,  # of TRL alone
    }
    if training is not None:
        values |= {"max_grad_norm": training.max_grad_norm or 0.0, "seed": training.seed}
    return values


def read_back_arguments(text: str, tool: str) -> dict[str, Any]:
    """The values that the real class of a tool reads, in its own process.

    Raises:
        ExportError: the class refuses the arguments.
    """
    return read_by_tool(
        f"{__name__}:read_back_in_rank",
        (text, tool),
        tool=f"{tool} {installed_version(tool)}",
        env={"HF_HUB_OFFLINE": "1"},
    )


ALWAYS_READ = ("gradient_checkpointing", "max_grad_norm", "seed", "torch_compile", "gradient_accumulation_steps")
"""Arguments that are read back whether a file has them or not: their defaults are not every plan's."""


def read_back_in_rank(context: RankContext, text: str, tool: str) -> dict[str, Any]:
    """The values that the class of arguments of a tool reads, in this process, and those of ALWAYS_READ.

    The example scripts of transformers read such a file with parse_json_file, too. Without a GPU, the class refuses
    bf16 and fp16 unless use_cpu is set, and refuses tf32 in any case, so tf32 is not checked there.
    """
    import os

    import torch
    from transformers import HfArgumentParser, TrainingArguments

    kind: Any = TrainingArguments
    if tool == "trl":
        import trl

        kind = trl.SFTConfig
    os.chdir(context.directory)  # the class may make the folder that output_dir names
    given = json.loads(text)
    if not torch.cuda.is_available():
        given["use_cpu"] = True
        given.pop("tf32", None)
    path = context.directory / "arguments.json"
    path.write_text(json.dumps(given))
    (arguments,) = HfArgumentParser(kind).parse_json_file(path)

    def plain(value: Any) -> Any:
        return value.to_dict() if hasattr(value, "to_dict") else str(value)

    found = {key: getattr(arguments, key) for key in (*given, *ALWAYS_READ, *(["max_length"] if tool == "trl" else []))}
    values: dict[str, Any] = json.loads(json.dumps(found, default=plain))
    return values


def as_written(value: Any, wanted: Any) -> Any:
    """The value as it was written: of a dict only the written keys; of an enum (its text is Class.NAME) the name."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return {key: value.get(key) for key in wanted}
    if isinstance(wanted, str) and isinstance(value, str) and "." in value and "." not in wanted:
        return value.rsplit(".", 1)[1].lower()
    return value


# The companion.


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


# What the workload trains with.

# Optimizers that the Trainer makes: its name for them, the options that it takes, and options that it leaves at these.
# From trainer_optimizer.py of transformers 5.23: `_get_adamw_torch`, `_get_sgd`, `_get_adagrad`, `_get_rmsprop`.
# Earlier versions drop the options of all but AdamW: their key table has no key for these.
_TRAINERS_OWN: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    ADAMW: ("adamw_torch", (), {"amsgrad": False, "maximize": False}),
    "torch.optim.sgd.SGD": ("sgd", ("momentum", "dampening", "nesterov"), {"maximize": False}),
    "torch.optim.adagrad.Adagrad": (
        "adagrad",
        ("lr_decay", "eps"),
        {"maximize": False, "initial_accumulator_value": 0},
    ),
    "torch.optim.rmsprop.RMSprop": ("rmsprop", ("momentum", "alpha", "eps", "centered"), {"maximize": False}),
}

# The functions of transformers.optimization behind the names of schedules that need nothing but steps.
_TRAINERS_SCHEDULES = {
    "_get_constant_lambda": "constant",
    "_get_constant_schedule_with_warmup_lr_lambda": "constant_with_warmup",
    "_get_linear_schedule_with_warmup_lr_lambda": "linear",
    "_get_cosine_schedule_with_warmup_lr_lambda": "cosine",
}
_STEP_FORMS = {
    ("for_loop", "cuda"): "optimizer_step=for_loop: adamw_torch takes torch's default on CUDA, which is foreach",
    ("foreach", "cpu"): "optimizer_step=foreach: adamw_torch takes torch's default on a CPU, which is the for-loop",
}
_SCHEDULE_DEFAULTS = {"num_cycles": 0.5, "min_lr_rate": 0.0}


class TrainedParts(NamedTuple):
    """Argument values by term, sentences on what is not carried, and the constants of `make_optimizers(model)` in the
    companion, where the Trainer's own optimizer and schedule will not do."""

    values: dict[str, Any]
    not_carried: list[str]
    optimizers: dict[str, Any]


def trained_parts(plan: Plan) -> TrainedParts:
    """The training of the plan's workload, in parts for the Trainer."""
    training = plan.training
    if training is None:
        return TrainedParts({}, [_UNKNOWN], {})
    values: dict[str, Any] = {"max_grad_norm": training.max_grad_norm or 0.0, "seed": training.seed}
    not_carried: list[str] = []
    values |= _optimizer_values(plan, training)
    schedule = _schedule_values(training.schedule)
    values |= schedule or {"schedule": "constant"}
    differs = _what_differs(plan, training)
    if differs is None and schedule is not None:
        form = _STEP_FORMS.get((plan.config.optimizer_step, plan.device))
        return TrainedParts(values, [] if form is None else [form], {})
    reason = why_not_made(training)
    if reason is None and plan.config.dp_shard > 1:
        reason = "the Trainer takes no optimizer together with FSDP"
    if reason is not None:
        not_carried += _handed_in_by_the_user(training, reason, differs, schedule is not None)
        return TrainedParts(values, not_carried, {})
    what = [] if differs is None else [differs]
    if schedule is None and training.schedule is not None:
        what.append(f"the schedule {last_part(training.schedule.kind)}")
    not_carried.append(f"{' and '.join(what)}, by the arguments alone: the companion's make_optimizers(model) makes it")
    return TrainedParts(values, not_carried, optimizer_settings(plan, training, with_schedule=schedule is None))


_UNKNOWN = (
    "optimizer, learning rate, weight decay, schedule, clipping and seed of the workload, which this plan does not "
    "know: the Trainer would use its own (AdamW, 5e-5, linear to zero, clipping at 1.0). Search again, or set them all"
)


def _optimizer_values(plan: Plan, training: TrainingFacts) -> dict[str, Any]:
    """The arguments of the optimizer, as far as there are any; of the largest group."""
    options = training.main_group.options
    values: dict[str, Any] = {"learning_rate": options.get("lr"), "weight_decay": options.get("weight_decay")}
    if training.optimizer not in _TRAINERS_OWN:
        return values
    name, taken, _ = _TRAINERS_OWN[training.optimizer]
    if training.optimizer == ADAMW:
        name += "_fused" if plan.config.optimizer_step == "fused" else ""
        betas = options.get("betas", [None, None])
        values |= {"beta1": betas[0], "beta2": betas[1], "epsilon": options.get("eps")}
    given = {key: options[key] for key in taken if key in options}
    if given:
        values["optimizer_options"] = ",".join(f"{key}={value}" for key, value in given.items())
    return values | {"optimizer": name}


def _what_differs(plan: Plan, training: TrainingFacts) -> str | None:
    """What of the workload's optimizer the Trainer's own has not; None: the Trainer makes the same.

    The Trainer makes two groups, with the weight decay and, for biases and norms, without.
    """
    if training.optimizer not in _TRAINERS_OWN:
        return f"the optimizer {last_part(training.optimizer)}"
    if len(training.groups) > 1:
        return f"the {len(training.groups)} parameter groups of the optimizer"
    if training.unheld:
        return "an optimizer that leaves out parameters"
    group, (_, _, needed) = training.main_group, _TRAINERS_OWN[training.optimizer]
    if group.options.get("weight_decay"):
        return "weight decay on every parameter (the Trainer leaves biases and norms out of it)"
    other = bool(group.unread) or any(group.options.get(key, value) != value for key, value in needed.items())
    if training.optimizer != ADAMW:
        other = other or plan.config.optimizer_step != "own" or _keys()["optimizer_options"] is None
    return f"the options of the optimizer {last_part(training.optimizer)}" if other else None


def _handed_in_by_the_user(training: TrainingFacts, reason: str, differs: str | None, schedule_fits: bool) -> list[str]:
    found = []
    if differs is not None:
        found.append(f"{differs}, because {reason}: hand it to Trainer(optimizers=...)")
    if not schedule_fits and training.schedule is not None:
        found.append(
            f"the schedule {last_part(training.schedule.kind)}, because {reason}: the arguments say constant; its "
            f"first learning rates are {first_rates(training.schedule)}; hand your own to "
            "Trainer(optimizers=(optimizer, schedule))"
        )
    return found


def _schedule_values(schedule: ScheduleFacts | None) -> dict[str, Any] | None:
    """The arguments that say the schedule; None: there are none for it."""
    if schedule is None:
        return {"schedule": "constant"}
    name = _TRAINERS_SCHEDULES.get(schedule.function or "")
    if name is None or schedule.options is None:
        return None
    options = {key: value for key, value in schedule.options.items() if _SCHEDULE_DEFAULTS.get(key, not value) != value}
    warmup, steps = options.pop("num_warmup_steps", 0), options.pop("num_training_steps", None)
    if options or not (isinstance(warmup, int) and isinstance(steps, int | None)):
        return None
    values: dict[str, Any] = {"schedule": name}
    values |= {"warmup_steps": warmup} if warmup else {}
    return values | ({} if steps is None else {"max_steps": steps})

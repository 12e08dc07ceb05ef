"""The sections of the exported PyTorch script, each only with what the plan uses."""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import CHECKPOINT_EVERY, CUDAGRAPH_MODES, OPTIMIZER_FLAGS, TrainingConfig

LANGUAGE_MODEL = "workloads/language_model.py"
KERNELS = "techniques/loss_kernels.py"
AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
LOSSES = {
    "causal": ("shifted_labels", "_cross_entropy", "causal_loss"),
    "masked": ("_cross_entropy", "masked_loss"),
    "seq2seq": ("_cross_entropy", "seq2seq_loss"),
}
AUTOCAST = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def knob_settings(config: TrainingConfig) -> dict[str, Any]:
    """The constants of the knobs that are set."""
    said: dict[str, Any] = {"PRECISION": config.precision}
    if config.checkpointing != "none":
        said["CHECKPOINTING"] = config.checkpointing
        said["CHECKPOINT_EVERY"] = CHECKPOINT_EVERY[config.checkpointing]
    if config.compile != "off":
        said["COMPILE"] = config.compile
        said["COMPILE_MODE"] = config.compile_mode
    if config.attention != "own":
        said["ATTENTION"] = config.attention
    if config.loss != "full":
        said["LOSS"] = config.loss
    if config.optimizer_step != "own":
        said["OPTIMIZER_FLAGS"] = OPTIMIZER_FLAGS[config.optimizer_step]
    if config.threads is not None:
        said["THREADS"] = config.threads
    return said


_ALLOCATOR_CONSTANTS = ("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD", "LARGEST_MAPPED_BYTES", "NEVER")


def imports(plan: Plan, task: str) -> str:
    """The import lines."""
    config, function = plan.config, plan.workload.kind == "function"
    fused = config.loss == "fused"
    plain = {"argparse", "time"} | (set() if config.precision in AUTOCAST else {"contextlib"})
    plain |= {"inspect", "importlib.util", "sys", "types"} if function else {"json"}
    plain |= {"ctypes", "sys"} if config.allocator == "keep" else set()
    plain |= {"functools"} if fused or config.checkpointing == "selective" else set()
    lines = [f"import {name}" for name in sorted(plain)]
    lines += ["from collections.abc import Callable, Iterable"] if function else []
    lines += ["from collections.abc import Callable"] if fused and not function else []
    lines += ["from dataclasses import dataclass"] if function else []
    lines += ["from typing import Any, NamedTuple, Protocol" if function else "from typing import Any, NamedTuple"]
    lines += ["", "import torch"]
    lines += ["import torch.nn.functional as F"] if fused or not function else []
    lines += ["from torch import nn"]
    if config.checkpointing != "none":
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    CheckpointImpl,",
            "    checkpoint_wrapper,",
            ")",
        ]
    names = ["checkpoint"] if fused else []
    if config.checkpointing == "selective":
        names = ["CheckpointPolicy", *names, "create_selective_checkpoint_contexts"]
    lines += [f"from torch.utils.checkpoint import {', '.join(names)}"] if names else []
    if not function:
        lines += [f"from transformers import AutoConfig, {AUTO_CLASSES[task]}"]
    return "\n".join([*lines, "", "Batch = Any", "IGNORE_INDEX = -100  # labels that the loss does not count"])


def language_model(plan: Plan, task: str) -> str:
    """A model of transformers, its batches, its loss and its optimizer."""
    fused = plan.config.loss == "fused"
    losses = ("shifted_labels",) if fused else LOSSES[task]
    pieces = [
        take("workloads/workload.py", "LossSum"),
        _model(plan, task),
        _BATCHES[task],
        take(LANGUAGE_MODEL, *losses, "count_labels"),
        *([_kernels(plan), _FUSED_LANGUAGE_MODEL] if fused else []),
        f"def count_items(batch):\n    return count_labels(batch, shifted={task == 'causal'})",
        "loss_sum = fused_loss" if fused else f"loss_sum = {task}_loss",
        "def build_optimizer(parameters):\n    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, "
        f"weight_decay=WEIGHT_DECAY{', **OPTIMIZER_FLAGS' if plan.config.optimizer_step != 'own' else ''})",
        "def build_schedule(optimizer):\n    return None",
    ]
    return "\n\n\n".join(pieces)


def _model(plan: Plan, task: str) -> str:
    auto = AUTO_CLASSES[task]
    make = f"{auto}.from_config(config, dtype=torch.float32)"
    if plan.workload.kind == "folder":
        make = f"{auto}.from_pretrained(MODEL_FOLDER, config=config, dtype=torch.float32, local_files_only=True)"
    return f'''def build_model():
    """The model, in fp32."""
    fields = dict(MODEL_FIELDS)
    for name in ("dtype", "torch_dtype"):
        fields.pop(name, None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    return {make}'''


_RANDOM = '''def random_tokens(generator, num_samples, length):
    """Tokens with frequencies that fall off as in text."""
    vocabulary = MODEL_FIELDS["vocab_size"]
    uniform = torch.rand(num_samples, length, generator=generator)
    return (uniform.pow(3) * vocabulary).long().clamp_(max=vocabulary - 1)


def make_batch(num_samples, index):
    """The random batches that the plan was measured with. Put your own data here, of the same shape."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + index)
    tokens = random_tokens(generator, num_samples, SEQUENCE_LENGTH)
'''
_BATCHES = {
    "causal": _RANDOM + '    return {"input_ids": tokens, "labels": tokens.clone()}',
    "seq2seq": _RANDOM
    + "    labels = random_tokens(generator, num_samples, max(1, int(SEQUENCE_LENGTH * 114 / 512)))  # as T5's\n"
    + '    return {"input_ids": tokens, "labels": labels}',
    "masked": _RANDOM
    + "    masked = torch.rand(tokens.shape, generator=generator) < 0.15\n"
    + "    masked[:, 0] = True\n"
    + "    labels = torch.where(masked, tokens, IGNORE_INDEX)\n"
    + '    return {"input_ids": torch.where(masked, MODEL_FIELDS["vocab_size"] - 1, tokens), "labels": labels}',
}


def _kernels(plan: Plan) -> str:
    names = ["Kernel", "_CHUNK_ELEMENTS", "chunk_rows", "recomputed_cross_entropy", "_chunk_loss"]
    names += ["precomputed_cross_entropy", "_Precomputed", "has_torch_kernel", "_torch_kernel", "choose_kernel"]
    compiled = plan.config.compile == "model"
    return take(KERNELS, *names) + f"\n\n\nKERNEL = choose_kernel(PRECISION, compiled={compiled})"


_FUSED_LANGUAGE_MODEL = '''def fused_loss(model, batch):
    """Output head and cross-entropy in one, without all logits at once."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    targets = shifted_labels(batch["labels"]).reshape(-1)
    total = KERNEL(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, targets)
    return LossSum(total, (targets != IGNORE_INDEX).sum())'''


def user_file(plan: Plan) -> str:
    """A workload of the user's own file, with a stand-in for the names it imports from autoplan."""
    pieces = [
        """class WorkloadError(ValueError):
    def __init__(self, message, *, hint=None):
        super().__init__(message if hint is None else f"{message}. {hint}")""",
        take("workloads/workload.py", "LossSum", "OutputHead", "Workload"),
        _LOAD_USER_FILE,
        "workload = load_user_file()\nbuild_model, make_batch = workload.build_model, workload.make_batch\n"
        "count_items, MAX_GRAD_NORM, SEED = workload.count, workload.max_grad_norm, workload.seed",
    ]
    if plan.config.loss == "fused":
        pieces += [_kernels(plan), _FUSED_USER]
    else:
        pieces += ["loss_sum = workload.loss"]
    pieces += [_USER_OPTIMIZER if plan.config.optimizer_step != "own" else "build_optimizer = workload.build_optimizer"]
    pieces += [_USER_SCHEDULE]
    return "\n\n\n".join(pieces)


_LOAD_USER_FILE = '''def load_user_file():
    """The workload that USER_FILE describes. The file imports Workload and LossSum from autoplan, and those above
    stand in for them, so that autoplan need not be installed."""
    names = {"Workload": Workload, "LossSum": LossSum, "OutputHead": OutputHead, "IGNORE_INDEX": IGNORE_INDEX}
    for module in ("autoplan", "autoplan.strategies", "autoplan.strategies.workloads.workload"):
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names, __path__=[])
    sys.path.insert(0, USER_FILE.rpartition("/")[0])
    spec = importlib.util.spec_from_file_location("user_workload", USER_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_workload"] = module
    spec.loader.exec_module(module)
    function = getattr(module, USER_FUNCTION)
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in USER_OPTIONS.items() if name in taken})'''

_FUSED_USER = '''def loss_sum(model, batch):
    """Output head and cross-entropy in one, without all logits at once."""
    hidden, head = workload.head.hidden(model, batch), workload.head.linear(model)
    targets = workload.head.targets(batch).reshape(-1)
    total = KERNEL(hidden.reshape(-1, hidden.shape[-1]), head.weight, getattr(head, "bias", None), targets)
    return LossSum(total, (targets != IGNORE_INDEX).sum())'''

_USER_SCHEDULE = """def build_schedule(optimizer):
    return None if workload.build_schedule is None else workload.build_schedule(optimizer)"""

_USER_OPTIMIZER = '''def build_optimizer(parameters):
    """The workload's optimizer, in another form of its step: same class, groups and hyper-parameters."""
    made = workload.build_optimizer(parameters)
    taken = inspect.signature(type(made)).parameters
    options = {name: value for name, value in made.defaults.items() if name in taken}
    flags = {name: value for name, value in OPTIMIZER_FLAGS.items() if name in taken}
    groups = [{key: value for key, value in g.items() if key not in OPTIMIZER_FLAGS} for g in made.param_groups]
    return type(made)(groups, **(options | flags))'''


def techniques(plan: Plan) -> str:
    """Building the run: the techniques in the order that the plan applies them."""
    config = plan.config
    pieces = []
    if config.checkpointing == "selective":
        pieces.append(
            take("techniques/checkpointing.py", "_KEPT_NAMES", "kept_operations", "_policy", "selective_context")
        )
    if plan.device == "cuda":
        pieces.append(take("techniques/precision.py", "set_matmul_tf32"))
    pieces.append(_TRAINING_MODULE)
    lines = [
        "def prepare(device):",
        '    """The model with its loss, and the optimizer, as the plan has them."""',
    ]
    if config.threads is not None:
        lines += ["    torch.set_num_threads(THREADS)"]
    if config.allocator == "keep":
        pieces.append(
            take("techniques/allocator.py", "can_keep_freed_memory", "keep_freed_memory", *_ALLOCATOR_CONSTANTS)
        )
        lines += ["    keep_freed_memory()"]
    lines += [
        "    torch.manual_seed(SEED)",
        "    with torch.device(device):",
        "        model = build_model()",
        "    model.to(device)",
        "    model.train()",
        "    module = TrainingModule(model)",
    ]
    if config.attention != "own":
        lines += ["    model.set_attn_implementation(ATTENTION)"]
    if config.checkpointing != "none":
        context = ", context_fn=selective_context" if config.checkpointing == "selective" else ""
        lines += [
            "    for stack in STACKS:",
            "        for name in stack[::CHECKPOINT_EVERY]:",
            '            parent, _, child = name.rpartition(".")',
            "            wrapped = checkpoint_wrapper(",
            f"                model.get_submodule(name), checkpoint_impl=CheckpointImpl.NO_REENTRANT{context}",
            "            )",
            "            setattr(model.get_submodule(parent), child, wrapped)",
        ]
    options = "dynamic=False" + (", mode=COMPILE_MODE" if config.compile_mode != "default" else "")
    if config.compile == "model":
        lines += [f"    module.compile({options})"]
    elif config.compile == "block":
        lines += [
            "    for name in [name for stack in STACKS for name in stack]:",
            f"        model.get_submodule(name).compile({options})",
        ]
    if plan.device == "cuda":
        lines += ['    set_matmul_tf32(PRECISION == "tf32")']
    lines += [
        "    optimizer = build_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])",
        "    return module, optimizer, build_schedule(optimizer)",
    ]
    return "\n\n\n".join([*pieces, "\n".join(lines)])


_TRAINING_MODULE = '''class TrainingModule(nn.Module):
    """The model with its loss: one forward gives the loss's sum and count."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return loss_sum(self.model, batch)'''


def step(plan: Plan) -> str:
    """One optimizer step at the full global batch."""
    config = plan.config
    fp16 = config.precision == "fp16"
    counted = plan.workload.kind != "function"
    autocast = AUTOCAST.get(config.precision)
    context = f"torch.autocast(device.type, dtype={autocast})" if autocast else "contextlib.nullcontext()"
    lines = [
        _BATCH_HELPERS,
        "",
        "",
        f"def train_step(module, optimizer, schedule, batch, device{', scaler' if fp16 else ''}):",
        '    """One optimizer step over the global batch; returns its loss: the sum over the count of all of it."""',
        "    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]",
    ]
    if counted:
        lines += ["    divisor = float(count_items(batch))"]
    else:
        lines += [f"    divisor = float(count_items(batch)) if count_items else float({_items(plan)})"]
    lines += [
        "    total = torch.zeros((), device=device)",
        "    count = torch.zeros((), device=device)",
        "    for start in range(0, GLOBAL_BATCH, MICRO_BATCH):",
        "        micro = move(cut(batch, start, start + MICRO_BATCH), device)",
    ]
    if config.compile_mode in CUDAGRAPH_MODES:
        lines += ["        torch.compiler.cudagraph_mark_step_begin()"]
    scaled = "scaler.scale(micro_total * (1 / divisor))" if fp16 else "(micro_total * (1 / divisor))"
    lines += [
        f"        with {context}:",
        "            micro_total, micro_count = module(micro)",
        f"        {scaled}.backward()",
        "        total += micro_total.detach().float()",
        "        count += torch.as_tensor(micro_count, device=device).detach().float()",
    ]
    lines += ["    scaler.unscale_(optimizer)"] if fp16 else []
    if not counted:
        lines += [
            "    if not count_items:  # the real count is known only now",
            "        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], divisor / count)",
        ]
    lines += [
        "    if MAX_GRAD_NORM is not None:",
        "        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)",
    ]
    if fp16:
        lines += [
            "    scale = scaler.get_scale()",
            "    scaler.step(optimizer)",
            "    scaler.update()",
            "    stepped = scaler.get_scale() >= scale",
        ]
    else:
        lines += ["    optimizer.step()", "    stepped = True"]
    lines += [
        "    if schedule is not None and stepped:",
        "        schedule.step()",
        "    optimizer.zero_grad(set_to_none=True)",
        "    return float(total / count)",
    ]
    return "\n".join(lines)


_BATCH_HELPERS = '''def cut(batch, start, stop):
    """The samples start to stop of a nest of tensors whose first dim counts samples."""
    if isinstance(batch, dict):
        return {key: cut(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(cut(value, start, stop) for value in batch)
    return batch[start:stop] if isinstance(batch, torch.Tensor) and batch.dim() else batch


def move(batch, device):
    """The batch on a device."""
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch'''


def _items(plan: Plan) -> str:
    """What a step works through, as an expression of the script."""
    return "GLOBAL_BATCH * SEQUENCE_LENGTH" if plan.workload.sequence_length else "GLOBAL_BATCH"


def main(plan: Plan) -> str:
    """The loop."""
    unit, items = plan.workload.unit, _items(plan)
    fp16 = plan.config.precision == "fp16"
    scaler = "    scaler = torch.amp.GradScaler(device.type)\n" if fp16 else ""
    return f"""def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--device", default=DEVICE)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    module, optimizer, schedule = prepare(device)
{scaler}    for number in range(arguments.steps):
        batch = make_batch(GLOBAL_BATCH, number)
        started = time.perf_counter()
        loss = train_step(module, optimizer, schedule, batch, device{", scaler" if fp16 else ""})
        seconds = time.perf_counter() - started
        print(f"step {{number + 1}}: loss {{loss:.8f}}, {{{items} / seconds:.1f}} {unit}/s", flush=True)


if __name__ == "__main__":
    main()"""

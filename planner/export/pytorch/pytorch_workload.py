"""Sections of the exported PyTorch script for the workload: imports, model, batches, loss, optimizer, schedule.

In: a plan. Out: Python source with only what the plan uses. The classes and functions that autoplan itself trains with
are copied from its source files (`source_text.take`).
"""

from __future__ import annotations

from autoplan.planner.export.pytorch import pytorch_ranks
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import ATTENTION_BACKENDS, CUDAGRAPH_MODES
from autoplan.strategies.rounding_knobs import rounds_steps

LANGUAGE_MODEL = "workloads/language_model.py"
KERNELS = "techniques/loss_kernels.py"
GPU_KERNELS = "techniques/loss_kernels_gpu.py"
_GPU_NAMES = (
    *("tl", "LARGEST_DIFFERENCE", "choose_gpu_kernel", "has_liger", "gpu_cross_entropy", "rows_cross_entropy_gpu"),
    *("liger_cross_entropy", "rows_in_place", "_compiled_row_kernel", "_row_kernel", "_AGREED", "agrees", "_full_fp32"),
    "_agree",
)
AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
LOSSES = {
    "causal": ("shifted_labels", "_cross_entropy", "causal_loss"),
    "masked": ("_cross_entropy", "masked_loss"),
    "seq2seq": ("_cross_entropy", "seq2seq_loss"),
}
AUTOCAST = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
"""The precisions that use autocast, and its dtype in the script."""
WORKLOAD_ERROR = """class WorkloadError(ValueError):
    def __init__(self, message, *, hint=None):
        super().__init__(message if hint is None else f"{message}. {hint}")"""


def any_containers(plan: Plan) -> bool:
    """Whether the script has autoplan's own code for batches: those of a user's function, and all on CUDA."""
    return plan.workload.kind == "function" or plan.device == "cuda"


def takes_gpu_kernels(plan: Plan) -> bool:
    """Whether the fused loss may run on kernels of Triton, as techniques/loss_kernels_gpu.py decides."""
    config = plan.config
    on_cuda = plan.device == "cuda" and config.compile != "model" and config.precision != "fp16"
    return on_cuda and config.loss == "fused"


def imports(plan: Plan, task: str, head: str) -> str:
    """The import lines; for `task` and `head` see ModelSummary."""
    config, function = plan.config, plan.workload.kind == "function"
    fused = config.loss == "fused"
    deferred = fused and bool(head)
    modules = {"argparse", "contextlib", "time"}
    modules |= {"inspect", "importlib.util", "sys", "types"} if function else {"json"}
    modules |= {"sys"} if config.compile == "model" or plan.device == "cuda" else set()
    modules |= {"ctypes", "sys"} if config.allocator == "keep" else set()
    modules |= {"inspect", "sys", "types"} if config.kernels != "own" else set()
    modules |= {"optimizer": {"types"}, "activations": {"weakref"}}.get(config.offload, set())
    modules |= {"dataclasses"} if any_containers(plan) else set()
    modules |= {"math"} if deferred else set()
    modules |= {"importlib.util"} if takes_gpu_kernels(plan) else set()
    modules |= {"functools"} if fused or config.checkpointing != "none" or plan.device == "cuda" else set()
    rounded = rounds_steps(config)
    modules |= {"importlib.util"} if rounded else set()
    ranks = pytorch_ranks.has_ranks(config)
    rank_modules, rank_lines = pytorch_ranks.imports(plan)
    modules |= rank_modules
    lines = [f"import {name}" for name in sorted(modules)]
    kinds = {"Iterator"}
    kinds |= {"Sequence"} if config.compile_mode in CUDAGRAPH_MODES or ranks or config.fp8 != "off" else set()
    kinds |= {"Iterable", "Mapping"} if any_containers(plan) or ranks or rounded else set()
    calls = fused or any_containers(plan) or ranks or rounded or config.offload == "optimizer"
    kinds |= {"Callable"} if calls else set()
    lines += ["from collections import deque"] if config.offload in ("optimizer", "activations") else []
    lines += [f"from collections.abc import {', '.join(sorted(kinds))}"]
    lines += ["from dataclasses import dataclass, field"] if config.tp > 1 else []
    lines += ["from dataclasses import dataclass"] if function and config.tp == 1 else []
    lines += ["from pathlib import Path"] if ranks else []
    lines += ["from typing import Any, NamedTuple" + (", Protocol" if function or config.tp > 1 else "")]
    lines += ["", "import torch"]
    lines += ["import torch.nn.functional as F"] if fused or not function or config.tp > 1 else []
    lines += ["from torch import nn", *rank_lines]
    if (config.offload == "optimizer" or rounded) and not ranks:
        lines += ["from torch.distributed.tensor import DTensor"]
    if config.offload == "activations":
        lines += ["from torch.multiprocessing.reductions import StorageWeakRef"]
    if takes_gpu_kernels(plan):
        lines += ["from torch._guards import detect_fake_mode"]
    if config.attention in ATTENTION_BACKENDS:
        lines += ["from torch.nn.attention import SDPBackend, sdpa_kernel"]
    lines += ["from torch.utils import _pytree as pytree"] if deferred or any_containers(plan) else []
    if config.checkpointing != "none":
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
            "    CheckpointImpl,",
            "    checkpoint_wrapper,",
            ")",
        ]
    names = ["checkpoint"] if fused else []
    if config.checkpointing != "none":
        names = ["CheckpointPolicy", *names, "create_selective_checkpoint_contexts"]
    lines += [f"from torch.utils.checkpoint import {', '.join(names)}"] if names else []
    if not function:
        lines += [f"from transformers import AutoConfig, {AUTO_CLASSES[task]}"]
    return "\n".join([*lines, "", "Batch = Any", "IGNORE_INDEX = -100  # labels that the loss does not count"])


def language_model(plan: Plan, task: str, head: str, padding: int | None) -> str:
    """A model of transformers: how to build it, its batches, its loss and its optimizer.

    Args:
        plan: The plan.
        task, head: See ModelSummary.
        padding: The number of its padding token, which batches do not have; None: it has none.
    """
    fused = plan.config.loss == "fused"
    by_formula = fused and not head
    losses = ("shifted_labels",) if by_formula else LOSSES[task]
    sections = [
        take("workloads/workload.py", "LossSum"),
        _model(plan, task),
        _random_tokens(padding),
        _BATCHES[task],
        take(LANGUAGE_MODEL, *losses, "count_labels"),
        *([_kernels(plan)] if fused else []),
        *([_FUSED_LANGUAGE_MODEL] if by_formula else []),
        f"def count_items(batch):\n    return count_labels(batch, shifted={task == 'causal'})",
        "loss_sum = fused_loss" if by_formula else f"loss_sum = {task}_loss",
        *([_deferred()] if fused and head else []),
        *_output_head(plan, task),
        "def build_optimizer(parameters):\n    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, "
        f"weight_decay=WEIGHT_DECAY{', **OPTIMIZER_FLAGS' if plan.config.optimizer_step != 'own' else ''})",
        "def build_schedule(optimizer):\n    return None",
    ]
    return "\n\n\n".join(sections)


def _output_head(plan: Plan, task: str) -> list[str]:
    """How the model splits into hidden states and output head, where tensor parallelism splits the vocabulary."""
    if plan.config.tp == 1 or task != "causal":
        return []
    head = take("workloads/workload.py", "OutputHead"), take(LANGUAGE_MODEL, "_SCALED_LOGITS", "CausalHead")
    return [WORKLOAD_ERROR, *head, "output_head = CausalHead()"]


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


def _random_tokens(padding: int | None) -> str:
    lines = [
        "def random_tokens(generator, num_samples, length):",
        '    """Tokens with frequencies that fall off as in text."""',
        '    kinds = MODEL_FIELDS["vocab_size"]' + ("" if padding is None else " - 1  # without the padding token"),
        "    uniform = torch.rand(num_samples, length, generator=generator)",
        "    tokens = (uniform.pow(3) * kinds).long().clamp_(max=kinds - 1)",
        "    return tokens" + ("" if padding is None else f" + (tokens >= {padding})"),
    ]
    return "\n".join(lines)


_RANDOM = '''def make_batch(num_samples, index):
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
    names = ["Kernel", "LossOfLogits", "_CHUNK_ELEMENTS", "_most_rows", "limited_rows", "chunk_rows"]
    names += ["ROW_MULTIPLE", "padded_rows", "recomputed_cross_entropy", "rows_cross_entropy", "_chunk_loss"]
    names += [
        "precomputed_cross_entropy",
        "loss_of_logits",
        "_Precomputed",
        "has_torch_kernel",
        "_torch_kernel",
        "choose_kernel",
    ]
    compiled = plan.config.compile == "model"
    if not takes_gpu_kernels(plan):
        return take(KERNELS, *names) + f"\n\n\nKERNEL = choose_kernel(PRECISION, compiled={compiled})"
    own = take(GPU_KERNELS, *_GPU_NAMES)
    return f"{take(KERNELS, *names)}\n\n\n{own}\n\n\nKERNEL = choose_gpu_kernel(PRECISION, compiled=False)"


def _deferred() -> str:
    """The user's own loss with the logits of the output head deferred."""
    names = ["FUSED", "DeferredLoss", "_plain", "_CROSS_ENTROPY_OPTIONS", "_DEFERRED_FUNCTIONS", "_OTHER_OPERATORS"]
    names += ["_with_other_operators", "DeferredLogits", "_keeps_last_dim", "_dims_of"]
    return take("techniques/deferred_logits.py", *names) + "\n\n\n" + _DEFER_LOGITS


_DEFER_LOGITS = '''def defer_logits(head):
    """Has the loss function compute the logits of the output head only where it needs them all."""
    global loss_sum
    loss_sum = DeferredLoss(loss_sum, head, KERNEL)'''


_FUSED_LANGUAGE_MODEL = '''def fused_loss(model, batch):
    """Output head and cross-entropy in one, without all logits at once."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    targets = shifted_labels(batch["labels"]).reshape(-1)
    total = KERNEL(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, targets)
    return LossSum(total, (targets != IGNORE_INDEX).sum())'''


def user_file(plan: Plan, head: str) -> str:
    """A workload of the user's own file, with copies of the classes that the file imports from autoplan."""
    sections = [
        WORKLOAD_ERROR,
        take("workloads/workload.py", "LossSum", "OutputHead", "Workload"),
        _LOAD_USER_FILE,
        "workload = load_user_file()\nbuild_model, make_batch = workload.build_model, workload.make_batch\n"
        "count_items, MAX_GRAD_NORM, SEED = workload.count, workload.max_grad_norm, workload.seed",
    ]
    if plan.config.loss == "fused" and head:
        sections += [_kernels(plan), "loss_sum = workload.loss", _deferred()]
    elif plan.config.loss == "fused":
        sections += [_kernels(plan), _FUSED_USER]
    else:
        sections += ["loss_sum = workload.loss"]
    sections += [
        _USER_OPTIMIZER if plan.config.optimizer_step != "own" else "build_optimizer = workload.build_optimizer"
    ]
    sections += [_USER_SCHEDULE, *(["output_head = workload.head"] if plan.config.tp > 1 else [])]
    return "\n\n\n".join(sections)


_LOAD_USER_FILE = '''def load_user_file():
    """The workload that USER_FILE describes. Where the file imports Workload and LossSum from autoplan, it gets the
    classes above, so that autoplan need not be installed."""
    names = {"Workload": Workload, "LossSum": LossSum, "OutputHead": OutputHead, "IGNORE_INDEX": IGNORE_INDEX}
    for module in ("autoplan", "autoplan.strategies", "autoplan.strategies.workloads.workload"):
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names, __path__=[])
    sys.path.insert(0, USER_FILE.rpartition("/")[0])
    spec = importlib.util.spec_from_file_location("user_workload", USER_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_workload"] = module
    before = sys.argv
    sys.argv = [USER_FILE, *USER_ARGUMENTS] if USER_ARGUMENTS else before  # what followed -- in the search
    try:
        spec.loader.exec_module(module)
        function = getattr(module, USER_FUNCTION)
        taken = inspect.signature(function).parameters
        return function(**{name: value for name, value in USER_OPTIONS.items() if name in taken})
    finally:
        sys.argv = before'''

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

"""Sections of the exported PyTorch script for training: the techniques, and prepare(), which applies them.

In: a plan. Out: Python source with only what the plan uses. The techniques are applied in the order of
`strategies/prepare.py`.
"""

from __future__ import annotations

from typing import Any

from autoplan.planner.export.pytorch import pytorch_ranks
from autoplan.planner.export.source_text import take
from autoplan.planner.plan import Plan
from autoplan.strategies.config import (
    ATTENTION_BACKENDS,
    CHECKPOINT_EVERY,
    CUDAGRAPH_MODES,
    OPTIMIZER_FLAGS,
    TrainingConfig,
)
from autoplan.strategies.rounding_knobs import rounds_steps

# What the script takes from techniques/checkpointing.py, techniques/allocator.py and workloads/training_mode.py.
CHECKPOINTING_NAMES = (
    *("_KEPT_NAMES", "kept_operations", "_policy", "selective_context"),
    *("wrap", "_keeps_statistics", "_contexts_with_statistics", "_statistics_kept"),
)
_TRAINING_MODE_NAMES = (
    *("EVERYTHING_TRAINS", "enter_training_mode", "caching_configs", "_nested", "without_cache"),
    *("CHECKPOINTING_FLAGS", "own_checkpointing", "without_own_checkpointing"),
)
CAUSAL_ATTENTION_NAMES = (
    *("NAME", "PLAIN_ARGUMENTS", "reason_against_maskless", "_register_maskless"),
    *("use_maskless_attention", "_choose", "_put_back"),
)
_ALLOCATOR_NAMES = (
    *("can_keep_freed_memory", "keep_freed_memory"),
    *("M_TRIM_THRESHOLD", "M_MMAP_THRESHOLD", "LARGEST_MAPPED_BYTES", "NEVER"),
)

_PARAMETERS_NAMES = ("rounded_parameters", "_kept_in_fp32", "cast_parameters", "clip_in_fp32")
_ROUNDED_STEPS_NAMES = (
    *("PIECE_ELEMENTS", "MOMENTS", "MASTER", "ELEMENTWISE", "BLOCK", "LEAST_8BIT_ELEMENTS", "TORCHAO"),
    *("StepRounding", "_Rounded", "with_rounding", "is_elementwise", "held_by", "like", "differs"),
    *("widened", "round_by_chance", "reason_against_8bit", "load_8bit_states"),
)
_CONFIG_ERROR = """class ConfigError(ValueError):
    def __init__(self, message, *, hint=None):
        super().__init__(message if hint is None else f"{message}. {hint}")"""


# What it takes from techniques/host_states.py and techniques/host_activations.py, with the sizes of offload_rules.py.
_HOST_STATES_NAMES = (
    *("_ALIGNMENT", "Held", "keep_states_on_host", "HostStates", "_without_hooks"),
    *("_moves", "_like", "_fits", "_bytes_of"),
)
_HOST_ACTIVATIONS_NAMES = (
    *("SMALLEST_BYTES", "LARGEST_WHOLE", "AHEAD_BYTES", "SavedOnHost", "HostActivations"),
    *("_is_dense", "_STREAMS", "_streams_of", "_wait_beyond"),
)


# Of techniques/fp8.py, with the sizes of fp8_rules.py.
_FP8_NAMES = ("fp8_linears", "_linears", "_is_aligned", "_is_special", "use_fp8", "_filling")

_KERNELS_NAMES = (
    *("liger_function", "use_liger", "_apply_to_instance", "_modeling_files", "_classes_of"),
    *("_replaced_functions", "_uses", "_with_globals"),
)


def knob_settings(config: TrainingConfig) -> dict[str, Any]:
    """The constants of the knobs that are not at their default, by name."""
    constants: dict[str, Any] = {"PRECISION": config.precision}
    if config.checkpointing != "none":
        constants["CHECKPOINTING"] = config.checkpointing
        constants["CHECKPOINT_EVERY"] = CHECKPOINT_EVERY[config.checkpointing]
    if config.compile != "off":
        constants["COMPILE"] = config.compile
        constants["COMPILE_MODE"] = config.compile_mode
    if config.attention != "own":
        constants["ATTENTION"] = "sdpa" if config.attention in ATTENTION_BACKENDS else config.attention
    if config.attention in ATTENTION_BACKENDS:
        constants["ATTENTION_KERNEL"] = ATTENTION_BACKENDS[config.attention]
    if config.fp8 != "off":
        constants["FP8"] = config.fp8
    if config.gelu != "own":
        constants["GELU"] = config.gelu
    if config.kernels != "own":
        constants["KERNELS"] = config.kernels
    if config.loss != "full":
        constants["LOSS"] = config.loss
    if config.optimizer_step != "own":
        constants["OPTIMIZER_FLAGS"] = OPTIMIZER_FLAGS[config.optimizer_step]
    if config.offload != "none":
        constants["OFFLOAD"] = config.offload
    if rounds_steps(config):
        constants |= {"PARAMETERS": config.parameters, "OPTIMIZER_STATE": config.optimizer_state}
    if config.threads is not None:
        constants["THREADS"] = config.threads
    return constants


def techniques(plan: Plan) -> str:
    """The functions that the techniques need."""
    config = plan.config
    sections = []
    sections.append(take("workloads/training_mode.py", *_TRAINING_MODE_NAMES))
    sections.append(take("analysis/training_facts.py", "own_checkpointing_text"))
    if config.checkpointing != "none":
        sections.append(take("techniques/checkpointing.py", *CHECKPOINTING_NAMES))
    if plan.device == "cuda":
        sections.append(take("techniques/precision.py", "set_matmul_tf32"))
    sections.append(_TRAINING_MODULE)
    if config.allocator == "keep":
        sections.append(take("techniques/allocator.py", *_ALLOCATOR_NAMES))
    if config.allocator == "expandable":
        sections.append(take("techniques/allocator.py", "expand_segments", "_segment_setter"))
    if config.gelu != "own":
        sections.append(take("techniques/gelu.py", "WRITTEN_OUT", "written_out", "use_torch_gelu"))
    if config.offload == "optimizer":
        sections.append(take("techniques/offload_rules.py", "PIECE_BYTES", "PIECES_AT_ONCE"))
        sections.append(take("techniques/host_states.py", *_HOST_STATES_NAMES))
    if config.offload == "activations":
        sections.append(take("techniques/offload_rules.py", "IN_FLIGHT_BYTES"))
        sections.append(take("techniques/host_activations.py", *_HOST_ACTIVATIONS_NAMES))
    if config.parameters != "own":
        sections.append(take("techniques/parameters.py", *_PARAMETERS_NAMES))
    if rounds_steps(config):
        sections += [_CONFIG_ERROR, take("techniques/rounded_steps.py", *_ROUNDED_STEPS_NAMES)]
    if (config.offload == "optimizer" or rounds_steps(config)) and not pytorch_ranks.has_ranks(config):
        sections.append(take("techniques/mesh.py", "local_tensor"))  # with ranks it comes with the rest of that file
    if config.fp8 != "off":
        sections.append(take("techniques/fp8_rules.py", "MULTIPLE", "reason_against_sizes"))
        sections.append(take("techniques/fp8.py", *_FP8_NAMES))
    if config.kernels != "own":
        sections.append(take("techniques/kernels.py", *_KERNELS_NAMES))
    if replays_graphs(plan):
        sections.append(take("techniques/own_gradients.py", "OwnGradients"))
    if config.attention != "own" or config.kernels != "own" or avoids_masks(plan):
        sections.append(take("analysis/structure.py", "language_models"))
    if avoids_masks(plan):
        sections.append(take("techniques/causal_attention.py", *CAUSAL_ATTENTION_NAMES))
    sections += pytorch_ranks.techniques(plan)
    return "\n\n\n".join(sections)


def avoids_masks(plan: Plan) -> bool:
    """As techniques/attention.py: where transformers would make a mask tensor that plainly causal attention lacks."""
    return plan.config.tp * plan.config.pp == 1 and (plan.config.compile == "model" or plan.device == "cuda")


def replays_graphs(plan: Plan) -> bool:
    """Whether several micro-steps replay CUDA graphs, so that gradients need memory of their own."""
    return plan.config.compile_mode in CUDAGRAPH_MODES and plan.accumulation > 1


def prepare(plan: Plan, head: str, fields: list[str]) -> str:
    """`prepare(device)`, which builds the run.

    Args:
        plan: The plan.
        head: The name of the output head whose logits are deferred; "" for none.
        fields: Of the class Run; each is a name in the function.
    """
    config = plan.config
    deferred = config.loss == "fused" and head
    ranks = pytorch_ranks.has_ranks(config)
    lines = [
        "def prepare(device):",
        '    """The model with its loss, and the optimizer, as the plan has them."""',
        *(pytorch_ranks.mesh_lines(config) if ranks else ["    device = torch.device(device)"]),
        *(["    torch.set_num_threads(THREADS)"] if config.threads is not None else []),
        *(["    keep_freed_memory()"] if config.allocator == "keep" else []),
        *(["    assert expand_segments(), torch.__version__"] if config.allocator == "expandable" else []),
        "    torch.manual_seed(SEED)",
        "    with torch.device(device):",
        "        model = build_model()",
        "    model.to(device)",
        "    said = enter_training_mode(model)",
        "    if said is not None:",
        "        print(said)",
        "    if own_checkpointing(model):",
        f"        print(own_checkpointing_text({config.checkpointing!r}))",
        "    module = TrainingModule(model)",
        *(["    cast_parameters(rounded_parameters(model))"] if config.parameters != "own" else []),
        *(_ATTENTION_LINES if config.attention != "own" else []),
        *(["    use_maskless_attention(language_models(model))"] if avoids_masks(plan) else []),
        *(["    use_torch_gelu(model)"] if config.gelu != "own" else []),
        *(["    assert use_liger(model), KERNELS"] if config.kernels == "liger" else []),
        *(_fp8_lines(plan) if config.fp8 != "off" else []),
        *(["    defer_logits(model.get_submodule(HEAD))"] if deferred else []),
        *pytorch_ranks.tensor_lines(config),
        *pytorch_ranks.batch_norm_lines(config),
        *_checkpointing_lines(config),
        *_compile_lines(config),
        *(['    set_matmul_tf32(PRECISION == "tf32")'] if plan.device == "cuda" else []),
        *pytorch_ranks.wrap_lines(config),
        "    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        "    optimizer = build_optimizer(parameters)",
        *(["    keep_states_on_host(optimizer)"] if config.offload == "optimizer" else []),
        *(_ROUNDED_LINES if rounds_steps(config) else []),
        *(["    own_gradients = OwnGradients(parameters, optimizer)"] if replays_graphs(plan) else []),
        *(["    scaler = torch.amp.GradScaler(device.type)"] if config.precision == "fp16" else []),
        *(["    clip = GlobalNormClipper(mesh)"] if ranks else []),
        *(["    torch.manual_seed(rank_seed(SEED, mesh))  # dropout differs from rank to rank"] if ranks else []),
        "    schedule = build_schedule(optimizer)",
        f"    return Run({', '.join(fields)})",
    ]
    return "\n".join(lines)


_ROUNDED_LINES = [
    "    optimizer = with_rounding(",
    "        optimizer, parameters=PARAMETERS, states=OPTIMIZER_STATE, seed=SEED",
    "    )  # its steps are in fp32",
]

_ATTENTION_LINES = [
    "    for inner in language_models(model):",
    '        if ATTENTION == "eager" or inner._supports_sdpa:',
    "            inner.set_attn_implementation(ATTENTION)",
]


def _fp8_lines(plan: Plan) -> list[str]:
    return [
        "    in_fp8 = fp8_linears(model, [name for stack in STACKS for name in stack], FP8)",
        '    assert in_fp8, "no linear layer is large enough: it is another model"',
        "    use_fp8(model, in_fp8, FP8)  # pip install torchao",
    ]


def _checkpointing_lines(config: TrainingConfig) -> list[str]:
    if config.checkpointing == "none":
        return []
    compiled = config.compile != "off"
    return [
        "    for stack in STACKS:",
        "        for name in stack[::CHECKPOINT_EVERY]:",
        '            parent, _, child = name.rpartition(".")',
        '            selective = CHECKPOINTING == "selective"',
        f"            wrapped = wrap(model.get_submodule(name), selective=selective, compiled={compiled})",
        "            setattr(model.get_submodule(parent), child, wrapped)",
    ]


def _compile_lines(config: TrainingConfig) -> list[str]:
    options = "dynamic=False" + (", mode=COMPILE_MODE" if config.compile_mode != "default" else "")
    if config.compile == "model":
        return [f"    module.compile({options})"]
    if config.compile == "block":
        return [
            "    for name in [name for stack in [*STACKS, *FROZEN_STACKS] for name in stack]:",
            f"        model.get_submodule(name).compile({options})",
        ]
    return []


_TRAINING_MODULE = '''class TrainingModule(nn.Module):
    """The model with its loss: one forward gives the loss's sum and count."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return loss_sum(self.model, batch)'''

"""Lines of `prepare_model(model)` in the modules that go with the arguments of other trainers.

In: a configuration. Out: Python source, indented by four, for a model that is named `model`. The companion of
transformers and the modules for Lightning and Fabric share them.
"""

from __future__ import annotations

from autoplan.strategies.config import ATTENTION_BACKENDS, TrainingConfig

MALLOPT = {"M_MMAP_THRESHOLD": (-3, 1 << 30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""Options of mallopt(3) and their values, as in strategies/techniques/allocator.py."""

OWN_CHECKPOINTING_OFF = [
    "    # The model had checkpointing of its own switched on; from here on, the training arguments decide.",
    '    if hasattr(model, "activation_checkpointing_disable"):',
    "        model.activation_checkpointing_disable()",
    "    else:",
    "        model.gradient_checkpointing_disable()",
]


OWN_GRADIENTS = [
    '    if "plan_gradients" not in model.__dict__:  # in memory that no CUDA graph writes to',
    "        trained = [p for p in model.parameters() if p.requires_grad]",
    '        model.__dict__["plan_gradients"] = OwnGradients(trained, optimizer)',
    '    own = model.__dict__["plan_gradients"]',
]
"""Of a function of one step, over `model` and `optimizer`: its gradients, where CUDA graphs are replayed."""


def attention_name(config: TrainingConfig) -> str:
    """What `set_attn_implementation` of transformers is given; the knob is not `own`."""
    return "sdpa" if config.attention in ATTENTION_BACKENDS else config.attention


def kernel_lines(config: TrainingConfig) -> list[str]:
    """Leaves scaled_dot_product_attention one kernel, where the knob names one."""
    if config.attention not in ATTENTION_BACKENDS:
        return []
    kernel = config.attention.removeprefix("sdpa_")
    names = {"flash": "flash_sdp", "cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp", "math": "math_sdp"}
    return [
        "    # one attention kernel and no other, for the whole process",
        *(f"    torch.backends.cuda.enable_{name}({key == kernel})" for key, name in names.items()),
    ]


def gelu_lines(config: TrainingConfig) -> list[str]:
    """GPT-2's formula of GELU as torch's one operation, where the knob says so."""
    if config.gelu == "own":
        return []
    return [
        "    # GPT-2's tanh formula of GELU as one operation",
        "    for name, module in list(model.named_modules(remove_duplicate=False)):",
        '        if type(module).__name__ in ("NewGELUActivation", "FastGELUActivation"):',
        '            parent, _, child = name.rpartition(".")',
        '            setattr(model.get_submodule(parent), child, torch.nn.GELU(approximate="tanh"))',
    ]


def thread_lines(config: TrainingConfig) -> list[str]:
    """The number of threads of a rank, where the knob gives one."""
    return [] if config.threads is None else [f"    torch.set_num_threads({config.threads})"]


def allocator_lines(config: TrainingConfig) -> list[str]:
    """Has glibc keep freed memory (the module imports ctypes), or CUDA's segments grow, where the knob says so."""
    if config.allocator == "expandable":
        return [
            "    # segments of torch's CUDA allocator that grow, for the whole process",
            '    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")',
            "    setter = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)",
            "    if setter is not None:",
            '        setter("expandable_segments:True")',
        ]
    if config.allocator != "keep":
        return []
    return [
        "    libc = ctypes.CDLL(None)  # glibc keeps freed memory, for the whole process (mallopt(3))",
        *(f"    libc.mallopt({option}, {value})  # {name}" for name, (option, value) in MALLOPT.items()),
    ]

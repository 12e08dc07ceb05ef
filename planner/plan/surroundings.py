"""The packages and variables where a training runs, and how they differ from those where its plan was found.

In: this machine, its packages, its environment. Out: an `Environment`, which a plan keeps; a sentence for each
difference that can change the speed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from autoplan.planner.plan.current import variables_for
from autoplan.planner.plan.hardware import hardware_differences
from autoplan.planner.plan.key_tables import installed_version
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import Environment
from autoplan.probes.profile import HardwareProfile
from autoplan.record import Record

# The environment variables that a plan keeps: those that change how training runs. By name, since others with the same
# beginning may be secrets (TORCH_TOKEN).
SHOWN_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC", "OMP_WAIT_POLICY"),
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_SERVICE_FORCE_INTEL"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "KMP_SETTINGS", "KMP_TPAUSE"),
    *("OPENBLAS_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED"),
    *("TORCH_COMPILE_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
    *("TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_CPP_WRAPPER"),
    *("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT", "CUDA_CACHE_DISABLE", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_CROSS_NIC", "NCCL_TOPO_FILE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
    *("NCCL_DEBUG", "NCCL_LAUNCH_MODE", "NCCL_CUMEM_ENABLE", "GLOO_DEVICE_TRANSPORT"),
)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The installed versions and the environment variables that change how training runs."""
    source = os.environ if variables is None else variables
    return Environment(
        autoplan=installed_version("autoplan") or "source",
        torch=installed_version("torch") or "not installed",
        python=platform.python_version(),
        transformers=installed_version("transformers"),
        liger_kernel=installed_version("liger-kernel"),
        triton=installed_version("triton"),
        torchao=installed_version("torchao"),
        platform=platform.platform(),
        variables={name: source[name] for name in sorted(SHOWN_VARIABLES) if name in source},
    )


class Difference(Record):
    """Something that is not as it was where the plan was found."""

    kind: Literal["hardware", "versions", "environment"]
    text: str


def find_differences(plan: Plan, here: HardwareProfile, environment: Environment | None = None) -> list[Difference]:
    """The differences between where a plan was found and here: hardware first, then versions, then variables.

    Args:
        plan: The plan.
        here: This machine.
        environment: Its packages and variables; None: they are read.
    """
    found = [Difference(kind="hardware", text=text) for text in hardware_differences(plan.hardware, here, plan.device)]
    then, now = plan.environment, environment or read_environment()
    on_gpu = ("triton",) if plan.device == "cuda" else ()  # torch.compile, and what loss=fused compiles
    layers = ("liger_kernel",) if plan.config.kernels == "liger" else ()
    in_8_bits = ("torchao",) if plan.config.fp8 != "off" or plan.config.optimizer_state == "8bit" else ()
    for package in ("torch", "transformers", *on_gpu, *layers, *in_8_bits, "python", "autoplan"):
        before, after = getattr(then, package), getattr(now, package)
        if before != after:
            package = package.replace("_", "-")
            found.append(Difference(kind="versions", text=f"{package} {after or 'none'} here, {before or 'none'} then"))
    own = variables_for(plan, Path(), {}, here.host.cores_usable)  # as `autoplan run` sets them
    for name in sorted(then.variables.keys() | now.variables.keys()):
        before, after = then.variables.get(name), now.variables.get(name)
        if before != after and after != own.get(name, before):
            found.append(Difference(kind="environment", text=f"{name}={after or ''} here, {before or 'not set'} then"))
    return found

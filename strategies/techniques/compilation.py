"""The compile knob: torch.compile of each repeated block, or of the model with its loss.

Compiled in place (`nn.Module.compile`), so that no name in a state changes. Blocks of one class share their compiled
code. Shapes are static: a run has one micro-batch shape. Fused kernels round differently, within fp32 noise.
"""

from __future__ import annotations

import functools
import os
import shutil
from typing import Any

import torch

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.processes.compile_cache import use_own_cache
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.config import CUDAGRAPH_MODES, knob_values
from autoplan.strategies.techniques.base import Build, Strategy, check_applies
from autoplan.strategies.workloads.devices import is_elsewhere
from autoplan.strategies.workloads.workload import Workload


class CompilationStrategy:
    """off; block: each repeated block; model: the model and its loss as one."""

    name = "compile"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Blocks only where the model has them; nothing where the machine lacks a compiler."""
        reason = None if is_elsewhere(device) else reason_against_compiling(device)
        if reason is not None:
            return offer(self.name, ("off",), dict.fromkeys(("block", "model"), reason))
        if not structure.blocks:
            return offer(self.name, ("off", "model"), {"block": "the model has no repeated blocks"})
        return offer(self.name, ("off", "block", "model"))

    def apply(self, build: Build) -> None:
        """Marks modules for compilation at their first call.

        Raises:
            ConfigError: no compiler, no blocks, or a mode that needs CUDA.
        """
        config = build.config
        if config.compile == "off":
            return
        reason = reason_against_compiling(build.device.type)
        if reason is None and config.compile == "block" and not build.structure.blocks:
            reason = "the model has no repeated blocks"
        check_applies(config, self.name, reason)
        if config.compile_mode in CUDAGRAPH_MODES and build.device.type != "cuda":
            raise ConfigError(
                f"compile_mode={config.compile_mode} records CUDA graphs; it needs a CUDA device",
                hint="Use compile_mode=default.",
            )
        use_own_cache()
        options: dict[str, Any] = {"dynamic": False}
        if config.compile_mode != "default":
            options["mode"] = config.compile_mode
        if config.compile == "model":
            build.module.compile(**options)
        else:
            for name, _ in build.structure.all_blocks:
                build.model.get_submodule(name).compile(**options)
        if config.compile_mode in CUDAGRAPH_MODES:
            # outputs of a recorded graph are overwritten by the next replay; this says where a new one begins
            build.hooks.begin = torch.compiler.cudagraph_mark_step_begin


class CompileModeStrategy(Strategy):
    """The mode of torch.compile; applied by CompilationStrategy."""

    name = "compile_mode"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CUDA all modes; on CPU the default one."""
        if device == "cuda":
            return offer(self.name, knob_values(self.name) or ())
        tuning = "on CPU it times matmul templates against MKL at each compilation, for minutes"
        graphs = dict.fromkeys(CUDAGRAPH_MODES, "CUDA graphs need a CUDA device")
        return offer(self.name, ("default",), graphs | {"max-autotune-no-cudagraphs": tuning})


@functools.cache
def reason_against_compiling(device: str) -> str | None:
    """Why torch.compile cannot work for a device type on this machine; None if it can."""
    if device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "torch.compile needs Triton on CUDA, and it is not installed"
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # triton/runtime/build.py
            return (
                "torch.compile on CUDA needs a C compiler, with which Triton builds what starts its kernels, "
                "and none is installed (gcc, clang, or what the variable CC names): install gcc"
            )
        return None
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, exc.CppCompileError, RuntimeError):
        return "torch.compile needs a C++ compiler on CPU, and none is installed (g++ or clang++)"
    return None

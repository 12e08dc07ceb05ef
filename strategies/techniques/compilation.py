"""The compile knob: torch.compile of each repeated block, or of the model with its loss.

Compiled in place (`nn.Module.compile`), so that no name in a state changes. Blocks of one class share their compiled
code. Shapes are static: a run has one micro-batch shape. Fused kernels round differently, within fp32 noise.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build, Choices, LeftOut
from autoplan.strategies.workloads.workload import Workload

CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")


class CompilationStrategy:
    """off; block: each repeated block; model: the model and its loss as one."""

    name = "compile"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """Blocks only where the model has them; nothing where the machine lacks a compiler."""
        reason = reason_against_compiling(device)
        if reason is not None:
            left_out = tuple(LeftOut(value=value, reason=reason) for value in ("block", "model"))
            return Choices(knob=self.name, values=("off",), left_out=left_out)
        if not structure.blocks:
            dropped = LeftOut(value="block", reason="the model has no repeated blocks")
            return Choices(knob=self.name, values=("off", "model"), left_out=(dropped,))
        return Choices(knob=self.name, values=("off", "block", "model"))

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
        if reason is not None:
            raise ConfigError(f"compile={config.compile} does not apply: {reason}", hint="Use compile=off.")
        if config.compile_mode in CUDAGRAPH_MODES and (build.device.type != "cuda" or config.compile == "block"):
            raise ConfigError(
                f"compile_mode={config.compile_mode} records CUDA graphs; it needs a CUDA device and compile=model",
                hint="Use compile_mode=default.",
            )
        options: dict[str, Any] = {"dynamic": False}
        if config.compile_mode != "default":
            options["mode"] = config.compile_mode
        if config.compile == "model":
            build.module.compile(**options)
        else:
            for name, _ in build.structure.blocks:
                build.model.get_submodule(name).compile(**options)
        if config.compile_mode in CUDAGRAPH_MODES:
            # outputs of a recorded graph are overwritten by the next replay; this says where a new one begins
            build.begin_micro_step = torch.compiler.cudagraph_mark_step_begin


class CompileModeStrategy:
    """The mode of torch.compile; applied by CompilationStrategy."""

    name = "compile_mode"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """On CUDA all modes; on CPU the default one."""
        if device == "cuda":
            modes = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
            return Choices(knob=self.name, values=modes)
        graphs = tuple(LeftOut(value=mode, reason="CUDA graphs need a CUDA device") for mode in CUDAGRAPH_MODES)
        tuning = LeftOut(
            value="max-autotune-no-cudagraphs",
            reason="on CPU it times matmul templates against MKL at each compilation, for minutes",
        )
        return Choices(knob=self.name, values=("default",), left_out=(*graphs, tuning))

    def apply(self, build: Build) -> None:
        """Nothing by itself."""


@functools.cache
def reason_against_compiling(device: str) -> str | None:
    """Why torch.compile cannot work for a device type on this machine; None if it can."""
    if device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "torch.compile needs Triton on CUDA, and it is not installed"
        return None
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, exc.CppCompileError, RuntimeError):
        return "torch.compile needs a C++ compiler on CPU, and none is installed (g++ or clang++)"
    return None

"""The gelu knob: GPT-2's tanh formula of GELU as torch's own operation.

transformers' NewGELUActivation writes the formula out, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): eight passes
over the widest activation of a block, and as many tensors kept for the backward. torch.nn.functional.gelu with
approximate="tanh" is the same formula in one pass. Compiled code fuses the passes by itself.
"""

from __future__ import annotations

from torch import nn

from autoplan.errors import ConfigError
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.analysis.structure import Structure
from autoplan.strategies.techniques.base import Build
from autoplan.strategies.workloads.workload import Workload

WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation")
"""The classes of transformers.activations that write the formula out."""

NONE_WRITTEN_OUT = "the model has no GELU whose tanh formula is written out (NewGELUActivation of transformers)"


class GeluStrategy:
    """own: as the model has it; torch: one operation for the formula."""

    name = "gelu"

    def choices(self, workload: Workload, structure: Structure, hardware: HardwareProfile, device: str) -> Choices:
        """torch where a module has the formula."""
        return offer(self.name, ("own",), {"torch": None if written_out(structure.model) else NONE_WRITTEN_OUT})

    def apply(self, build: Build) -> None:
        """Puts torch's operation in the place of the formula.

        Raises:
            ConfigError: no module has it.
        """
        if build.config.gelu == "own":
            return
        if build.pipeline.cut is None and not written_out(build.model):
            raise ConfigError(f"gelu=torch does not apply: {NONE_WRITTEN_OUT}", hint="Use gelu=own.")
        use_torch_gelu(build.model)


def written_out(model: nn.Module) -> list[str]:
    """The names of the modules that write the formula out; a module that several parts share has several."""
    return [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).__module__ == "transformers.activations" and type(module).__name__ in WRITTEN_OUT
    ]


def use_torch_gelu(model: nn.Module) -> None:
    """Puts torch's operation in the place of the formula, in place; neither has parameters."""
    for name in written_out(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.GELU(approximate="tanh"))

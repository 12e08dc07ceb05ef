"""The models that are traced: copies of one, whole or with its stacks of blocks cut short."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.workloads.workload import Workload


class TracedModels:
    """Hands out copies of a workload's model, built once per depth.

    Args:
        workload: Builds the model.
        device: Where it is built.
        mode: FakeTensorMode, or a null context for the real thing.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self._built: dict[int | None, nn.Module] = {}

    def built(self, depth: int | None = None) -> nn.Module:
        """The model with `depth` blocks in each stack, None: whole. It is not to be changed.

        Raises:
            TypeError: its blocks stand in no list that can be cut.
        """
        if depth not in self._built:
            with self.mode, torch.device(self.device):
                model = self.workload.build_model()
            if depth is not None:
                cut_model(model, depth)
            self._built[depth] = model
        return self._built[depth]

    def copy(self, depth: int | None = None) -> nn.Module:
        """A copy to be prepared and run.

        Under fake tensors it has modules of its own and shares the parameters, which hold no values; whoever runs it
        leaves no gradient and no hook on them. Else all is its own.
        """
        model = self.built(depth)
        if not isinstance(self.mode, FakeTensorMode):
            return copy.deepcopy(model)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)


def uniform_depth(structure: Structure) -> int | None:
    """Blocks per stack, where all stacks are as long and each is of one class; else None."""
    lengths = {len(stack) for stack in structure.stacks}
    classes = [{type(block) for _, block in stack} for stack in structure.stacks]
    return lengths.pop() if len(lengths) == 1 and all(len(kinds) == 1 for kinds in classes) else None


def cut_model(model: nn.Module, depth: int) -> None:
    """Leaves the first `depth` blocks of each stack, in place.

    Raises:
        TypeError: its blocks stand in no list that can be cut.
    """
    for stack in find_structure(model).stacks:
        name = stack[0][0].rpartition(".")[0]
        parent = model.get_submodule(name)
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"{name} is a {type(parent).__name__}")
        del parent[depth:]
    config = getattr(model, "config", None)
    for attribute in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, depth)


def gradient_bytes(structure: Structure) -> float:
    """Bytes of the gradients of all blocks."""
    parameters = (p for _, block in structure.blocks for p in block.parameters() if p.requires_grad)
    return float(sum(p.numel() * p.element_size() for p in parameters))

"""The models that are traced: copies of the workload's model, whole or with each stack of blocks cut to a depth.

In: a workload. Out: modules on the device, or under fake tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.strategies.analysis.structure import Structure, find_structure
from autoplan.strategies.workloads.workload import Workload


class TruncatedModels:
    """Builds a workload's model once per depth, and gives out copies of it.

    Args:
        workload: Builds the model.
        device: Where it is built.
        mode: FakeTensorMode, or a null context for real tensors.
    """

    def __init__(self, workload: Workload, device: str, mode: Any) -> None:
        self.workload = workload
        self.device = device
        self.mode = mode
        self._built: dict[int | None, nn.Module] = {}

    def built(self, depth: int | None = None) -> nn.Module:
        """The model with `depth` blocks in each stack; None: the whole model. The caller must not change it.

        Raises:
            TypeError: the blocks are in no list that can be cut.
        """
        if depth not in self._built:
            with self.mode, torch.device(self.device):
                model = self.workload.build_model()
            if depth is not None:
                # The copy has its own config. The user's may belong to every model that build_model makes.
                model = self._copy(model)
                truncate_model(model, depth)
            self._built[depth] = model
        return self._built[depth]

    def copy(self, depth: int | None = None) -> nn.Module:
        """A copy that may be prepared and run.

        Under fake tensors the copy has its own modules and shares the parameters, which have no values; the caller
        must leave no gradient and no hook on them. With real tensors the copy shares nothing.
        """
        return self._copy(self.built(depth))

    def _copy(self, model: nn.Module) -> nn.Module:
        if not isinstance(self.mode, FakeTensorMode):
            return copy.deepcopy(model)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)


def uniform_depth(structure: Structure) -> int | None:
    """Blocks per stack, if all stacks have the same length and each has blocks of one class; else None."""
    lengths = {len(stack) for stack in structure.stacks}
    classes = [{type(block) for _, block in stack} for stack in structure.stacks]
    return lengths.pop() if len(lengths) == 1 and all(len(kinds) == 1 for kinds in classes) else None


def truncate_model(model: nn.Module, depth: int) -> None:
    """Keeps the first `depth` blocks of each stack, in place.

    Raises:
        TypeError: the blocks are in no list that can be cut.
    """
    for stack in find_structure(model).stacks:
        name = stack[0][0].rpartition(".")[0]
        parent = model.get_submodule(name)
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            raise TypeError(f"{name} is a {type(parent).__name__}, which cannot be cut: it is no list of modules")
        del parent[depth:]
    config = getattr(model, "config", None)
    for attribute in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, depth)


def gradient_bytes(structure: Structure) -> float:
    """Bytes of the gradients of all blocks."""
    parameters = (p for _, block in structure.blocks for p in block.parameters() if p.requires_grad)
    return float(sum(p.numel() * p.element_size() for p in parameters))

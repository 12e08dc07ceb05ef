"""Gradients of their own memory, for runs under CUDA graphs: allocated outside the graphs, cleared in place.

A recorded graph writes its results, the gradients among them, to the same addresses at each replay. Where `.grad` is
None, autograd keeps the graph's own output as the gradient, and the next micro-step overwrites it: torch then raises
"accessing gradient tensor output of CUDAGraphs that has been overwritten by a subsequent run". Its text asks for what
is here: "allocate stable .grad buffers outside of CUDAGraph capture ... by preallocating zeroed .grad tensors". Source:
torch/_inductor/cudagraph_trees.py, CUDAGraphTreeManager.format_dealloc_msg, torch 2.13 at line 2,658.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class OwnGradients:
    """The gradients of a run: attached before each backward, added to by it, zeroed after each step.

    A parameter that no backward of a step reached has no gradient for the optimizer, as in a plain loop: AdamW would
    decay its weight otherwise.

    Args:
        parameters: Those that train.
        optimizer: What a plain loop's `zero_grad` clears is what it holds; other gradients go on adding up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(parameters)
        self._held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._buffers: dict[int, torch.Tensor] = {}
        self._reached: set[int] = set()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        self._reached.add(id(parameter))

    def attach(self) -> None:
        """Gives each parameter without a gradient one of zeros; before each backward."""
        for parameter in self._parameters:
            if parameter.grad is None:
                buffer = self._buffers.get(id(parameter))
                if buffer is None:
                    buffer = self._buffers[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)
                else:
                    buffer.zero_()
                parameter.grad = buffer

    def drop_unused(self) -> None:
        """Takes the gradient of zeros from parameters that no backward reached; before anything reads gradients."""
        for parameter in self._parameters:
            if id(parameter) in self._held and id(parameter) not in self._reached:
                parameter.grad = None

    def clear(self) -> None:
        """Zeroes the gradients in place; after the optimizer's step."""
        held = (parameter for parameter in self._parameters if id(parameter) in self._held)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        self._reached.clear()

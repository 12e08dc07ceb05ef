"""Records one micro-step of one variant.

In: a workload, a variant, a copy of its model. Out: a `Recording`. The run is built by
`prepare()`, as in training; hooks on the blocks tell the recorder which part of the micro-step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from autoplan.planner.trace.model_profile import VariantKey
from autoplan.planner.trace.op_recorder import OpRecorder, Recording, in_backward
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques.loss_kernels import watch_loss_of_logits
from autoplan.strategies.workloads.batch import Batch, know_containers
from autoplan.strategies.workloads.workload import Workload


def config_of(key: VariantKey, workload: Workload) -> TrainingConfig:
    """A configuration of a variant. Its micro-batch is the fixed one, or any: the trace makes its own batches."""
    return TrainingConfig.model_validate(
        {
            "micro_batch": workload.fixed_micro_batch or 1,
            "precision": "bf16" if key.precision == "half" else "fp32",
            "attention": key.attention,
            "checkpointing": key.checkpointing,
            "loss": key.loss,
            "parameters": key.parameters,
        }
    )


def make_batch(workload: Workload, samples: int, mode: Any) -> Batch:
    """A batch of the workload; under fake tensors one without values, unless make_batch itself reads values.

    Such a batch is made for real, and its tensors lose their values then.

    Args:
        workload: What is trained.
        samples: How many.
        mode: FakeTensorMode, or a null context.
    """
    try:
        with mode:
            return workload.make_batch(samples, 0)
    except Exception:
        if not isinstance(mode, FakeTensorMode):
            raise
    with unset_fake_temporarily():
        batch = workload.make_batch(samples, 0)
    know_containers(batch)
    return pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch)


def record_step(
    workload: Workload, device: str, key: VariantKey, model: nn.Module, samples: int, mode: Any
) -> Recording:
    """Runs one micro-step of a variant and records it.

    Args:
        workload: What is trained.
        device: cpu or cuda.
        key: The variant.
        model: A copy of the workload's model. It is changed; its parameters are left without gradients and hooks.
        samples: The micro-batch.
        mode: FakeTensorMode, or a null context.

    Returns:
        The recording. Its bytes do not count what was alive before the micro-step.

    Raises:
        ConfigError: the variant does not apply to the workload.
    """
    with mode:
        blocks = [block for _, block in find_structure(model).blocks]
        # The model is on its device already, and torch cannot move fake parameters that something refers to.
        model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
        stored = [(parameter, parameter.data) for parameter in model.parameters()]  # which copies of a model share
        run = prepare(workload, config_of(key, workload), device=device, model=model)
        batch = make_batch(workload, samples, mode)
        recorder = OpRecorder()
        recorder.track([*model.parameters(), *model.buffers()])
        before = recorder.live_bytes
        hooks = _count_gradients(recorder, run.parameters)
        _mark_parts(recorder, blocks)
        recorder.mark_rnns(model)
        divisor = torch.tensor(1.0, device=device)
        try:
            with watch_loss_of_logits(recorder.mark_fused_loss), recorder:
                run.micro_step(batch, divisor, sync=True)
            recorder.recording.unused_parameters = any(parameter.grad is None for parameter in run.parameters)
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in run.parameters:
                parameter.grad = None
            for parameter, data in stored:
                if parameter.dtype is not data.dtype:
                    parameter.data = data
    recording = recorder.recording
    recording.peaks = {part: (a - before, b - before) for part, (a, b) in recording.peaks.items()}
    recording.saved_after_forward_bytes -= before
    return recording


def _count_gradients(recorder: OpRecorder, parameters: list[nn.Parameter]) -> list[Any]:
    """Hooks that add the bytes of each finished gradient to the recorder; returns their handles."""

    def count(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            # else of an nn.Embedding(sparse=True)
            dense = gradient if gradient.layout == torch.strided else gradient._values()
            recorder.gradient_bytes += dense.untyped_storage().nbytes()

    return [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]


def _mark_parts(recorder: OpRecorder, blocks: list[nn.Module]) -> None:
    """Hooks that set the recorder's current part (see Recording) and record what each block saves."""
    if not blocks:
        return
    first, last = blocks[0], blocks[-1]
    bytes_before: dict[int, int] = {}

    def before_forward(module: nn.Module, args: Any) -> None:
        if not in_backward():
            bytes_before[id(module)] = recorder.live_bytes

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # the recomputation of a checkpointed block
            return
        recorder.recording.block_saved_bytes += recorder.live_bytes - bytes_before[id(module)]
        if module is last:
            recorder.part = "head"
            _on_gradient(output, lambda: _enter_part(recorder, "backward", {"forward", "head"}))
            _on_gradient(args, lambda: _enter_part(recorder, "middle", {"backward"}))
        if module is first and first is not last:
            _on_gradient(output, lambda: _enter_part(recorder, "tail", {"middle", "backward", "head"}))

    for block in blocks:
        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)


def _enter_part(recorder: OpRecorder, part: str, allowed_from: set[str]) -> None:
    """Moves on to a part, but never back: a hook may run more than once."""
    if recorder.part in allowed_from:
        recorder.part = part


def _on_gradient(tensors: Any, action: Callable[[], None]) -> None:
    """Runs the action when the gradient of the first tensor that needs one is known."""
    for tensor in pytree.tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: action())
            return

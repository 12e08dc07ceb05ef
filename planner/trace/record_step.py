"""Records one micro-step of one variant: prepared by prepare(), with hooks that say which part of it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.planner.trace.model_profile import VariantKey
from autoplan.planner.trace.op_recorder import Recorder, Recording, Samples, in_backward
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.workload import Workload


def config_of(key: VariantKey) -> TrainingConfig:
    """A configuration of a variant; its micro-batch plays no part, the trace makes batches of its own."""
    return TrainingConfig.model_validate(
        {
            "micro_batch": 1,
            "precision": "bf16" if key.precision == "half" else "fp32",
            "attention": key.attention,
            "checkpointing": key.checkpointing,
            "loss": key.loss,
        }
    )


def record_step(
    workload: Workload, device: str, key: VariantKey, model: nn.Module, samples: Samples, mode: Any
) -> tuple[Recording, ...]:
    """One micro-step of a variant, as a recording for each of the micro-batches that `samples` asks for.

    Args:
        workload: What is trained.
        device: Where.
        key: The variant.
        model: A copy of the workload's model. It is changed; its parameters are left without gradients and hooks.
        samples: The micro-batch that runs, and those that are recorded.
        mode: FakeTensorMode, or a null context.

    Raises:
        ConfigError: the variant does not apply to the workload.
    """
    with mode:
        blocks = [block for _, block in find_structure(model).blocks]
        # built where it belongs already; under fake tensors torch cannot swap parameters that are looked at
        model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
        run = prepare(workload, config_of(key), device=device, model=model)
        batch = workload.make_batch(samples.run, 0)
        recorder = Recorder(samples)
        recorder.watch([*model.parameters(), *model.buffers()])
        at_start = recorder.alive
        hooks = _watch_gradients(recorder, run.parameters)
        _mark_parts(recorder, blocks)
        divisor = torch.tensor(1.0, device=device)
        try:
            with recorder:
                run.micro_step(batch, divisor, sync=True)
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in run.parameters:
                parameter.grad = None
    for recording, start in zip(recorder.recordings, at_start, strict=True):
        recording.peaks = {part: (a - start, b - start) for part, (a, b) in recording.peaks.items()}
        recording.saved_after_forward -= start
    return recorder.recordings


def _watch_gradients(recorder: Recorder, parameters: list[nn.Parameter]) -> list[Any]:
    def count(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.gradient_bytes += parameter.grad.untyped_storage().nbytes()

    return [parameter.register_post_accumulate_grad_hook(count) for parameter in parameters]


def _mark_parts(recorder: Recorder, blocks: list[nn.Module]) -> None:
    """Hooks that tell the recorder where it is: see Recording for the parts."""
    if not blocks:
        return
    first, last = blocks[0], blocks[-1]
    alive_before: dict[int, tuple[float, ...]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if not in_backward():
            alive_before[id(module)] = recorder.alive

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # the recomputation of a checkpointed block
            return
        for recording, now, before in zip(recorder.recordings, recorder.alive, alive_before[id(module)], strict=True):
            recording.block_saved.append(now - before)
        if module is last:
            recorder.part = "head"
            _on_gradient(output, lambda: _go(recorder, "backward", {"forward", "head"}))
            _on_gradient(args, lambda: _go(recorder, "middle", {"backward"}))
        if module is first and first is not last:
            _on_gradient(output, lambda: _go(recorder, "tail", {"middle", "backward", "head"}))

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)


def _go(recorder: Recorder, part: str, come_from: set[str]) -> None:
    if recorder.part in come_from:
        recorder.part = part


def _on_gradient(tensors: Any, then: Callable[[], None]) -> None:
    for tensor in pytree.tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: then())
            return

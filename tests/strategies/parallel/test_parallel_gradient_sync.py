"""What a rank holds of gradients, when FSDP2 scatters them at every micro-step or at the last alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.planner.trials.device_monitor import MemoryMonitor
from autoplan.processes import RankContext, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.techniques.mesh import named_parameters
from autoplan.strategies.workloads.batch import split_batch
from tests.strategies.parallel.world import (
    SEQUENCE,
    VOCABULARY,
    each_in_turn,
    fsdp_groups,
    make_workload,
    run_ranks,
)

MIB = 2**20


def gradient_bytes(run: TrainingRun) -> dict[str, int]:
    """Bytes of gradients that this rank holds: whole ones, and of shards (HSDP's sums of shards among them)."""
    held = {"whole": 0, "shards": 0}
    for group in fsdp_groups(run._build.module):
        if group._partial_reduce_output is not None:
            held["shards"] += group._partial_reduce_output.nbytes
        for parameter in group.fsdp_params:
            whole = parameter.unsharded_accumulated_grad
            if whole is None and hasattr(parameter, "_unsharded_param"):
                whole = parameter._unsharded_param.grad
            held["whole"] += 0 if whole is None else whole.nbytes
    for _, parameter in named_parameters(run.model):
        if parameter.grad is not None:
            held["shards"] += parameter.grad.to_local().nbytes
    return held


def hold_gradients(context: RankContext, config: TrainingConfig) -> dict[str, Any]:
    """Two micro-steps of one step; what is held after each."""
    workload = make_workload("gpt2")
    run = prepare(workload, config, device="cpu")
    batch = run.local_share(workload.make_batch(workload.global_batch, 0))
    divisor = run.loss_divisor(batch)
    held = []
    micros = split_batch(batch, config.micro_batch)
    for number, micro in enumerate(micros, start=1):
        run.micro_step(micro, divisor, sync=number == run.accumulation)
        held.append(gradient_bytes(run))
    whole = sum(parameter.full_tensor().nbytes for _, parameter in named_parameters(run.model))
    return {"held": held, "whole": whole}


SHARES = {"last": (1.0, 0.0), "every": (0.0, 0.5)}
"""Of the gradients of all, what is held between micro-steps: whole ones, and shards."""


@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, [{"dp_shard": 2, "gradient_sync": "last"}, {"dp_shard": 2, "gradient_sync": "every"}]),
        (4, [{"dp_replicate": 2, "dp_shard": 2, "gradient_sync": "every", "micro_batch": 1}]),
    ],
    ids=["fsdp", "hsdp"],
)
def test_what_is_held_between_micro_steps(zygote: Zygote, ranks: int, knobs: list[dict[str, Any]]) -> None:
    configs = [TrainingConfig(**({"micro_batch": 2} | one)) for one in knobs]
    for rank in run_ranks(zygote, each_in_turn, ranks, (hold_gradients, [(one,) for one in configs])).ranks:
        for config, result in zip(configs, rank.result, strict=True):
            whole, held = result["whole"], result["held"]
            whole_share, shard_share = SHARES[config.gradient_sync]
            for between in held[:-1]:
                assert between["whole"] == pytest.approx(whole_share * whole)
                assert between["shards"] == pytest.approx(shard_share * whole, rel=0.05)  # padded to an even split
            assert held[-1]["whole"] == 0
            assert held[-1]["shards"] == pytest.approx(0.5 * whole, rel=0.05)


def build_deep() -> nn.Module:
    """16 blocks of 3.2 M parameters each, 192 MiB, and little outside them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=512, n_layer=16, n_head=8, use_cache=False)
    )


def peak_of_a_step(context: RankContext, config: TrainingConfig) -> dict[str, int]:
    """The resident peak of the second step above what was resident before it, in bytes; elements, whole."""
    import ctypes

    # pieces of 64 KiB and more are mapped one by one, so that what is freed is no longer resident
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)
    context.init_process_group("gloo", 60.0)
    workload = make_workload("gpt2", build_model=build_deep)
    run = prepare(workload, config, device="cpu")
    batch = run.local_share(workload.make_batch(workload.global_batch, 0))
    run.step(batch)
    watch = MemoryMonitor(torch.device("cpu"), None)
    before = watch.read().resident_bytes
    run.step(batch)
    after = watch.read().resident_bytes
    assert before is not None and after is not None
    elements = {name: parameter.numel() for name, parameter in named_parameters(run.model)}
    in_block = sum(count for name, count in elements.items() if ".h.0." in name)
    return {"peak": after - before, "elements": sum(elements.values()), "in_block": in_block}


@pytest.mark.exhaustive  # a minute: peaks of two ranks
def test_the_peak_of_a_step_is_smaller_when_every_micro_step_scatters(zygote: Zygote) -> None:
    """192 MiB of whole gradients against 96 of shards and, at a time, those of two blocks, 12 each, unscattered."""
    peaks = {}
    for sync in ("last", "every"):
        config = TrainingConfig.model_validate({"micro_batch": 1, "dp_shard": 2, "gradient_sync": sync})
        ranks = run_ranks(zygote, peak_of_a_step, 2, (config,)).ranks
        peaks[sync] = max(rank.result["peak"] for rank in ranks)
    assert peaks["last"] > 192 * MIB
    assert peaks["every"] < peaks["last"] - 48 * MIB, peaks

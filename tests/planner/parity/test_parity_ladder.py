"""The plain run does not fit at its own length: with checkpointing, proved first, it is compared all the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from autoplan.planner.parity.compare import compare
from autoplan.planner.parity.records import CHECK_SEQUENCE_LENGTH
from autoplan.planner.records.trials import Parity
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import Workload
from tests.contracts.parity_contract import candidate, reference
from tests.strategies.tiny import GPT2, LLAMA, language

LONG = {
    "llama": {**LLAMA, "max_position_embeddings": 192, "num_hidden_layers": 4},
    "gpt2": {**GPT2, "n_positions": 192},
}
CHECKPOINTED = TrainingConfig(micro_batch=2, checkpointing="full")


def verdict(workload: Workload, config: TrainingConfig) -> Parity:
    plain = reference(workload, config, rung="checkpointing")
    return compare(plain, [candidate(workload, config, plain)], config)


def with_another_recomputation(workload: Workload) -> Workload:
    """Past the length of the check's steps a block recomputes something else: any checkpointing of it is wrong."""
    build = workload.build_model

    def forward(honest: Any, hidden: torch.Tensor) -> Any:
        recomputes = torch._C._current_graph_task_id() != -1
        return honest(hidden * 2 if recomputes and hidden.shape[1] > CHECK_SEQUENCE_LENGTH else hidden)

    def build_model() -> torch.nn.Module:
        model = build()
        block: Any = model.model.layers[1].mlp
        block.forward = functools.partial(forward, block.forward)
        return model

    workload.build_model = build_model
    return workload


@pytest.mark.parametrize(
    ("name", "knobs"), [("llama", {"checkpointing": "full"}), ("gpt2", {"precision": "bf16"})], ids=str
)
def test_the_own_length_is_compared(name: str, knobs: dict[str, Any]) -> None:
    config = TrainingConfig.model_validate({"micro_batch": 2, **knobs})
    parity = verdict(language(LONG[name], length=192), config)
    assert parity.passed, parity.failures
    assert not parity.not_checked
    assert any(check.name == "whole gradient, own length" for check in parity.checks)


def test_a_fault_that_both_share_is_found_on_two_blocks_and_what_has_no_checkpointing_is_not_to_blame() -> None:
    workload = with_another_recomputation(language(LONG["llama"], length=192))
    plain = reference(workload, CHECKPOINTED, rung="checkpointing")
    parity = compare(plain, [candidate(workload, CHECKPOINTED, plain)], CHECKPOINTED)
    assert not parity.passed
    assert "full checkpointing changes the gradient of two blocks at 192 tokens" in parity.failures[0]
    other = TrainingConfig(micro_batch=2, precision="bf16")
    parity = compare(plain, [candidate(workload, other, plain)], other)
    assert parity.passed, parity.failures
    assert "its own 192 tokens: full checkpointing changes the gradient" in " ".join(parity.not_checked)


def test_the_fault_would_not_be_seen_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.planner.parity import reference as module

    monkeypatch.setitem(module.TOLERANCES, "fp32", module.TOLERANCES["fp32"].model_copy(update={"whole": 1e9}))
    assert verdict(with_another_recomputation(language(LONG["llama"], length=192)), CHECKPOINTED).passed

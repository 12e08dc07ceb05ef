"""Every value that a technique offers on this machine trains the same thing, on models of different make."""

import functools

import pytest
import torch

from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import DEGREES, TrainingConfig
from autoplan.strategies.prepare import STRATEGIES
from tests.contracts.knob_cases import needed_by
from tests.contracts.parity_contract import check_parity_of
from tests.recorded import make_hardware
from tests.strategies.tiny import BERT, GPT2, LLAMA, T5, classifier, language

WORKLOADS = {
    "gpt2": lambda: language(GPT2),
    "llama": lambda: language(LLAMA),
    "classifier": lambda: classifier(),
    "batch_norm": lambda: classifier(norm=True, fixed_micro_batch=4),
}
SLOW = {("compile", "block"), ("compile", "model")}
SLOWEST = {("gpt2", "compile", value) for value in ("block", "model")}  # half a minute each; `make test` compiles one
ALL_OF = "gpt2"
"""Of the other workloads `make test` runs what this one has not, and a value of each technique that reads the model."""
READ_THE_MODEL = {"checkpointing": "selective", "loss": "fused", "precision": "bf16", "parameters": "bf16"}


@functools.cache
def offered(workload_name):
    """(knob, value) of all that the strategies offer for a workload, the plain value of each left out."""
    elsewhere = {case.values[1:] for case in offered(ALL_OF)} if workload_name != ALL_OF else set()
    return list(cases(workload_name, elsewhere))


def cases(workload_name, elsewhere):
    workload = WORKLOADS[workload_name]()
    with torch.device("meta"):
        structure = find_structure(workload.build_model())
    for strategy in STRATEGIES:
        if strategy.name in DEGREES:
            continue  # on several ranks: tests/strategies/parallel/test_parallel_parity.py
        choices = strategy.choices(workload, structure, make_hardware(), "cpu")
        for value in choices.values[0 if strategy.name == "micro_batch" else 1 :]:
            if (strategy.name, value) not in SLOW or workload_name in ("gpt2", "batch_norm"):
                marks = [pytest.mark.slow] if (strategy.name, value) in SLOW else []
                alike = (strategy.name, value) in elsewhere - SLOW and READ_THE_MODEL.get(strategy.name) != value
                marks += [pytest.mark.exhaustive] * (alike or (workload_name, strategy.name, value) in SLOWEST)
                yield pytest.param(workload_name, strategy.name, value, marks=marks)


@pytest.mark.parametrize(("workload_name", "knob", "value"), [case for name in WORKLOADS for case in offered(name)])
def test_every_offered_value_trains_the_same(workload_name, knob, value):
    micro_batch = WORKLOADS[workload_name]().fixed_micro_batch or 2
    config = TrainingConfig.model_validate({"micro_batch": micro_batch} | needed_by(knob) | {knob: value})
    parity = check_parity_of(WORKLOADS[workload_name], config)
    assert parity.passed, parity
    assert parity.worst_gradient_error is not None and parity.worst_gradient_error <= parity.gradient_error_tolerance
    lossy = {"parameters", "optimizer_state"} & config.knobs_off_default().keys()
    assert parity.changes_numerics is (config.precision != "fp32" or bool(lossy))


@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "selective", "loss": "fused", "precision": "bf16", "attention": "eager"},
        {"checkpointing": "full", "loss": "fused", "precision": "fp16", "optimizer_step": "fused"},
        {"checkpointing": "every_2", "loss": "fused", "optimizer_step": "foreach"},
        pytest.param({"compile": "block", "checkpointing": "selective", "loss": "fused"}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"compile": "model", "checkpointing": "full", "loss": "fused", "precision": "bf16"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_combinations(knobs):
    parity = check_parity_of(WORKLOADS["gpt2"], TrainingConfig(micro_batch=2, **knobs))
    assert parity.passed, parity


OTHER = {"t5": functools.partial(language, T5), "bert": functools.partial(language, BERT)}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("knobs", [{"checkpointing": "full"}, {"precision": "bf16"}], ids=str)
def test_other_kinds_of_language_model(name, knobs):
    parity = check_parity_of(OTHER[name], TrainingConfig(micro_batch=2, **knobs))
    assert parity.passed, parity


def test_each_strategy_says_why_it_leaves_a_value_out():
    workload = WORKLOADS["classifier"]()
    structure = find_structure(workload.build_model())
    for strategy in STRATEGIES:
        choices = strategy.choices(workload, structure, make_hardware(), "cpu")
        assert choices.values, strategy.name
        assert all(len(left_out.reason) > 10 for left_out in choices.left_out)

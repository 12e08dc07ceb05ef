"""Liger's kernels: what is said where they cannot run; what they compute is in interpreted_liger.py, on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoplan.errors import ConfigError
from autoplan.planner.space.generate import narrow
from autoplan.strategies.analysis.facts import LeftOut
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import kernels
from autoplan.strategies.techniques.kernels import KernelsStrategy
from autoplan.strategies.techniques.rules import incompatible
from tests.exports.environments import needs_environment, run_python
from tests.recorded import make_hardware
from tests.strategies.tiny import GPT2, LLAMA, classifier, language

HERE = Path(__file__).parent


def reason(workload: Any, device: str) -> str:
    with torch.device("meta"):
        structure = find_structure(workload.build_model())
    (found,) = KernelsStrategy().choices(workload, structure, make_hardware(), device).left_out
    return found.reason


def test_each_reason_is_named_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "for GPUs" in reason(language(LLAMA), "cpu")
    spec: Any = None
    monkeypatch.setattr(kernels, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: spec)))
    assert 'pip install "autoplan[cuda]"' in reason(language(LLAMA), "cuda")
    spec = "there"
    monkeypatch.setattr(kernels, "liger_function", {"llama": print}.get)
    assert "no kernels for models of type gpt2" in reason(language(GPT2), "cuda")
    assert "not one of transformers" in reason(classifier(), "cuda")
    with torch.device("meta"):
        structure = find_structure(language(LLAMA).build_model())
    offered = KernelsStrategy().choices(language(LLAMA), structure, make_hardware(), "cuda")
    assert offered.values == ("own", "liger") and not offered.left_out


@pytest.mark.parametrize("installed", [False, True])
def test_prepare_refuses_with_the_reason_and_the_install_line(installed: bool, monkeypatch: Any) -> None:
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: "there" if installed else None))
    monkeypatch.setattr(kernels, "importlib", found)
    with pytest.raises(ConfigError, match="written in Triton, for GPUs") as caught:
        prepare(language(LLAMA), TrainingConfig(micro_batch=2, kernels="liger"))
    assert ('liger-kernel is not installed: pip install "autoplan[cuda]"' in caught.value.message) is not installed
    assert caught.value.hint == "Use kernels=own."
    left_out = LeftOut(knob="kernels", value="liger", reason=reason(language(LLAMA), "cpu"))
    with pytest.raises(ConfigError, match=r"kernels=liger is not possible here: .*for GPUs") as refused:
        narrow("kernels", ["own"], [left_out], {"kernels": "liger"}, {})
    assert ("pip install" in refused.value.message) is not installed


@pytest.mark.parametrize("knobs", [{"compile": "block"}, {"tp": 2}, {"pp": 2, "pp_microbatches": 2}], ids=str)
def test_what_does_not_go_together(knobs: Any) -> None:
    assert "kernels=liger" in (incompatible(TrainingConfig(micro_batch=2, kernels="liger", **knobs)) or "")


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(**needs_environment("kernels")[1].kwargs, condition=needs_environment("kernels")[1].args[0])
def test_the_numbers_by_tritons_interpreter() -> None:
    file = HERE / "interpreted_liger.py"
    done = run_python("kernels", ["-m", "pytest", "-q", "--no-header", file], env={"TRITON_INTERPRET": "1"})
    assert " passed" in done.stdout and "skipped" not in done.stdout

"""Modules that ask for the GPU while the zygote imports them: the ranks that it forks can use CUDA all the same.

There is no GPU here. A module that initialises CUDA is one after whose import torch says to each forked process what
its C code says there then (`_cuda_isInBadFork`). All else is real: imports, forks, ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Task, Zygote

INITIALISES_CUDA = """
import os
import torch
_here = os.getpid()
torch.cuda._is_in_bad_fork = lambda: os.getpid() != _here
"""


def look(context: object, *names: str) -> dict[str, Any]:
    """What a rank has of some modules, and whether torch refuses CUDA to it."""
    import torch

    return {"bad": torch.cuda._is_in_bad_fork()} | {name: name in sys.modules for name in names}


@pytest.mark.slow
def test_a_module_that_initialises_cuda_is_left_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_for_the_gpu.py").write_text(INITIALISES_CUDA)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("json", "torch", "asks_for_the_gpu", "wave")
    with Zygote(preload=names) as zygote:
        assert set(zygote.preload_errors) == {"asks_for_the_gpu"}
        assert "initialises CUDA" in zygote.preload_errors["asks_for_the_gpu"]
        found = zygote.run(Task(target=look, args=names, total_deadline_s=60.0)).check().ranks[0].result
    assert found == {"bad": False, "json": True, "torch": True, "asks_for_the_gpu": False, "wave": False}


def look_for_torchao(context: object) -> dict[str, Any]:
    """What a rank has of transformers and finds of torchao."""
    before = look(context, "transformers.modeling_utils", "torchao")
    import torchao
    from transformers.utils import is_torchao_available

    return before | {"available": is_torchao_available(), "version": torchao.__version__}


@pytest.mark.slow
def test_torchao_is_not_imported_before_the_ranks_and_they_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' models import torchao wherever it is installed; here one that would start CUDA is installed."""
    support = tmp_path / "torchao/prototype/safetensors"
    support.mkdir(parents=True)
    (tmp_path / "torchao/__init__.py").write_text("__version__ = '99.0'\n" + INITIALISES_CUDA)
    (support / "safetensors_support.py").write_text("flatten_tensor_state_dict = None\n")
    metadata = tmp_path / "torchao-99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Zygote(preload=("torch", "transformers.modeling_utils")) as zygote:
        assert zygote.preload_errors == {}
        found = zygote.run(Task(target=look_for_torchao, total_deadline_s=120.0)).check().ranks[0].result
    expected = {"bad": False, "transformers.modeling_utils": True, "torchao": False}
    assert found == expected | {"available": True, "version": "99.0"}

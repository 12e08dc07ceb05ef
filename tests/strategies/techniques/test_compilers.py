"""Whether torch.compile can work on a machine with a GPU: Triton, and the C compiler that Triton calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autoplan.strategies.techniques.compilation import reason_against_compiling


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton can be imported, and no program is on the path."""
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    reason_against_compiling.cache_clear()
    yield
    reason_against_compiling.cache_clear()


def test_without_a_c_compiler_nothing_is_compiled_on_cuda() -> None:
    reason = reason_against_compiling("cuda")
    assert reason is not None and "C compiler" in reason and "install gcc" in reason


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_either_compiler_will_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    assert reason_against_compiling("cuda") is None


def test_a_compiler_that_is_named_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/compilers/cc")
    assert reason_against_compiling("cuda") is None


def test_without_triton_there_is_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton" in str(reason_against_compiling("cuda"))

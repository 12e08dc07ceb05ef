"""Which of many parametrised cases that are alike `make test` runs; `make test-all` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], in_make_test: Collection[Any]) -> list[Any]:
    """The cases as parameters; those that `make test` leaves out are marked `exhaustive`.

    Raises:
        AssertionError: a case that should be run is none of the cases.
    """
    cases = list(cases)
    assert all(case in cases for case in in_make_test), f"{[c for c in in_make_test if c not in cases]}: no such case"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.exhaustive] * (case not in in_make_test)
        )
        for case in cases
    ]

"""Memory over the steps: growth, and the lines that keep tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoplan.planner.diagnose.memory import cut_graphs, find_kept, growth_bytes, line_that_grows, sizes_of_names
from autoplan.planner.diagnose.session import steps_with

MIB = 1 << 20


def test_memory_grows_only_if_it_goes_on_growing() -> None:
    assert growth_bytes([n * MIB for n in range(40)]) == pytest.approx(MIB)
    assert growth_bytes([0] * 20 + [500 * MIB] * 20) == 0  # a cache that came once
    assert growth_bytes([n % 4 * MIB for n in range(40)]) == 0
    assert growth_bytes([1, 2]) == 0


@pytest.mark.parametrize(
    "line",
    ["losses.append(loss)", "losses += loss", "self.losses.extend([loss])", "losses = losses + loss",
     "losses[step] = loss", "losses['train'].append(loss)", "out, losses = cell(x, losses)"],
)  # fmt: skip
def test_the_line_that_adds_to_a_name(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(f"losses = []\nother.append(losses)\n{line}\n")
    name = "self.losses" if line.startswith("self") else "losses[0]" if "'" in line else "losses"
    assert line_that_grows(str(tmp_path / "train.py"), name) == "train.py:3"


def test_lists_and_sums_that_keep_graphs_are_found_and_cut() -> None:
    weight, numbers = torch.ones(4, requires_grad=True), []
    kept: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    total = (weight * 0).sum()
    before = sizes_of_names()
    for step in range(10):
        loss = (weight * step).sum()
        kept.append(loss)
        plain.append(loss.detach())
        numbers.append(step)
        total = total + loss
    found = {one.name: one for one in find_kept(before, 10)}
    assert set(found) == {"kept", "plain", "total"}
    assert found["kept"].graphs and not found["plain"].graphs
    since = {"kept": 5}
    cut_graphs(("kept", "total"), since)
    assert [one.grad_fn is None for one in kept] == [False] * 5 + [True] * 5
    assert total.grad_fn is None and since["kept"] == 10


def test_a_graph_of_a_longer_sequence_is_no_sum() -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = weight.sum()
    before = sizes_of_names()
    for step in range(20):
        states = [weight]
        for _ in range(step):
            states[0] = states[0].sin()
        loss = states[0].sum()
    assert loss.grad_fn is not None and "loss" not in {one.name for one in find_kept(before, 10)}


def test_what_comes_each_fourth_step_has_that_cycle() -> None:
    assert steps_with([0.0, 0.0, 0.0, 1.0] * 6) == (6, 4)
    assert steps_with([0.0] * 9 + [5.0]) == (1, 10)
    assert steps_with([1.0, 1.2, 0.9]) == (3, 1)

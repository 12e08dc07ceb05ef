"""The hooks and switches in one process: what they take away is away, and comes back."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torch.utils.data._utils import fetch

from autoplan.planner.diagnose.clock import Clock
from autoplan.planner.diagnose.hooks import (
    OF_PROFILER,
    Hooks,
    LoaderHooks,
    _goes_elsewhere,
    cropped,
    in_single,
    padding_share,
)
from autoplan.planner.diagnose.libraries import around
from autoplan.planner.diagnose.records import Suspect
from autoplan.planner.diagnose.sandbox import Sandbox
from autoplan.planner.diagnose.session import recompile_reasons
from autoplan.planner.diagnose.switches import Undo, can_foreach, can_fuse, has_acted, remove


def hooks_in(folder: Path) -> Hooks:
    return Hooks(Clock(), Sandbox(folder), lambda: None)


def without(hooks: Hooks, switch: str) -> Undo:
    return remove(hooks, Suspect(switch=switch, part="forward", worth=0.5))


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> LoaderHooks:
    """Hooks of DataLoaders, which are taken away after the test."""
    hooks = LoaderHooks(Clock())
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", dataloader._BaseDataLoaderIter.__next__)
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", fetch._MapDatasetFetcher.fetch)
    hooks.install()
    return hooks


DATA = TensorDataset(torch.arange(6.0))


def epoch(hooks: LoaderHooks, loader: DataLoader[tuple[torch.Tensor, ...]] | None = None) -> list[float]:
    """Trains an epoch of three batches; the first number of each."""
    seen = []
    for (batch,) in loader or DataLoader(DATA, batch_size=2):
        hooks.note_training()
        seen.append(float(batch[0]))
    return seen


def test_where_there_is_a_gpu_a_tensor_of_the_host_is_read_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer reads its number of steps, which is on the host, once for each parameter."""
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        hooks = hooks_in(tmp_path)
        read = hooks._read(torch.Tensor.item)
        hooks.clock.open()
        assert read(torch.tensor(3.0)) == 3.0
        assert hooks._read(lambda device: device)(0) == 0  # torch.cuda.synchronize(0)
        calls = sum(calls for (part, _), (_, calls) in hooks.clock.lines.items() if part == "sync")
        assert calls == (1 if has_gpu else 2)


def test_autocast_of_a_gpu_is_seen_before_it_is_known_where_the_training_runs(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    hooks.clock.open()
    hooks.modules._outermost(nn.Module.__call__, nn.Linear(2, 2), (torch.ones(1, 2),), {})
    assert not hooks.modules.low_precision
    torch.set_autocast_enabled("cuda", True)  # `with torch.autocast("cuda")` does nothing where there is none
    try:
        hooks.modules._outermost(nn.Module.__call__, nn.Linear(2, 2), (torch.ones(1, 2),), {})
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert hooks.modules.low_precision


@pytest.mark.parametrize(("every", "part"), [(1, "forward"), (4, "no_grad")])
def test_forwards_without_gradients_are_a_part_of_their_own_where_they_are_seldom(
    tmp_path: Path, every: int, part: str
) -> None:
    hooks, model = hooks_in(tmp_path), nn.Linear(4, 4)

    def forward() -> None:
        hooks.modules._outermost(nn.Module.__call__, model, (torch.ones(1, 4),), {})

    steps = []
    for step in range(8):
        hooks.clock.open()
        forward()
        if step % every == every - 1:
            with torch.no_grad():
                forward()
            assert hooks.clock.background == ("loss" if part == "forward" else part)
        hooks.modules.end_step()
        steps.append(hooks.clock.close())
    assert any(of == "no_grad" and line.startswith("test_hooks.py:") for of, line in hooks.clock.lines) == (every > 1)
    own = [step.parts.get("no_grad", 0.0) > 0 for step in steps]
    assert own == [part == "no_grad" and step % every == every - 1 for step in range(8)]
    assert all(step.parts["forward"] > 0 for step in steps)


@pytest.mark.parametrize(("each_step", "from_a_loader"), [(True, False), (True, True), (False, False)])
def test_a_policy_that_acts_in_each_step_is_no_evaluation(tmp_path: Path, each_step: bool, from_a_loader: bool) -> None:
    hooks, model = hooks_in(tmp_path), nn.Linear(4, 4)
    hooks._trained = {id(one) for one in model.parameters()}
    call, train = nn.Module.__call__, around(nn.Module.train, hooks.modules._mode)
    evaluated = 0
    for step in range(8):
        hooks.clock.open()
        if each_step or step % 4 == 3:
            train(model, False)
            with torch.no_grad():
                if from_a_loader:
                    hooks.loaders._last = DataLoader(DATA)
                hooks.modules._outermost(call, model, (torch.ones(1, 4),), {})
            train(model, True)
        hooks.modules._outermost(call, model, (torch.ones(1, 4),), {})
        hooks.modules.end_step()
        evaluated += hooks.clock.close().parts.get("evaluation", 0.0) > 0
    assert evaluated == (8 if from_a_loader else 0 if each_step else 2)


def test_a_second_loader_of_the_training_is_whole_where_evaluations_are_left_out(loaders: LoaderHooks) -> None:
    first, second = DataLoader(DATA, batch_size=2), DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    held_out = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)

    def trained() -> int:
        count = 0
        for _ in zip(first, second, strict=True):
            loaders.note_training()
            count += 1
        return count

    def evaluated() -> int:
        return sum(loaders.note_evaluation() for _ in held_out)

    assert (trained(), evaluated()) == (3, 4)
    loaders.clock.skipped.add("evaluation")
    assert (trained(), evaluated()) == (3, 1)


def test_a_step_that_fails_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    hooks = Hooks(Clock(), Sandbox(tmp_path), lambda: ended.append(1))
    wrapped = hooks._stepped(torch.optim.Optimizer.profile_hook_step)
    monkeypatch.setattr(torch.optim.Optimizer, "profile_hook_step", staticmethod(wrapped))

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                closure()
            super().step()

    def fails() -> None:
        raise RuntimeError("out of memory")

    optimizer = Own([nn.Parameter(torch.ones(2))], lr=0.1)
    places = (optimizer.register_step_pre_hook(hooks._before_optimizer),)
    places += (optimizer.register_step_post_hook(hooks._after_optimizer),)
    hooks.clock.open()
    for closure in (None, fails, None, fails, None):
        try:
            optimizer.step(closure)
        except RuntimeError:
            assert closure is fails and hooks.clock.depth == 0 and hooks.clock.current == "loop"
    for place in places:
        place.remove()
    assert len(ended) == 3


def test_what_an_optimizer_has_that_has_not_stepped_yet_is_not_needless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, model = hooks_in(tmp_path), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    monkeypatch.setattr(
        torch.optim.Optimizer, "add_param_group", around(torch.optim.Optimizer.add_param_group, hooks._added)
    )
    head, seldom = (torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 1))
    assert hooks.is_trained(model[1]) is None
    hooks.clock.open()
    hooks._before_optimizer(head, (), {})
    hooks._after_optimizer(head, (), {})
    model(torch.ones(1, 2)).sum().backward()
    hooks.modules.called.add(model)
    assert list(hooks.needless()) == ["Sequential.2"] and hooks.is_trained(model[1])
    seldom.add_param_group({"params": list(model[2].parameters())})
    assert not hooks.needless()


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "copies"),
    [
        ("to", (torch.float16,), {}, False),
        ("to", ("cpu",), {}, False),
        ("to", ("cuda:1", torch.float16), {}, True),
        ("to", (0,), {}, True),
        ("to", (torch.ones(1, dtype=torch.float64),), {}, False),
        ("to", (), {"dtype": torch.float16}, False),
        ("to", (), {"memory_format": torch.channels_last}, False),
        ("to", (), {"device": torch.device("cuda")}, True),
        ("cuda", (), {}, True),
        ("cuda", (), {"non_blocking": True}, True),
    ],
)
def test_a_cast_is_no_copy_to_the_device(name: str, args: Any, kwargs: Any, copies: bool) -> None:
    assert _goes_elsewhere(name, torch.ones(1), args, kwargs) is copies


@pytest.mark.parametrize("by_schedule", [False, True])
def test_a_profiler_that_is_left_on_is_off_meanwhile_and_records_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_schedule: bool
) -> None:
    hooks, traces = hooks_in(tmp_path), []
    for name, state in OF_PROFILER.items():
        wrapped = hooks._profiles(getattr(torch.profiler.profile, name), state)
        monkeypatch.setattr(torch.profiler.profile, name, wrapped)
    course = torch.profiler.schedule(wait=0, warmup=1, active=2) if by_schedule else None
    suspect = Suspect(switch="profiler", part="loop", worth=0.5)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=course, on_trace_ready=traces.append) as profiler:

        def steps(count: int) -> list[bool]:
            recorded = []
            for _ in range(count):
                torch.ones(3).sum()
                recorded.append(torch.autograd._profiler_enabled())
                profiler.step()
            return recorded

        for before in range(4):  # prepared, recording, and in between
            assert any(steps(3 + before)), before
            made = len(traces)
            undo = remove(hooks, suspect)
            assert steps(7) == [False] * 7 and has_acted(hooks, suspect) and len(traces) == made
            undo()
            recorded = steps(6)
            assert recorded == [True] * 6 or by_schedule and sum(recorded) == 4, recorded
        assert not by_schedule or len(traces) > made
    assert not torch.autograd._profiler_enabled()


def test_a_loader_that_is_made_for_each_epoch_is_one_loader(loaders: LoaderHooks) -> None:
    epoch(loaders)
    assert not loaders.remade
    epoch(loaders)
    assert loaders.remade
    loaders.restart()
    loaders.clock.skipped.add("evaluation")
    assert epoch(loaders) == [0.0, 2.0, 4.0]  # it is no evaluation
    assert loaders.starts == 1 and loaders.got == 3
    loaders.clock.skipped.clear()
    epoch(loaders, DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    assert not loaders.remade  # another dataset


@pytest.mark.parametrize("remade", [False, True])
def test_an_epoch_of_known_batches_is_as_long_as_the_scripts_own(loaders: LoaderHooks, remade: bool) -> None:
    loader = None if remade else DataLoader(DATA, batch_size=2)
    for _ in range(3):
        assert epoch(loaders, loader) == [0.0, 2.0, 4.0]
    made = loaders.got
    loaders.replay = True
    assert len(epoch(loaders, loader)) == 3 and loaders.got == made
    iterator = iter(loader or DataLoader(DATA, batch_size=2))
    next(iterator)
    loaders.replay = False
    assert [float(batch[0]) for (batch,) in iterator] == [0.0, 2.0]  # its own, from the start, to the end of the epoch
    iterator = iter(loader or DataLoader(DATA, batch_size=2))
    next(iterator)
    loaders.replay = True
    assert len(list(iterator)) == 2
    loaders.replay = False
    iterator = iter(loader or DataLoader(DATA, batch_size=2))
    next(iterator)
    loaders.replay = True
    next(iterator)
    loaders.replay = False
    assert len(list(iterator)) == 1  # one of its own, one that was given, one of its own
    assert epoch(loaders, loader) == [0.0, 2.0, 4.0]


def test_an_epoch_of_known_batches_has_a_length_and_goes_on_after_an_exception(
    loaders: LoaderHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's own iterators: a script may ask for their length, and skip a sample that cannot be read."""
    loader = DataLoader(DATA, batch_size=2)
    epoch(loaders, loader)
    epoch(loaders, loader)
    loaders.replay = True
    iterator: Any = iter(loader)
    assert len(iterator) == 3
    next(iterator)
    with monkeypatch.context() as patched:
        patched.setattr(loaders, "instead", lambda of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
    next(iterator)
    assert list(iterator) == []


class Again:
    """A batch sampler without an end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class OneIterator(DataLoader[tuple[torch.Tensor, ...]]):
    """One iterator for all epochs, as the loaders of ultralytics and timm have it."""

    def __init__(self) -> None:
        super().__init__(DATA, batch_size=2)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


def test_an_iterator_for_all_epochs_has_no_end(loaders: LoaderHooks) -> None:
    loader = OneIterator()
    for replay in (False, False, True, False):
        loaders.replay = replay
        assert len(epoch(loaders, loader)) == 3
    assert loaders.got == 8  # not the very first, of which no step was known, and none of the third epoch


class Values(NamedTuple):
    """A batch whose fields have the names of methods of a dict."""

    values: torch.Tensor
    get: int
    items: int


def test_a_batch_may_have_fields_of_any_name() -> None:
    ids = torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]])
    for batch in (Values(ids, 1, 2), SimpleNamespace(values=ids, get=1, items=2)):
        assert cropped(batch) is batch
    assert padding_share(Values(ids, 1, 2)) == padding_share(UserDict(ids=ids)) == 5 / 8
    assert cropped(UserDict(ids=ids))["ids"].shape == (2, 3)


def test_activations_are_kept_while_checkpointing_is_removed(tmp_path: Path) -> None:
    hooks, calls = hooks_in(tmp_path), []

    def run(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        calls.append(scale)
        return scale * x.sin()

    def step() -> int:
        calls.clear()
        own(run, torch.ones(3, requires_grad=True), scale=2.0, use_reentrant=False).sum().backward()
        return len(calls)

    own = hooks._checkpointed(checkpoint)
    assert step() == 2
    undo = without(hooks, "checkpointing")
    assert step() == 1
    undo()
    assert step() == 2 and hooks.recomputed == 3


def test_a_backward_over_the_same_graph_once_more_is_seen(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    own = hooks._backward(torch.autograd.backward)
    body, other = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))

    def again(first: Callable[[torch.Tensor], Any], second: Callable[[torch.Tensor], Any]) -> bool:
        hooks.again_s = 0.0
        hooks._forget_graph()
        hooks._shared = {}
        out = body(torch.randn(4, 8))
        first(out)
        second(out)
        return hooks.again_s > 0

    def keeps(out: torch.Tensor) -> None:
        own(out.sum(), None, True)

    assert again(keeps, lambda out: own(out.mean()))
    assert not again(keeps, lambda out: own(other(torch.randn(4, 8)).sum())), "another graph"
    assert not again(lambda out: own(out.sum(), None, True, True), lambda out: own(out.mean())), "of a gradient"
    assert not again(lambda out: (keeps(out), hooks._before_optimizer(None, (), {})), lambda out: own(out.mean()))
    zero_grad = hooks._zeroed(lambda: None)
    assert not again(lambda out: (keeps(out), zero_grad()), lambda out: own(out.mean())), "each by itself"
    edges = torch.autograd.graph.get_gradient_edge
    assert again(keeps, lambda out: own([edges(out)], [torch.ones(4, 8)]))


def test_a_backward_over_the_same_graph_is_left_out_and_made_again(tmp_path: Path) -> None:
    hooks, body = hooks_in(tmp_path), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    own = hooks._backward(torch.autograd.backward)

    def step() -> list[float]:
        hooks._forget_graph()
        hooks.clock.open()
        out = body(torch.ones(4, 8))
        sums = []
        for number, keeps in enumerate((True, True, False)):
            body.zero_grad()
            if number < 2:
                own((number + 1) * out.sum(), retain_graph=keeps)
            else:
                own(out.sum())
            sums.append(0.0 if body[0].bias.grad is None else float(body[0].bias.grad.abs().sum()))
        own(body(torch.ones(4, 8)).sum())  # a graph of its own
        return sums

    suspect = Suspect(switch="two_backwards", part="backward", worth=0.5)
    as_is = step()
    assert as_is[0] > 0 and as_is[1] == pytest.approx(2 * as_is[0]) and as_is[2] == pytest.approx(as_is[0])
    undo = remove(hooks, suspect)
    assert step() == [as_is[0], 0.0, 0.0] and has_acted(hooks, suspect) and body[0].bias.grad is not None
    undo()
    assert step() == pytest.approx(as_is)


def test_modules_are_compiled_while_that_is_tried_and_not_afterwards(tmp_path: Path) -> None:
    hooks, model = hooks_in(tmp_path), nn.Linear(4, 4)
    hooks.modules.called.add(model)
    suspect = Suspect(switch="compile", part="forward", worth=0.5)
    compiled = []
    for _ in range(2):
        undo = without(hooks, "compile")
        compiled.append(model._compiled_call_impl)
        undo()
        assert model._compiled_call_impl is None and not torch._dynamo.config.suppress_errors
    assert compiled[0] is not None and compiled[0] is compiled[1], "once"
    assert not has_acted(hooks_in(tmp_path), suspect), "nothing was compiled there"


def test_rows_that_a_batch_did_not_use_are_left_to_the_optimizer_no_more(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    model = nn.Sequential(nn.Embedding(4096, 128), nn.Linear(128, 1))
    hooks.modules.called.add(model)
    assert hooks.unused_rows() == {}
    model(torch.tensor([1, 5, 5])).sum().backward()
    ((name, (table, share)),) = hooks.unused_rows().items()
    assert name == "Sequential.0" and share == pytest.approx(1 - 2 / 4096)
    undo = without(hooks, "unused_rows")
    hooks._before_optimizer(None, (), {})
    assert table.grad is None and model[1].weight.grad is not None
    undo()
    model.zero_grad()
    model(torch.arange(4096)).sum().backward()
    assert hooks.unused_rows() == {}


def test_a_model_in_fp64_trains_in_fp32_while_that_is_removed(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    optimizer = torch.optim.Adam(model.parameters())
    hooks.modules.called.add(model)
    hooks.optimizers.add(optimizer)
    call = in_single(nn.Module.__call__)

    def step(single: bool) -> None:
        outputs = (call if single else nn.Module.__call__)(model, torch.randn(8, 4, dtype=torch.float64))
        loss = (outputs - torch.zeros(8, 4, dtype=torch.float64)).square().mean()
        assert loss.dtype == torch.float64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def dtypes() -> set[torch.dtype]:
        states = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
        return {one.dtype for one in (*model.parameters(), *states, model[1].running_mean)}

    step(False)
    undo = without(hooks, "float64")
    assert hooks.modules.single and dtypes() == {torch.float32}
    step(True)
    undo()
    assert not hooks.modules.single and dtypes() == {torch.float64}
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float32  # as it was
    step(False)


Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def steps_of(make: Made, switch: str | None, folder: Path) -> tuple[list[set[str]], torch.optim.Optimizer]:
    """Nine steps, of which the fourth to sixth go without a cause: the optimizer's operations in each of the three."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    hooks, optimizer, seen = hooks_in(folder), make(parameters), []
    hooks.anchor = optimizer
    suspect = Suspect(switch=switch or "gc", part="optimizer", worth=0.5)
    for number in range(9):
        if number % 3 == 0:
            undo = remove(hooks, suspect) if switch and number == 3 else lambda: None
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            profiler.start()
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer.step()
        if number % 3 == 2:
            profiler.stop()
            seen.append({event.name for event in profiler.events()})
            if switch and number == 5:
                assert has_acted(hooks, suspect)
            undo()
    return seen, optimizer


@pytest.mark.parametrize(
    ("switch", "operation", "make"),
    [
        ("fused", "aten::_fused_adamw_", lambda given: torch.optim.AdamW(given)),
        ("fused", "aten::_fused_adam_", lambda given: torch.optim.Adam(given, amsgrad=True)),
        ("fused", "aten::_fused_sgd_", lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
        ("fused", "aten::_fused_adagrad_", lambda given: torch.optim.Adagrad(given, lr=0.1)),
        ("together", "aten::_fused_adamw_", lambda given: torch.optim.AdamW(given, foreach=False)),
        ("together", "aten::_foreach_addcdiv_", lambda given: torch.optim.RMSprop(given, foreach=False)),
        ("foreach", "aten::_foreach_addcdiv_", lambda given: torch.optim.NAdam(given, foreach=False)),
        ("foreach", "aten::_foreach_add_", lambda given: torch.optim.SGD(given, lr=0.1, foreach=False)),
    ],
)
def test_an_optimizer_that_has_stepped_takes_the_other_step_and_goes_on_as_before(
    switch: str, operation: str, make: Made, tmp_path: Path
) -> None:
    (before, removed, after), other = steps_of(make, switch, tmp_path)
    assert operation in removed and operation not in before | after
    _, plain = steps_of(make, None, tmp_path)
    groups = [{name: one for name, one in of.param_groups[0].items() if name != "params"} for of in (other, plain)]
    assert groups[0] == groups[1]
    for one, same in zip(other.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one, same)
        assert other.state[one].keys() == plain.state[same].keys()
        for name, value in plain.state[same].items():
            torch.testing.assert_close(other.state[one][name], value)  # its dtype and device too


def test_which_optimizers_have_another_step() -> None:
    one = nn.Parameter(torch.randn(3))
    assert can_fuse(torch.optim.AdamW([one])) and not can_fuse(torch.optim.AdamW([one], fused=True))
    assert not can_fuse(torch.optim.RMSprop([one])) and not can_fuse(torch.optim.AdamW([one], capturable=True))
    assert can_foreach(torch.optim.RMSprop([one], foreach=False)) and not can_foreach(torch.optim.RMSprop([one]))
    assert not can_foreach(torch.optim.AdamW([one], fused=True)) and not can_foreach(None)
    assert not can_foreach(torch.optim.Adam([one], lr=torch.tensor(0.1), foreach=False))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert not can_fuse(torch.optim.SGD(table.parameters(), lr=0.1))


def test_a_removal_that_the_script_takes_back_has_not_acted(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    hooks.anchor = torch.optim.AdamW([nn.Parameter(torch.randn(3))], foreach=False)
    suspect = Suspect(switch="fused", part="optimizer", worth=0.5)
    undo = remove(hooks, suspect)
    assert has_acted(hooks, suspect)
    hooks.anchor.param_groups[0]["fused"] = False
    assert not has_acted(hooks, suspect)
    undo()
    saving = Suspect(switch="saving", part="saving", worth=0.5)
    save = hooks.clock.region(lambda: 1, "saving")
    undo = remove(hooks, saving)
    assert not has_acted(hooks, saving)  # nothing was to be saved
    assert save() is None and has_acted(hooks, saving)
    undo()
    assert save() == 1
    needless = Suspect(switch="needless_gradients", part="backward", worth=0.5)
    remove(hooks, needless)()
    assert not has_acted(hooks, needless)  # there are none
    batches = Suspect(switch="batches", part="data", worth=0.5)
    undo = remove(hooks, batches)
    assert not hooks.loaders.gives_instead and not has_acted(hooks, batches)  # none is at hand
    undo()


def test_collections_that_the_script_asks_for_are_left_out_too(tmp_path: Path) -> None:
    hooks, cause = hooks_in(tmp_path), Suspect(switch="gc", part="gc", worth=0.5)
    gc.callbacks.append(hooks._on_gc)
    collect = gc.collect
    try:
        undo = remove(hooks, cause)
        assert gc.collect() == 0 and not gc.isenabled() and has_acted(hooks, cause)
        collect()  # a script that has its own name for it
        assert not has_acted(hooks, cause)
        undo()
        assert gc.isenabled() and gc.collect is collect
    finally:
        gc.callbacks.remove(hooks._on_gc)


def test_a_script_that_profiles_with_stacks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, model = hooks_in(tmp_path), nn.Sequential(nn.Linear(3, 3))
    monkeypatch.setattr(nn.Module, "__call__", hooks.modules._called(nn.Module.__call__))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        model(torch.randn(2, 3))
    assert model in hooks.modules.called


def test_tf32_is_taken_back(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path)
    hooks.anchor = torch.optim.AdamW([nn.Parameter(torch.randn(3))])
    for switch in ("tf32", "together"):
        undo = without(hooks, switch)
        assert torch.get_float32_matmul_precision() == "high"
        undo()
        assert torch.get_float32_matmul_precision() == "highest"


class Counting(nn.Module):
    """A model whose guard on a Python number fails at each call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_a_recompilation_has_the_line_of_the_users_and_not_of_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = hooks_in(tmp_path)
    monkeypatch.setattr(nn.Module, "__call__", hooks.modules._called(nn.Module.__call__))
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()  # of other tests: only the most frequent reasons are read
    model = torch.compile(Counting(), backend="eager", dynamic=False)
    for _ in range(3):
        model(torch.randn(4))
    lines = {one.partition(": ")[0] for one in recompile_reasons() if "calls" in one}
    first = Counting.forward.__code__.co_firstlineno
    assert lines and lines <= {f"test_hooks.py:{first + n}" for n in range(3)}, recompile_reasons()

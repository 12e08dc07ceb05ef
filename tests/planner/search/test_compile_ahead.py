"""Which candidates are compiled ahead, how many side by side, and what the search keeps of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.planner.records.trials import Compiled, CompiledAhead, Interval, Outcome, Trial
from autoplan.planner.search.candidate_model import CandidateModel
from autoplan.planner.search.compile_ahead import (
    COMPILERS,
    MOST,
    CompileAhead,
    Machine,
    Waiting,
    choose,
    slowdown,
    times_padding,
)
from autoplan.planner.search.sampler import make_sampler
from autoplan.planner.search.trial_cost import TrialCost
from autoplan.planner.store.store import Store
from autoplan.planner.trace.model_profile import LinearFit, OperationGroup
from autoplan.planner.trials.worker import share_of, take_share
from autoplan.processes import RankContext, Task, Zygote
from autoplan.strategies.config import TrainingConfig

MACHINE = Machine(
    cores=16,
    memory_limit_bytes=64 * 2**30,
    host_limit_bytes=64 * 2**30,
    context_bytes=0.0,
    serial_share=0.4,
    fixed_s=1.0,
    left_s=600.0,
)


def waiting(number: int = 8, **others: float) -> list[Waiting]:
    values = {"cold_s": 20.0, "warm_s": 3.0, "trial_s": 10.0, "micro_step_s": 0.1, "peak_bytes": 2.0**30} | others
    return [Waiting(config=TrainingConfig(micro_batch=2**i, compile="model"), **values) for i in range(number)]


def test_a_share_of_the_cores_slows_what_runs_in_parallel_alone() -> None:
    assert slowdown(1, 16, 0.4) == 1.0
    assert slowdown(4, 4, 0.0) == pytest.approx(4.0), "all in parallel: n at once take n times as long"
    assert slowdown(4, 4, 1.0) == pytest.approx(1.0), "all in one thread: n at once take as long as one"
    assert slowdown(2, 2, 0.5) == pytest.approx(1.0 / 0.75)
    assert slowdown(2, 2 * COMPILERS, 0.0) == pytest.approx(1.0), "one alone has no use for more cores than that"
    factors = [slowdown(number, 16, 0.4) for number in range(1, 17)]
    assert factors == sorted(factors)


def number_of(found: list[Waiting], machine: Machine) -> int:
    choice = choose(found, machine)
    return 1 if choice is None else choice.number


def test_on_many_cores_several_are_compiled_at_once() -> None:
    found = choose(waiting(), MACHINE)
    assert found is not None and found.number == MOST
    together = 1.0 + 8 * 0.1 + 20.0 * slowdown(8, 16, 0.4)
    assert found.seconds == pytest.approx(together)
    assert found.saving_s == pytest.approx(17.0 + 0.8 * 7 * 17.0 - together)


@pytest.mark.parametrize(
    ("cores", "serial_share", "number"),
    [(1, 0.4, 1), (2, 0.4, 1), (2, 1.0, 2), (4, 0.4, 4), (7, 0.0, 1)],
)
def test_it_is_done_only_where_it_saves_time(cores: int, serial_share: float, number: int) -> None:
    assert number_of(waiting(), replace(MACHINE, cores=cores, serial_share=serial_share)) == number


def test_they_have_to_fit_beside_each_other() -> None:
    tight = replace(MACHINE, memory_limit_bytes=2.5 * 2**30)
    assert number_of(waiting(), tight) == 2
    assert number_of(waiting(peak_bytes=1.5 * 2**30), tight) == 1
    gpu = replace(tight, context_bytes=0.6 * 2**30)
    assert number_of(waiting(), gpu) == 1, "on a GPU each further process has a context too"
    assert number_of(waiting(), replace(MACHINE, host_limit_bytes=8 * 2**30)) == 1, "the compilers need memory too"


def test_what_is_compiled_can_be_measured_in_the_time_left() -> None:
    assert 1 < number_of(waiting(), replace(MACHINE, left_s=100.0)) < MOST
    assert number_of(waiting(), replace(MACHINE, left_s=30.0)) == 1


def test_expensive_micro_steps_speak_against_it() -> None:
    """They run side by side too, on the same device."""
    assert number_of(waiting(micro_step_s=20.0), MACHINE) == 1


def test_one_alone_is_measured_at_once() -> None:
    assert number_of(waiting(1), MACHINE) == 1


@pytest.mark.parametrize(("cores", "processes"), [(16, 8), (16, 5), (3, 2), (2, 2), (1, 3), (2, 5)])
def test_the_cores_are_shared_out(cores: int, processes: int) -> None:
    shares = [share_of(list(range(cores)), number, processes) for number in range(processes)]
    assert all(shares)
    if cores >= processes:
        assert sorted(core for share in shares for core in share) == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def threads_and_cores(context: RankContext, processes: int) -> list[int]:
    """torch's threads and the cores of one of several processes; alone it takes no share."""
    import torch

    if processes > 1:
        take_share(context.rank, processes)
    return [torch.get_num_threads(), len(os.sched_getaffinity(0)), torch._inductor.config.compile_threads or 0]


def test_a_share_of_the_cores_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU it is part of the cache's key: another number, and the trial would compile again."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with Zygote(preload=("torch", "torch._inductor.config", "autoplan.planner.trials.worker")) as zygote:
        alone = zygote.run(Task(target=threads_and_cores, args=(1,))).check().results
        beside = zygote.run(Task(target=threads_and_cores, args=(2,), ranks=2, independent=True)).check().results
    assert all(threads == alone[0][0] and own_cores == workers for threads, own_cores, workers in beside)
    assert sum(own_cores for _, own_cores, _ in beside) == max(2, cores), "on one core both have the same"


# Which candidates wait.

CANDIDATES = [
    TrainingConfig.model_validate({"micro_batch": m, "compile": c, "optimizer_step": o})
    for m in (1, 2, 4)
    for c in ("off", "block")
    for o in ("own", "fused")
]


class Estimates:
    """Compiled is twice as fast, a larger micro-batch a little faster."""

    def table(self, configs: Any) -> Any:
        times = np.array([(1.0 if c.compile == "off" else 0.5) * (1 + 0.1 / c.micro_batch) for c in configs])
        memory = np.full(len(configs), 2.0**30)
        return SimpleNamespace(
            step_time_s=times,
            step_time_low_s=times / 2,
            step_time_high_s=times * 2,
            peak_memory_bytes=memory,
            peak_memory_low_bytes=memory / 1.3,
            peak_memory_high_bytes=memory * 1.3,
        )

    def observe(self, trial: Trial) -> None:
        pass


def searching(
    folder: Path, candidates: list[TrainingConfig] = CANDIDATES, *, sampler: str = "autoplan", global_batch: int = 8
) -> Any:
    """As much of a session as compiling ahead asks for; what is not compiled was measured."""
    cost = TrialCost(candidates, global_batch=global_batch, num_blocks=4, device="cpu")
    estimates: Any = Estimates()
    model = CandidateModel(candidates, estimates, cost, memory_limit_bytes=64 * 2**30)
    for number, config in enumerate(c for c in candidates if c.compile == "off"):
        model.observe(trial_of(config, number, 1.0 + 0.1 / config.micro_batch))
    return SimpleNamespace(
        store=Store(folder, "0" * 16, summary={}),
        model=model,
        trial_cost=cost,
        sampler=None if sampler == "autoplan" else make_sampler(sampler, model, seed=0),
        options=SimpleNamespace(max_trials=None),
        trials_done=0,
        left_s=600.0,
        observer=SimpleNamespace(),
        notes=(notes := []),
        note=notes.append,
        context=SimpleNamespace(
            estimator=estimates,
            device="cpu",
            memory_limit_bytes=64 * 2**30,
            host_limit_bytes=64 * 2**30,
            spec=SimpleNamespace(batch_sizes=None, global_batch=global_batch),
            hardware=SimpleNamespace(host=SimpleNamespace(cores_usable=16)),
        ),
    )


def trial_of(config: TrainingConfig, number: int, seconds: float, *warnings: str) -> Trial:
    return Trial(
        number=number, purpose="search", config=config, outcome=Outcome.OK, phase="done", seconds_spent=9.0,
        step_time_s=Interval(median=seconds, low=seconds, high=seconds, samples=5), warnings=warnings,
        phase_seconds={"compile": 0.0 if config.compile == "off" else 5.0, "measure": 2.0},
    )  # fmt: skip


def test_each_graph_waits_once_in_the_order_of_the_sampler(tmp_path: Path) -> None:
    session = searching(tmp_path)
    ranked = session.model.ranking()
    assert set(ranked) == {config for config in CANDIDATES if config.compile == "block"}
    found = [one.config for one in CompileAhead(session).waiting()]
    assert found == [config for config in ranked if config in found], "in that order"
    assert len(found) == 3 and {config.micro_batch for config in found} == {1, 2, 4}, "the optimizer is in no graph"
    assert all(config.compile == "block" for config in found)


def test_nothing_waits_where_the_next_trial_compiles_nothing_new(tmp_path: Path) -> None:
    session = searching(tmp_path)
    ahead = CompileAhead(session)
    best = ahead.waiting()[0].config
    session.model.observe_ahead(best, 20.0)
    assert session.model.ranking()[0].compile == "block", "with its kernels in the cache it is cheaper still"
    assert ahead.waiting() == []
    assert session.trial_cost.compile_s(best) == 20.0 and session.trial_cost.is_warm(best)


def test_what_is_left_out(tmp_path: Path) -> None:
    drawn = searching(tmp_path / "drawn", sampler="random")
    assert CompileAhead(drawn).waiting() == []
    slow = [c.model_copy(update={"compile": "model", "compile_mode": "max-autotune"}) for c in CANDIDATES[::4]]
    assert CompileAhead(searching(tmp_path / "slow", slow)).waiting() == [], "it measures kernels, and is the leader's"
    ranks = [TrainingConfig(micro_batch=m, compile="block", dp_replicate=2) for m in (1, 2)]
    assert CompileAhead(searching(tmp_path / "ranks", ranks)).waiting() == []
    sizes = searching(tmp_path / "sizes")
    sizes.context.spec.batch_sizes = SimpleNamespace(vary=True)
    assert CompileAhead(sizes).waiting() == []
    groups = [
        OperationGroup(name="mm", kind="matmul", segment=segment, phase="forward", dtype="bfloat16", count=1, **sizes)
        for segment, last in (("block", 64.0), ("rest", 50257.0))
        if (sizes := {"m": LinearFit(per_sample=128.0), "k": LinearFit(fixed=64.0), "n": LinearFit(fixed=last)})
    ]
    profile: Any = SimpleNamespace(variants={"plain": SimpleNamespace(groups=groups)})
    block = TrainingConfig(micro_batch=2, compile="block", precision="bf16")
    assert not times_padding(profile, block)
    assert times_padding(profile, block.model_copy(update={"compile": "model"})), "the head of 50,257 classes"
    on_cuda = searching(tmp_path / "cuda")
    on_cuda.context.device, on_cuda.context.estimator.profile = "cuda", profile
    assert CompileAhead(on_cuda).waiting()
    groups[0] = groups[0].model_copy(update={"k": LinearFit(fixed=63.0)})
    assert CompileAhead(on_cuda).waiting() == []
    few = searching(tmp_path / "few")
    few.options.max_trials = 2
    assert len(CompileAhead(few).waiting()) == 2, "no more than trials are left for"


def test_the_record_keeps_what_was_compiled_ahead(tmp_path: Path) -> None:
    done, lost = (config for config in CANDIDATES[2:8] if config.compile == "block" and config.optimizer_step == "own")
    group = CompiledAhead(
        compiled=(Compiled(config=done, compile_s=9.0), Compiled(config=lost, why_not="killed by signal 9")),
        seconds=10.0,
        expected_s=12.0,
        expected_saving_s=20.0,
    )
    session = searching(tmp_path)
    with session.store as store:
        store.add(group)
        assert store.take_number() == 0 and not store.trials, "no trial"
    with Store(tmp_path, "0" * 16, summary={}) as store:
        assert store.compiled_ahead == (group,)
        session.store = store
        ahead = CompileAhead(session)
        assert session.trial_cost.is_warm(done) and not session.trial_cost.is_warm(lost)
        store.add(trial_of(done, 0, 0.5, "compile cache: 2 hit(s), 0 miss(es)"))
        ahead.say()
    assert session.notes == [
        "compiled ahead: 1 configurations in 1 group(s) side by side, in 10 s; 1 of them were then measured, each "
        "alone, 1 with all kernels from the cache"
    ]
